"""Which round the results are of."""

from typing import Any

from bespokefl.evaluation.score import Score
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.experiments.selection import Selection
from bespokefl.federation.callbacks import Callback, Rounds


class Selecting(Callback):
    """Keeps the score of the round that the rule selects; it survives a kill."""

    name = "score"

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._evaluated: tuple[int, Evaluation] | None = None  # the last round that was

    @property
    def score(self) -> Score | None:
        return self._selection.score

    def on_evaluation(self, run: Rounds) -> None:
        test = run.scores["test"]
        self._evaluated = run.newest.round, test
        self._selection.consider(run.newest.round, test, run.scores.get("val"))

    def on_end(self, run: Rounds) -> None:
        """A run that ends before the rule has selected a round is judged by the last one that was scored."""
        if self.score is None and self._evaluated is not None:
            self._selection.settle(*self._evaluated)

    def state(self) -> dict[str, Any]:
        return {} if self.score is None else dict(self.score.tensors())

    def restore(self, state: dict[str, Any]) -> None:
        self._selection.score = Score.from_tensors(state) if state else None
