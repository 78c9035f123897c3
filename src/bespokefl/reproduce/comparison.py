"""Ours beside the paper's: every setting, method and figure of a table, and what the comparison comes to."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bespokefl.experiments.one_run import RunPlan
from bespokefl.experiments.reading import experiment_document
from bespokefl.experiments.resuming import differences
from bespokefl.experiments.schema import Experiment, PaperSection, Part
from bespokefl.experiments.small_scale import read_set_up
from bespokefl.reproduce.cells import Cell, Column, by_seed, paper_columns
from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.verdict import Tally, total
from bespokefl.results.files import CONFIG, StoredRun, read_runs
from bespokefl.results.methods import BASELINE
from bespokefl.results.table import caption

SHARED = (
    "data",
    "model",
    "train",
    "eval",
    "attack",
    "new_clients",
)  # sections that all runs of a setting have in common


COSTS = frozenset({"seconds", "hours", "megabytes"})  # columns that need a word on what is counted


class Elsewhere(NamedTuple):
    """Where the runs of a method are that are the same in an earlier setting."""

    setting: str
    folder: Path


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
    remarks: tuple[str, ...] = ()  # runs that are an earlier setting's, columns that a small set-up does not carry
    uncomparable: frozenset[str] = frozenset()  # these columns
    has_runs: bool = True  # of its own
    borrowed: str = ""  # the settings whose runs are its own, too, and of which methods where not of all
    runs_of: Mapping[str, str] = field(default_factory=dict)  # by method: the setting whose runs are also its own


@dataclass(frozen=True)
class Comparison:
    """A whole table or figure."""

    name: str
    paper: PaperSection
    settings: tuple[SettingResult, ...]
    small: bool
    left_out: int = 0  # numbers of the paper in settings that were not asked for

    @property
    def compared(self) -> tuple[Column, ...]:
        """The columns that the paper prints; of a small set-up those that it has, and whose ordering it carries."""
        columns = [
            column
            for setting in self.settings
            for column in setting.columns
            if column.tally.printed and column.metric not in setting.uncomparable
        ]
        return tuple(column for column in columns if not self.small or column.tally.cells)

    @property
    def tally(self) -> Tally:
        """Of all columns together."""
        return total([*(column.tally for column in self.compared), Tally(printed=0 if self.small else self.left_out)])

    @property
    def notes(self) -> tuple[str, ...]:
        """The footnotes, in the order of the cells; a mark is its place here, from 1."""
        cells = (cell for setting in self.settings for column in setting.columns for cell in column.cells)
        return tuple(dict.fromkeys(note for cell in cells for note in cell.notes))

    def marks(self, cell: Cell) -> list[int]:
        """The footnotes of a cell."""
        return [self.notes.index(note) + 1 for note in cell.notes]


def compare_setting(
    part: Part,
    as_in_paper: Experiment,
    folder: Path,
    plans: Mapping[tuple[str, int], RunPlan],
    missing_data: str = "",
    elsewhere: Mapping[str, Elsewhere] | None = None,
) -> SettingResult:
    """The finished runs of a setting beside the paper's numbers; ``plans`` are of those that were asked for now."""
    paper, others = part.experiment.paper, dict(elsewhere or {})
    runs = _runs(part.experiment, folder, plans) if plans else []
    runs = [run for run in runs if run.label not in others]
    for other in dict.fromkeys(others.values()):
        found = _runs(part.experiment, other.folder, plans)
        runs += [run for run in found if others.get(run.label) == other]
    by_label: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    local = {run.seed: run for run in runs if run.summary and run.summary["algorithm"] == BASELINE}

    labels = [choice.label for choice in part.experiment.algorithms]

    def seeds(label: str, metric: str) -> dict[int, float]:
        return by_seed((run.seed, measure(metric).value(run, local.get(run.seed))) for run in by_label.get(label, ()))

    return SettingResult(
        name=part.name,
        title=part.title,
        columns=paper_columns(part.name, paper, labels, seeds),
        scored=caption(runs, costs=not COSTS.isdisjoint(paper.metrics)) if runs else "",
        departures=tuple(departures(as_in_paper, part.experiment)),
        seeds=len({run.seed for run in runs}),
        missing_data=missing_data,
        remarks=tuple(_remarks(part, others)),
        uncomparable=_uncomparable(part),
        has_runs=any(run.label not in others for run in runs),
        borrowed=" and ".join(
            f"{'' if all_ else f'{who} of '}{setting}" for setting, who, all_ in _lenders(part, others)
        ),
        runs_of={label: other.setting for label, other in others.items()},
    )


def _lenders(part: Part, others: Mapping[str, Elsewhere]) -> Iterator[tuple[str, str, bool]]:
    """Settings that have runs of this one, of which methods, and whether these are all."""
    every = [choice.label for choice in part.experiment.algorithms]
    for setting in dict.fromkeys(other.setting for other in others.values()):
        labels = [label for label in every if label in others and others[label].setting == setting]
        yield setting, ", ".join(labels), labels == every


def _uncomparable(part: Part) -> frozenset[str]:
    """The columns whose ordering the small set-up does not carry."""
    if not part.set_up:
        return frozenset()
    set_up = read_set_up(part.set_up)
    return frozenset(metric for metric in part.experiment.paper.metrics if not set_up.carries(metric))


def _remarks(part: Part, others: Mapping[str, Elsewhere]) -> Iterator[str]:
    if part.set_up:
        yield f"Small set-up: {part.set_up}."
    for setting, labels, are_all in _lenders(part, others):
        who = "All methods" if are_all else labels
        yield f"{who}: the same here as in {setting}, run there once; the paper's numbers are this setting's."
    if left := sorted(_uncomparable(part)):
        yield f"Not compared, as this set-up does not carry it: {', '.join(left)}."


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
    changed = {key: (now.get(key), before.get(key)) for key in sorted(before.keys() | now.keys())}
    said = [f"{key} = {_shown(to)} instead of {_shown(was)}" for key, (to, was) in changed.items() if to != was]
    return said + _of_methods(as_in_paper, used)


def _set_up(experiment: Experiment) -> dict[str, Any]:
    document = experiment_document(experiment)
    found = {f"{name}.{key}": value for name in SHARED for key, value in document.get(name, {}).items()}
    found.pop("data.root", None)
    return found | {"seeds": document["seeds"]}


def _of_methods(as_in_paper: Experiment, used: Experiment) -> list[str]:
    """What methods have of their own, or had; methods with the same change together."""
    before, now = _own(as_in_paper), _own(used)
    labels: dict[tuple[str, str], list[str]] = {}  # by key and change
    for label in now:
        own, was = now[label], before.get(label, {})
        for key in sorted(own.keys() | was.keys()):
            values = [
                table.get(key, _shared_value(experiment, key))
                for table, experiment in ((own, used), (was, as_in_paper))
            ]
            if values[0] != values[1]:
                labels.setdefault((key, " instead of ".join(map(_shown, values))), []).append(label)
    return [
        f"{who[0]}.{key} = {change}" if len(who) == 1 else f"{key} = {change} for {', '.join(who)}"
        for (key, change), who in labels.items()
    ]


def _own(experiment: Experiment) -> dict[str, Mapping[str, Any]]:
    return {choice.label: choice.hyper for choice in experiment.algorithms}


def _shared_value(experiment: Experiment, key: str) -> Any:
    """What a method without a value of its own takes from [train]."""
    return experiment_document(experiment).get("train", {}).get(key)


def _shown(value: Any) -> str:
    return "the default" if value is None else str(value)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """For machines."""
    return {
        "experiment": comparison.name,
        "title": comparison.paper.title,
        "source": comparison.paper.source,
        "scale": "small" if comparison.small else "paper",
        "compared": compared_json(comparison.tally, small=comparison.small),
        "settings": [
            {
                "name": setting.name,
                "title": setting.title,
                "seeds": setting.seeds,
                "scored": setting.scored,
                "departures": list(setting.departures),
                "missing_data": setting.missing_data or None,
                "remarks": list(setting.remarks),
                "runs_of": dict(setting.runs_of),
                "columns": [_column_json(column, comparison) for column in setting.columns],
            }
            for setting in comparison.settings
        ],
        "contradictions": [{"mark": n, "says": note} for n, note in enumerate(comparison.notes, 1)],
    }


def _column_json(column: Column, comparison: Comparison) -> dict[str, Any]:
    chosen = measure(column.metric)
    return {
        "metric": column.metric,
        "heading": chosen.heading,
        "unit": chosen.unit,
        "higher_is_better": chosen.higher_is_better,
        "methods": [
            {
                "label": cell.label,
                "ours": None if cell.ours is None else cell.ours.mean,
                "ours_std_over_seeds": None if cell.ours is None else cell.ours.std,
                "ours_by_seed": {str(seed): value for seed, value in cell.seeds.items()},
                "paper": cell.paper,
                "paper_std_over_seeds": cell.paper_spread,
                "in_paper": cell.in_paper,
                "lost": cell.lost,
                "difference": cell.difference,
                "contradictions": comparison.marks(cell),
            }
            for cell in column.cells
        ],
        "compared": compared_json(column.tally, small=comparison.small),
    }


def compared_json(found: Tally, *, small: bool) -> dict[str, Any]:
    """Cells, difference, ordering and verdict; a small set-up has no differences to the paper."""
    return {
        "cells": found.cells,
        "cells_of_the_paper": found.printed,
        "mean_absolute_difference": None if small else found.mean_difference,
        "cells_with_a_spread": found.judged,
        "outside_both_spreads": None if small else found.outside,
        "kendall_tau": found.ordering.tau,
        "pairs_that_the_paper_separates": [pair._asdict() | {"outcome": pair.outcome} for pair in found.ordering.pairs],
        "verdict": found.verdict.answer,
        "why": found.verdict.why,
    }
