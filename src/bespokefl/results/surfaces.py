"""Loss surfaces of a run on disk: surface.safetensors holds the numbers, surface.json what they are of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from bespokefl.errors import InputError
from bespokefl.results.files import read_json, write_atomically, write_json

NUMBERS, ABOUT = "surface.safetensors", "surface.json"


class Surface(NamedTuple):
    """The mean loss at w + a d1 + b d2: a row per value of a, a column per value of b."""

    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]
    about: dict[str, Any]  # model, client, round, metric, score, data, rows, rows_available, seed


def write_surfaces(run: Path, surfaces: Mapping[str, Surface]) -> None:
    arrays = {
        f"{name}/{part}": np.ascontiguousarray(getattr(surface, part))
        for name, surface in surfaces.items()
        for part in ("a", "b", "loss")
    }
    write_atomically(run / NUMBERS, safetensors.numpy.save(arrays))
    write_json(run / ABOUT, {name: surface.about for name, surface in surfaces.items()})


def read_surfaces(run: Path) -> dict[str, Surface]:
    """By name: ``global`` where there is a global model, and the clients ``worst``, ``median`` and ``best``."""
    if not (run / NUMBERS).is_file():
        raise InputError(f"{run} holds no {NUMBERS}; run with output.surface = true.")
    arrays = safetensors.numpy.load_file(run / NUMBERS)
    return {
        name: Surface(arrays[f"{name}/a"], arrays[f"{name}/b"], arrays[f"{name}/loss"], about)
        for name, about in read_json(run / ABOUT).items()
    }
