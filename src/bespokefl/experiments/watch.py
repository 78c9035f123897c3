"""Watching a run: what a person should hear of while there is time to do something about it."""

from collections.abc import Mapping
from typing import Any

from bespokefl.core.clients import NOT_FINITE
from bespokefl.errors import REMEDY

COLLAPSE = 0.2  # of accuracy lost since the best round
HALF = 0.5


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
