"""The loss around a global model and around personal ones, from a run's surface.safetensors.

The file holds 1-D `a` and `b`, the coordinates along two directions (0 is the model itself), and a 2-D tensor of losses
(len(b), len(a)) for each model, named `global`, `worst`, `median`, `best` or otherwise. surface.json beside it may say
more; `round` (a number) and `clients` (by name, the number of the client) are shown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bespokefl.report.gather import Comparison, Problem
from bespokefl.report.tables import Table, plain

LOSSES, NOTES = "surface.safetensors", "surface.json"
ORDER = ("global", "worst", "median", "best")


@dataclass(frozen=True)
class Surface:
    """The loss around one model of a run."""

    method: str
    seed: int
    name: str
    client: int | None
    round: int | None
    table: Table
    range: tuple[float, float]  # of all surfaces of the run, so that colours mean the same


def surfaces(comparison: Comparison) -> tuple[list[Surface], list[Problem]]:
    """Of the first seed of each method that has them."""
    found, problems = [], []
    for label, own in comparison.methods.items():
        for run in own:
            if not (run.folder / LOSSES).is_file():
                continue
            try:
                found += _read(label, run.seed, run.folder)
                break
            except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
                what = f"{LOSSES} is damaged ({error}); it is not drawn."
                problems.append(Problem(f"{label}, seed {run.seed}", what))
    return found, problems


def _read(label: str, seed: int, folder: Path) -> list[Surface]:
    arrays = safetensors.numpy.load_file(folder / LOSSES)
    a, b = arrays.pop("a"), arrays.pop("b")
    losses = {name: values.astype(np.float64) for name, values in arrays.items() if values.ndim == 2}
    for name, values in losses.items():
        if values.shape != (len(b), len(a)):
            raise ValueError(f"{name} has shape {values.shape}, not {(len(b), len(a))}")
    finite = [values[np.isfinite(values)] for values in losses.values() if np.isfinite(values).any()]
    if not finite:
        raise ValueError("no finite loss")
    range_ = (float(min(values.min() for values in finite)), float(max(values.max() for values in finite)))
    notes = _notes(folder / NOTES)
    clients = notes.get("clients")
    rows, columns = (place.ravel() for place in np.indices((len(b), len(a))))
    ranked = sorted(losses, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return [
        Surface(
            label,
            seed,
            name,
            clients.get(name) if isinstance(clients, Mapping) else None,
            notes.get("round"),
            {"a": plain(a[columns]), "b": plain(b[rows]), "loss": plain(losses[name].ravel())},
            range_,
        )
        for name in ranked
    ]


def _notes(path: Path) -> Mapping[str, Any]:
    """Empty where there are none that can be read: the losses stand without them."""
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, Mapping) else {}
