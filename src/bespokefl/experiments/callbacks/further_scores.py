"""Scores beside those of the personal models on their own test data."""

from collections.abc import Collection

from bespokefl.experiments.selection import crossed_rows
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.results.evaluations import CROSSED


class FurtherScores(Callback):
    """Validation scores, and what ``eval.also`` asks for, where there is such."""

    def __init__(self, wanted: Collection[str], *, validates: bool, s_fraction: float) -> None:
        self._wanted, self._validates, self._s_fraction = wanted, validates, s_fraction

    def on_evaluation(self, run: Rounds) -> None:
        fed, wanted = run.federation, self._wanted
        if self._validates:
            run.scores["val"] = fed.evaluate(split="val")
        run.scores |= {name: fed.evaluate(model=name) for name in wanted if name in fed.scorable}
        if "train" in wanted:
            run.scores["train"] = fed.evaluate(split="train")
        if fed.local is not None:
            crossed = crossed_rows(fed.local, self._s_fraction, [name for name in CROSSED if name in wanted])
            run.scores |= {name: fed.local.evaluate(rows=rows) for name, rows in crossed.items()}
