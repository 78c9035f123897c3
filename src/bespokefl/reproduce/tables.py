"""The comparison for people: on a terminal, and as markdown."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bespokefl.reproduce import block
from bespokefl.reproduce.block import DASH
from bespokefl.reproduce.cells import Cell, Column
from bespokefl.reproduce.comparison import Comparison, SettingResult
from bespokefl.reproduce.measures import measure

HEADINGS = ("method", "ours", "paper", "difference")
NOT_AT_HAND, NOT_IN_PAPER, LOST = "not at hand", "not in the paper", "lost"
OURS_ALONE = "without a number of the paper's at hand, ours"
COMPARED = "Compared with the paper"


def print_comparison(comparison: Comparison, console: Console) -> None:
    for setting in comparison.settings:
        for column in _of_the_paper(setting):
            _print_title(console, *_titles(comparison, setting, measure(column.metric).heading))
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for place, heading in enumerate(_headings(comparison)):
                table.add_column(heading, justify="right" if place else "left", no_wrap=True)
            for cell in column.cells:
                table.add_row(*(escape(text) for text in _row(comparison, cell, column.metric)))
            console.print(table)
        if ours := _ours_alone(setting):
            _print_title(console, *_titles(comparison, setting, OURS_ALONE))
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
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
    _print_title(console, COMPARED)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(block.headings(comparison)):
        table.add_column(escape(heading), justify="right" if place else "left")
    for line in block.rows(comparison):
        table.add_row(*(escape(text) for text in line))
    console.print(table)
    for sentence in block.sentences(comparison):
        console.print(sentence, markup=False, highlight=False)


def _print_title(console: Console, *parts: str) -> None:
    """As wide as the page: in a table it would be as narrow as the table is."""
    console.print(": ".join(parts), style="italic", markup=False, highlight=False)


def markdown(comparison: Comparison) -> str:
    lines = [f"# {comparison.paper.title or comparison.name}", ""]
    if comparison.paper.source:
        lines += [comparison.paper.source, ""]
    for setting in comparison.settings:
        if setting.name:
            lines += [f"## {setting.title or setting.name}", ""]
        for column in _of_the_paper(setting):
            lines += [f"**{measure(column.metric).heading}**", ""]
            lines += ["| " + " | ".join(shown := _headings(comparison)) + " |"]
            lines += ["| --- |" + " ---: |" * (len(shown) - 1)]
            lines += ["| " + " | ".join(_row(comparison, cell, column.metric)) + " |" for cell in column.cells]
            lines += [""]
        if ours := _ours_alone(setting):
            headings = ["method", *(measure(column.metric).heading for column in ours)]
            lines += [f"**{OURS_ALONE.capitalize()}**", "", "| " + " | ".join(headings) + " |"]
            lines += ["| --- |" + " ---: |" * len(ours)]
            lines += ["| " + " | ".join(row) + " |" for row in _wide_rows(ours)] + [""]
        lines += [setting_text(comparison, setting), ""]
    lines += [f"{note}\n" for note in footnotes(comparison)]
    titles = [heading.replace("|", "\\|") for heading in block.headings(comparison)]
    lines += [f"## {COMPARED}", "", "| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in block.rows(comparison)] + [""]
    lines += [f"{sentence}\n" for sentence in block.sentences(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _headings(comparison: Comparison) -> tuple[str, ...]:
    return HEADINGS[:-1] if comparison.small else HEADINGS  # a small set-up has no differences to the paper


def _of_the_paper(setting: SettingResult) -> list[Column]:
    """What the paper reports: with a number of the paper's, or the first."""
    first = setting.columns[0]
    return [c for c in setting.columns if _has_paper(c) or (c is first and _has_ours(c))]


def _ours_alone(setting: SettingResult) -> list[Column]:
    """What was measured beside it; of another setting's runs it stands there."""
    if not setting.has_runs:
        return []
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


def _row(comparison: Comparison, cell: Cell, metric: str) -> tuple[str, ...]:
    decimals = measure(metric).decimals
    absent = LOST if cell.lost else NOT_AT_HAND if cell.in_paper else NOT_IN_PAPER
    paper = absent if cell.paper is None else f"{cell.paper:.{decimals}f}"
    marks = "".join(f" [{mark}]" for mark in comparison.marks(cell))
    texts = (
        cell.label,
        DASH if cell.ours is None else cell.ours.show(decimals),
        paper + marks,
        DASH if cell.difference is None else f"{cell.difference:+.{decimals}f}",
    )
    return texts[: len(_headings(comparison))]


def setting_text(comparison: Comparison, setting: SettingResult) -> str:
    """What ours are, and how far the set-up is from the paper's."""
    sentences = []
    if setting.missing_data:
        sentences.append(f"Not run: {setting.missing_data}")
    if setting.scored and setting.has_runs:
        sentences.append(setting.scored)
    sentences += setting.remarks
    everywhere = _everywhere(comparison)
    here = [departure for departure in setting.departures if departure not in everywhere]
    if here:
        sentences.append(f"{_not_as_in_paper(comparison)}: {'; '.join(here)}.")
    return " ".join(sentences)


def _not_as_in_paper(comparison: Comparison) -> str:
    return "SMALL SCALE" if comparison.small else "NOT THE PAPER'S SET-UP"


def _everywhere(comparison: Comparison) -> list[str]:
    """What all of several settings have otherwise than the paper."""
    if len(comparison.settings) == 1:
        return []
    first, *others = (setting.departures for setting in comparison.settings)
    return [departure for departure in first if all(departure in other for other in others)]


def footnotes(comparison: Comparison) -> list[str]:
    """The marks that the tables show, and what is to be known of all of the paper's numbers."""
    everywhere = _everywhere(comparison)
    common = [f"{_not_as_in_paper(comparison)}, in all settings: {'; '.join(everywhere)}."] if everywhere else []
    marked = [f"[{mark}] In the paper: {note}" for mark, note in enumerate(comparison.notes, 1)]
    return common + marked + [f"The paper's numbers here: {remark}" for remark in comparison.paper.remarks]
