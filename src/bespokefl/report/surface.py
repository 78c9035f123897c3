"""The loss around a global model and around personal ones, of runs that have written it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from bespokefl.report.gather import Comparison, Problem
from bespokefl.report.tables import Table, plain
from bespokefl.results.surfaces import ABOUT, NUMBERS, read_surfaces


@dataclass(frozen=True)
class Shown:
    """The loss around one model of a run."""

    method: str
    seed: int
    name: str
    about: dict[str, Any]
    table: Table
    range: tuple[float, float]  # of all surfaces of the run, so that colours mean the same


def shown_surfaces(comparison: Comparison) -> tuple[list[Shown], list[Problem]]:
    """Of the first seed of each method that has them."""
    found, problems = [], []
    for label, own in comparison.methods.items():
        for run in own:
            if not (run.folder / NUMBERS).is_file():
                continue
            try:
                found += _read(label, run.seed, run.folder)
                break
            except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{NUMBERS} or {ABOUT} is damaged ({error}); the loss around its models is not drawn."
                problems.append(Problem(f"{label}, seed {run.seed}", what))
    return found, problems


def _read(label: str, seed: int, folder: Path) -> list[Shown]:
    surfaces = read_surfaces(folder)
    finite = np.concatenate([np.zeros(0), *(s.loss[np.isfinite(s.loss)] for s in surfaces.values())])
    if not len(finite):
        raise ValueError("no finite loss")
    range_ = (float(finite.min()), float(finite.max()))
    found = []
    for name, (a, b, loss, about) in surfaces.items():
        if loss.shape != (len(a), len(b)):
            raise ValueError(f"{name} has losses of shape {loss.shape}, not {(len(a), len(b))}")
        rows, columns = (place.ravel() for place in np.indices(loss.shape))
        table = {"a": plain(a[rows]), "b": plain(b[columns]), "loss": plain(loss.ravel())}
        found.append(Shown(label, seed, name, dict(about), table, range_))
    return found
