"""Local: every client trains alone; the baseline that federation has to beat, client by client.

A client trains E epochs in the rounds in which it is sampled, so that every method gets the same computation;
``local_every_round`` trains all clients in every round instead. Nothing is sent.
"""

from dataclasses import dataclass
from typing import ClassVar

from bespokefl.core import (
    Algorithm,
    Batch,
    Cohort,
    Down,
    Exchange,
    Model,
    Newcomer,
    Phase,
    Program,
    Task,
    Training,
    Tree,
    hyper,
    never,
)


@dataclass(frozen=True)
class Local(Algorithm):
    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "no federation: each client on its own data"
    exchanges: ClassVar = (Exchange("train"),)
    stays: ClassVar = {"x": "the personal model"}

    acts: ClassVar = {"weights": never("nothing is averaged")}

    local_every_round: bool = hyper(False, "train all clients in every round, not only those sampled")

    def init_client(self, task: Task, x0: Model) -> Training:
        return Training(x0, self.momentum_to_keep(self.opt.init(task.params(x0))))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        (cohort.everyone() if self.local_every_round else cohort).run(self.train)
        return server

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        return self.joining("the initial model, trained alone", self.begin, self.step, {})

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, own: Training) -> Training:
        return Training(own.x, self.momentum_at_start(own.m, task.params(own.x)))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return self.descend(c, task.grad(c.x, batch))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {}, Training(c.x, self.momentum_to_keep(c.m))

    def own(self, task: Task, down: Down, own: Training) -> Model:
        return own.x
