"""FedDyn: a dynamic regulariser lines up the clients' minima with the global one (Acar et al., ICLR 2021).

Client i minimises f_i(x) - <s_i, x> + alpha/2 |x - w|^2 and then takes s_i <- s_i - alpha (x_i - w), the gradient of
f_i at x_i if it got to the minimum. The server tracks the mean of all s_i, also of those absent,
h <- h - (alpha / N) sum_{i in S} (x_i - w), and sets w <- mean_{i in S} x_i - h / alpha. h is (1/N) sum_i s_i after
every round, whoever takes part: it divides by N, the mean of the models by C, and both use the old w.

FedDyn has no personal model: ``personal`` is FedAvg's, and fine-tuning minimises the same local objective. The authors'
code gives clients with more samples a smaller alpha (divided by n_i over the mean of n); here, as in Algorithm 1, all
have the same. Large alpha lr diverges, the more so with momentum 0.9. Running statistics are averaged as they are.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from bespokefl.algorithms.fedavg import Kept, LocalSGD
from bespokefl.core import Batch, Cohort, Down, Model, Setup, Task, Training, Tree, hyper, pulled
from bespokefl.core.trees import mean, shift, sub, zeros


class Remembering(NamedTuple):
    """What a client keeps between rounds."""

    own: Kept  # as in FedAvg
    s: Model  # s_i


class Corrected(NamedTuple):
    training: Training
    s: Model  # constant during a round


@dataclass(frozen=True)
class FedDyn(LocalSGD):
    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    stays: ClassVar = {"s": "s_i, the sum of its earlier moves"}

    alpha: float = hyper(0.01, "alpha: weight of the dynamic regulariser, eq. (1)", above=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": x0, "h": zeros(task.params(x0))}

    def init_client(self, task: Task, x0: Model) -> Tree:
        return Remembering(super().init_client(task, x0), zeros(task.params(x0)))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w, h = server["w"], server["h"]
        up = cohort.run(self.train, shared={"w": w})
        each = torch.full((len(up.ids),), 1 / len(cohort.everyone()), dtype=torch.float64)
        h = shift(h, -self.alpha, mean({k: up.x[k] - w[k] for k in h}, each))
        return {"w": shift(mean(up.x, up.weights(self.weights)), -1 / self.alpha, h), "h": h}

    # one client --------------------------------------------------------------------------------------
    def begin(self, task: Task, down: Down, kept: Tree) -> Tree:
        return Corrected(super().begin(task, down, kept.own), kept.s)

    def step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        x = c.training.x
        p = task.grad(x, batch)
        grad = pulled(sub(p.grad, c.s), self.alpha, x, down.w)
        return c._replace(training=self.descend(c.training, p._replace(grad=grad)))

    def finish(self, task: Task, down: Down, c: Tree) -> tuple[dict[str, Tree], Tree]:
        upload, own = super().finish(task, down, c.training)
        moved = {k: c.training.x[k] - down.w[k] for k in c.s}
        return upload, Remembering(own, shift(c.s, -self.alpha, moved))

    # the scored model --------------------------------------------------------------------------------
    def newest_or_own(self, task: Task, down: Down, kept: Tree) -> Model:
        return super().newest_or_own(task, down, kept.own)

    def begin_fresh(self, task: Task, down: Down, kept: Tree) -> Tree:
        return Corrected(super().begin_fresh(task, down, kept.own), kept.s)

    def tuned_model(self, task: Task, down: Down, c: Tree) -> tuple[dict[str, Tree], Tree]:
        return super().tuned_model(task, down, c.training)

    def joined_model(self, task: Task, down: Down, c: Tree) -> Model:
        return super().joined_model(task, down, c.training)

    def fresh_optimiser(self, task: Task, down: Down, c: Tree) -> Tree:
        return c._replace(training=super().fresh_optimiser(task, down, c.training))
