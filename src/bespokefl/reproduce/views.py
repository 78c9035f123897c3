"""Figures of a run by the model that is scored and the round that is taken, so that like is compared with like.

``personal:worst5@last`` is the lowest 5 % of the clients' own models in the last round; ``global:mean@best_test`` the
mean of the global model over clients in the round that is best for it on the test data, which a comparison must label;
``@selected`` is the round that the run scores (``eval.select``), whatever the model.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bespokefl.evaluation.metrics import summarise
from bespokefl.results.evaluations import EVALUATIONS, OTHER_MODELS, read_series
from bespokefl.results.files import SUMMARY

Curve = Mapping[int, npt.NDArray[np.float64]]  # by round, the clients' accuracies

MODELS = {
    "personal": "own models",
    **dict(zip(OTHER_MODELS, ("global model", "before averaging"), strict=True)),
}
FIGURES = {"mean": "mean", "std": "std over clients", "worst5": "lowest 5 %", "top5": "top 5 %"}
ROUNDS = {"last": "last round", "selected": "selected round", "best_test": "best test round"}

_NAME = re.compile(f"({'|'.join(MODELS)}):({'|'.join(FIGURES)})@({'|'.join(ROUNDS)})")


class View(NamedTuple):
    """Which number of a run."""

    model: str
    figure: Literal["mean", "std", "worst5", "top5"]
    round: str

    @classmethod
    def named(cls, name: str) -> "View | None":
        found = _NAME.fullmatch(name)
        return cls(*found.groups()) if found else None  # type: ignore[arg-type]

    @property
    def heading(self) -> str:
        return f"{MODELS[self.model]}, {FIGURES[self.figure]}, {ROUNDS[self.round]}"

    def of(self, folder: Path) -> float | None:
        """As a fraction; None where the run has no such model, or its scores were not kept."""
        curve = curves(folder / EVALUATIONS).get(self.model)
        if not curve:
            return None
        selected = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["selected_round"]
        return summarise(curve[chosen_round(curve, self.round, selected)])[self.figure]


def chosen_round(curve: Curve, rule: str, selected: int) -> int:
    """The last evaluated round, the one that the run scores, or the first of those with the highest mean."""
    if rule == "best_test":
        return max(sorted(curve), key=lambda r: float(np.nanmean(curve[r])))
    return selected if rule == "selected" else max(curve)


@lru_cache(maxsize=4)  # a table asks for many figures of a run, one after the other
def curves(path: Path) -> dict[str, dict[int, npt.NDArray[np.float64]]]:
    """By model, the test accuracies of all evaluated rounds in which somebody has one."""
    found: dict[str, dict[int, npt.NDArray[np.float64]]] = {}
    for series in read_series(path):
        if series.split == "test" and series.metric == "accuracy" and not np.isnan(series.values).all():
            found.setdefault(series.model, {})[series.round] = series.values
    return found
