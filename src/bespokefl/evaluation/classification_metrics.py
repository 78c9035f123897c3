"""Figures of classifiers, for many clients at once, from counts of what was answered for which class.

The last axis of labels holds samples; axes before it (clients, for example) are kept. Clients of different sizes are
padded to one, and a mask says which samples count (`pad`). A ratio over nothing is 0; a client without samples has NaN.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bespokefl.errors import InputError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def pad(per_client: Sequence[npt.ArrayLike]) -> tuple[npt.NDArray[Any], Mask]:
    """One array of all clients' samples, padded with zeros behind, and which of them are real."""
    arrays = [np.asarray(samples) for samples in per_client]
    if not arrays or len({array.shape[1:] for array in arrays}) > 1 or any(array.ndim == 0 for array in arrays):
        shapes = [array.shape for array in arrays]
        raise InputError(f"shapes of the clients' samples are {shapes}; only the first axis may differ")
    sizes = np.array([len(array) for array in arrays])
    mask = np.arange(sizes.max()) < sizes[:, None]
    padded = np.zeros((*mask.shape, *arrays[0].shape[1:]), dtype=np.result_type(*arrays))
    padded[mask] = np.concatenate(arrays)
    return padded, mask


def confusion(y: npt.ArrayLike, predicted: npt.ArrayLike, classes: int, mask: npt.ArrayLike | None = None) -> Counts:
    """How many samples of each class (last axis but one) were taken for each class (last axis)."""
    truth, answer = np.asarray(y), np.asarray(predicted)
    counted = real(mask, truth.shape)
    if truth.shape != answer.shape:
        raise InputError(f"{truth.shape} labels but {answer.shape} predictions; give one prediction per label")
    for name, values in (("labels", truth[counted]), ("predictions", answer[counted])):
        if values.dtype.kind not in "biu" or np.any((values < 0) | (values >= classes)):
            raise InputError(f"{name} must be whole numbers from 0 to {classes - 1}")
    clients = truth.shape[:-1]
    client = np.arange(np.prod(clients, dtype=np.int64)).reshape(*clients, 1)
    cell = (np.broadcast_to(client, truth.shape)[counted] * classes + truth[counted]) * classes + answer[counted]
    counts = np.bincount(cell.astype(np.int64), minlength=client.size * classes**2)
    return counts.reshape(*clients, classes, classes)


def accuracy(counts: Counts) -> Floats:
    """The share of samples taken for what they are."""
    return _share(_right(counts).sum(-1), counts.sum((-2, -1)), counts.sum((-2, -1)))


def recall(counts: Counts) -> Floats:
    """Of each class the share that was found; 0 for a class without samples."""
    return _share(_right(counts), counts.sum(-1), counts.sum((-2, -1))[..., None])


def f1(counts: Counts) -> Floats:
    """Of each class 2 TP / (2 TP + FP + FN); 0 for a class that neither occurs nor is predicted."""
    return _share(2 * _right(counts), counts.sum(-1) + counts.sum(-2), counts.sum((-2, -1))[..., None])


def balanced_accuracy(counts: Counts) -> Floats:
    """Mean recall over the classes that occur: each counts the same, however many samples it has."""
    return _mean_over(recall(counts), counts.sum(-1) > 0)


def macro_f1(counts: Counts) -> Floats:
    """Mean F1 over the classes that occur or are predicted (scikit-learn's default)."""
    return _mean_over(f1(counts), counts.sum(-1) + counts.sum(-2) > 0)


def _mean_over(values: Floats, present: Mask) -> Floats:
    """Over the last axis; NaN where nothing is present."""
    number = present.sum(-1)
    total = np.where(present, values, 0).sum(-1)
    mean: Floats = np.divide(total, number, out=np.full(number.shape, np.nan), where=number > 0)
    return mean


def real(mask: npt.ArrayLike | None, shape: tuple[int, ...]) -> Mask:
    """The mask as an array of that shape; no mask: every sample counts."""
    array = np.ones(shape, dtype=np.bool_) if mask is None else np.asarray(mask)
    if array.shape != shape or array.dtype != np.bool_:
        raise InputError(
            f"mask is {array.dtype} of shape {array.shape}; it must be bool of shape {shape}, as the labels"
        )
    return array


def _right(counts: Counts) -> Counts:
    return np.diagonal(counts, axis1=-2, axis2=-1)


def _share(part: Counts, whole: Counts, samples: Counts) -> Floats:
    """part / whole; 0 where the whole is nothing, NaN where there are no samples at all."""
    ratio = np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)
    return np.where(samples > 0, ratio, np.nan)
