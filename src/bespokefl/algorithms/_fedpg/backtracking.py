"""Personal steps that spare the others at finite length: halved until nobody else's loss rises.

FedPG's personal directions do no harm to first order only. Here every client of the cohort scores the models of all,
which costs as many passes over its data as there are clients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bespokefl.core import Batch, Down, Model, Phase, Program, Task, Tree, Uploads, ordered
from bespokefl.core.trees import combine, leaves, rows

SLACK = 1e-12  # by which others' losses may rise
HALVINGS = 60  # then a client stays where it is


class Scores(NamedTuple):
    losses: Tensor  # sums over the samples, one per model
    n: Tensor


def spare_others(up: Uploads, d: Model, models: Callable[[Model], Model], losses: Program) -> Model:
    """The stacked directions, halved until ``models(d)`` raise no other client's loss above ``up.loss``.

    ``losses`` is the program of `score_all`.
    """
    shares = torch.ones(len(up.ids), dtype=torch.float64)
    allowed = up.loss.double().cpu() + SLACK
    for _ in range(HALVINGS):
        told = up.cohort.run(losses, shared={"x": models(_scaled(shares, d))}, write=False)
        rises = told.loss.double().cpu() > told.align(allowed)[:, None]  # row: client j, column: model i
        rises &= told.align(torch.arange(len(up.ids)))[:, None] != torch.arange(len(up.ids))
        if not rises.any():
            break
        shares = torch.where(rises.any(0), shares / 2, shares)
    else:
        shares = torch.where(rises.any(0), torch.zeros_like(shares), shares)
    return _scaled(shares, d)


def finite(loss: Tensor) -> Tensor:
    """A step so long that the loss overflows is a bad step, not a broken client."""
    return torch.nan_to_num(loss, nan=1e30, posinf=1e30).clamp(max=1e30)


def _scaled(shares: Tensor, d: Model) -> Model:
    scaled: Model = combine(torch.diag(shares).to(leaves(d)[0].device), d)
    return scaled


# one client: its loss under each model ----------------------------------------------------------------------------
def score_all(batch_size: int | None) -> Program:
    return Program(no_scores, (Phase(add_scores, ordered("train", batch_size)),), tell_scores)


def no_scores(task: Task, down: Down, kept: Tree) -> Scores:
    return Scores(torch.zeros(leaves(down.x)[0].shape[0]), torch.zeros(()))


def add_scores(task: Task, down: Down, c: Scores, batch: Batch) -> Scores:
    sums = [batch.sum(task.losses(rows(down.x, k), batch)) for k in range(leaves(down.x)[0].shape[0])]
    return Scores(c.losses + torch.stack(sums), c.n + batch.n)


def tell_scores(task: Task, down: Down, c: Scores) -> tuple[dict[str, Tree], Tree]:
    return {"loss": finite(c.losses / c.n)}, {}
