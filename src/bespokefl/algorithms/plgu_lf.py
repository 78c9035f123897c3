"""PLGU-LF: the layers that drift most stay personal, and the global model is trained against layer-wise perturbations.

Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, CVPR 2023, Algorithms 1
and 2. A client scores its layers by their distance to w, keeps the D highest of its own theta_i, takes the rest from w,
and trains two models on the same batches: theta_i by its gradient, its copy of w by the gradient at a point that LWSAM
(eq. 5) has perturbed. The server adds the mean change of the copies, 1/C each, to w.

Where the paper is not literal (the authors published no code):

* The scores are renormalised to sum to 1; ||theta_l - w_l|| / dim(l) alone does not. With L layers and equal scores the
  radius is then rho / L; ``score_scale="mean1"`` makes it rho.
* The denominator of eq. (5) has the exponent 1/p, not p - 1. Eq. (4) as printed is SAM without any scores.
* Algorithm 1 differentiates with respect to w + epsilon but prints F at theta + epsilon. ``perturb_at="w"`` takes the
  variable of the derivative; with "theta" w is moved by gradients of another model, and falls behind FedAvg's. Only "w"
  with rho = 0 leaves w on FedAvg's path whatever D is.
* A layer is a convolution or a linear layer with its norm (``sharpness.layers_of``): a ResNet-18 has 21, where Fig. 5
  sweeps D to 23 and Theorem 1 speaks of the parameter matrices of L layers. By ``grouping="module"`` it has 41, and as
  a score is divided by the number of parameters, the D highest are mostly norms.
* K counts batches in Algorithm 1 and epochs in the experiments: ``local_unit``.
* D counts personal layers (Section 4, Fig. 5), not universal ones (Section 6.1); its default, 5, is cut to
  half of the layers: with all of them personal nothing comes from w, and theta_i is trained alone. Personal layers are
  not overwritten by the server but train on, unless ``freeze_train`` is off.
* Line 9 of Algorithm 2 prints w^{t+1} on both sides inside the client loop; w^t is meant, once per round.
* Buffers (running statistics) follow their layer at the start; in training both models take those of the pass at theta,
  never those of the perturbed one.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.algorithms._plgu.sharpness import largest, lwsam, only, scores
from bespokefl.core import (
    CHANGE,
    Batch,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    ModelAveraging,
    OneModel,
    Part,
    Phase,
    Program,
    Setup,
    Task,
    Tree,
    hyper,
    layers_of,
    unless,
)
from bespokefl.core.trees import add, shift, sub

DEFAULT_D = 5


class Kept(NamedTuple):
    theta: Model  # the personal model
    m_theta: Model  # momenta (opt_state="keep" only)
    m_w: Model


class Both(NamedTuple):
    theta: Model
    w: Model  # the client's copy of the global model
    m_theta: Model
    m_w: Model
    xi: Tensor  # scores of the layers, for the perturbation
    per: Tensor  # which layers are personal


@dataclass(frozen=True)
class PLGULF(ModelAveraging, OneModel):
    name: ClassVar[str] = "plgu-lf"
    paper: ClassVar[str] = "Qu et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023"
    sends: ClassVar = {"delta": None}
    exchanges: ClassVar = (Exchange("train", {"delta": CHANGE}),)
    stays: ClassVar = {"theta": "the personal model"}
    averages: ClassVar = ("train",)

    D: int | None = hyper(None, "D: number of personal layers, Algorithm 2; nothing: 5, at most half of them", low=0)
    rho: float = hyper(0.05, "rho: radius of the perturbation, eq. (5)", low=0)
    p: float = hyper(2.0, "p: norm of the perturbation, eq. (5)", above=1)
    perturb_at: Literal["theta", "w"] = hyper("w", "where the perturbed gradient is taken, Algorithm 1")
    perturb_layers: Literal["all", "universal"] = hyper(
        "all", "Lambda: which layers are perturbed, eq. (5) or eq. (7)", when=unless(D=0)
    )
    score_scale: Literal["sum1", "mean1"] = hyper("sum1", "xi: scores sum to 1, or have the mean 1")
    norm_scope: Literal["global", "layer"] = hyper("global", "||g||: of the whole gradient, eq. (5), or of each layer")
    grouping: Literal["module", "conv_norm"] = hyper(
        "conv_norm", "a layer: a convolution or a linear layer with its norm, or any module"
    )
    freeze_train: bool = hyper(True, "whether personal layers are trained locally", when=unless(D=0))
    local_unit: Literal["epochs", "steps"] = hyper("epochs", "K: whether local_epochs counts epochs or batches")
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        layers = len(self.layers(task))
        if self.D is not None and layers < self.D:
            raise InputError(
                f"algorithm.D = {self.D} (plgu-lf): it is a number of layers from 0 to {layers}, all that the model has"
            )

    def init_client(self, task: Task, x0: Model) -> Kept:
        m = self.momentum_to_keep(self.opt.init(task.params(x0)))
        return Kept(x0, m, m)

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        delta = self.average(up.delta, None, up.weights(self.weights))
        return {"w": add(server["w"], delta)}  # Algorithm 2, line 9

    def client_facts(self, task: Task, server: Tree, kept: Kept) -> dict[str, Tensor]:
        return {"scores": scores(kept.theta, server["w"], self.layers(task), self.score_scale)}

    def layer_names(self, task: Task) -> list[str]:
        return [part.params[0].rpartition(".")[0] for part in self.layers(task)]

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs_or_steps(self.local_unit)),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Both:
        """Algorithm 2, lines 3 to 5: score the layers and take the universal ones from w."""
        layers = self.layers(task)
        xi = scores(kept.theta, down.w, layers, self.score_scale)
        per = largest(xi, min(DEFAULT_D, len(layers) // 2) if self.D is None else self.D)
        own = {k: torch.where(per[l], kept.theta[k], down.w[k]) for l, part in enumerate(layers) for k in sum(part, ())}
        theta = {**down.w, **own}
        xi = only(~per, xi) if self.perturb_layers == "universal" else xi
        m_theta, m_w = (self.momentum_at_start(m, task.params(down.w)) for m in (kept.m_theta, kept.m_w))
        return Both(theta, down.w, m_theta, m_w, xi, per)

    def step(self, task: Task, down: Down, c: Both, batch: Batch) -> Both:
        """Algorithm 1: two gradients on one batch, the first gives the perturbation of the second."""
        layers = self.layers(task)
        p = task.grad(c.theta, batch)
        epsilon = lwsam(p.grad, c.xi, layers, self.rho, self.p, self.norm_scope)
        q = task.grad(shift(c.theta if self.perturb_at == "theta" else c.w, 1.0, epsilon), batch)
        theta, m_theta = self.opt.step(c.theta, p.grad, c.m_theta)
        w, m_w = self.opt.step(c.w, q.grad, c.m_w)
        if not self.freeze_train:
            theta |= {
                k: torch.where(c.per[l], c.theta[k], theta[k]) for l, part in enumerate(layers) for k in part.params
            }
        return Both(theta | p.buffers, w | p.buffers, m_theta, m_w, c.xi, c.per)

    def finish(self, task: Task, down: Down, c: Both) -> tuple[dict[str, Tree], Kept]:
        kept = Kept(c.theta, self.momentum_to_keep(c.m_theta), self.momentum_to_keep(c.m_w))
        return {"delta": sub(c.w, down.w)}, kept

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        return kept.theta

    def layers(self, task: Task) -> tuple[Part, ...]:
        return layers_of(task, self.grouping)
