"""Colours from 0 to 1 that can be told from each other."""

import numpy as np
import numpy.typing as npt

Colour = npt.NDArray[np.float64]  # (3,)
_BRIGHTNESS = np.array([0.299, 0.587, 0.114])  # of red, green and blue, as eyes see them


def brightness(colour: Colour) -> float:
    return float(_BRIGHTNESS @ colour)


def with_brightness(colour: Colour, wanted: float) -> Colour:
    """The colour mixed with white or black until it is as bright as wanted."""
    now = brightness(colour)
    if wanted >= now:
        return 1 - (1 - colour) * ((1 - wanted) / max(1 - now, 1e-9))
    return colour * (wanted / now)


def contrasting(colour: Colour, contrast: float, rng: np.random.Generator) -> Colour:
    """A random colour that much brighter or darker than the given one, as far as there is room."""
    base, other, prefers_bright = brightness(colour), rng.random(3), rng.random() < 0.5
    room_above, room_below = 1 - base, base
    brighter = prefers_bright if min(room_above, room_below) >= contrast else room_above > room_below
    return with_brightness(other, min(base + contrast, 1.0) if brighter else max(base - contrast, 0.0))
