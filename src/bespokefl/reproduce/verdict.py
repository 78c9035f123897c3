"""What a comparison with the paper comes to: cells, mean difference, Kendall's tau, and whether the ordering holds.

**holds**: every pair of methods that the paper separates is ordered the same way in ours, beyond two standard errors
over seeds, and every number of the paper has one of ours beside it. **does not hold**: some such pair is ordered the
other way, beyond two standard errors. **cannot tell**: anything else; so with one seed always. Of few seeds more
standard errors are asked for, as many as make two of many seeds (`ordering.standard_errors`): 13.97 of two seeds,
4.53 of three.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bespokefl.reproduce.measures import Measure
from bespokefl.reproduce.ordering import ROUNDING, Method, Ordering, Pair, compare_orderings, joined, standard_errors

Answer = Literal["holds", "does not hold", "cannot tell"]
POINTS = "points"


class Verdict(NamedTuple):
    answer: Answer
    why: str  # in words


@dataclass(frozen=True)
class Tally:
    """What the cells of a column say, or of several together."""

    cells: int = 0  # with the paper's number and ours
    printed: int = 0  # with the paper's number
    differences: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by unit, without sign
    judged: int = 0  # cells that have two seeds or more
    paper_spreads: int = 0  # of these, the cells whose spread over seeds the paper prints
    outside: int = 0  # of these, the cells whose difference is larger than our spread and the paper's together
    ordering: Ordering = field(default_factory=Ordering)

    @property
    def mean_difference(self) -> dict[str, float]:
        """The mean absolute difference, by unit: points of percentages apart from seconds, rounds and the like."""
        return {unit: sum(values) / len(values) for unit, values in self.differences.items()}

    @property
    def verdict(self) -> Verdict:
        return _verdict(self)


def tally(methods: Sequence[Method], printed: int, measure: Measure) -> Tally:
    """Of one column: the methods that both have, and how many numbers the paper has there."""
    unit = measure.heading if measure.unit == "plain" else POINTS
    differences = tuple(abs(method.mean - method.paper) for method in methods)
    judged = [(method, spread) for method in methods if (spread := method.spread) is not None]
    return Tally(
        cells=len(methods),
        printed=printed,
        differences={unit: differences} if methods else {},
        judged=len(judged),
        paper_spreads=sum(method.paper_spread is not None for method, _ in judged),
        outside=sum(
            abs(method.mean - method.paper) > spread + (method.paper_spread or 0.0) + ROUNDING
            for method, spread in judged
        ),
        ordering=compare_orderings(methods, higher_is_better=measure.higher_is_better),
    )


def total(tallies: Iterable[Tally]) -> Tally:
    """Columns together: every cell and every pair counts once."""
    every = list(tallies)
    units = dict.fromkeys(itertools.chain.from_iterable(one.differences for one in every))
    return Tally(
        cells=sum(one.cells for one in every),
        printed=sum(one.printed for one in every),
        differences={
            unit: tuple(itertools.chain.from_iterable(one.differences.get(unit, ()) for one in every)) for unit in units
        },
        judged=sum(one.judged for one in every),
        paper_spreads=sum(one.paper_spreads for one in every),
        outside=sum(one.outside for one in every),
        ordering=joined(one.ordering for one in every),
    )


def _verdict(found: Tally) -> Verdict:
    pairs = found.ordering.pairs
    other, unclear = found.ordering.among("other"), found.ordering.among("open")
    if not pairs:
        return Verdict("cannot tell", "no two methods with both numbers that the paper separates by more than a spread")
    counted = f"{_pairs(len(pairs))} that the paper separates"
    if other:
        return Verdict("does not hold", f"{len(other)} of {counted}, the other way round beyond {_threshold(other)}")
    if unclear:
        several = [pair for pair in unclear if pair.error is not None]
        reasons = [f"within {_threshold(several)}"] if several else []
        reasons += ["with fewer than two seeds in common"] if len(several) < len(unclear) else []
        return Verdict("cannot tell", f"{len(unclear)} of {counted}, {' or '.join(reasons)}")
    if missing := found.printed - found.cells:
        return Verdict("cannot tell", f"{missing} of the paper's {found.printed} numbers have none of ours beside them")
    return Verdict("holds", f"all {counted}, the same way beyond {_threshold(pairs)}")


def _threshold(pairs: Iterable[Pair]) -> str:
    """What these pairs' differences are held against, in words: how many standard errors with how many seeds."""
    counts = sorted({pair.seeds for pair in pairs})
    return " or ".join(
        f"{standard_errors(count):.2f} standard errors ({count} seeds, {count - 1} {_degrees(count - 1)} of freedom)"
        for count in counts
    )


def _degrees(count: int) -> str:
    return "degree" if count == 1 else "degrees"


def _pairs(count: int) -> str:
    return f"{count} pair" if count == 1 else f"{count} pairs"
