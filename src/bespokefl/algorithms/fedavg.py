"""FedAvg: average the locally trained models (McMahan et al., AISTATS 2017).

Algorithm 1: the server sends w, every client of the cohort runs E epochs of SGD from it, and the server averages what
comes back by p_i. FedAvg has no personal model of its own, so ``personal`` says which one is scored for a client:

* ``local_before_agg`` (default): what the client had at the end of its last local training; the newest w if it never
  took part. It costs nothing extra and is what a participant holds in its hands.
* ``global``: the newest w.
* ``finetune``: ``finetune_epochs`` of local SGD from the newest w, on a copy, at evaluation.

The numbers differ a lot (10 points and more on skewed labels): a comparison must say which one it takes.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.core import (
    MODEL,
    Batch,
    Batches,
    Call,
    Cohort,
    Down,
    Exchange,
    Model,
    ModelAveraging,
    Newcomer,
    OneModel,
    Pass,
    Phase,
    Program,
    Task,
    Training,
    Tree,
    hand_over,
    hyper,
    when,
)
from bespokefl.core.trees import where


class Kept(NamedTuple):
    """What a client keeps between rounds."""

    x: Model  # its model after local training (local_before_agg only)
    m: Model  # momentum (opt_state="keep" only)
    seen: Tensor  # 1 once it took part


@dataclass(frozen=True)
class LocalSGD(OneModel):
    """FedAvg's clients: each trains from w and sends the result; what the server makes of it is a method's matter."""

    sends: ClassVar = {"x": "w"}
    exchanges: ClassVar = (Exchange("train", {"x": MODEL}),)

    personal: Literal["local_before_agg", "global", "finetune"] = hyper(
        "local_before_agg", "which model a client is scored with"
    )
    finetune_epochs: int = hyper(
        1, 'epochs of fine-tuning at evaluation (personal="finetune")', low=1, when=when(personal="finetune")
    )

    def init_client(self, task: Task, x0: Model) -> Kept:
        return self._kept(x0, self.opt.init(task.params(x0)), torch.zeros(()))

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        programs = {"local_before_agg": self.last_trained, "global": self.received_model, "finetune": self.tuned}
        return Call(programs[self.personal], {"w": server["w"]})

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        return self.joining(
            "the global model, trained on by the local objective", self.begin_fresh, self.step, {"w": server["w"]}
        )

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        return Training(down.w, self.momentum_at_start(kept.m, task.params(down.w)))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return self.descend(c, self.gradient(task, down, c.x, batch))

    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        """The local objective's gradient, f_i here; methods that only change the objective change this."""
        return task.grad(x, batch)

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        return {"x": c.x}, self._kept(c.x, c.m, torch.ones(()))

    def _kept(self, x: Model, m: Model, seen: Tensor) -> Kept:
        return Kept(x if self.personal == "local_before_agg" else {}, self.momentum_to_keep(m), seen)

    # the scored model --------------------------------------------------------------------------------
    @property
    def last_trained(self) -> Program:
        return Program(self.newest_or_own, (), hand_over)

    def newest_or_own(self, task: Task, down: Down, kept: Kept) -> Model:
        model: Model = where(kept.seen > 0, kept.x, down.w)
        return model

    @property
    def tuned(self) -> Program:
        batches = Batches("train", self.finetune_epochs, self.batch_size, stream="finetune", drop_last=self.drop_last)
        return Program(self.begin_fresh, (Phase(self.step, batches),), self.tuned_model)

    def begin_fresh(self, task: Task, down: Down, kept: Kept) -> Training:
        return Training(down.w, self.opt.init(task.params(down.w)))

    def tuned_model(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Tree]:
        return {"model": c.x}, {}


@dataclass(frozen=True)
class FedAvg(ModelAveraging, LocalSGD):
    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    averages: ClassVar = ("train",)

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        return {"w": self.average(up.x, server["w"], up.weights(self.weights))}
