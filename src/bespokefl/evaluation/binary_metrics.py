"""Accuracy, AUC, sensitivity, specificity and macro F1 of two-class models, for many clients at once.

Class 1 is the positive one. The last axis of labels and scores holds samples, axes before it are kept; a mask leaves
padding out (`bespokefl.evaluation.classification_metrics.pad`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from bespokefl.errors import InputError
from bespokefl.evaluation.classification_metrics import Floats, accuracy, confusion, f1, real, recall


class BinaryScores(NamedTuple):
    """One value per client in each array; NaN for a client without samples."""

    accuracy: Floats
    auc: Floats  # NaN also for a client with samples of one class only
    sensitivity: Floats  # TP / (TP + FN); 0 without positives
    specificity: Floats  # TN / (TN + FP); 0 without negatives
    f1: Floats  # mean of both classes' F1 (macro)


def binary_scores(logits: npt.ArrayLike, y: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> BinaryScores:
    """All five, from two logits per sample (the last axis). Equal logits are taken for class 0."""
    outputs = np.asarray(logits, dtype=np.float64)
    if outputs.ndim == 0 or outputs.shape[-1] != 2:
        raise InputError(f"logits have shape {outputs.shape}; their last axis must be the two classes")
    with np.errstate(invalid="ignore"):  # NaN where both are infinite
        margin = outputs[..., 1] - outputs[..., 0]  # probabilities of class 1 would tie at 1 where the model is sure
    counts = confusion(y, outputs.argmax(-1), classes=2, mask=mask)
    found, both_f1 = recall(counts), f1(counts)
    return BinaryScores(
        accuracy=accuracy(counts),
        auc=auc(margin, y, mask),
        sensitivity=found[..., 1],
        specificity=found[..., 0],
        f1=both_f1.mean(-1),
    )


def auc(score: npt.ArrayLike, y: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """Area under the ROC curve by the trapezoidal rule: a tie of a positive with a negative counts one half.

    It is the share of (positive, negative) pairs in order, so it does not exist without both classes: NaN, as 0
    would say that every pair is in the wrong order.
    """
    scores, labels = np.asarray(score, dtype=np.float64), np.asarray(y)
    counted = real(mask, scores.shape)
    if labels.shape != scores.shape:
        raise InputError(f"{labels.shape} labels but {scores.shape} scores; give one score per label")
    if not np.isfinite(scores[counted]).all():
        raise InputError("scores hold values that are not finite: a diverged model has no AUC")
    if not np.isin(labels[counted], (0, 1)).all():
        raise InputError("labels of an AUC must be 0 or 1")
    positive = counted & (labels == 1)
    positives, negatives = positive.sum(-1), (counted & (labels == 0)).sum(-1)
    ranks = rankdata(np.where(counted, scores, np.inf), axis=-1)  # from 1; equals share theirs; padding comes last
    in_order = np.where(positive, ranks, 0).sum(-1) - positives * (positives + 1) / 2  # Mann and Whitney's U
    pairs = positives * negatives
    area: Floats = np.divide(in_order, pairs, out=np.full(np.shape(pairs), np.nan), where=pairs > 0)
    return area
