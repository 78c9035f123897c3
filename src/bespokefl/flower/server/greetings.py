"""When a node is greeted: one that keeps silent, or does not fit, holds up nobody for long."""

import time
from collections import Counter
from collections.abc import Iterable

AGAIN = 5.0  # seconds until a node that was left out is greeted again: it may have come right


class Greetings:
    """By node: not before when it is greeted again."""

    def __init__(self, patience: float) -> None:
        self.patience = patience  # seconds within which a greeting is answered
        self._silences: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}

    def due(self, nodes: Iterable[int]) -> list[int]:
        now = time.monotonic()
        return [node for node in nodes if self._not_before.get(node, now) <= now]

    def later(self, node: int) -> None:
        """It has answered, and is left out for now."""
        self._silences.pop(node, None)
        self._not_before[node] = time.monotonic() + AGAIN

    def keeps_silent(self, node: int) -> str:
        """It has not answered: it is greeted again after a pause, twice as long each time. For people."""
        self._silences[node] += 1
        pause = self.patience * 2 ** min(self._silences[node], 20)
        self._not_before[node] = time.monotonic() + pause
        return (
            f"it did not answer the greeting within {self.patience:g} s (federation.hello), and is greeted again in "
            f"{pause:g} s"
        )
