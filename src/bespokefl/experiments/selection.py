"""Which round is scored, and everything that is measured in that round.

The per-client rows of the best round so far are kept, not the models: they are small, and go into every checkpoint.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bespokefl.core.program import Rows
from bespokefl.core.rng import stream
from bespokefl.errors import InputError
from bespokefl.evaluation.score import Score
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.federation import Federation
from bespokefl.federation.loop import RoundLoop
from bespokefl.results.evaluations import CROSSED

Floats = npt.NDArray[np.float64]
Rule = Literal["last", "val", "best_test"]

AFFORDABLE = {"cpu": 5e10}  # multiplications that S- and G-accuracy may cost unasked: seconds
AFFORDABLE_ON_ACCELERATOR = 5e12


class Selection:
    """Meets every evaluated round, and keeps the score of the one that the rule selects."""

    def __init__(self, federation: RoundLoop, rule: Rule, last_round: int, s_fraction: float, cross: bool) -> None:
        self._federation, self._rule, self._last = federation, rule, last_round
        self._s_fraction, self._cross = s_fraction, cross
        self.score: Score | None = None

    def consider(self, round_: int, test: Evaluation, val: Evaluation | None) -> None:
        """Score this round if it beats those before it (the first of equals stays)."""
        if self._rule == "last":
            criterion, wanted = float(round_), round_ == self._last
        else:
            judged = val if self._rule == "val" else test
            assert judged is not None
            criterion = _mean(judged.main)
            wanted = self.score is None or criterion > self.score.criterion
        if wanted:
            self.score = self._measure(round_, criterion, test)

    def settle(self, round_: int, test: Evaluation) -> None:
        """Score this round, whatever the rule says: there will be no other."""
        self.score = self._measure(round_, float(round_), test)

    def _measure(self, round_: int, criterion: float, test: Evaluation) -> Score:
        """What was not measured then is missing, if the federation has gone on since."""
        fed = self._federation
        there = fed.rounds_done == round_
        unmeasured = np.full(len(test.accuracy), np.nan)
        nothing = {"s_accuracy": unmeasured, "g_accuracy": unmeasured}
        complete = "auc" in test.further or not fed.task.classifies  # then a closer look finds nothing more
        further = test.further if complete or not there else fed.evaluate(closer=True).further
        return Score(
            round=round_,
            criterion=criterion,
            accuracy=_floats(test.accuracy),
            loss=_floats(test.loss),
            global_accuracy=_floats(fed.evaluate(model="global").accuracy) if fed.has_global and there else unmeasured,
            **(_crossed(fed.local, self._s_fraction) if self._cross and fed.local is not None else nothing),
            further={name: _floats(further[name]) for name in sorted(further)},
        )


def _crossed(fed: Federation, s_fraction: float) -> dict[str, Floats]:
    """Personal models on the test data of others."""
    on = crossed_rows(fed, s_fraction, list(CROSSED))
    return {f"{CROSSED[name]}accuracy": _floats(fed.evaluate(rows=rows).accuracy) for name, rows in on.items()}


def crossed_rows(fed: Federation, s_fraction: float, names: Sequence[str]) -> dict[str, Sequence[Rows] | Rows]:
    """By name, ``s_acc`` or ``g_acc``, the honest clients' test rows that a personal model is scored on."""
    none = np.empty(0, dtype=np.int64)
    own = [rows if client in fed.honest else none for client, rows in enumerate(fed.data.splits["test"])]
    rows: dict[str, Sequence[Rows] | Rows] = {}
    for name in names:
        rows[name] = s_rows(own, s_fraction, fed.seed) if name == "s_acc" else g_rows(own)
    return rows


def choose_rule(select: str, validated: bool) -> Rule:
    """``auto`` is ``val`` where there is validation data, else ``last``."""
    if select == "auto":
        return "val" if validated else "last"
    if select == "val" and not validated:
        raise InputError(
            "eval.select = 'val', but no client has validation data; set data.val to a fraction such as 0.1, "
            "or eval.select to 'last'."
        )
    rules: dict[str, Rule] = {"last": "last", "val": "val", "best_test": "best_test"}
    return rules[select]


def affordable(
    clients: int, test_rows: int, parameters: int, scored_rounds: int, device: str, *, pixels: int = 1
) -> bool:
    """Whether every model on every test row costs seconds only; a model of masks uses its parameters at all pixels."""
    cost = clients * test_rows * parameters * pixels * scored_rounds
    return cost <= AFFORDABLE.get(device, AFFORDABLE_ON_ACCELERATOR)


def g_rows(test: Sequence[Rows]) -> Rows:
    """The test rows of all clients, on which each is scored (G-accuracy)."""
    return np.concatenate(test)


def s_rows(test: Sequence[Rows], fraction: float, seed: int) -> list[Rows]:
    """For each client its own test rows and those of round(fraction * (N - 1)) others, equally many of each.

    Drawn from a stream per client, so the same in every round and for every method. A client without test rows
    is not drawn, and gets none.
    """
    tested = [client for client, rows in enumerate(test) if len(rows)]
    return [_s_rows_of(client, tested, test, fraction, seed) for client in range(len(test))]


def _s_rows_of(client: int, tested: Sequence[int], test: Sequence[Rows], fraction: float, seed: int) -> Rows:
    if client not in tested:
        return np.empty(0, dtype=np.int64)
    rng = stream(seed, "metric", client)
    others = [other for other in tested if other != client]
    drawn = rng.permutation(others)[: round(len(others) * fraction)]
    involved = [client, *(int(other) for other in drawn)]
    size = min(len(test[one]) for one in involved)
    return np.concatenate([rng.permutation(test[one])[:size] for one in involved])


def _mean(values: npt.NDArray[Any]) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _floats(values: npt.NDArray[Any]) -> Floats:
    return np.array(values, dtype=np.float64)
