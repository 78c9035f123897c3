"""Scoring a client's model: the program that makes the model, with a scoring phase behind it. Nothing is written.

Hits and losses are summed as batches go by. What cannot be summed (an AUC, the outline of a mask) is computed from the
answers to all samples, which the phase then keeps in a buffer of a fixed size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.core.losses import class_logits, hit
from bespokefl.core.model_programs import Outputs
from bespokefl.core.program import Down, Phase, Program, ordered
from bespokefl.core.task import Batch, Task
from bespokefl.core.trees import Model, Tree

Floats = NDArray[np.float64]


class Evaluation(NamedTuple):
    """A model per client, scored; one entry per client in each array."""

    clients: NDArray[np.int64]
    n: NDArray[np.int64]  # samples scored
    accuracy: Floats  # NaN where nothing was scored, or for tasks without classes; of masks, the share of pixels
    loss: Floats
    further: Mapping[str, Floats] = {}  # by name, what else this task is judged by

    @property
    def main_metric(self) -> str:
        """The name of what methods are compared by."""
        return "dice" if "dice" in self.further else "accuracy"

    @property
    def main(self) -> Floats:
        """Dice for masks, else the accuracy."""
        return self.further.get("dice", self.accuracy)


class Answers(NamedTuple):
    """What is kept of every sample: its logits, or the class of the largest one (of every pixel, for masks)."""

    rows: int  # room for so many samples of a client, a scoring batch at least
    shape: tuple[int, ...]  # of a sample's entry
    outputs: bool

    def dtype(self, task: Task) -> torch.dtype:
        if self.outputs:
            return task.dtype
        return torch.uint8 if self.shape else torch.int32  # masks have at most 256 classes

    def nbytes(self, task: Task) -> int:
        """Of one client."""
        return self.rows * int(np.prod(self.shape)) * self.dtype(task).itemsize


class Tally(NamedTuple):
    model: Model
    hits: Tensor
    loss: Tensor
    n: Tensor
    answers: dict[str, Tensor]  # the buffer and the next free place in it, if answers are kept


@cache
def scored(
    program: Program,
    split: str,
    size: int | None,
    outputs: Outputs,
    answers: Answers | None = None,
    shared: bool = False,
) -> Program:
    """The program that runs ``program`` up to its upload's ``model`` and scores it on a split.

    The same one for the same arguments, so that engines know its functions again in later evaluations and runs.
    ``shared`` says that the split is the same for all clients.
    """
    scoring = _Scoring(program, outputs, answers)
    phase = Phase(scoring.add, ordered(split, size, shared=shared), scoring.enter)
    return Program(program.begin, (*program.phases, phase), scoring.finish)


@dataclass(frozen=True)
class _Scoring:
    made_by: Program
    outputs: Outputs
    answers: Answers | None

    def enter(self, task: Task, down: Down, carry: Tree) -> Tally:
        zero = torch.zeros((), dtype=torch.float64)
        kept = {}
        if (wanted := self.answers) is not None:
            kept["buffer"] = torch.zeros((wanted.rows, *wanted.shape), dtype=wanted.dtype(task))
            kept["next"] = torch.zeros((), dtype=torch.int64)
        return Tally(self.made_by.finish(task, down, carry)[0]["model"], zero, zero, zero, kept)

    def add(self, task: Task, down: Down, c: Tally, batch: Batch) -> Tally:
        out = self.outputs(task, c.model, batch)
        hits = batch.sum(hit(out, batch.y)) if task.classifies else torch.zeros(())
        loss = batch.sum(task.per_sample(out, batch.y))
        answers = self._kept(c.answers, out)
        return Tally(c.model, c.hits + hits.double(), c.loss + loss.double(), c.n + batch.n.double(), answers)

    def _kept(self, answers: dict[str, Tensor], out: Tensor) -> dict[str, Tensor]:
        """The buffer with a batch's answers behind those before.

        Padding lies behind the samples, so the next batch overwrites it, or nobody looks at it. A client that has
        finished may be computed on in a stack: its place stays inside of the buffer.
        """
        if self.answers is None:
            return answers
        logits, buffer = class_logits(out), answers["buffer"]
        values = logits if self.answers.outputs else logits.argmax(1)
        places = answers["next"].clamp(max=len(buffer) - len(out)) + torch.arange(len(out), device=out.device)
        filled = buffer.index_copy(0, places, values.to(buffer.dtype))
        return {"buffer": filled, "next": answers["next"] + len(out)}

    def finish(self, task: Task, down: Down, c: Tally) -> tuple[dict[str, Tree], Tree]:
        found: dict[str, Tree] = {"hits": c.hits, "loss": c.loss, "n": c.n}
        return (found if self.answers is None else found | {"answers": c.answers["buffer"]}), {}
