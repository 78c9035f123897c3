"""Does the paper's ordering of methods hold? Kendall's tau, and what our seeds say of the pairs that it separates."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, pstdev, stdev
from typing import Literal, NamedTuple

from scipy.stats import norm, t

STANDARD_ERRORS = 2  # a difference must be larger than so many to count, with many seeds
ROUNDING = 1e-9  # of sums of decimal numbers


@cache
def standard_errors(seeds: int) -> float:
    """How many standard errors a difference over so many seeds, two or more, must be larger than to count.

    Student's quantile at the level that two standard errors have with many seeds (95.4 %): with few seeds the standard
    error itself is uncertain, and two of them are passed by chance.
    """
    return float(t.isf(norm.sf(STANDARD_ERRORS), seeds - 1))


class Method(NamedTuple):
    """A method with the paper's number and ours, in the same column of a table."""

    label: str
    paper: float
    ours: Mapping[int, float]  # by seed
    paper_spread: float | None = None  # over the paper's seeds; None where it prints none

    @property
    def mean(self) -> float:
        return fmean(self.ours.values())

    @property
    def spread(self) -> float | None:
        """Our standard deviation over seeds (ddof 0, as tables show it); None with one seed."""
        return pstdev(self.ours.values()) if len(self.ours) > 1 else None


class Pair(NamedTuple):
    """Two methods that the paper separates; it ranks ``above`` over ``below``."""

    above: str
    below: str
    paper: float  # how much better ``above`` is in the paper
    ours: float | None  # and in ours, over the seeds that both have; None: none in common
    error: float | None  # the standard error of ``ours`` over these seeds; None: fewer than two
    seeds: int  # that both have

    @property
    def outcome(self) -> Literal["same", "other", "open"]:
        """Ordered as in the paper or the other way beyond chance (`standard_errors`); ``open``: neither can be said."""
        if self.ours is None or self.error is None:
            return "open"
        if abs(self.ours) <= standard_errors(self.seeds) * self.error + ROUNDING:
            return "open"
        return "same" if self.ours > 0 else "other"


@dataclass(frozen=True)
class Ordering:
    """How alike two rankings of the same methods are; of one column, or of several together."""

    pairs: tuple[Pair, ...] = ()  # that the paper separates
    balance: int = 0  # pairs that are ordered alike, less those that are not: of all, by the means
    untied_paper: int = 0  # pairs without a tie in the paper
    untied_ours: int = 0

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b. 1: the same order, -1: the reverse; None: nothing to compare.

        Of several columns the pairs are counted together; there are none across columns.
        """
        # a column's ties take part in both products, so that one column alone gives the usual tau-b
        untied = self.untied_paper * self.untied_ours
        return self.balance / math.sqrt(untied) if untied else None

    def among(self, outcome: Literal["same", "other", "open"]) -> list[Pair]:
        """The separated pairs of this outcome, the largest difference of ours first."""
        return sorted((pair for pair in self.pairs if pair.outcome == outcome), key=lambda pair: -abs(pair.ours or 0.0))


def joined(orderings: Iterable[Ordering]) -> Ordering:
    """The pairs of all columns together."""
    every = list(orderings)
    return Ordering(
        pairs=tuple(itertools.chain.from_iterable(one.pairs for one in every)),
        balance=sum(one.balance for one in every),
        untied_paper=sum(one.untied_paper for one in every),
        untied_ours=sum(one.untied_ours for one in every),
    )


def compare_orderings(methods: Sequence[Method], *, higher_is_better: bool) -> Ordering:
    """The ordering of the methods of one column."""
    sign = 1 if higher_is_better else -1
    pairs, balance, untied_paper, untied_ours = [], 0, 0, 0
    for first, second in itertools.combinations(methods, 2):
        above, below = (first, second) if sign * (first.paper - second.paper) >= 0 else (second, first)
        theirs = sign * (above.paper - below.paper)
        own = sign * (above.mean - below.mean)
        untied_paper += theirs != 0
        untied_ours += own != 0
        balance += int(math.copysign(1, own)) if theirs and own else 0
        if theirs > _noise(above) + _noise(below) + ROUNDING:
            pairs.append(_pair(above, below, theirs, sign))
    return Ordering(tuple(pairs), balance, untied_paper, untied_ours)


def _noise(method: Method) -> float:
    """How far the paper's number may be off by its seeds: its own spread, or ours where it prints none."""
    return (method.spread or 0.0) if method.paper_spread is None else method.paper_spread


def _pair(above: Method, below: Method, theirs: float, sign: int) -> Pair:
    """Seed by seed, as the methods of a seed have the same partition and the same first model."""
    differences = [sign * (above.ours[seed] - below.ours[seed]) for seed in above.ours.keys() & below.ours.keys()]
    if not differences:
        return Pair(above.label, below.label, theirs, None, None, 0)
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return Pair(above.label, below.label, theirs, fmean(differences), error, len(differences))
