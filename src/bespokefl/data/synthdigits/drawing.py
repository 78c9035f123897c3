"""Synthetic digits: written in varied typefaces, colours, on varied backgrounds, blurred and noisy.

Made in the manner of the data set SynthDigits (Ganin and Lempitsky, ICML 2015), which was rendered with the fonts of
one operating system. Here the typefaces are the project's own. Every image has its own random stream: the same image
whatever the number of images.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter, shift

from bespokefl.core.rng import stream
from bespokefl.data.synthdigits.backgrounds import PATTERNS, Plane, pixel_centres
from bespokefl.data.synthdigits.colours import Colour, contrasting
from bespokefl.data.synthdigits.skeletons import HEIGHT, WIDTH
from bespokefl.data.synthdigits.typefaces import TYPEFACES, Typeface, distances
from bespokefl.errors import InputError

Picture = npt.NDArray[np.float64]  # (3, size, size), from 0 to 1
LEAST_SIZE, GREATEST_SIZE = 16, 512


class Placement(NamedTuple):
    """Where each pixel lies in the plane of the digit."""

    x: Plane
    y: Plane
    unit: float  # pixels in a hundredth of the digit's height
    half: float  # the image's width over two, in the plane of the digit


def synth_digits(n: int, seed: int = 0, size: int = 32) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Draw `n` colour images of digits: pixels (n, 3, size, size) and labels (n,).

    In every ten images from the first on each digit comes once. The first images are the same for every `n`.
    """
    if n < 1:
        raise InputError(f"n = {n}: the number of images must be at least 1.")
    if not LEAST_SIZE <= size <= GREATEST_SIZE:
        raise InputError(f"size = {size}: allowed are {LEAST_SIZE} to {GREATEST_SIZE} pixels.")
    if seed < 0:
        raise InputError(f"seed = {seed}: must not be negative.")
    tens = [stream(seed, "synth-digits-labels", ten).permutation(10) for ten in range(-(-n // 10))]
    labels = np.concatenate(tens)[:n].astype(np.int64)
    images = np.empty((n, 3, size, size), dtype=np.uint8)
    for number, label in enumerate(labels.tolist()):
        images[number] = draw(label, size, stream(seed, "synth-digits", number))
    return images, labels


def draw(digit: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One image (3, size, size)."""
    contrast = _between(rng, 0.38, 0.8)
    ground = rng.random(3)
    ink = contrasting(ground, contrast, rng)
    picture = _background(ground, contrast, size, rng)
    _write(picture, digit, ink, ground, rng)
    blur = _between(rng, 0.2, 1.1) * size / 32
    picture = gaussian_filter(picture, (0, blur, blur), mode="nearest")
    picture += _between(rng, 0.0, 0.05) * rng.standard_normal(picture.shape, dtype=np.float32)
    pixels: npt.NDArray[np.uint8] = np.rint(255 * picture.clip(0, 1)).astype(np.uint8)
    return pixels


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(rng.random())


def _chance(rng: np.random.Generator, probability: float) -> bool:
    return float(rng.random()) < probability


def _background(ground: Colour, contrast: float, size: int, rng: np.random.Generator) -> Picture:
    """A pattern of two colours, the second closer in brightness to the first than the ink is."""
    pattern = PATTERNS[int(rng.random() * len(PATTERNS))](size, rng)
    second = contrasting(ground, min(_between(rng, 0.1, 0.4) * contrast, 0.2), rng)
    return ground[:, None, None] + (second - ground)[:, None, None] * pattern


def _write(picture: Picture, digit: int, ink: Colour, ground: Colour, rng: np.random.Generator) -> None:
    """Lay the digit on the picture, perhaps with others cut by the image's edges, a shadow, a border."""
    face = TYPEFACES[int(rng.random() * len(TYPEFACES))]
    place = _placement(picture.shape[1], rng)
    radius = _between(rng, *face.weights)
    reach = distances(face, digit, place.x, place.y)
    for side in (-1, 1):
        if _chance(rng, 0.45):
            reach = np.minimum(reach, _neighbour(face, place, side, radius, rng))
    kind = rng.random()
    if kind < 0.15:  # a shadow: the same again, moved
        down, right = _between(rng, 3, 8) * place.unit, _between(rng, 3, 8) * place.unit
        moved = shift(reach, (down, right), order=1, mode="nearest")
        _lay(picture, 0.6 * _coverage(radius - moved, place.unit), contrasting(ink, 0.5, rng))
    elif kind < 0.35:  # a border in another colour
        border = _between(rng, 3, 6)
        _lay(picture, _coverage(radius + border - reach, place.unit), contrasting(ink, 0.4, rng))
    elif kind < 0.5 and face.hollow:  # the outline only
        line = max(2.5, 0.9 / place.unit)
        _lay(picture, _coverage(line - np.abs(radius + 1 - reach), place.unit), ink)
        return
    _lay(picture, _coverage(radius - reach, place.unit), ink)


def _lay(picture: Picture, coverage: Plane, colour: Colour) -> None:
    picture += coverage * (colour[:, None, None] - picture)


def _coverage(inside: Plane, unit: float) -> Plane:
    """How much of each pixel is covered, from how far its centre lies inside."""
    return (inside * unit + 0.5).clip(0, 1)


def _neighbour(face: Typeface, place: Placement, side: int, radius: float, rng: np.random.Generator) -> Plane:
    """Distances of a digit to the left (-1) or right (1) of the main one; at least half of it lies outside."""
    step = max(WIDTH + 2 * radius + _between(rng, 4, 20), 1.2 * place.half)
    return distances(face, int(rng.random() * 10), place.x - side * step, place.y)


def _placement(size: int, rng: np.random.Generator) -> Placement:
    """A random height, width, slant, turn, position and perspective."""
    x, y = pixel_centres(size)
    height, width = _between(rng, 0.6, 0.85), _between(rng, 0.75, 1.15)
    angle, slant = np.radians(_between(rng, -20, 20)), _between(rng, -0.2, 0.3)
    x, y = x - _between(rng, -0.12, 0.12), y - _between(rng, -0.12, 0.12)
    turned_x, turned_y = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    depth = 1 + _between(rng, -0.2, 0.2) * turned_x + _between(rng, -0.2, 0.2) * turned_y
    down = turned_y / depth / height
    right = (turned_x / depth / height + slant * down) / width
    at_x, at_y = WIDTH / 2 + HEIGHT / 2 * right, HEIGHT / 2 + HEIGHT / 2 * down
    return Placement(at_x, at_y, unit=size * height / HEIGHT, half=HEIGHT / 2 / height / width)
