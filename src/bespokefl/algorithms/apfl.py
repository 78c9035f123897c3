"""APFL: each client mixes its own model with the global one, by a share it learns (Deng et al., arXiv 2020).

A client's model is v_bar = alpha v + (1 - alpha) w. In local training w_i is its copy of w, and on each batch
w_i <- w_i - eta grad f_i(w_i), v <- v - eta alpha grad f_i(v_bar). At the first step of a round
alpha <- clip(alpha - eta <v - w_i, grad f_i(v_bar)>, 0, 1), eq. (10), unless ``adaptive`` is off. All gradients of a
step are taken where it starts; v still moves by the old alpha, and the new one counts from the next step on. The server
averages the w_i by p_i. What is scored mixes v with the newest w, not with the copy that trained beside it.

With a fixed alpha = 0 a client's model is FedAvg's w, and with a fixed alpha = 1 that of Local, bit for bit.

* A popular version adds 0.02 alpha to the gradient of alpha: ``alpha_decay``. It also mixes the two models' logits,
  which is another method and not offered; another repository prints alpha for both weights of the mixture.
* Running statistics: those of the pass at w_i go to w_i, those of the pass at v_bar to v, and they are mixed like
  weights. v and w_i each have their momentum (the factor alpha enters v's); alpha has none.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bespokefl.core import (
    MODEL,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    Model,
    ModelAveraging,
    Newcomer,
    OneModel,
    Phase,
    Program,
    Task,
    Tree,
    hand_over,
    hyper,
    part_way,
    when,
)
from bespokefl.core.trees import dot, scale, sub, zeros


class Kept(NamedTuple):
    v: Model  # the client's own model
    alpha: Tensor  # its share
    mw: Model  # momenta (opt_state="keep" only)
    mv: Model


class Both(NamedTuple):
    w: Model  # w_i, the client's copy of w
    v: Model
    alpha: Tensor
    first: Tensor  # 1 in the first step of a round
    mw: Model
    mv: Model


@dataclass(frozen=True)
class APFL(ModelAveraging, OneModel):
    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, arXiv 2020"
    sends: ClassVar = {"w": "w"}
    exchanges: ClassVar = (Exchange("train", {"w": MODEL}),)
    stays: ClassVar = {"v": "the personal model before it is mixed", "alpha": "its weight in the mixture"}
    averages: ClassVar = ("train",)

    alpha0: float = hyper(0.5, "alpha: share of a client's own model; where it starts if adaptive", low=0, high=1)
    adaptive: bool = hyper(True, "whether clients learn their alpha, eq. (10)")
    alpha_decay: float = hyper(0.0, "weight of alpha^2/2 in the objective of alpha", low=0, when=when(adaptive=True))

    def init_client(self, task: Task, x0: Model) -> Kept:
        m = self.momentum_to_keep(self.opt.init(task.params(x0)))
        return Kept(x0, torch.full((), self.alpha0, dtype=task.dtype), m, m)

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        return {"w": self.average(up.w, server["w"], up.weights(self.weights))}

    def client_facts(self, task: Task, server: Tree, kept: Kept) -> dict[str, Tensor]:
        return {"alpha": kept.alpha}

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.mixed_model, {"w": server["w"]})

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "a model of its own that starts at the global one, mixed with that by a learned share"
        return self.joining(how, self.begin_new, self.newcomer_step, {"w": server["w"]})

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Both:
        mw, mv = (self.momentum_at_start(m, task.params(down.w)) for m in (kept.mw, kept.mv))
        return Both(down.w, kept.v, kept.alpha, torch.ones(()), mw, mv)

    def step(self, task: Task, down: Down, c: Both, batch: Batch) -> Both:
        p, q = task.grad(c.w, batch), task.grad(part_way(c.w, c.alpha, c.v), batch)
        w, mw = self.opt.step(c.w, p.grad, c.mw)
        v, mv = self.opt.step(c.v, scale(c.alpha, q.grad), c.mv)
        alpha = self.learned(task, c, q.grad) if self.adaptive else c.alpha
        return Both(w | p.buffers, v | q.buffers, alpha, torch.zeros(()), mw, mv)

    def learned(self, task: Task, c: Both, grad: Model) -> Tensor:
        slope = dot(sub(task.params(c.v), task.params(c.w)), grad) + self.alpha_decay * c.alpha
        return torch.where(c.first > 0, (c.alpha - self.lr * slope).clamp(0, 1), c.alpha)

    def finish(self, task: Task, down: Down, c: Both) -> tuple[dict[str, Tree], Kept]:
        return {"w": c.w}, Kept(c.v, c.alpha, self.momentum_to_keep(c.mw), self.momentum_to_keep(c.mv))

    @property
    def mixed_model(self) -> Program:
        return Program(self.mixed, (), hand_over)

    def mixed(self, task: Task, down: Down, kept: Kept) -> Model:
        model: Model = part_way(down.w, kept.alpha, kept.v)
        return model

    # one that comes later: w stays, and alpha is learned at every step, for v = w leaves the first nothing to learn ---
    def begin_new(self, task: Task, down: Down, kept: Kept) -> Both:
        return Both(down.w, down.w, kept.alpha, torch.ones(()), {}, self.opt.init(task.params(down.w)))

    def newcomer_step(self, task: Task, down: Down, c: Both, batch: Batch) -> Both:
        q = task.grad(part_way(c.w, c.alpha, c.v), batch)
        v, mv = self.opt.step(c.v, scale(c.alpha, q.grad), c.mv)
        alpha = self.learned(task, c, q.grad) if self.adaptive else c.alpha
        return c._replace(v=v | q.buffers, alpha=alpha, mv=mv)

    def joined_model(self, task: Task, down: Down, c: Both) -> Model:
        model: Model = part_way(c.w, c.alpha, c.v)
        return model

    def fresh_optimiser(self, task: Task, down: Down, c: Both) -> Both:
        return c._replace(mv=zeros(c.mv))
