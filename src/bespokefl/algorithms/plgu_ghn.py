"""PLGU-GHN: a hypernetwork on the server writes every client's model, and is trained flat in its own weights.

Qu et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023, Algorithm 4. The
server sends w_i = H(v_i; phi), the clients answer with the change Delta_i of K local steps, and -Delta_i, pulled back
through H, is the gradient of phi. It is taken twice: at phi for the perturbation (eq. 24), and at phi + epsilon for the
step (eq. 25). A client keeps nothing: its model is H(v_i; phi).

Eqs. (24) and (25) stand in a supplement that is not public, and the authors published no code; they are rebuilt here
from the slides' objective, min over phi and v of max over epsilon of (1/N) sum f_i(H(v_i; phi + epsilon)):

    g = -(1/C) sum_i J_phi H(v_i; phi)^T Delta_i,  epsilon = rho g / ||g||                                   (24)
    phi <- phi + eta_h (1/C) sum_i J_phi H(v_i; phi + epsilon)^T Delta_i                                     (25)
    v_i <- v_i + eta_v J_v H(v_i; phi + epsilon)^T Delta_i   for the clients of the round

Everything but the round is pFedHN's (``pfedhn.py``), which is the case rho = 0 with one client per round: the length
of the embeddings, H's width, all rates, momenta and decays, and clipping. Two defaults differ:

* H has 3 fully connected layers (``n_hidden=2``), as PLGU's section 6.1 says; pFedHN's code has 4 (``n_hidden=3``).
* v takes the plain steps of (25), of the clients of the round (``embed_opt="plain"``); pFedHN's code moves all v by
  momentum and decay (``"sgd"``).

Where the two are compared they are to have the same H and the same steps, as in PLGU's experiments here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bespokefl.algorithms._plgu.sharpness import lwsam, scores
from bespokefl.algorithms.pfedhn import HyperNetworked, Server
from bespokefl.core import Cohort, Model, Part, hyper, pull_phi, pull_v, when
from bespokefl.core.trees import add, mean, zeros


@dataclass(frozen=True)
class PLGUGHN(HyperNetworked):
    name: ClassVar[str] = "plgu-ghn"
    paper: ClassVar[str] = "Qu et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023"

    rho: float = hyper(0.05, "rho: radius of the perturbation of phi, eq. (24)", low=0)
    ghn_delta: Literal["reuse", "recompute"] = hyper("reuse", "Delta_i of (25): that of (24), or of H(v; phi + eps)")
    embed_at: Literal["perturbed", "clean"] = hyper("perturbed", "where v's gradient is taken: phi + epsilon, or phi")
    ghn_layerwise: bool = hyper(False, "whether epsilon is scaled by scores of H's layers, ||g_l|| / dim(l)")
    score_scale: Literal["sum1", "mean1"] = hyper(
        "sum1", "xi: scores sum to 1, or have the mean 1 (ghn_layerwise)", when=when(ghn_layerwise=True)
    )
    embed_opt: Literal["sgd", "plain"] = hyper(
        "plain", "v: phi's SGD on the v of all clients, or plain steps of those who answered"
    )
    n_hidden: int = hyper(2, "H has 1 + n_hidden layers before its heads", low=0)

    def round(self, server: Server, cohort: Cohort) -> Server:
        H, phi = self.hypernetwork(cohort.task, len(server.v)), server.phi
        up = self.exchange(H, phi, server, cohort)
        rest = mean(up.rest, up.weights(self.weights))
        v, delta = server.v[self.embedded(up.cohort, server)], up.delta
        g = pull_phi(H, phi, v, self.weighted(delta, up.weights(self.weights)))
        at = add(phi, self.perturbation(g))  # eq. (24)
        clean_delta = delta
        if self.ghn_delta == "recompute":
            up = self.exchange(H, at, server, up.cohort)
            v, clean_delta, delta = up.align(v), up.align(clean_delta), up.delta
        g = pull_phi(H, at, v, self.weighted(delta, up.weights(self.weights)))
        g_v = -(pull_v(H, at, v, delta) if self.embed_at == "perturbed" else pull_v(H, phi, v, clean_delta))
        return self.descended(server, g, g_v, self.embedded(up.cohort, server))._replace(rest=rest)  # eq. (25)

    def perturbation(self, g: Model) -> Model:
        """epsilon of eq. (24): SAM's, or LWSAM's with scores of the gradient itself."""
        groups: dict[str, list[str]] = {}
        for k in g:
            groups.setdefault(k.rpartition(".")[0], []).append(k)
        layers = tuple(Part(tuple(names), ()) for names in groups.values())
        some = next(iter(g.values()))
        xi = scores(g, zeros(g), layers, self.score_scale) if self.ghn_layerwise else some.new_ones(len(layers))
        return lwsam(g, xi, layers, self.rho)
