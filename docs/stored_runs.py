"""The runs beside docs/reproduction.md: reading, collecting, and which of them are of older settings.

A file of docs/reproduction/ holds the runs of one setting of an experiment in their compact form, each with the
command, the hardware and the date. Where a reason is written beside a run, its measures are no longer what they are
called: they are shown with the reason, and count in no comparison. Where a method's hyper-parameters have changed in
the experiment since, its runs are of *older settings*: they count, and are said to be so, until the setting has new
ones. Of runs over different numbers of rounds only the longest of a setting count: a mean over others would be of no
run at all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from bespokefl.errors import InputError
from bespokefl.experiments.reading import read_parts
from bespokefl.experiments.resolve import make_algorithm
from bespokefl.experiments.schema import AlgorithmChoice, Part
from bespokefl.models import MODELS
from bespokefl.reproduce.cells import Column, by_seed, paper_columns, paper_numbers, paper_spreads
from bespokefl.reproduce.digest import Made, RunDigest, digest_runs, measured, read_digest, superseded, write_digest

DOCS = Path(__file__).resolve().parent
COLLECTION, EXPERIMENTS = DOCS / "reproduction", DOCS.parent / "experiments"
WHOLE = "-"  # the setting of an experiment that has none

OTHERWISE = ("data", "model", "train")  # sections in which a run may differ from its experiment
NOT_COMPARED = {"rounds", "root", "seed", "options", "loss"}  # rounds have a place of their own; "auto" is resolved


class Table(NamedTuple):
    """The runs of one setting, and what the paper has for it."""

    part: Part
    runs: dict[str, list[RunDigest]]  # by label, in the order of the experiment; a run for each seed
    counted: dict[str, list[RunDigest]]  # those with the settings of now, else all; of these the longest

    @property
    def paper(self) -> dict[str, dict[str, float]]:
        """The paper's numbers by measure and label, in percent."""
        return paper_numbers(self.part.experiment.paper)

    @property
    def paper_spreads(self) -> dict[str, dict[str, float]]:
        """Those over seeds."""
        return paper_spreads(self.part.experiment.paper)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What is compared with the paper: runs of the settings that the experiment has now."""
        labels = [choice.label for choice in self.part.experiment.algorithms]
        return paper_columns(self.part.name, self.part.experiment.paper, labels, self.current)

    def current(self, label: str, metric: str) -> dict[int, float]:
        """A measure by seed, of the runs that count."""
        runs = [run for run in self.counted.get(label, ()) if self.no_longer(run, metric) is None]
        return by_seed((run["seed"], self.value(run, metric)) for run in runs)

    def no_longer(self, run: RunDigest, metric: str) -> str | None:
        """Why a measure of a run counts in no comparison."""
        if reason := superseded(run, metric):
            return reason
        if run["label"] not in {choice.label for choice in self.part.experiment.algorithms}:
            return "no longer in the experiment"
        if not any(run is other for other in self.counted.get(run["label"], ())):
            return "older settings" if changes(self.part, run) else "fewer rounds"
        return None

    def value(self, run: RunDigest, metric: str) -> float | None:
        return measured(run, metric, self.local(run["seed"]))

    def local(self, seed: int) -> RunDigest | None:
        """Local's run of a seed."""
        runs = (run for own in self.runs.values() for run in own)
        return next((run for run in runs if run["algorithm"] == "local" and run["seed"] == seed), None)


# reading ----------------------------------------------------------------------------------------------


@cache
def parts(experiment: str) -> tuple[Part, ...]:
    return tuple(read_parts(EXPERIMENTS / f"{experiment}.toml"))


def read_part(experiment: str, setting: str) -> Part:
    name = "" if setting == WHOLE else setting
    return next(part for part in parts(experiment) if part.name == name)


@cache
def read_table(experiment: str, setting: str) -> Table:
    """The stored runs of a setting, none where it was not run; labels that the experiment has no more come last."""
    part, path = read_part(experiment, setting), stored(experiment, setting)
    runs = read_digest(path) if path.exists() else []
    labels = [choice.label for choice in part.experiment.algorithms]
    if path.exists() and "runs_of" in json.loads(path.read_text(encoding="utf-8")):
        runs = [run for run in runs if run["label"] in labels]
    every = list(dict.fromkeys([*labels, *(run["label"] for run in runs)]))
    by_label = {label: own for label in every if (own := [run for run in runs if run["label"] == label])}
    new = {label: [run for run in own if not changes(part, run)] for label, own in by_label.items()}
    return Table(part, by_label, _longest({label: own for label, own in new.items() if own} or by_label))


def _longest(by_label: dict[str, list[RunDigest]]) -> dict[str, list[RunDigest]]:
    """The runs that were asked for the most rounds of all (one that ended early has done fewer)."""
    most = max((_rounds(run) for own in by_label.values() for run in own), default=0)
    longest = {label: [run for run in own if _rounds(run) == most] for label, own in by_label.items()}
    return {label: own for label, own in longest.items() if own}


def _rounds(run: RunDigest) -> int:
    return int(run["config"]["train"]["rounds"])


def stored(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{named(experiment, setting)}.json"


def trials_of(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{named(experiment, setting)}-trials.json"


def named(experiment: str, setting: str) -> str:
    return experiment if setting == WHOLE else f"{experiment}-{setting}"


def percent(found: Table, label: str, name: str) -> float | None:
    """A measure's or a view's figure, the mean over the seeds that count."""
    values = by_seed((run["seed"], found.value(run, name)) for run in found.counted[label])
    return fmean(values.values()) if values else None


def with_spread(values: Sequence[float | None]) -> str:
    """The mean over seeds, ± their standard deviation."""
    known = [value for value in values if value is not None]
    if len(known) < max(1, len(values)):
        return "-"
    return f"{fmean(known):.2f}" + (f" ±{pstdev(known):.2f}" if len(known) > 1 else "")


# settings then and now --------------------------------------------------------------------------------


def changes(part: Part, run: RunDigest) -> dict[str, str]:
    """Hyper-parameters of the method that the run had otherwise than the experiment now: what it had, and now has.

    An option that did not exist then had its default. One that changes nothing in the method is not looked at.
    """
    choice = next((choice for choice in part.experiment.algorithms if choice.label == run["label"]), None)
    if choice is None:
        return {}
    then = {**run["config"]["train"], **run["config"]["algorithm"]}
    algorithm = _algorithm(part, choice)
    found, idle = {}, algorithm.unused()
    for field in fields(algorithm):
        if field.name in idle:
            continue
        before, now = _plain(then.get(field.name, field.default)), _plain(getattr(algorithm, field.name))
        if before != now:
            found[field.name] = f"{before} ({now})"
    return found


def set_up_changes(part: Part, run: RunDigest) -> dict[str, str]:
    """Likewise of data, model and training, apart from the rounds and what is the method's."""
    choice = next((choice for choice in part.experiment.algorithms if choice.label == run["label"]), None)
    own = set() if choice is None else {field.name for field in fields(_algorithm(part, choice))}
    found = {}
    for name in OTHERWISE:
        section = getattr(part.experiment, name)
        defaults = {key: field.default for key, field in type(section).model_fields.items()}
        now = section.model_dump(exclude={"options"}) | getattr(section, "options", {})
        if name == "model" and now["name"] in MODELS:
            defaults |= MODELS[now["name"]].options
            now = dict(MODELS[now["name"]].options) | now
        for key in sorted(now.keys() - NOT_COMPARED - own):
            before = _plain(run["config"].get(name, {}).get(key, defaults.get(key)))
            if now[key] is not None and before != _plain(now[key]):
                found[f"{name}.{key}"] = f"{before} ({_plain(now[key])})"
    return found


_ALGORITHMS: dict[tuple[int, str], tuple[Part, Any]] = {}  # with the part, so that its id stays its own


def _algorithm(part: Part, choice: AlgorithmChoice) -> Any:
    key = (id(part), choice.label)
    if key not in _ALGORITHMS:
        _ALGORITHMS[key] = (part, make_algorithm(part.experiment, choice))
    return _ALGORITHMS[key][1]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# collecting -------------------------------------------------------------------------------------------


def collect(folder: Path, experiment: str, made: Made) -> list[str]:
    """Take in the finished runs of an output folder of `bespoke reproduce`; the settings that had some.

    A run takes the place of an earlier one of the same method and seed. One that settings have in common, which the
    comparison in the folder says, is taken in for each of them.
    """
    taken: dict[str, list[RunDigest]] = {}
    elsewhere = _elsewhere(folder)
    for part in parts(experiment):
        others = {label: folder / setting for label, setting in elsewhere.get(part.name, {}).items()}
        if not (others or (folder / part.name).is_dir()):
            continue
        new = digest_runs(folder / part.name, part.experiment.paper.metrics, made, others)
        for run in new:
            _check(part, run)
        if new:
            taken[part.name or WHOLE] = new
    for setting, new in taken.items():
        path = stored(experiment, setting)
        before = read_digest(path) if path.exists() else []
        runs = {(run["label"], run["seed"]): run for run in [*before, *new]}
        write_digest(path, [runs[key] for key in sorted(runs)])
    read_table.cache_clear()
    return list(taken)


def _elsewhere(folder: Path) -> dict[str, dict[str, str]]:
    """By setting and method, the setting in whose folder the runs of both are."""
    path = folder / "comparison.json"
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.is_file() else []
    return {setting["name"]: setting.get("runs_of", {}) for setting in settings}


def _check(part: Part, run: RunDigest) -> None:
    """Refuses runs that are not of this setting, such as those of the small scale."""
    labels = [choice.label for choice in part.experiment.algorithms]
    where = f"The run of {run['label']}, seed {run['seed']}, in setting {part.name or 'of the whole'!r}"
    if run["label"] not in labels:
        raise InputError(f"{where}: the experiment has no such method, but {', '.join(labels)}.")
    source, wanted = run["config"]["data"]["source"], part.experiment.data.source
    if source != wanted:
        raise InputError(
            f"{where}: data.source = {source!r}, the experiment has {wanted!r}. Runs of the small scale, or of another "
            "experiment, do not belong here."
        )


def collect_trials(folder: Path, experiment: str, setting: str, made: Made) -> None:
    """Take in the trials of `bespoke tune` below a folder."""
    part = read_part(experiment, setting)
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("**/tuning/*.json")}
    labels = [choice.label for choice in part.experiment.algorithms if choice.label in found]
    content: Mapping[str, Any] = {"about": made, "methods": {label: found[label]["trials"] for label in labels}}
    trials_of(experiment, setting).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def supersede(experiment: str, setting: str, labels: Sequence[str], metrics: str, reason: str) -> None:
    """Write a reason beside runs: their measures of this pattern are of older settings."""
    path = stored(experiment, setting)
    runs = read_digest(path)
    for run in runs:
        if run["label"] in labels:
            run["superseded"] = run.get("superseded", {}) | {metrics: reason}
    write_digest(path, runs)
    read_table.cache_clear()
