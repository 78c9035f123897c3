"""The comparison for people: on a terminal, and as markdown."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bespokefl.reproduce.comparison import Cell, Column, Comparison, SettingResult
from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.ordering import Ordering, Pair

HEADINGS = ("method", "ours", "paper", "difference")
DASH, NOT_AT_HAND, NOT_IN_PAPER = "-", "not at hand", "not in the paper"
OURS_ALONE = "without a number of the paper's at hand, ours"
MOST_PAIRS = 8  # swapped pairs that are listed


def print_comparison(comparison: Comparison, console: Console) -> None:
    for setting in comparison.settings:
        for column in _of_the_paper(setting):
            title = escape(": ".join(_titles(comparison, setting, measure(column.metric).heading)))
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            for place, heading in enumerate(HEADINGS):
                table.add_column(heading, justify="right" if place else "left", no_wrap=True)
            for cell in column.cells:
                table.add_row(*(escape(text) for text in _row(cell, column.metric)))
            console.print(table)
            console.print(ordering_text(column.ordering), markup=False, highlight=False)
        if ours := _ours_alone(setting):
            title = escape(": ".join(_titles(comparison, setting, OURS_ALONE)))
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("method", no_wrap=True)
            for column in ours:
                table.add_column(escape(measure(column.metric).heading), justify="right")
            for row in _wide_rows(ours):
                table.add_row(*(escape(text) for text in row))
            console.print(table)
        console.print(setting_text(comparison, setting), markup=False, highlight=False)
        console.print()
    for note in footnotes(comparison):
        console.print(note, markup=False, highlight=False)


def markdown(comparison: Comparison) -> str:
    lines = [f"# {comparison.paper.title or comparison.name}", ""]
    if comparison.paper.source:
        lines += [comparison.paper.source, ""]
    for setting in comparison.settings:
        if setting.name:
            lines += [f"## {setting.title or setting.name}", ""]
        for column in _of_the_paper(setting):
            lines += [f"**{measure(column.metric).heading}**", ""]
            lines += ["| " + " | ".join(HEADINGS) + " |", "| --- | ---: | ---: | ---: |"]
            lines += ["| " + " | ".join(_row(cell, column.metric)) + " |" for cell in column.cells]
            lines += ["", ordering_text(column.ordering), ""]
        if ours := _ours_alone(setting):
            headings = ["method", *(measure(column.metric).heading for column in ours)]
            lines += [f"**{OURS_ALONE.capitalize()}**", "", "| " + " | ".join(headings) + " |"]
            lines += ["| --- |" + " ---: |" * len(ours)]
            lines += ["| " + " | ".join(row) + " |" for row in _wide_rows(ours)] + [""]
        lines += [setting_text(comparison, setting), ""]
    lines += [f"{note}\n" for note in footnotes(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _of_the_paper(setting: SettingResult) -> list[Column]:
    """What the paper reports: with a number of the paper's, or the first."""
    first = setting.columns[0]
    return [c for c in setting.columns if _has_paper(c) or (c is first and _has_ours(c))]


def _ours_alone(setting: SettingResult) -> list[Column]:
    """What was measured beside it."""
    return [c for c in setting.columns if _has_ours(c) and c not in _of_the_paper(setting)]


def _has_paper(column: Column) -> bool:
    return any(cell.paper is not None for cell in column.cells)


def _has_ours(column: Column) -> bool:
    return any(cell.ours is not None for cell in column.cells)


def _wide_rows(columns: list[Column]) -> Iterator[tuple[str, ...]]:
    for cells in zip(*(column.cells for column in columns), strict=True):
        shown = [
            DASH if cell.ours is None else cell.ours.show(measure(column.metric).decimals)
            for cell, column in zip(cells, columns, strict=True)
        ]
        yield cells[0].label, *shown


def _titles(comparison: Comparison, setting: SettingResult, heading: str) -> Iterator[str]:
    yield comparison.paper.title or comparison.name
    if setting.name:
        yield setting.title or setting.name
    yield heading


def _row(cell: Cell, metric: str) -> tuple[str, ...]:
    decimals = measure(metric).decimals
    absent = NOT_AT_HAND if cell.in_paper else NOT_IN_PAPER
    paper = absent if cell.paper is None else f"{cell.paper:.{decimals}f}"
    marks = "".join(f" [{mark}]" for mark in cell.marks)
    return (
        cell.label,
        DASH if cell.ours is None else cell.ours.show(decimals),
        paper + marks,
        DASH if cell.difference is None else f"{cell.difference:+.{decimals}f}",
    )


def ordering_text(ordering: Ordering) -> str:
    """Whether the paper's ordering holds, in words."""
    if ordering.tau is None:
        return "The paper's ordering: nothing to compare (fewer than two methods with both numbers)."
    agreement = f"Kendall's tau {ordering.tau:+.2f} over {ordering.methods} methods"
    if not ordering.swapped:
        return f"The paper's ordering holds: {agreement}."
    listed = "; ".join(_pair(pair) for pair in ordering.swapped[:MOST_PAIRS])
    more = len(ordering.swapped) - MOST_PAIRS
    rest = f"; and {more} more" if more > 0 else ""
    verdict = "holds within the spread over seeds" if ordering.holds else "does not hold"
    return f"The paper's ordering {verdict}: {agreement}. The other way round in ours: {listed}{rest}."


def _pair(pair: Pair) -> str:
    spread = {True: ", within the spread over seeds", False: ", beyond the spread over seeds", None: ", one seed"}
    return (
        f"{pair.above} over {pair.below} (paper {pair.paper:+.2f}, ours {pair.ours:+.2f}{spread[pair.within_spread]})"
    )


def setting_text(comparison: Comparison, setting: SettingResult) -> str:
    """What ours are, and how far the set-up is from the paper's."""
    sentences = []
    if setting.missing_data:
        sentences.append(f"Not run: {setting.missing_data}")
    if setting.scored:
        sentences.append(setting.scored)
    if setting.departures:
        what = "SMALL SCALE, only the ordering can be compared" if comparison.small else "NOT THE PAPER'S SET-UP"
        sentences.append(f"{what}: {'; '.join(setting.departures)}.")
    return " ".join(sentences)


def footnotes(comparison: Comparison) -> list[str]:
    """The marks that the tables show, and what is to be known of all of the paper's numbers."""
    used = {
        mark for setting in comparison.settings for column in setting.columns for c in column.cells for mark in c.marks
    }
    marked = [f"[{mark}] In the paper: {note.says}" for mark, note in enumerate(comparison.notes, 1) if mark in used]
    return marked + [f"The paper's numbers here: {remark}" for remark in comparison.paper.remarks]
