"""Metrics of a client that need the answers to all its samples at once: which there are, and what they take.

Two classes: AUC, sensitivity, specificity, F1. More classes: balanced accuracy and F1. Masks: Dice, Hausdorff distance.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bespokefl.evaluation.binary_metrics import binary_scores
from bespokefl.evaluation.classification_metrics import balanced_accuracy, confusion, macro_f1
from bespokefl.evaluation.segmentation_metrics import class_masks, dice, hausdorff

Floats = NDArray[np.float64]
Labels = NDArray[np.int64] | NDArray[np.uint8]

BINARY = ("auc", "sensitivity", "specificity", "f1")  # of `binary_scores`
UNBOUNDED = frozenset({"hausdorff"})  # all others are fractions

MOST_CELLS = 2**22  # of confusion matrices, or pixels of masks, that are worked on at a time


class Judged(NamedTuple):
    """What a task's answers are."""

    kind: Literal["binary", "classes", "masks"]
    classes: int

    @property
    def always(self) -> bool:
        """Whether some of its metrics are so cheap and so usual that every evaluation has them."""
        return self.kind != "classes"

    def names(self, closer: bool) -> tuple[str, ...]:
        """The metrics that `judge` finds."""
        if self.kind == "masks":
            return ("dice", "hausdorff") if closer else ("dice",)
        return BINARY if self.kind == "binary" else ("f1", "balanced_accuracy")


def judge(
    judged: Judged, answers: NDArray[np.generic], y: Labels, n: NDArray[np.int64], closer: bool
) -> dict[str, Floats]:
    """A value per client in each metric, from (clients, rows, ...) answers and labels; a client's first n rows count.

    ``closer`` adds what takes its time: the Hausdorff distance. NaN where a client has no samples, or no finite answer.
    """
    mask = np.arange(answers.shape[1]) < n[:, None]
    if judged.kind == "binary":
        return _binary(answers, y, mask)
    if judged.kind == "classes":
        return _classes(answers, y, mask, judged.classes)
    return _masks(answers, y, n, judged.classes, closer)


def _binary(logits: NDArray[np.generic], y: Labels, mask: NDArray[np.bool_]) -> dict[str, Floats]:
    finite = np.isfinite(logits).all(-1) | ~mask
    diverged = ~finite.all(1)
    scores = binary_scores(np.where(diverged[:, None, None], 0, logits), y, mask)
    return {name: np.where(diverged, np.nan, getattr(scores, name)) for name in BINARY}


def _classes(answers: NDArray[np.generic], y: Labels, mask: NDArray[np.bool_], classes: int) -> dict[str, Floats]:
    at_once = max(1, MOST_CELLS // classes**2)
    parts = []
    for k in range(0, len(answers), at_once):
        some = slice(k, k + at_once)
        counts = confusion(y[some], answers[some], classes, mask[some])
        parts.append((balanced_accuracy(counts), macro_f1(counts)))
    balanced, f1 = (np.concatenate(values) for values in zip(*parts, strict=True))
    return {"f1": f1, "balanced_accuracy": balanced}


def _masks(
    answers: NDArray[np.generic], y: Labels, n: NDArray[np.int64], classes: int, closer: bool
) -> dict[str, Floats]:
    """Means over a client's images and their classes, the background (class 0) apart."""
    functions = {"dice": dice, "hausdorff": hausdorff} if closer else {"dice": dice}
    found = {name: np.full(len(n), np.nan) for name in functions}
    at_once = max(1, MOST_CELLS // (classes * int(np.prod(y.shape[2:]))))
    for client in np.flatnonzero(n):
        sums = dict.fromkeys(functions, 0.0)
        for k in range(0, n[client], at_once):
            rows = slice(k, min(k + at_once, n[client]))
            pair = [class_masks(maps[client, rows], range(1, classes)) for maps in (answers, y)]
            for name, function in functions.items():
                sums[name] += float(function(*pair).mean(1).sum())
        for name, total in sums.items():
            found[name][client] = total / n[client]
    return found
