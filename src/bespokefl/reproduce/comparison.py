"""Ours beside the paper's: every setting, method and figure of a table, with the difference and the ordering."""

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespokefl.config import Contradiction, Experiment, PaperSection, Part
from bespokefl.config_file import experiment_document
from bespokefl.experiment import differences
from bespokefl.reproduce.measures import in_table_units, measure
from bespokefl.reproduce.ordering import Ordering, compare_orderings
from bespokefl.results.files import CONFIG, StoredRun, read_runs
from bespokefl.results.methods import BASELINE
from bespokefl.results.table import Figure, caption
from bespokefl.run import RunPlan

SHARED = (
    "data",
    "model",
    "train",
    "eval",
    "attack",
    "new_clients",
)  # sections that all runs of a setting have in common


@dataclass(frozen=True)
class Cell:
    """A method's figure; percent where the measure is one."""

    label: str
    ours: Figure | None
    paper: float | None  # None: not at hand, or not in the paper
    in_paper: bool  # whether the paper has this method
    marks: tuple[int, ...] = ()  # footnotes, from 1

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper


@dataclass(frozen=True)
class Column:
    """One measure of one setting."""

    setting: str  # empty in an experiment without settings
    metric: str
    cells: tuple[Cell, ...]
    ordering: Ordering


@dataclass(frozen=True)
class SettingResult:
    """What is known of one setting."""

    name: str
    title: str
    columns: tuple[Column, ...]
    scored: str  # which models, rounds and splits ours are; empty without a finished run
    departures: tuple[str, ...]  # from the paper's set-up, as the experiment states it
    seeds: int
    missing_data: str = ""  # why it could not run


@dataclass(frozen=True)
class Comparison:
    """A whole table or figure."""

    name: str
    paper: PaperSection
    settings: tuple[SettingResult, ...]
    small: bool

    @property
    def notes(self) -> tuple[Contradiction, ...]:
        """The footnotes; a mark is its place here, from 1."""
        return tuple(self.paper.contradictions)


def compare_setting(
    part: Part, as_in_paper: Experiment, folder: Path, plans: Mapping[tuple[str, int], RunPlan], missing_data: str = ""
) -> SettingResult:
    """The finished runs of a setting beside the paper's numbers; ``plans`` are of those that were asked for now."""
    paper = part.experiment.paper
    runs = _runs(part.experiment, folder, plans) if plans else []
    by_label: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    local = {run.seed: run for run in runs if run.summary and run.summary["algorithm"] == BASELINE}
    numbers = paper_numbers(paper)
    labels = list(dict.fromkeys([*(choice.label for choice in part.experiment.algorithms), *_labels(numbers)]))
    columns = [
        _column(part.name, name, paper, numbers.get(name, {}), labels, by_label, local) for name in paper.metrics
    ]
    return SettingResult(
        name=part.name,
        title=part.title,
        columns=tuple(columns),
        scored=caption(runs) if runs else "",
        departures=tuple(departures(as_in_paper, part.experiment)),
        seeds=len({run.seed for run in runs}),
        missing_data=missing_data,
    )


def paper_numbers(paper: PaperSection) -> dict[str, dict[str, float]]:
    """The paper's numbers by metric and label, as our tables show them."""
    numbers = {
        name: {label: in_table_units(name, number, paper.unit) for label, number in by_label.items()}
        for name, by_label in paper.numbers.items()
    }
    if paper.accuracy:
        numbers["mean"] = dict(paper.accuracy) | numbers.get("mean", {})
    return numbers


def _labels(numbers: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [label for by_label in numbers.values() for label in by_label]


def _column(
    setting: str,
    name: str,
    paper: PaperSection,
    numbers: Mapping[str, float],
    labels: Sequence[str],
    runs: Mapping[str, Sequence[StoredRun]],
    local: Mapping[int, StoredRun],
) -> Column:
    chosen = measure(name)
    ours: dict[str, Figure] = {}
    for label in labels:
        values = [chosen.value(run, local.get(run.seed)) for run in runs.get(label, ())]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            ours[label] = Figure.over_seeds(known)
    cells = [
        Cell(label, ours.get(label), numbers.get(label), label not in paper.added, _marks(setting, label, name, paper))
        for label in labels
    ]
    reported = {label: number for label, number in numbers.items() if label not in paper.added}
    return Column(
        setting, name, tuple(cells), compare_orderings(reported, ours, higher_is_better=chosen.higher_is_better)
    )


def _marks(setting: str, label: str, metric: str, paper: PaperSection) -> tuple[int, ...]:
    cell = "/".join(part for part in (setting, label, metric) if part)
    notes = enumerate(paper.contradictions, 1)
    return tuple(n for n, note in notes if any(fnmatch.fnmatchcase(cell, place) for place in note.places))


def _runs(experiment: Experiment, folder: Path, plans: Mapping[tuple[str, int], RunPlan]) -> list[StoredRun]:
    """The finished runs of the experiment in this folder; one of another set-up, made at another time, is left out."""
    labels = {choice.label for choice in experiment.algorithms}
    setup = {seed: plan.document for (_, seed), plan in plans.items()}
    return [
        run
        for run in read_runs(folder)
        if run.summary is not None and run.label in labels and run.seed in setup and _alike(run, setup[run.seed])
    ]


def _alike(run: StoredRun, wanted: Mapping[str, Any]) -> bool:
    stored = tomllib.loads((run.folder / CONFIG).read_text(encoding="utf-8"))
    return not list(differences(_shared(stored), _shared(wanted)))


def _shared(document: Mapping[str, Any]) -> dict[str, Any]:
    sections = {name: dict(document.get(name, {})) for name in SHARED}
    sections["data"].pop("root", None)  # the same data may lie elsewhere
    return sections


def departures(as_in_paper: Experiment, used: Experiment) -> list[str]:
    """What was changed in the experiment for this run, by the scale or on the command line."""
    before, now = _set_up(as_in_paper), _set_up(used)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} = {_shown(now.get(key))} instead of {_shown(before.get(key))}" for key in changed]


def _set_up(experiment: Experiment) -> dict[str, Any]:
    document = experiment_document(experiment)
    found = {f"{name}.{key}": value for name in SHARED for key, value in document.get(name, {}).items()}
    found.pop("data.root", None)
    hyper = {f"{c.label}.{key}": value for c in experiment.algorithms for key, value in c.hyper.items()}
    return found | hyper | {"seeds": document["seeds"]}


def _shown(value: Any) -> str:
    return "the default" if value is None else str(value)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """For machines."""

    def column(one: Column) -> dict[str, Any]:
        chosen = measure(one.metric)
        return {
            "metric": one.metric,
            "heading": chosen.heading,
            "unit": chosen.unit,
            "higher_is_better": chosen.higher_is_better,
            "methods": [
                {
                    "label": cell.label,
                    "ours": None if cell.ours is None else cell.ours.mean,
                    "ours_std_over_seeds": None if cell.ours is None else cell.ours.std,
                    "paper": cell.paper,
                    "in_paper": cell.in_paper,
                    "difference": cell.difference,
                    "contradictions": list(cell.marks),
                }
                for cell in one.cells
            ],
            "ordering": {
                "methods": one.ordering.methods,
                "kendall_tau": one.ordering.tau,
                "holds": one.ordering.holds,
                "swapped": [pair._asdict() for pair in one.ordering.swapped],
            },
        }

    return {
        "experiment": comparison.name,
        "title": comparison.paper.title,
        "source": comparison.paper.source,
        "scale": "small" if comparison.small else "paper",
        "settings": [
            {
                "name": setting.name,
                "title": setting.title,
                "seeds": setting.seeds,
                "scored": setting.scored,
                "departures": list(setting.departures),
                "missing_data": setting.missing_data or None,
                "columns": [column(one) for one in setting.columns],
            }
            for setting in comparison.settings
        ],
        "contradictions": [{"mark": n, **note.model_dump()} for n, note in enumerate(comparison.notes, 1)],
    }
