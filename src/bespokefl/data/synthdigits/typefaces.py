"""Typefaces: every digit as a field of distances from its centre line.

A centre line and a pen make a typeface. The field tells for each point of the plane how wide the pen must be to reach
it, so one field gives the digit in every weight, in outline, and with a border. No font files are read: the digits are
the same on every machine.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.ndimage import map_coordinates
from scipy.spatial import KDTree

from bespokefl.data.synthdigits import skeletons

Field = npt.NDArray[np.float32]
Plane = npt.NDArray[np.float64]
_MARGIN, _STEP = 40.0, 2.0  # of a field, around the digit's box and between its points


@dataclass(frozen=True)
class Typeface:
    """How digits are written; lengths in hundredths of a digit's height."""

    name: str
    paths: tuple[str, ...]  # of the ten digits
    weights: tuple[float, float]  # least and greatest radius of the pen
    flatness: float = 1.0  # the pen's long axis over its short one; above 1 some strokes are thinner than others
    tilt: float = 0.0  # of the pen's long axis against the horizontal, degrees
    norm: float = 2.0  # 2: the pen is round; infinity: square, so that strokes have square ends and corners
    hollow: bool = True  # whether its outlines alone can be read


TYPEFACES = (
    Typeface("sans", skeletons.SANS, (5, 11)),
    Typeface("poster", skeletons.SANS, (6, 9), norm=np.inf),
    Typeface("roman", skeletons.SERIF, (7, 11), flatness=2.2),
    Typeface("slab", skeletons.SERIF, (5, 8), norm=np.inf),
    Typeface("nib", skeletons.SANS, (8, 11), flatness=2.4, tilt=-35.0),
    Typeface("hand", skeletons.HAND, (4.5, 9)),
    Typeface("brush", skeletons.HAND, (7, 9.5), flatness=2.0, tilt=-40.0),
    Typeface("octagon", skeletons.OCTAGON, (6, 9), norm=np.inf),
    Typeface("segments", skeletons.SEGMENTS, (5, 7.5), norm=1.0, hollow=False),
    Typeface("dots", skeletons.DOTS, (7.6, 8.8), norm=np.inf, hollow=False),
)


@cache
def field(face: Typeface, digit: int) -> Field:
    """Distances at points `_STEP` apart over the digit's box and `_MARGIN` around it; rows are y."""
    x = np.arange(-_MARGIN, skeletons.WIDTH + _MARGIN + _STEP, _STEP)
    y = np.arange(-_MARGIN, skeletons.HEIGHT + _MARGIN + _STEP, _STEP)
    right, down = np.meshgrid(x, y)
    angle = np.radians(face.tilt)
    along, across = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
    pen = np.stack([along, face.flatness * across], axis=1)  # to a plane where the pen is as wide as high
    line = KDTree(skeletons.points_of(face.paths[digit]) @ pen)
    distance, _ = line.query(np.stack([right.ravel(), down.ravel()], axis=1) @ pen, p=face.norm)
    distances_at: Field = distance.reshape(right.shape).astype(np.float32)
    return distances_at


def distances(face: Typeface, digit: int, x: Plane, y: Plane) -> Plane:
    """The field at the points (x, y) of the digit's plane, between its own points by interpolation."""
    at = np.stack([(y + _MARGIN) / _STEP, (x + _MARGIN) / _STEP])
    found: Plane = map_coordinates(field(face, digit), at, np.float64, order=1, mode="nearest")
    return found
