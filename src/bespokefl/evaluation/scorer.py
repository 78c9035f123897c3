"""From what a scoring program hands out to the clients' figures: which answers are kept, and what is made of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from bespokefl.core.model_programs import Outputs
from bespokefl.core.program import Program, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree
from bespokefl.data.federated import FederatedData
from bespokefl.engines.base import Resident
from bespokefl.evaluation.fit import check_fit
from bespokefl.evaluation.sample_metrics import Judged, judge
from bespokefl.evaluation.scoring import Answers, Evaluation, scored

SCORING_BATCH = 256
SCORING_PIXELS = 2**20  # of masks in a scoring batch: networks that answer pixel by pixel keep large maps


class Closer(NamedTuple):
    """The answers that a scoring program keeps for metrics beside hits and loss, and how they are judged."""

    judged: Judged
    answers: Answers
    slow: bool  # also the metrics that take their time


def batch_size(data: FederatedData) -> int:
    """Samples that are scored at once."""
    return max(1, min(SCORING_BATCH, SCORING_PIXELS // data.y[0].numel())) if data.has_masks else SCORING_BATCH


def judged_by(task: Task, data: FederatedData, shape: tuple[int, ...]) -> Judged | None:
    """What answers of a shape (to one sample) are."""
    if not task.classifies or not data.classes:
        return None
    if data.has_masks:
        return Judged("masks", shape[0])
    logits = max((2, *shape))  # a single output is one of two classes
    return Judged("binary" if logits == 2 else "classes", logits)


def closer_look(judged: Judged, data: FederatedData, rows: Sequence[Rows], slow: bool) -> Closer:
    """Room for the answers to the longest of the given rows: whole batches."""
    size, longest = batch_size(data), max(len(own) for own in rows)
    shape = {"binary": (2,), "classes": (), "masks": tuple(data.y.shape[1:])}[judged.kind]
    return Closer(judged, Answers(size * max(1, -(-longest // size)), shape, judged.kind == "binary"), slow)


class Scorer:
    """Scores models of clients whose samples are here; who runs the scoring programs is the caller's matter.

    Made only where model, loss and data fit together (`check_fit`).
    """

    def __init__(self, task: Task, data: FederatedData, resident: Resident) -> None:
        self.task, self.data = task, data
        self.answer = check_fit(task, data, resident)
        self.judged = judged_by(task, data, self.answer.shape)

    def look(self, rows: Sequence[Rows], *, closer: bool, usual: bool = True) -> Closer | None:
        """What is kept of the answers to the given rows; nothing where no metric needs it.

        ``closer`` asks for all metrics; else, of ``usual`` rows, for those that every evaluation has.
        """
        judged = self.judged
        if judged is None or not (closer or (usual and judged.always)):
            return None
        return closer_look(judged, self.data, rows, slow=closer)

    def scoring(
        self, program: Program, split: str, outputs: Outputs, look: Closer | None, *, shared: bool = False
    ) -> Program:
        """The program that scores the model of another one."""
        return scored(program, split, batch_size(self.data), outputs, look.answers if look else None, shared)

    def evaluation(self, result: Result, ids: Rows, rows: Sequence[Rows], look: Closer | None) -> Evaluation:
        """What the scoring program found, by client."""
        return evaluation(self.task, self.data.y, ids, rows, result.positions, result.uploads, look)


def evaluation(
    task: Task, y: Tensor, ids: Rows, rows: Sequence[Rows], found: Rows, tally: dict[str, Tree], closer: Closer | None
) -> Evaluation:
    """Arrays over all asked clients; NaN for those that could not be scored (all but the positions ``found``)."""
    n = np.zeros(len(ids), dtype=np.int64)
    accuracy, loss = np.full(len(ids), np.nan), np.full(len(ids), np.nan)
    further: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    if len(found):
        counted = tally["n"].cpu().numpy()
        n[found] = counted.astype(np.int64)
        with np.errstate(invalid="ignore", divide="ignore"):
            loss[found] = tally["loss"].cpu().numpy() / counted
            if task.classifies:
                accuracy[found] = tally["hits"].cpu().numpy() / counted
        if closer is not None:
            answers = tally["answers"].cpu().numpy()
            labels = _padded_labels(y, [rows[client] for client in ids[found]], answers.shape[1])
            for name, values in judge(closer.judged, answers, labels, n[found], closer.slow).items():
                further[name] = np.full(len(ids), np.nan)
                further[name][found] = values
    return Evaluation(ids, n, accuracy, loss, further)


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Of several groups of clients, one after the other; a group of which none could be scored has NaN."""
    names = dict.fromkeys(name for part in parts for name in part.further)
    further = {
        name: np.concatenate([part.further.get(name, np.full(len(part.n), np.nan)) for part in parts]) for name in names
    }
    clients, n, accuracy, loss = (np.concatenate([part[k] for part in parts]) for k in range(4))
    return Evaluation(clients, n, accuracy, loss, further)


def of_all(found: Evaluation, clients: int) -> Evaluation:
    """The same with an entry for every client: NaN for those that were not scored."""
    if len(found.clients) == clients:
        return found

    def placed(values: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        everyone = np.full(clients, np.nan)
        everyone[found.clients] = values
        return everyone

    n = np.zeros(clients, dtype=np.int64)
    n[found.clients] = found.n
    further = {name: placed(values) for name, values in found.further.items()}
    return Evaluation(np.arange(clients), n, placed(found.accuracy), placed(found.loss), further)


def _padded_labels(y: Tensor, rows: Sequence[Rows], length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    index = np.zeros((len(rows), length), dtype=np.int64)
    for place, own in enumerate(rows):
        index[place, : len(own)] = own
    labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = y.cpu().numpy()[index]
    return labels
