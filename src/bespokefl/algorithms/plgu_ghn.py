"""PLGU-GHN: a hypernetwork on the server writes every client's model, and is trained flat in its own weights.

Guo et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023, Algorithm 4. The
server sends w_i = H(v_i; phi), the clients answer with the change Delta_i of K local steps, and -Delta_i, pulled back
through H, is the gradient of phi. It is taken twice: at phi for the perturbation (eq. 24), and at phi + epsilon for the
step (eq. 25). A client keeps nothing: its model is H(v_i; phi).

Eqs. (24) and (25) stand in a supplement that is not public, and the authors published no code; they are rebuilt here
from the slides' objective, min over phi and v of max over epsilon of (1/N) sum f_i(H(v_i; phi + epsilon)):

    g = -(1/C) sum_i J_phi H(v_i; phi)^T Delta_i,  epsilon = rho g / ||g||                                   (24)
    phi <- phi + eta_h (1/C) sum_i J_phi H(v_i; phi + epsilon)^T Delta_i                                     (25)
    v_i <- v_i + eta_v J_v H(v_i; phi + epsilon)^T Delta_i   for the clients of the round

Optimisers, clipping and the architecture (but for its 3 layers instead of 4) are those of pFedHN's code, which is the
case rho = 0 with one client per round; there momentum and weight decay move absent clients' v too, here v takes plain
steps. Buffers (running statistics) are averaged as in FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bespokefl.algorithms.base import Algorithm, Setup, Training
from bespokefl.algorithms.hyper import hyper
from bespokefl.cohort import Cohort
from bespokefl.errors import InputError
from bespokefl.hypernetwork import HyperNetwork, generate, initial_parameters, pull_phi, pull_v
from bespokefl.optim import SGD
from bespokefl.program import Batches, Call, Down, Phase, Program, shuffled
from bespokefl.rng import stream
from bespokefl.scoring import hand_over
from bespokefl.sharpness import Part, lwsam, scores
from bespokefl.task import Batch, Task
from bespokefl.trees import Model, Tree, add, mean, norm, pick, scale, sub, tree_map, zeros

LARGEST = 2**28  # parameters of a hypernetwork: 1 GiB, and several times that in training


class Server(NamedTuple):
    phi: Model  # weights of the hypernetwork
    m: Model  # their momentum
    v: Tensor  # embeddings, a row per client
    rest: Model  # what H does not write: buffers and frozen parameters


@dataclass(frozen=True)
class PLGUGHN(Algorithm):
    name: ClassVar[str] = "plgu-ghn"
    paper: ClassVar[str] = "Guo et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023"

    lr: float = hyper(0.005, "eta: step size of local SGD", low=0)
    momentum: float = hyper(0.9, "momentum of local SGD", low=0, below=1)
    weight_decay: float = hyper(5e-5, "weight decay of local SGD", low=0)
    rho: float = hyper(0.05, "rho: radius of the perturbation of phi, eq. (24)", low=0)
    eta_h: float = hyper(0.01, "eta_h: step size of phi, eq. (25)", low=0)
    eta_v: float = hyper(0.01, "eta_v: step size of the embeddings", low=0)
    momentum_h: float = hyper(0.9, "momentum of phi", low=0, below=1)
    weight_decay_h: float = hyper(1e-3, "weight decay of phi", low=0)
    clip: float | None = hyper(50.0, "largest norm of a local gradient, and of phi's and v's together", above=0)
    ghn_delta: Literal["reuse", "recompute"] = hyper("reuse", "Delta_i of (25): that of (24), or of H(v; phi + eps)")
    embed_at: Literal["perturbed", "clean"] = hyper("perturbed", "where v's gradient is taken: phi + epsilon, or phi")
    ghn_layerwise: bool = hyper(False, "whether epsilon is scaled by scores of H's layers, ||g_l|| / dim(l)")
    score_scale: Literal["sum1", "mean1"] = hyper("sum1", "xi: scores sum to 1, or have the mean 1 (ghn_layerwise)")
    embed: int | None = hyper(None, "length of an embedding; nothing: 1 + N/4", low=1)
    width: int = hyper(100, "width of H's layers", low=1)
    n_hidden: int = hyper(2, "H has 1 + n_hidden layers before its heads", low=0)
    head_rank: int | None = hyper(None, "rank of H's heads, for large models; nothing: full", low=1)
    local_unit: Literal["epochs", "steps"] = hyper("epochs", "K: whether local_epochs counts epochs or batches")
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def check(self, task: Task, setup: Setup) -> None:
        size = sum(v.numel() for v in self.hypernetwork(task, setup.clients).parameters())
        if size > LARGEST:
            raise InputError(
                f"algorithm.head_rank = {self.head_rank}, algorithm.width = {self.width}: the hypernetwork of a model "
                f"with {task.size:,} parameters would have {size:,}, at most {LARGEST:,} are allowed; set a (smaller) "
                "head_rank or take a smaller model"
            )

    def hypernetwork(self, task: Task, n_clients: int) -> nn.Module:
        """H without values, from the shapes of the model."""
        embed = self.embed or 1 + n_clients // 4
        return HyperNetwork(task.params(task.initial), embed, self.width, self.n_hidden, self.head_rank)

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        net, like = self.hypernetwork(task, setup.clients), x0[task.names[0]]
        phi = initial_parameters(net, setup.seed, like)
        v = stream(setup.seed, "embedding").normal(size=(setup.clients, self.embed or 1 + setup.clients // 4))
        return Server(phi, self.opt_h.init(phi), torch.as_tensor(v).to(like), pick(x0, task.buffer_names))

    def init_client(self, task: Task, x0: Model) -> Model:
        return self.momentum_to_keep(self.opt.init(task.params(x0)))

    def round(self, server: Server, cohort: Cohort) -> Server:
        H = self.hypernetwork(cohort.site.task, len(server.v))
        phi, v = server.phi, server.v[self._rows(cohort, server)]
        up = cohort.run(self.train, {"rest": server.rest}, {"w": generate(H, phi, v)})
        v, delta, rest = up.align(v), up.delta, mean(up.rest, up.weights(self.weights))
        g = pull_phi(H, phi, v, self._weighted(delta, up.weights(self.weights)))
        at = add(phi, self.perturbation(g))  # eq. (24)
        clean_delta = delta
        if self.ghn_delta == "recompute":
            up = up.cohort.run(self.train, {"rest": server.rest}, {"w": generate(H, at, v)})
            v, clean_delta, delta = up.align(v), up.align(clean_delta), up.delta
        g = pull_phi(H, at, v, self._weighted(delta, up.weights(self.weights)))
        g_v = -(pull_v(H, at, v, delta) if self.embed_at == "perturbed" else pull_v(H, phi, v, clean_delta))
        g, g_v = self._clipped((g, g_v))
        phi, m = self.opt_h.step(phi, g, server.m)  # eq. (25)
        embeddings = server.v.index_copy(0, self._rows(up.cohort, server), v - self.eta_v * g_v)
        return Server(phi, m, embeddings, rest)

    def personal_model(self, server: Server, cohort: Cohort) -> Call:
        H = self.hypernetwork(cohort.site.task, len(server.v))
        w = generate(H, server.phi, server.v[self._rows(cohort, server)])
        return Call(Program(self.written, (), hand_over), {"rest": server.rest}, {"w": w})

    def perturbation(self, g: Model) -> Model:
        """epsilon of eq. (24): SAM's, or LWSAM's with scores of the gradient itself."""
        groups: dict[str, list[str]] = {}
        for k in g:
            groups.setdefault(k.rpartition(".")[0], []).append(k)
        layers = tuple(Part(tuple(names), ()) for names in groups.values())
        some = next(iter(g.values()))
        xi = scores(g, zeros(g), layers, self.score_scale) if self.ghn_layerwise else some.new_ones(len(layers))
        return lwsam(g, xi, layers, self.rho)

    @property
    def opt_h(self) -> SGD:
        return SGD(self.eta_h, self.momentum_h, self.weight_decay_h)

    def _weighted(self, delta: Model, p: Tensor) -> Model:
        """-p_i Delta_i: what is pulled back through H to a gradient."""
        weighted: Model = tree_map(lambda d: -d * p.to(d).reshape(-1, *(1,) * (d.ndim - 1)), delta)
        return weighted

    def _rows(self, cohort: Cohort, server: Server) -> Tensor:
        return torch.as_tensor(cohort.ids, device=server.v.device)

    def _clipped(self, g: Tree) -> Tree:
        return g if self.clip is None else scale((self.clip / norm(g)).clamp(max=1.0), g)

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.local_batches),), self.finish)

    @property
    def local_batches(self) -> Batches:
        steps = self.local_epochs if self.local_unit == "steps" else None
        return shuffled(self.local_epochs, self.batch_size, steps=steps, drop_last=self.drop_last)

    def begin(self, task: Task, down: Down, kept: Model) -> Training:
        return Training(self.written(task, down, kept), self.momentum_at_start(kept, down.w))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        return self.descend(c, p._replace(grad=self._clipped(p.grad)))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Model]:
        delta = sub(task.params(c.x), task.params(down.w))
        return {"delta": delta, "rest": pick(c.x, task.buffer_names)}, self.momentum_to_keep(c.m)

    def written(self, task: Task, down: Down, kept: Model) -> Model:
        """The model that H wrote, with the shared buffers."""
        parts = {**down.w, **down.rest}
        return {k: parts[k] for k in task.initial}
