"""Dice and Hausdorff distance of two-dimensional masks: one value per image and class.

The last two axes of masks are height and width; axes before them (images and classes, for example) are kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from bespokefl.errors import InputError

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class SegmentationScores(NamedTuple):
    """One value per client in each array: the mean over its images and classes. NaN for a client without images."""

    dice: Floats
    hausdorff: Floats  # in pixels


def segmentation_scores(predicted: Sequence[npt.ArrayLike], truth: Sequence[npt.ArrayLike]) -> SegmentationScores:
    """Both metrics of every client, from one array of masks per client (images by classes by height by width)."""
    if len(predicted) != len(truth):
        raise InputError(f"masks of {len(predicted)} clients against the truth of {len(truth)}")
    pairs = list(zip(predicted, truth, strict=True))
    return SegmentationScores(
        dice=np.array([_mean(dice(p, t)) for p, t in pairs]),
        hausdorff=np.array([_mean(hausdorff(p, t)) for p, t in pairs]),
    )


def class_masks(labels: npt.ArrayLike, classes: Sequence[int]) -> Mask:
    """Label maps as one mask per class, on a new axis before height and width."""
    maps = np.asarray(labels)
    if maps.ndim < 2:
        raise InputError(f"label maps have shape {maps.shape}; it must end in height and width")
    masks: Mask = maps[..., None, :, :] == np.asarray(classes)[:, None, None]
    return masks


def dice(predicted: npt.ArrayLike, truth: npt.ArrayLike) -> Floats:
    """2 |A and B| / (|A| + |B|); 1 where both masks are empty."""
    a, b = _pair(predicted, truth)
    total = a.sum((-2, -1)) + b.sum((-2, -1))
    shared = (a & b).sum((-2, -1))
    overlap: Floats = np.divide(2 * shared, total, out=np.ones(np.shape(total)), where=total > 0)
    return overlap


def hausdorff(predicted: npt.ArrayLike, truth: npt.ArrayLike) -> Floats:
    """Symmetric Hausdorff distance of the masks' boundaries in pixels: the largest, not a percentile.

    0 where both masks are empty, the image's diagonal where one is.
    """
    a, b = _pair(predicted, truth)
    height, width = a.shape[-2:]
    flat = zip(a.reshape(-1, height, width), b.reshape(-1, height, width), strict=True)
    distances = np.array([_hausdorff(one, other) for one, other in flat], dtype=np.float64)
    return distances.reshape(a.shape[:-2])


def boundary(mask: Mask) -> Mask:
    """The pixels of one mask that have one of their four neighbours outside of it, or outside of the image."""
    inner: Mask = ndimage.binary_erosion(mask)
    return mask & ~inner


def _hausdorff(a: Mask, b: Mask) -> float:
    if not (a.any() and b.any()):
        return float(np.hypot(*a.shape)) if a.any() or b.any() else 0.0
    rim_a, rim_b = boundary(a), boundary(b)
    box = ndimage.find_objects((rim_a | rim_b).astype(np.int8))[0]  # all distances are between pixels in here
    rim_a, rim_b = rim_a[box], rim_b[box]
    return max(_farthest(rim_a, rim_b), _farthest(rim_b, rim_a))


def _farthest(points: Mask, target: Mask) -> float:
    """The largest distance from one of the points to its nearest target."""
    return float(ndimage.distance_transform_edt(~target)[points].max())


def _pair(predicted: npt.ArrayLike, truth: npt.ArrayLike) -> tuple[Mask, Mask]:
    a, b = np.asarray(predicted), np.asarray(truth)
    if a.shape != b.shape or a.ndim < 2:
        raise InputError(
            f"masks of shape {a.shape} against {b.shape}; both must be the same, ending in height and width"
        )
    for array in (a, b):
        if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
            raise InputError(
                "masks must hold 0 and 1 only; threshold probabilities, and split label maps by class_masks"
            )
    return a.astype(np.bool_), b.astype(np.bool_)


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")
