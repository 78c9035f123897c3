"""A paper's table from its TOML file to the comparison: choose, check, run what is not finished, compare."""

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from bespokefl.data import SOURCES
from bespokefl.data.sources.base import FilesMissing
from bespokefl.errors import InputError
from bespokefl.experiments.listing import experiment_file
from bespokefl.experiments.lock import working_in
from bespokefl.experiments.one_run import RunPlan
from bespokefl.experiments.overrides import Setting
from bespokefl.experiments.paper_numbers import merged
from bespokefl.experiments.reading import SETTING, read_parts
from bespokefl.experiments.running import Outcome, at_once, prepare, run_experiment
from bespokefl.experiments.schema import DataNote, Experiment, Part
from bespokefl.experiments.small_scale import Scale
from bespokefl.interrupts import stop_on_signals
from bespokefl.progress import Countdown, Reporter, make_reporter, several_reporters
from bespokefl.reproduce import measures, tables
from bespokefl.reproduce.cells import numbers_printed
from bespokefl.reproduce.comparison import Comparison, Elsewhere, SettingResult, compare_setting, to_json
from bespokefl.reproduce.pool import Job, free_workers, run_jobs
from bespokefl.results import files
from bespokefl.results.tomlfile import dumps

MARKDOWN, JSON = "comparison.md", "comparison.json"


@dataclass(frozen=True)
class Request:
    """What is to be reproduced, and how."""

    name: str
    file: Path
    out: Path
    settings: Sequence[Setting] = ()
    only: Sequence[str] = ()  # patterns; none: everything
    scale: Scale = "paper"
    data: Path | None = None  # the folder that holds all data sets
    jobs: int | None = None  # runs at a time; None: as many as the machine has GPUs or cores


def request(
    name: str,
    out: Path | str | None = None,
    settings: Sequence[Setting] = (),
    *,
    only: Sequence[str] = (),
    scale: str = "paper",
    data: Path | str | None = None,
    jobs: int | None = None,
) -> Request:
    """The request for an experiment of `bespoke list experiments`; its runs go to runs/NAME unless ``out`` is given."""
    if scale not in get_args(Scale):
        raise InputError(f"--scale {scale} is not known. Allowed: {', '.join(get_args(Scale))}.")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: it is a whole number of at least 1, or absent.")
    folder = Path("runs") / (name if scale == "paper" else f"{name}-{scale}") if out is None else Path(out)
    root = None if data is None else Path(data)
    return Request(name, experiment_file(name), folder, settings, only, cast(Scale, scale), root, jobs)


@dataclass
class _Setting:
    """A setting on its way."""

    part: Part  # all its methods
    as_in_paper: Experiment
    chosen: Experiment  # those that were asked for
    folder: Path
    plans: dict[tuple[str, int], RunPlan]
    finished: frozenset[Path] = frozenset()
    missing_data: str = ""
    notes: tuple[str, ...] = ()  # what its folder holds that the user should know
    shared: dict[str, "_Setting"] = field(default_factory=dict)  # by method: the setting whose runs are its own, too


def reproduce(request: Request, console: Console) -> tuple[Comparison, Outcome]:
    """Run what is not finished, and compare; the comparison is also written into the folder."""
    chosen = _choose(request)
    for setting in chosen:
        _check(setting)
    _say_missing_data(request.name, chosen, console)
    _share_runs(chosen)
    outcome = _run(request, chosen, console)
    results = [_compare(setting) for setting in chosen]
    comparison = Comparison(
        name=request.name,
        paper=chosen[0].part.experiment.paper,
        settings=tuple(results),
        small=request.scale == "small",
        left_out=_left_out(request, {setting.part.name for setting in chosen}),
    )
    files.write_atomically(request.out / MARKDOWN, tables.markdown(comparison))
    files.write_json(request.out / JSON, to_json(comparison))
    return comparison, outcome


def _compare(setting: _Setting) -> SettingResult:
    elsewhere = {label: Elsewhere(other.part.name, other.folder) for label, other in setting.shared.items()}
    return compare_setting(
        setting.part,
        setting.as_in_paper,
        setting.folder,
        setting.plans,
        missing_data=setting.missing_data,
        elsewhere=elsewhere,
    )


def _left_out(request: Request, asked_for: Set[str]) -> int:
    """How many numbers the paper has in the settings that were not asked for."""
    others = (part for part in read_parts(request.file) if part.name not in asked_for)
    return sum(numbers_printed(part.experiment.paper) for part in others)


# choosing and checking -------------------------------------------------------------------------------


def _choose(request: Request) -> list[_Setting]:
    """The settings and methods that ``only`` names, each pattern matching something."""
    as_in_paper = {part.name: part.experiment for part in read_parts(request.file)}
    found: list[_Setting] = []
    matched: set[str] = set()
    met: list[str] = []  # methods, which a scale or what is set may change
    for part in _asked_for(request, list(as_in_paper)):
        measures.check(part.experiment.paper.metrics)
        part = replace(part, experiment=_with_data(part.experiment, request.data))
        picked = []
        met += [choice.label for choice in part.experiment.algorithms]
        for choice in part.experiment.algorithms:
            hits = {pattern for pattern in request.only if _matches(pattern, part.name, choice.label)}
            matched |= hits
            if hits or not request.only:
                picked.append(choice)
        if picked:
            chosen = replace(part.experiment, algorithms=tuple(picked))
            found.append(_Setting(part, as_in_paper[part.name], chosen, request.out / part.name, {}))
    _share_notes(found)
    for pattern in request.only:
        if pattern not in matched:
            there = f"settings: {', '.join(as_in_paper)}; " if any(as_in_paper) else ""
            labels = met or [choice.label for paper in as_in_paper.values() for choice in paper.algorithms]
            methods = ", ".join(dict.fromkeys(labels))
            raise InputError(f"--only {pattern} matches nothing. There are {there}methods: {methods}.")
    return found


def _share_notes(settings: Sequence[_Setting]) -> None:
    """Footnotes are numbered over all settings: each gets the notes of all, which name their setting."""
    papers = [setting.part.experiment.paper for setting in settings]
    notes = merged(note for paper in papers for note in paper.contradictions)
    remarks = list(dict.fromkeys(remark for paper in papers for remark in paper.remarks))
    for setting, paper in zip(settings, papers, strict=True):
        shared = paper.model_copy(update={"contradictions": notes, "remarks": remarks})
        setting.part = replace(setting.part, experiment=replace(setting.part.experiment, paper=shared))


def _asked_for(request: Request, names: Sequence[str]) -> Iterator[Part]:
    """The settings that ``only`` may mean; what the command line sets need not suit the others."""
    chosen = dict(request.settings).get(SETTING)
    if chosen is not None or names == [""]:
        yield from read_parts(request.file, request.settings, request.scale)
        return
    for name in names:
        if not request.only or any(_may_mean(pattern, name, names) for pattern in request.only):
            yield from read_parts(request.file, [*request.settings, (SETTING, name)], request.scale)


def _may_mean(pattern: str, setting: str, names: Sequence[str]) -> bool:
    """Whether a pattern can match something in a setting; without a slash and no setting's name, it is a method's."""
    of_setting, slash, _ = pattern.partition("/")
    known = slash or any(fnmatch.fnmatchcase(name, pattern) for name in names)
    return fnmatch.fnmatchcase(setting, of_setting) or not known


def _matches(pattern: str, setting: str, label: str) -> bool:
    """A pattern for setting/label; without a slash, for either of the two."""
    if "/" in pattern:
        return fnmatch.fnmatchcase(f"{setting}/{label}", pattern)
    return fnmatch.fnmatchcase(label, pattern) or (bool(setting) and fnmatch.fnmatchcase(setting, pattern))


def _with_data(experiment: Experiment, folder: Path | None) -> Experiment:
    """data.root below the folder of all data sets, for sources that need files."""
    if folder is None or not SOURCES[experiment.data.source].files or "data.root" in experiment.origin.from_command:
        return experiment
    root = os.path.join(folder, experiment.data.root or "")
    return replace(experiment, data=experiment.data.model_copy(update={"root": root}))


def _check(setting: _Setting) -> None:
    """All that can be checked before the start; without its data a setting is left out."""
    try:
        prepared = prepare(setting.chosen, setting.folder, resume=True)
    except FilesMissing as missing:
        setting.missing_data = " ".join([str(missing), *_where_to_get(setting.part)])
    else:
        setting.plans, setting.finished, setting.notes = prepared.plans, prepared.finished, prepared.notes


def _say_missing_data(name: str, settings: Sequence[_Setting], console: Console) -> None:
    """Which settings cannot run and where to get their data, before anything runs; an error where none can."""
    without: dict[str, list[str]] = {}  # by what is missing
    for setting in settings:
        if setting.missing_data:
            without.setdefault(setting.missing_data, []).append(setting.part.name or name)
    texts = [f"{', '.join(names)} cannot run: {missing}" for missing, names in without.items()]
    if all(setting.missing_data for setting in settings):
        raise InputError("\n".join(texts))
    for text in texts:
        console.print(f"warning: {text}", markup=False, highlight=False)


def _where_to_get(part: Part) -> Iterator[str]:
    for note in part.experiment.paper.data:
        if not part.name or any(fnmatch.fnmatchcase(part.name, pattern) for pattern in note.settings):
            yield describe_data(note)


def describe_data(note: DataNote) -> str:
    """Where to get data, under which terms, and how to lay them out."""
    licence = f" Licence: {note.licence.rstrip('.')}." if note.licence else ""
    layout = f" Layout: {note.layout.rstrip('.')}." if note.layout else ""
    return f"{note.name} is at {note.where.rstrip('.')}.{licence}{layout}"


def _share_runs(settings: Sequence[_Setting]) -> None:
    """A method whose configuration is the same in two settings, as at a small scale, runs in the first of them only."""
    first: dict[str, _Setting] = {}
    for setting in settings:
        for choice in setting.chosen.algorithms:
            documents = [plan.document for (label, _), plan in setting.plans.items() if label == choice.label]
            if documents:
                owner = first.setdefault("".join(dumps(document) for document in documents), setting)
                if owner is not setting:
                    setting.shared[choice.label] = owner
        own = tuple(choice for choice in setting.chosen.algorithms if choice.label not in setting.shared)
        setting.chosen = replace(setting.chosen, algorithms=own)
        if not own and not any(setting.folder.iterdir()):
            setting.folder.rmdir()  # nothing runs here


# running ---------------------------------------------------------------------------------------------


def _run(request: Request, settings: Sequence[_Setting], console: Console) -> Outcome:
    outcome = Outcome()
    jobs: list[Job] = []
    for setting in settings:
        own = [plan.folder for (label, _), plan in setting.plans.items() if label not in setting.shared]
        outcome.finished += [folder for folder in own if folder in setting.finished]
        jobs += _jobs(setting)
    runs = sum(len(job.folders) for job in jobs)
    if outcome.finished:
        console.print(f"{len(outcome.finished)} runs finished before, skipped; {runs} to run", highlight=False)
    if not jobs:
        return outcome
    workers = min(request.jobs or free_workers(jobs[0].experiment), len(jobs))
    if workers == 1:
        new = _in_turn(settings, jobs, console)
    else:
        for note in (note for setting in settings for note in setting.notes):
            console.print(f"warning: {note}", highlight=False, markup=False)
        new = _side_by_side(jobs, runs, workers, console)
    outcome.join(new)
    return outcome


def _jobs(setting: _Setting) -> Iterator[Job]:
    """What is not finished of a setting; seeds of a method that share an engine are one job."""
    described: set[int] = set()
    for seeds in at_once(setting.chosen) if setting.plans else []:
        for choice in setting.chosen.algorithms:
            folders = {seed: setting.plans[choice.label, seed].folder for seed in seeds}
            folders = {seed: folder for seed, folder in folders.items() if folder not in setting.finished}
            if folders:
                name = "/".join(part for part in (setting.part.name, choice.label) if part)
                new = tuple(seed for seed in folders if seed not in described)
                yield Job(setting.chosen, setting.folder, choice.label, folders, name, describes=new)
                described.update(new)


def _in_turn(settings: Sequence[_Setting], jobs: Sequence[Job], console: Console) -> Outcome:
    """One run after another in this process, where the runs of a setting share their data."""
    outcome = Outcome()
    reporter: Reporter = make_reporter(console, lines_per_run=4)
    if all(len(job.folders) == 1 for job in jobs):
        reporter = Countdown(reporter, [job.experiment.train.rounds for job in jobs])
    for setting in settings:
        if any(job.out == setting.folder for job in jobs):
            if setting.part.name:
                reporter.note(f"{setting.part.name}: {setting.part.title}".rstrip(": "))
            new = run_experiment(setting.chosen, setting.folder, resume=True, reporter=reporter)
            new.finished = [folder for folder in new.finished if folder not in setting.finished]
            outcome.join(new)
    return outcome


def _side_by_side(jobs: Sequence[Job], runs: int, workers: int, console: Console) -> Outcome:
    most = max(len(job.folders) for job in jobs)
    console.print(f"{runs} runs, {workers * most} at a time", highlight=False)

    def announce() -> None:
        console.print("stopping after these rounds; once more to stop at once", highlight=False)

    with contextlib.ExitStack() as stack:
        stack.enter_context(working_in(folder for job in jobs for folder in job.folders.values()))
        reporters = stack.enter_context(several_reporters(console, workers * most, runs))
        stop = stack.enter_context(stop_on_signals(announce))
        return run_jobs(jobs, [reporters[k::workers] for k in range(workers)], stop)
