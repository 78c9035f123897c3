"""FedAvg, and then every client takes steps of its own from its model, on its risk or on everybody's (PGFed, figure 2).

For ``after`` rounds this is FedAvg. In every further round all N clients, sampled or not, take one step each from
theirs, theta_i, which starts at the final global model w; w stays as it is. With f_i the mean loss on all of client i's
train samples, a step descends PGFed's eq. (4),

    F_i(theta_i) = f_i(theta_i) + mu / (N - 1) sum_{j != i} f_j(theta_i),

the "explicit" objective; ``mu = 0``, the default, is the "implicit" one, the own risk alone. The others' risks are
exact: their samples go to client i, so for mu > 0 this is a study and no federation, and O(N^2) work.

What is scored is w until round ``after``, then theta_i: with ``eval.every = 1`` the last rounds are the figure's curve,
and ``gain_over_global`` its gains. Steps are those of the local optimiser on whole gradients, its momentum fresh at the
first; the rate is ``step_lr``. Dropout and running statistics see the own samples in training mode, the others' in
evaluation mode.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from bespokefl.algorithms.pgfed import data_of
from bespokefl.core import (
    MODEL,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    ModelAveraging,
    OneModel,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    hyper,
    ordered,
)
from bespokefl.core.trees import add

SAMPLES_AT_ONCE = 2048  # of the others: their activations have to fit into memory


@dataclass(frozen=True)
class FedAvgSteps(ModelAveraging, OneModel):
    name: ClassVar[str] = "fedavg-steps"
    paper: ClassVar[str] = "Luo et al., PGFed: Personalize Each Client's Global Objective, ICCV 2023, figure 2"
    sends: ClassVar = {"x": "w"}
    exchanges: ClassVar = (Exchange("train", {"x": MODEL}), Exchange("first_step"), Exchange("next_step"))

    after: int = hyper(100, "rounds of FedAvg, after which every round is a step of each client", low=1)
    mu: float = hyper(0.0, "mu: weight of the other clients' risks, eq. (4); 0: the own risk alone", low=0)
    step_lr: float | None = hyper(None, "size of these steps; nothing: lr", low=0)

    @property
    def remote_unsupported(self) -> str:
        return "algorithm.mu > 0 takes every client's samples to all others" if self.mu else ""

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        if self.mu and setup.clients < 2:
            raise InputError(
                f"algorithm.mu = {self.mu:g} ({self.name}) weighs the risks of other clients, and there is one client; "
                "take more clients, or mu = 0"
            )

    def init_client(self, task: Task, x0: Model) -> Training:
        return Training(x0, self.opt.init(task.params(x0)))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w = server["w"]
        if cohort.round < self.after:
            up = cohort.run(self.train, shared={"w": w})
            return {"w": self.average(up.x, w, up.weights(self.weights))}
        program = self.first_step if cohort.round == self.after else self.next_step
        everyone = cohort.everyone()
        if not self.mu:
            everyone.run(program, shared={"w": w})
            return server
        data = data_of(torch.as_tensor(everyone.ids), everyone)
        means = data.pop("mean_of")
        share = self.mu / (len(everyone) - 1) * (means.sum(0) - means)  # row i: the weight of each sample for client i
        everyone.run(program, shared={"w": w, **data}, per_client={"share": share})
        return server

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        if cohort.round <= self.after:
            return Call(self.received_model, {"w": server["w"]})
        return super().personal_model(server, cohort)

    def own(self, task: Task, down: Down, kept: Training) -> Model:
        return kept.x

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    @property
    def first_step(self) -> Program:
        return Program(self.begin_at_w, (Phase(self.full_step, ordered("train")),), self.keep)

    @property
    def next_step(self) -> Program:
        return Program(self.go_on, (Phase(self.full_step, ordered("train")),), self.keep)

    def begin(self, task: Task, down: Down, kept: Training) -> Training:
        return Training(down.w, self.momentum_at_start(kept.m, task.params(down.w)))

    def begin_at_w(self, task: Task, down: Down, kept: Training) -> Training:
        return Training(down.w, self.opt.init(task.params(down.w)))

    def go_on(self, task: Task, down: Down, kept: Training) -> Training:
        return kept

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return self.descend(c, task.grad(c.x, batch))

    def full_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        """One step on eq. (4); the batch is the whole train split."""
        p = task.grad(c.x, batch)
        g = add(p.grad, self.of_the_others(task, down, c.x, batch)) if self.mu else p.grad
        x, m = self.opt_at(self.lr if self.step_lr is None else self.step_lr).step(c.x, g, c.m)
        return Training(x | p.buffers, m)

    def of_the_others(self, task: Task, down: Down, x: Model, batch: Batch) -> Model:
        """The gradient of mu / (N - 1) sum_{j != i} f_j."""
        total: Model = {}
        for k in range(0, len(down.y), SAMPLES_AT_ONCE):
            x_part, y_part, share = (v[k : k + SAMPLES_AT_ONCE] for v in (down.x, down.y, down.share))
            g = _gradient(task, x, Batch(x_part, y_part, None, batch.key), share)
            total = add(total, g) if total else g
        return total

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {"x": c.x}, c

    def keep(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {}, c


def _gradient(task: Task, x: Model, batch: Batch, share: torch.Tensor) -> Model:
    """Of the losses of some samples, each with its share."""
    weighed = task.grad(x, batch, train=False, objective=lambda _, out, h: share @ task.per_sample(out, batch.y))
    return weighed.grad
