"""The cells of the paper's tables: its numbers, with their spreads over seeds, and ours beside them."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bespokefl.experiments.schema import PaperSection
from bespokefl.reproduce.measures import in_table_units, measure
from bespokefl.reproduce.ordering import Method
from bespokefl.reproduce.verdict import Tally, tally
from bespokefl.results.table import Figure

Seeds = Callable[[str, str], Mapping[int, float]]  # ours by seed, of a label and a metric


@dataclass(frozen=True)
class Cell:
    """A method's figure; percent where the measure is one."""

    label: str
    seeds: Mapping[int, float]  # ours by seed; empty unless every run has it
    paper: float | None  # None: lost, not at hand, or not in the paper
    in_paper: bool  # whether the paper has this method
    paper_spread: float | None = None  # over the paper's seeds
    lost: bool = False  # printed in the paper, and not to be read any more
    notes: tuple[str, ...] = ()  # what else the paper says of this number, as footnotes

    @property
    def ours(self) -> Figure | None:
        return Figure.over_seeds(list(self.seeds.values())) if self.seeds else None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper


@dataclass(frozen=True)
class Column:
    """One measure of one setting."""

    setting: str  # empty in an experiment without settings
    metric: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.setting, self.metric) if part)

    @property
    def tally(self) -> Tally:
        return compare_cells(self.metric, self.cells)


def compare_cells(metric: str, cells: Sequence[Cell]) -> Tally:
    """What a column's cells come to; rows that the paper does not have take no part."""
    printed = [cell for cell in cells if cell.in_paper and cell.paper is not None]
    both = [Method(cell.label, cell.paper or 0.0, cell.seeds, cell.paper_spread) for cell in printed if cell.seeds]
    return tally(both, len(printed), measure(metric))


def by_seed(values: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """A measure of a method's runs by seed; empty where some run does not have it."""
    every = dict(values)
    known = {seed: value for seed, value in every.items() if value is not None and math.isfinite(value)}
    return known if len(known) == len(every) else {}


def paper_numbers(paper: PaperSection) -> dict[str, dict[str, float]]:
    """The paper's numbers by metric and label, as our tables show them."""
    numbers = _in_table_units(paper.numbers, paper)
    if paper.accuracy:
        numbers["mean"] = dict(paper.accuracy) | numbers.get("mean", {})
    return numbers


def numbers_printed(paper: PaperSection) -> int:
    """How many numbers there are to compare with, in the columns and of the methods that the paper has."""
    numbers = paper_numbers(paper)
    return sum(label not in paper.added for metric in paper.metrics for label in numbers.get(metric, {}))


def paper_spreads(paper: PaperSection) -> dict[str, dict[str, float]]:
    """The spreads over seeds that the paper prints, likewise; those over clients are none."""
    return _in_table_units(paper.spreads, paper) if paper.spread_of == "seeds" else {}


def _in_table_units(numbers: Mapping[str, Mapping[str, float]], paper: PaperSection) -> dict[str, dict[str, float]]:
    return {
        name: {label: in_table_units(name, number, paper.unit) for label, number in by_label.items()}
        for name, by_label in numbers.items()
    }


def paper_columns(setting: str, paper: PaperSection, labels: Sequence[str], seeds: Seeds) -> tuple[Column, ...]:
    """The columns of a setting, with a row for each label and for each further one that the paper has."""
    numbers, spreads = paper_numbers(paper), paper_spreads(paper)
    rows = list(dict.fromkeys([*labels, *(label for by_label in numbers.values() for label in by_label)]))

    def cell(label: str, metric: str) -> Cell:
        number, lost = numbers.get(metric, {}).get(label), f"{metric}/{label}" in paper.lost
        return Cell(
            label=label,
            seeds=seeds(label, metric),
            paper=number,
            in_paper=label not in paper.added,
            paper_spread=spreads.get(metric, {}).get(label),
            lost=lost,
            notes=() if number is None and not lost else _notes(setting, label, metric, paper),
        )

    return tuple(Column(setting, metric, tuple(cell(label, metric) for label in rows)) for metric in paper.metrics)


def _notes(setting: str, label: str, metric: str, paper: PaperSection) -> tuple[str, ...]:
    cell = "/".join(part for part in (setting, label, metric) if part)
    return tuple(
        note.says for note in paper.contradictions if any(fnmatch.fnmatchcase(cell, place) for place in note.places)
    )
