"""The compare block that ends a comparison: a line for each column, one for all, and the verdict in words."""

from collections.abc import Sequence

from bespokefl.reproduce.comparison import Comparison
from bespokefl.reproduce.ordering import Pair
from bespokefl.reproduce.verdict import Tally

DASH = "-"
ALL = "all"
MOST_PAIRS = 8  # that are listed
SMALL_SCALE = "Small scale: the ordering of the methods is compared, no difference to the paper's numbers."
HEADINGS = ("column", "cells", "mean |difference|", "outside both spreads", "Kendall's tau", "pairs", "verdict")
OF_DIFFERENCES = ("mean |difference|", "outside both spreads")  # which a small set-up has no use for


def headings(comparison: Comparison) -> list[str]:
    return [heading for heading in HEADINGS if not (comparison.small and heading in OF_DIFFERENCES)]


def rows(comparison: Comparison) -> list[list[str]]:
    """A row for each column that the paper prints, and the last for all of them."""
    named = [(one.name, one.tally) for one in comparison.compared]
    return [_row(name, found, comparison) for name, found in [*named, (ALL, comparison.tally)]]


def _row(name: str, found: Tally, comparison: Comparison) -> list[str]:
    cells = dict(
        zip(
            HEADINGS,
            (
                name,
                cells_text(found),
                mean_difference_text(found),
                outside_text(found),
                tau_text(found),
                pairs_text(found),
                found.verdict.answer,
            ),
            strict=True,
        )
    )
    return [cells[heading] for heading in headings(comparison)]


def cells_text(found: Tally) -> str:
    return f"{found.cells} of {found.printed}"


def mean_difference_text(found: Tally) -> str:
    """Of percentages in points; another quantity with its name."""
    return ", ".join(f"{value:.2f} {unit}" for unit, value in found.mean_difference.items()) or DASH


def outside_text(found: Tally) -> str:
    """Of the cells that have a spread of ours."""
    if not found.judged:
        return DASH
    return f"{found.outside} of {found.judged}" + ("" if found.paper_spreads else " (ours only)")


def tau_text(found: Tally) -> str:
    return DASH if found.ordering.tau is None else f"{found.ordering.tau:+.2f}"


def pairs_text(found: Tally) -> str:
    """Of the pairs that the paper separates: as in the paper, the other way round, neither to be said."""
    counts = [len(found.ordering.among(outcome)) for outcome in ("same", "other", "open")]
    return " / ".join(map(str, counts)) if found.ordering.pairs else DASH


def sentences(comparison: Comparison) -> list[str]:
    """What stands below the block."""
    found = comparison.tally
    set_up = "on the small set-up" if comparison.small else "not in the paper's set-up"
    aside = f" ({set_up})" if any(setting.departures for setting in comparison.settings) else ""
    said = [f"Verdict{aside}: {found.verdict.answer}; {found.verdict.why}."]
    if found.ordering.pairs:
        said.append(
            "Pairs: as in the paper / the other way round, both beyond Student's quantile at 95.4 % (with many seeds "
            "two standard errors) / neither."
        )
    borrowed = [f"{setting.name}: {setting.borrowed}" for setting in comparison.settings if setting.borrowed]
    if borrowed and found.ordering.pairs:
        said.append(
            "Runs that several settings share are measured once, and their pairs counted in each, beside its numbers "
            f"of the paper ({'; '.join(borrowed)}): they are no further evidence of ours."
        )
    swapped = [(column.name, pair) for column in comparison.compared for pair in column.tally.ordering.among("other")]
    if swapped:
        said.append(f"The other way round in ours: {_in_words(swapped)}.")
    return [SMALL_SCALE, *said] if comparison.small else said


def _in_words(pairs: Sequence[tuple[str, Pair]]) -> str:
    """The largest differences first."""
    ranked = sorted(pairs, key=lambda one: -abs(one[1].ours or 0.0))
    more = len(pairs) - MOST_PAIRS
    return "; ".join(_pair(*one) for one in ranked[:MOST_PAIRS]) + (f"; and {more} more" if more > 0 else "")


def _pair(column: str, pair: Pair) -> str:
    numbers = f"paper {pair.paper:+.2f}, ours {pair.ours:+.2f}, standard error {pair.error:.2f}, {pair.seeds} seeds"
    return f"{pair.above} over {pair.below} in {column} ({numbers})"
