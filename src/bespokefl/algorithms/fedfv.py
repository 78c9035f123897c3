"""FedFV: average the updates after taking out what conflicts between clients (Wang et al., IJCAI 2021).

A client sends its model and its loss at w; g_i = w - w_i. Of two updates with g_i . g_j < 0 each undoes some of the
other's work. In a round t of m clients:

* Internal conflicts: each g_i is projected, one after another in the order of rising losses, on the normal planes of
  those g_j (the originals) that it still conflicts with. The clients with the largest losses, from position
  ceil((m - 1)(1 - alpha)) on in that order, keep their g_i. g is the mean of the results.
* External conflicts: for each of the rounds t - tau, ..., t - 1 (the oldest first), the last updates of the clients
  that took part then and not since, as far as they conflict with g, are summed, and g is projected on the normal plane
  of the sum.
* g is brought to the length of the mean of the original g_i, and w <- w - g.

Projections meet one conflict at a time, so freedom from conflict is certain for two clients only. Without conflict the
round is that of FedAvg with uniform weights. What is scored for a client is as in FedAvg.

* Unlike the authors' code: its loop runs over the rounds t - tau + 1, ..., t, so that with tau = 1 only the round's own
  clients are looked at again (``external="code"``). As in it, alpha = 0 lets nobody keep the original.
* Beyond the paper: where the projected g vanishes, w stays. Buffers (running statistics) are averaged. The loss at w
  is the mean over the train split in evaluation mode. tau = 0 turns external conflicts off.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespokefl.algorithms.fedavg import Kept, LocalSGD
from bespokefl.core import (
    LOSS,
    MODEL,
    Batch,
    Cohort,
    Down,
    Exchange,
    Model,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    gram,
    hyper,
    lengths,
    ordered,
    unless,
    weighted_sum,
)
from bespokefl.core.common_direction import STATIONARY
from bespokefl.core.solvers import Floats
from bespokefl.core.trees import concat, drop, mean, rows, shift, stack, sub, tree_map


class Last(NamedTuple):
    """The last updates of the clients that took part lately."""

    g: Model  # stacked
    ids: list[int]
    rounds: list[int]


class Work(NamedTuple):
    loss: Tensor  # sum over samples, at w
    n: Tensor
    local: Training


@dataclass(frozen=True)
class FedFV(LocalSGD):
    name: ClassVar[str] = "fedfv"
    paper: ClassVar[str] = "Wang et al., Federated Learning with Fair Averaging, IJCAI 2021"
    exchanges: ClassVar = (Exchange("train", {"x": MODEL, "loss": LOSS}),)

    alpha: float = hyper(0.1, "alpha: share of clients, those of the largest losses, that keep g_i", low=0, high=1)
    tau: int = hyper(1, "tau: rounds for which an absent client's last update counts", low=0)
    external: Literal["absent", "code"] = hyper(
        "absent",
        "external conflicts with rounds t - tau to t - 1, or t - tau + 1 to t (authors' code)",
        when=unless(tau=0),
    )
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        nobody = tree_map(lambda v: v.new_zeros(0, *v.shape), task.params(x0))
        return {"w": x0, "last": Last(nobody, [], [])}

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w, task, t = server["w"], cohort.task, cohort.round
        up = cohort.run(self.train, shared={"w": w})
        p = up.weights(self.weights)
        g = sub(task.params(w), task.params(up.x))
        last = self.remembered(server["last"], g, [int(i) for i in up.ids], t)
        weights = self.fair_weights(gram(last.g), up.loss.cpu().numpy(), p.numpy(), t - np.array(last.rounds))
        fair, plain = weighted_sum(weights, last.g), weighted_sum(p.numpy(), g)
        length, wanted = lengths(stack([fair, plain]))
        factor = float(wanted / length) if length > STATIONARY * wanted else 0.0
        return {"w": shift(w, -factor, fair) | mean(drop(up.x, task.names), p), "last": last}

    def remembered(self, last: Last, g: Model, ids: list[int], t: int) -> Last:
        """This round's updates, then those of absent clients that still count."""
        absent = [
            k for k, (i, r) in enumerate(zip(last.ids, last.rounds, strict=True)) if i not in ids and t - r <= self.tau
        ]
        kept = rows(last.g, torch.tensor(absent, dtype=torch.int64))
        return Last(
            concat([g, kept]), ids + [last.ids[k] for k in absent], [t] * len(ids) + [last.rounds[k] for k in absent]
        )

    def fair_weights(self, products: Floats, losses: Floats, p: Floats, ages: Floats) -> Floats:
        """The projected g as weights of the remembered updates (this round's first), from their Gram matrix alone."""
        m = len(losses)
        order = np.argsort(losses, kind="stable")
        first_kept = math.ceil((m - 1) * (1 - self.alpha) - 1e-9) if self.alpha > 0 else m  # in spite of rounding
        projected = np.eye(m)
        for i in order[:first_kept]:
            for j in order[order != i]:
                slope = products[j, :m] @ projected[i]
                if slope < 0:
                    projected[i, j] -= slope / products[j, j]
        weights = np.zeros(len(products))
        weights[:m] = p @ projected
        oldest, newest = (self.tau, 1) if self.external == "absent" else (self.tau - 1, 0)
        for age in range(oldest, newest - 1, -1):
            slopes = products @ weights
            against = (ages == age) & (slopes < 0)
            squared = products[np.ix_(against, against)].sum()
            if squared > 0:
                weights[against] -= slopes[against].sum() / squared
        return weights

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        told = Phase(self.add_loss, ordered("train", self.batch_size))
        return Program(self.begin_with_loss, (told, Phase(self.local_step, self.epochs)), self.finish_with_loss)

    def begin_with_loss(self, task: Task, down: Down, kept: Kept) -> Work:
        return Work(torch.zeros(()), torch.zeros(()), self.begin(task, down, kept))

    def add_loss(self, task: Task, down: Down, c: Work, batch: Batch) -> Work:
        return c._replace(loss=c.loss + batch.sum(task.losses(down.w, batch)), n=c.n + batch.n)

    def local_step(self, task: Task, down: Down, c: Work, batch: Batch) -> Work:
        return c._replace(local=self.step(task, down, c.local, batch))

    def finish_with_loss(self, task: Task, down: Down, c: Work) -> tuple[dict[str, Tree], Kept]:
        upload, kept = self.finish(task, down, c.local)
        return upload | {"loss": c.loss / c.n}, kept
