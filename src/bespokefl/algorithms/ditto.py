"""Ditto: a personal model beside the global one, pulled towards it (Li et al., ICML 2021).

Algorithm 1: the cohort trains w as in FedAvg, and each client also takes, for its own v_i,
v_i <- v_i - eta (grad f_i(v_i) + lam (v_i - w)), w being the model of the round's start (not the moving local copy).
As in the authors' code both updates of a step share the batch, and the global average is uniform.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from bespokefl.core import (
    MODEL,
    Batch,
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
    Training,
    Tree,
    hyper,
    pulled,
)


class Kept(NamedTuple):
    v: Model  # the personal model
    mx: Model  # momenta (opt_state="keep" only)
    mv: Model


class Two(NamedTuple):
    x: Model  # the copy of w that is averaged
    v: Model
    mx: Model
    mv: Model


@dataclass(frozen=True)
class Ditto(ModelAveraging, OneModel):
    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    sends: ClassVar = {"x": "w"}
    exchanges: ClassVar = (Exchange("train", {"x": MODEL}),)
    stays: ClassVar = {"v": "the personal model"}
    averages: ClassVar = ("train",)

    lam: float = hyper(1.0, "lambda: pull of the personal model towards the global one, eq. (1)", low=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init_client(self, task: Task, x0: Model) -> Kept:
        m = self.momentum_to_keep(self.opt.init(task.params(x0)))
        return Kept(x0, m, m)

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        return {"w": self.average(up.x, server["w"], up.weights(self.weights))}

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "a personal model that starts at the global one and is pulled towards it"
        return self.joining(how, self.begin_tuning, self.newcomer_step, {"w": server["w"]})

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Two:
        params = task.params(down.w)
        return Two(down.w, kept.v, self.momentum_at_start(kept.mx, params), self.momentum_at_start(kept.mv, params))

    def step(self, task: Task, down: Down, c: Two, batch: Batch) -> Two:
        p, q = task.grad(c.x, batch), task.grad(c.v, batch)
        x, mx = self.opt.step(c.x, p.grad, c.mx)
        v, mv = self.opt.step(c.v, pulled(q.grad, self.lam, c.v, down.w), c.mv)
        return Two(x | p.buffers, v | q.buffers, mx, mv)

    def finish(self, task: Task, down: Down, c: Two) -> tuple[dict[str, Tree], Kept]:
        return {"x": c.x}, Kept(c.v, self.momentum_to_keep(c.mx), self.momentum_to_keep(c.mv))

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        return kept.v

    # one that comes later ----------------------------------------------------------------------------
    def newcomer_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        return self.descend(c, p._replace(grad=pulled(p.grad, self.lam, c.x, down.w)))
