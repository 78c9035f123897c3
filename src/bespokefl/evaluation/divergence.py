"""When a run has diverged: the same rule for every method."""

import math

import numpy as np

from bespokefl.evaluation.scoring import Evaluation

LOST = 1000.0  # times the cross-entropy of guessing: no model that learns comes near it


def what_diverged(scores: Evaluation, classes: int) -> str:
    """Why the scored models are lost, or nothing: for more than half of the clients the loss is not finite or absurd.

    Absurd is a cross-entropy of more than `LOST` times that of guessing; other losses have no such measure.
    """
    loss = scores.loss[scores.n > 0]
    guessing = max(1.0, math.log(classes)) if classes else math.inf
    if 2 * np.count_nonzero(~np.isfinite(loss)) > len(loss):
        return "the loss of more than half of the clients is not finite"
    if 2 * np.count_nonzero(~(loss <= LOST * guessing)) > len(loss):
        return f"more than half of the clients have a loss over {LOST * guessing:.3g}; guessing has {guessing:.2g}"
    return ""
