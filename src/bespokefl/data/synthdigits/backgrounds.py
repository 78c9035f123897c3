"""Backgrounds: patterns that mix two colours, from 0 (the first) to 1 (the second), over a square of pixels."""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter

Plane = npt.NDArray[np.float64]
Pattern = Callable[[int, np.random.Generator], Plane]


@cache
def pixel_centres(size: int) -> tuple[Plane, Plane]:
    """x and y of every pixel, from -1 to 1."""
    at = (np.arange(size) + 0.5) * 2 / size - 1
    x, y = np.meshgrid(at, at)
    return x, y


def _along(size: int, rng: np.random.Generator) -> Plane:
    """A coordinate in a random direction."""
    x, y = pixel_centres(size)
    angle = 2 * np.pi * rng.random()
    along: Plane = np.cos(angle) * x + np.sin(angle) * y
    return along


def plain(size: int, rng: np.random.Generator) -> Plane:
    return np.zeros((size, size))


def gradient(size: int, rng: np.random.Generator) -> Plane:
    return (_along(size, rng) / 2 + 0.5).clip(0, 1)


def stripes(size: int, rng: np.random.Generator) -> Plane:
    length, phase = 0.25 + 0.5 * rng.random(), rng.random()
    wave = np.sin(2 * np.pi * (_along(size, rng) / length + phase))
    return (wave * (1 + 4 * rng.random()) / 2 + 0.5).clip(0, 1)  # from soft to hard edges


def clouds(size: int, rng: np.random.Generator) -> Plane:
    """Smoothed noise, of fine to coarse grain."""
    grain = size * (0.03 + 0.12 * rng.random())
    smooth: Plane = gaussian_filter(rng.random((size, size)), grain, mode="wrap")
    low, high = float(smooth.min()), float(smooth.max())
    return (smooth - low) / (high - low)


def discs(size: int, rng: np.random.Generator) -> Plane:
    x, y = pixel_centres(size)
    pattern = np.zeros((size, size))
    for right, down, radius in rng.random((5, 3)):
        away = np.sqrt((x - 2 * right + 1) ** 2 + (y - 2 * down + 1) ** 2)
        pattern = np.maximum(pattern, ((0.2 + 0.4 * radius - away) * size / 4 + 0.5).clip(0, 1))
    return pattern


def two_parts(size: int, rng: np.random.Generator) -> Plane:
    """A straight edge, as that of a wall or a sign."""
    edge = _along(size, rng) - 1.4 * rng.random() + 0.7
    return (edge * size / 2 + 0.5).clip(0, 1)


def checks(size: int, rng: np.random.Generator) -> Plane:
    side = 0.4 + 0.5 * rng.random()
    first, second = _along(size, rng), _along(size, rng)
    return ((np.floor(first / side) + np.floor(second / side)) % 2).astype(np.float64)


PATTERNS: tuple[Pattern, ...] = (plain, gradient, stripes, clouds, discs, two_parts, checks)
