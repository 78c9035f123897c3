"""Does the paper's ordering of methods hold? Kendall's tau, and the pairs that are the other way round."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bespokefl.results.table import Figure


class Pair(NamedTuple):
    """Two methods; the paper ranks ``above`` over ``below``."""

    above: str
    below: str
    paper: float  # how much higher ``above`` is in the paper
    ours: float  # and in ours: zero or less
    within_spread: bool | None  # our difference is no larger than both spreads over seeds; None: one seed, no spread


@dataclass(frozen=True)
class Ordering:
    """How alike two rankings of the same methods are."""

    methods: int
    tau: float | None  # Kendall's tau-b, 1: the same order, -1: the reverse; None: nothing to compare
    swapped: tuple[Pair, ...]  # pairs that the paper ranks and that are not so ranked in ours

    @property
    def holds(self) -> bool | None:
        """No pair is swapped, apart from differences within the spread over seeds; None: nothing to compare."""
        return None if self.tau is None else all(pair.within_spread for pair in self.swapped)


def compare_orderings(paper: Mapping[str, float], ours: Mapping[str, Figure], *, higher_is_better: bool) -> Ordering:
    """The ordering of the methods that both have."""
    methods = [label for label in paper if label in ours]
    sign = 1 if higher_is_better else -1
    swapped, balance, tied_paper, tied_ours = [], 0, 0, 0
    for a, b in itertools.combinations(methods, 2):
        above, below = (a, b) if sign * (paper[a] - paper[b]) >= 0 else (b, a)
        theirs = sign * (paper[above] - paper[below])
        own = sign * (ours[above].mean - ours[below].mean)
        tied_paper += theirs == 0
        tied_ours += own == 0
        balance += int(math.copysign(1, own)) if theirs and own else 0
        if theirs > 0 and own <= 0:
            swapped.append(Pair(above, below, theirs, own, _within_spread(ours[above], ours[below])))
    pairs = len(methods) * (len(methods) - 1) // 2
    untied = (pairs - tied_paper) * (pairs - tied_ours)
    tau = balance / math.sqrt(untied) if untied else None
    return Ordering(len(methods), tau, tuple(sorted(swapped, key=lambda pair: pair.ours)))


def _within_spread(a: Figure, b: Figure) -> bool | None:
    if a.std is None or b.std is None:
        return None
    return abs(a.mean - b.mean) <= a.std + b.std
