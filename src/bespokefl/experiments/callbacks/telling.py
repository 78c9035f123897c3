"""What a person hears of a run while it goes: its progress and its warnings; and how somebody stops it."""

from collections.abc import Mapping
from typing import Any

from bespokefl.core.clients import NOT_FINITE
from bespokefl.errors import REMEDY
from bespokefl.experiments.callbacks.logs import RoundLines
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.interrupts import StopRequest
from bespokefl.progress import Reporter

COLLAPSE = 0.2  # of accuracy lost since the best round
HALF = 0.5


class Telling(Callback):
    """Tells a reporter of each round, and of what should be known while there is time to do something about it."""

    def __init__(self, reporter: Reporter, label: str, seed: int, rounds: RoundLines) -> None:
        self._reporter, self._label, self._seed, self._rounds = reporter, label, seed, rounds
        self._watch = Watch()

    def on_start(self, run: Rounds) -> None:
        for line in self._rounds.lines:
            self._watch.look(line, {})  # what was said before the run was interrupted
        self._reporter.start(self._label, self._seed, run.until, run.done)

    def on_round(self, run: Rounds) -> None:
        line, fed = self._rounds.lines[-1], run.federation
        self._reporter.round(line)
        told = fed.algorithm.warnings(fed.server) if run.scores else {}
        for warning in self._watch.look(line, told):
            self._reporter.note(f"warning: {self._label}, seed {self._seed}, {warning}")


class Watch:
    """Says each matter once in a run."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._best, self._best_round = 0.0, 0

    def look(self, line: Mapping[str, Any], of_algorithm: Mapping[str, str]) -> list[str]:
        """New warnings after a round, from its line in rounds.jsonl and what the algorithm says."""
        found = dict(of_algorithm)
        lost = [why for why in line["failed"].values() if why == NOT_FINITE]
        if len(lost) >= HALF * len(line["clients"]):
            found["not finite"] = (
                f"{len(lost)} of {len(line['clients'])} clients answered with values that are not finite; {REMEDY}"
            )
        mean = line["mean"]
        if mean is not None and mean > self._best:
            self._best, self._best_round = mean, line["round"]
        elif mean is not None and mean < self._best - COLLAPSE:
            found["collapse"] = (
                f"the mean accuracy fell to {100 * mean:.1f} % from {100 * self._best:.1f} % in round "
                f"{self._best_round}: the method may diverge with these settings"
            )
        new = {matter: text for matter, text in found.items() if matter not in self._said}
        self._said |= new.keys()
        return [f"round {line['round']}: {text}" for text in new.values()]


class StopOnRequest(Callback):
    """Ends the rounds after the one in which somebody asked for it."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def on_round(self, run: Rounds) -> None:
        run.stop = run.stop or self._request.asked
