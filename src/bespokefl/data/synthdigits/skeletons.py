"""The digits' centre lines, from which typefaces are made.

A digit stands in a box 60 wide and 100 high, x to the right and y down. Its path is a string of commands:
`M x y` begins a stroke, `L x y` draws a line to there, `Q a b x y` a quadratic curve with the control point (a, b), and
`A cx cy rx ry from to` an arc of an ellipse between two angles, in degrees clockwise from the right; an arc goes on
from where the stroke is, or begins one if `M` (without a point) stands before it.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]  # (n, 2), x and y
WIDTH, HEIGHT = 60.0, 100.0
_SPACING = 1.0  # between the points of a line

SANS = (
    "M A 30 50 28 50 0 360",
    "M 10 24 L 34 0 L 34 100",
    "M A 30 28 27 28 -170 35 L 3 100 L 59 100",
    "M A 29 25 25 25 -160 90 L 22 50 M 29 50 A 29 74 29 26 -90 160",
    "M 46 100 L 46 0 L 0 70 L 60 70",
    "M 54 0 L 11 0 L 6 47 A 29 67 30 33 -135 150",
    "M 54 12 A 32 30 29 30 -35 -180 L 3 69 M A 31 69 28 31 0 360",
    "M 2 0 L 58 0 Q 30 44 22 100",
    "M A 30 24 25 24 0 360 M A 30 74 29 26 0 360",
    "M 6 88 A 28 70 29 30 145 0 L 57 31 M A 29 31 28 31 0 360",
)
SERIF = (
    "M A 30 50 27 50 0 360",
    "M 14 16 Q 28 12 33 0 L 33 100 M 12 100 L 54 100",
    "M 4 28 A 30 28 26 28 -180 30 Q 34 74 4 100 L 57 100 L 58 84",
    "M A 28 25 24 25 -165 90 L 20 50 M 28 50 A 28 75 29 25 -90 165",
    "M 44 100 L 44 0 L 0 72 L 60 72 M 30 100 L 58 100",
    "M 52 2 L 14 2 L 10 46 A 28 68 29 32 -130 160",
    "M 56 4 Q 3 18 3 68 M A 30 69 27 31 0 360",
    "M 2 18 L 4 2 L 58 2 Q 28 50 24 100",
    "M A 30 24 24 24 0 360 M A 30 74 28 26 0 360",
    "M 4 96 Q 57 82 57 32 M A 30 31 27 31 0 360",
)
HAND = (
    "M A 30 50 27 48 -70 300 L 40 2",
    "M 32 0 L 28 100",
    "M 6 22 Q 20 -6 44 4 Q 66 20 40 54 Q 24 78 4 96 Q 30 86 60 98",
    "M 6 8 Q 46 -10 52 16 Q 54 42 22 46 Q 62 46 58 76 Q 48 108 2 92",
    "M 20 2 Q 14 34 4 60 L 58 56 M 44 30 L 38 100",
    "M 56 0 L 16 4 L 10 46 Q 54 32 58 66 Q 54 106 2 94",
    "M 44 0 Q 2 36 4 74 Q 10 104 36 98 Q 64 88 54 62 Q 36 42 6 66",
    "M 4 4 L 58 2 Q 36 40 22 100 M 18 50 L 48 48",
    "M 52 14 Q 26 -14 8 14 Q 6 36 34 50 Q 62 72 44 94 Q 16 108 4 80 Q 4 60 34 46 Q 54 32 52 14",
    "M 56 22 Q 34 -12 10 12 Q -6 40 20 50 Q 48 52 56 22 Q 54 60 40 100",
)
OCTAGON = (
    "M 14 0 L 46 0 L 58 14 L 58 86 L 46 100 L 14 100 L 2 86 L 2 14 L 14 0",
    "M 14 16 L 30 0 L 30 100 M 12 100 L 48 100",
    "M 2 20 L 2 14 L 14 0 L 46 0 L 58 14 L 58 40 L 2 82 L 2 100 L 58 100",
    "M 2 18 L 2 14 L 14 0 L 46 0 L 58 14 L 58 38 L 46 50 L 20 50 "
    "M 46 50 L 58 62 L 58 86 L 46 100 L 14 100 L 2 86 L 2 82",
    "M 44 100 L 44 0 L 36 0 L 2 58 L 2 72 L 60 72",
    "M 56 0 L 4 0 L 4 46 L 14 40 L 46 40 L 58 52 L 58 86 L 46 100 L 14 100 L 2 86 L 2 82",
    "M 58 18 L 58 14 L 46 0 L 14 0 L 2 14 L 2 86 L 14 100 L 46 100 L 58 86 L 58 56 L 46 44 L 2 44",
    "M 2 16 L 2 0 L 58 0 L 58 14 L 30 60 L 30 100",
    "M 14 0 L 46 0 L 56 12 L 56 38 L 46 48 L 14 48 L 4 38 L 4 12 L 14 0 "
    "M 14 48 L 46 48 L 58 60 L 58 88 L 46 100 L 14 100 L 2 88 L 2 60 L 14 48",
    "M 2 82 L 2 86 L 14 100 L 46 100 L 58 86 L 58 14 L 46 0 L 14 0 L 2 14 L 2 44 L 14 56 L 58 56",
)
# Seven segments as a clock has them, each short of the corners.
_SEGMENTS = {
    "top": "M 10 0 L 50 0",
    "upper left": "M 3 7 L 3 43",
    "upper right": "M 57 7 L 57 43",
    "middle": "M 10 50 L 50 50",
    "lower left": "M 3 57 L 3 93",
    "lower right": "M 57 57 L 57 93",
    "bottom": "M 10 100 L 50 100",
}
_DARK = (
    ("middle",),
    ("top", "upper left", "middle", "lower left", "bottom"),
    ("upper left", "lower right"),
    ("upper left", "lower left"),
    ("top", "lower left", "bottom"),
    ("upper right", "lower left"),
    ("upper right",),
    ("upper left", "middle", "lower left", "bottom"),
    (),
    ("lower left",),
)
SEGMENTS = tuple(" ".join(path for name, path in _SEGMENTS.items() if name not in dark) for dark in _DARK)
# Five by seven dots, as departure boards have them: a digit's rows from above, the bits of a row from the left.
_DOTS = (
    (0b01110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110),
    (0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110),
    (0b01110, 0b10001, 0b00001, 0b00110, 0b01000, 0b10000, 0b11111),
    (0b01110, 0b10001, 0b00001, 0b00110, 0b00001, 0b10001, 0b01110),
    (0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010),
    (0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110),
    (0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110),
    (0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000),
    (0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110),
    (0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100),
)
DOTS = tuple(
    " ".join(
        f"M {15 * column} {100 * row / 6}"
        for row, bits in enumerate(rows)
        for column in range(5)
        if bits >> (4 - column) & 1
    )
    for rows in _DOTS
)


def points_of(path: str) -> Points:
    """Points along all strokes of a path, about one unit apart."""
    return np.concatenate([_along(np.array(corners)) for corners in _strokes(path.split())])


def _strokes(words: list[str]) -> Iterator[list[tuple[float, float]]]:
    """The strokes as chains of points; curves in steps that are short enough to look round."""
    stroke: list[tuple[float, float]] = []
    at = 0
    while at < len(words):
        command, at = words[at], at + 1
        numbers = []
        while at < len(words) and not words[at].isalpha():
            numbers.append(float(words[at]))
            at += 1
        if command == "M":
            if stroke:
                yield stroke
            stroke = [(numbers[0], numbers[1])] if numbers else []
        elif command == "L":
            stroke.append((numbers[0], numbers[1]))
        elif command == "Q":
            stroke.extend(_curve(stroke[-1], (numbers[0], numbers[1]), (numbers[2], numbers[3])))
        else:
            stroke.extend(_arc(*numbers))
    yield stroke


def _curve(
    start: tuple[float, float], control: tuple[float, float], end: tuple[float, float], steps: int = 16
) -> Iterator[tuple[float, float]]:
    for t in (step / steps for step in range(1, steps + 1)):
        a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t * t
        yield a * start[0] + b * control[0] + c * end[0], a * start[1] + b * control[1] + c * end[1]


def _arc(x: float, y: float, rx: float, ry: float, begin: float, end: float) -> Iterator[tuple[float, float]]:
    steps = math.ceil(abs(end - begin) / 9)
    for step in range(steps + 1):
        angle = math.radians(begin + (end - begin) * step / steps)
        yield x + rx * math.cos(angle), y + ry * math.sin(angle)


def _along(corners: Points) -> Points:
    """A chain of points with more in between."""
    if len(corners) == 1:
        return corners
    pieces = []
    for start, end in pairwise(corners):
        steps = max(1, math.ceil(float(np.abs(end - start).max()) / _SPACING))
        pieces.append(start + (end - start) * (np.arange(steps) / steps)[:, None])
    return np.concatenate([*pieces, corners[-1:]])
