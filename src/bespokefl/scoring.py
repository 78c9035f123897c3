"""Scoring a client's model: the program that makes the model, with a scoring phase behind it. Nothing is written."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.losses import hit
from bespokefl.program import Down, Phase, Program, ordered
from bespokefl.task import Batch, Task
from bespokefl.trees import Model, Tree

Outputs = Callable[[Task, Model, Batch], Tensor]


class Evaluation(NamedTuple):
    """A model per client, scored; one entry per client in each array."""

    clients: NDArray[np.int64]
    n: NDArray[np.int64]  # samples scored
    accuracy: NDArray[np.float64]  # NaN where nothing was scored, or for tasks without classes
    loss: NDArray[np.float64]


class Tally(NamedTuple):
    model: Model
    hits: Tensor
    loss: Tensor
    n: Tensor


@cache
def scored(program: Program, split: str, size: int | None, outputs: Outputs) -> Program:
    """The program that runs ``program`` up to its upload's ``model`` and scores it on a split.

    The same one for the same arguments, so that engines know its functions again in later evaluations and runs.
    """
    scoring = _Scoring(program, outputs)
    phase = Phase(scoring.add, ordered(split, size), scoring.enter)
    return Program(program.begin, (*program.phases, phase), scoring.finish)


class _Scoring:
    def __init__(self, program: Program, outputs: Outputs) -> None:
        self._made_by, self._outputs = program, outputs

    def enter(self, task: Task, down: Down, carry: Tree) -> Tally:
        zero = torch.zeros((), dtype=torch.float64)
        return Tally(self._made_by.finish(task, down, carry)[0]["model"], zero, zero, zero)

    def add(self, task: Task, down: Down, c: Tally, batch: Batch) -> Tally:
        out = self._outputs(task, c.model, batch)
        hits = batch.sum(hit(out, batch.y)) if task.classifies else torch.zeros(())
        loss = batch.sum(task.per_sample(out, batch.y))
        return Tally(c.model, c.hits + hits.double(), c.loss + loss.double(), c.n + batch.n.double())

    def finish(self, task: Task, down: Down, c: Tally) -> tuple[dict[str, Tree], Tree]:
        return {"hits": c.hits, "loss": c.loss, "n": c.n}, {}


def network_outputs(task: Task, model: Model, batch: Batch) -> Tensor:
    """What the network itself answers."""
    return task.apply(model, batch)[0]


def hand_over(task: Task, down: Down, model: Model) -> tuple[dict[str, Tree], Tree]:
    """The finish of a program whose carry is the model itself."""
    return {"model": model}, {}


def received(task: Task, down: Down, state: Tree) -> Model:
    """The begin of a program whose model is the download ``w``."""
    w: Model = down.w
    return w


GLOBAL_MODEL = Program(received, (), hand_over)
