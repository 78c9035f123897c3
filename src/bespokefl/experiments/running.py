"""An experiment: every algorithm with every seed, each in a folder of its own.

All that can be checked is checked before the first round. Data are loaded once per seed and shared by the algorithms.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bespokefl.data import FederatedData
from bespokefl.engines import Engine
from bespokefl.engines.peak import PeakMemory
from bespokefl.engines.together import SharedEngine
from bespokefl.engines.variants import Variants
from bespokefl.errors import Diverged, EndedEarly, InputError, RunError, in_short, no_room
from bespokefl.experiments import resolve
from bespokefl.experiments.lock import clear, working_in
from bespokefl.experiments.one_run import RunPlan, execute
from bespokefl.experiments.resuming import examine
from bespokefl.experiments.schema import OF_OTHERS_DATA, AlgorithmChoice, EvalSection, Experiment
from bespokefl.experiments.selection import choose_rule
from bespokefl.federation.loop import Census, RoundLoop
from bespokefl.interrupts import Interrupted, StopRequest, stop_on_signals
from bespokefl.progress import Reporter, SideBySide
from bespokefl.results import files
from bespokefl.results.partition import partition_file, write_partition
from bespokefl.tracking import TrackedRun, Tracking, make_tracking

Result = TypeVar("Result")


@dataclass
class Outcome:
    """The folders of the runs, by how they ended."""

    finished: list[Path] = field(default_factory=list)  # also those that an earlier call had finished
    failed: list[Path] = field(default_factory=list)
    diverged: list[Path] = field(default_factory=list)
    tracking: Tracking | None = None  # who was told

    def add(self, folder: Path, ending: "Ending") -> None:
        by_ending = {Ending.FINISHED: self.finished, Ending.FAILED: self.failed, Ending.DIVERGED: self.diverged}
        by_ending[ending].append(folder)

    def troubles(self, out: Path) -> list[str]:
        """A line for each run that failed or diverged."""
        ended = (("failed", self.failed), ("diverged", self.diverged))
        return [
            f"{folder.relative_to(out)} {how}; the reason is in {folder / files.ERROR}"
            for how, folders in ended
            for folder in folders
        ]

    def join(self, other: "Outcome") -> None:
        self.finished += other.finished
        self.failed += other.failed
        self.diverged += other.diverged


class Ending(Enum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Prepared:
    """What the checks before the start leave for the runs."""

    plans: dict[tuple[str, int], RunPlan]  # by label and seed
    resources: dict[str, resolve.RunResources]  # by label
    finished: frozenset[Path]  # folders that need no work
    first: FederatedData  # of the first seed
    notes: tuple[str, ...] = ()  # what the folders hold that their user should know


def run_experiment(experiment: Experiment, out: Path, *, resume: bool, reporter: Reporter) -> Outcome:
    """Run all that is not finished; a run that fails is recorded, and the others go on."""
    with experiment.origin.located():
        tracking = make_tracking(experiment.track, out, reporter.note)
    prepared = prepare(experiment, out, resume)
    outcome = Outcome(tracking=tracking)
    for text in unused_settings(experiment):
        reporter.note(text)
    if prepared.first.note:
        reporter.note(f"data: {prepared.first.note}")
    for note in prepared.notes:
        reporter.note(f"warning: {note}")

    def announce() -> None:
        reporter.note("stopping after this round; once more to stop at once")

    unfinished = [plan.folder for plan in prepared.plans.values() if plan.folder not in prepared.finished]
    with working_in(unfinished), stop_on_signals(announce) as stop:
        for seeds in at_once(experiment):
            data: dict[int, FederatedData] = {}
            for choice in experiment.algorithms:
                plans = []
                for plan in (prepared.plans[choice.label, seed] for seed in seeds):
                    if plan.folder in prepared.finished:
                        reporter.note(f"{choice.label}, seed {plan.seed}: finished before, skipped")
                        tracking.catch_up(tracked(plan))
                        outcome.finished.append(plan.folder)
                        continue
                    if plan.seed not in data:
                        first = plan.seed == experiment.seeds[0]
                        data[plan.seed] = prepared.first if first else resolve.load_data(experiment, plan.seed)
                        write_partition(partition_file(out, plan.seed), data[plan.seed])
                    plans.append(plan)
                if not plans:
                    continue
                if stop.asked:
                    raise Interrupted(f"before {choice.label}, seed {plans[0].seed}")
                shown = [reporter] if len(plans) == 1 else SideBySide(reporter, len(plans)).of_runs
                told = [tracking.reporter(one, tracked(plan)) for one, plan in zip(shown, plans, strict=True)]
                done = _run_group(experiment, prepared.resources[choice.label], plans, data, told, stop)
                for plan, ending in zip(plans, done, strict=True):
                    outcome.add(plan.folder, ending)
    return outcome


def at_once(experiment: Experiment) -> list[tuple[int, ...]]:
    """Groups of seeds whose runs of a method share the engine."""
    seeds, together = experiment.seeds, experiment.engine.together
    return [seeds[k : k + together] for k in range(0, len(seeds), together)]


def _run_group(
    experiment: Experiment,
    resources: resolve.RunResources,
    plans: Sequence[RunPlan],
    data: Mapping[int, FederatedData],
    reporters: Sequence[Reporter],
    stop: StopRequest,
) -> list[Ending]:
    """Runs of one method at the same time, as `_run_one` does each of them."""

    def run(plan: RunPlan, reporter: Reporter, engine: Engine) -> Ending:
        return _run_one(experiment, resources._replace(engine=engine), plan, data[plan.seed], reporter, stop)

    return side_by_side(resources.engine, [partial(run, *pair) for pair in zip(plans, reporters, strict=True)])


def side_by_side(
    engine: Engine, runs: Sequence[Callable[[Engine], Result]], variants: Variants | None = None
) -> list[Result]:
    """What runs return that go at the same time on one engine; alone, a run has it for itself.

    If some of them raise, the others go on; then the first error is raised, an interruption only if there is no other.
    """
    try:
        return [runs[0](engine)] if len(runs) == 1 else _seated(engine, runs, variants)
    finally:
        engine.release()


def _seated(engine: Engine, runs: Sequence[Callable[[Engine], Result]], variants: Variants | None) -> list[Result]:
    seats = SharedEngine(engine, len(runs), variants).seats

    def seated(k: int) -> Result:
        try:
            return runs[k](seats[k])
        finally:
            seats[k].leave()

    with ThreadPoolExecutor(max(1, len(runs)), "run") as threads:
        going = [threads.submit(seated, k) for k in range(len(runs))]
    errors = [run.exception() for run in going]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Interrupted)):
        raise error
    return [run.result() for run in going]


def run_seeds(
    experiment: Experiment,
    out: Path,
    label: str,
    data: Mapping[int, FederatedData],
    reporters: Sequence[Reporter],
    stop: StopRequest,
) -> list[Ending]:
    """Runs of an experiment that `prepare` found in order, at the same time: one for each seed that has data here.

    How each of them ended; Interrupted if somebody asked to stop.
    """
    choice = next(choice for choice in experiment.algorithms if choice.label == label)
    plans = []
    for seed, own in data.items():
        document = resolve.resolved(experiment, choice, seed, own, resolve.make_task(experiment, seed, own))
        plans.append(make_plan(experiment, choice, seed, out, document, own))
    resources = resolve.make_resources(experiment, choice, data[plans[0].seed])
    return _run_group(experiment, resources, plans, data, reporters, stop)


def _run_one(
    experiment: Experiment,
    resources: resolve.RunResources,
    plan: RunPlan,
    data: FederatedData,
    reporter: Reporter,
    stop: StopRequest,
) -> Ending:
    """How the run ended; Interrupted if somebody asked to stop."""
    return run_planned(plan, lambda: resolve.make_federation(experiment, resources, plan.seed, data), reporter, stop)


def run_planned(plan: RunPlan, make: Callable[[], RoundLoop], reporter: Reporter, stop: StopRequest) -> Ending:
    """How the run ended; Interrupted if somebody asked to stop."""
    ending, done = "stopped", 0
    try:
        with PeakMemory() as memory:
            federation = make()
            complete = execute(plan, federation, memory, reporter, stop)
        ending, done = "" if complete else "stopped", federation.rounds_done
    except EndedEarly as reason:
        files.write_atomically(plan.folder / files.ERROR, explain(reason))
        ending = f"ended early: {reason}"
        return Ending.DIVERGED if isinstance(reason, Diverged) else Ending.FAILED
    except Exception as error:
        if no_room(error):  # it says nothing about the method, and the other runs would meet it too
            ending = "failed: nothing more can be written"
            raise RunError(f"{plan.folder}: nothing more can be written ({error})") from error
        files.write_atomically(plan.folder / files.ERROR, explain(error))
        ending = f"failed: {in_short(error)} (see {plan.folder / files.ERROR})"
        return Ending.FAILED
    finally:
        reporter.finish(ending)
    if not complete:
        raise Interrupted(f"after round {done} of {plan.label}, seed {plan.seed}")
    return Ending.FINISHED


def tracked(plan: RunPlan) -> TrackedRun:
    return TrackedRun(plan.folder, plan.name, plan.label, plan.seed, plan.document)


def explain(error: Exception) -> str:
    """The text alone where it was written for the user, else the whole trace."""
    if isinstance(error, InputError | RunError):
        return f"{error}\n"
    return "".join(traceback.format_exception(error))


# before the start ------------------------------------------------------------------------------------


def prepare(experiment: Experiment, out: Path, resume: bool) -> Prepared:
    """Everything that can go wrong because of the input goes wrong here, before any work and any file."""
    for choice in experiment.algorithms:
        with experiment.origin.located(choice.key):
            resolve.refuse_unused(experiment, choice)
    plans: dict[tuple[str, int], RunPlan] = {}
    with experiment.origin.located():
        resolve.make_engine(experiment)
        first = resolve.load_data(experiment, experiment.seeds[0])
        for seed in experiment.seeds:
            data = first if seed == experiment.seeds[0] else resolve.load_data(experiment, seed)
            choose_rule(experiment.eval.select, validated=bool(data.sizes("val").any()))
            task = resolve.make_task(experiment, seed, data)
            for choice in experiment.algorithms:
                document = resolve.resolved(experiment, choice, seed, data, task)
                plans[choice.label, seed] = make_plan(experiment, choice, seed, out, document, data)
    resources: dict[str, resolve.RunResources] = {}
    for choice in experiment.algorithms:
        with experiment.origin.located(choice.key):
            resources[choice.label] = own = resolve.make_resources(experiment, choice, first)
            resolve.make_federation(experiment, own, experiment.seeds[0], first)
    found = {plan.folder: examine(plan, resume=resume) for plan in plans.values()}
    finished = frozenset(folder for folder, what in found.items() if what.finished)
    for folder in finished:
        clear(folder)
    make_folder(out)
    return Prepared(plans, resources, finished, first, tuple(note for what in found.values() for note in what.notes))


def unused_settings(experiment: Experiment) -> Iterator[str]:
    """A line for each method that does not use all that it is told with others."""
    for choice in experiment.algorithms:
        told = [f"{name} changes nothing ({why})" for name, why in resolve.unused(experiment, choice).items()]
        if told:
            yield f"{choice.label}: {'; '.join(told)}"


def make_plan(
    experiment: Experiment, choice: AlgorithmChoice, seed: int, out: Path, document: Any, data: Census
) -> RunPlan:
    return RunPlan(
        folder=out / choice.label / f"seed-{seed}",
        name=choice.name,
        label=choice.label,
        seed=seed,
        rounds=experiment.train.rounds,
        eval=_with_crossed(experiment),
        checkpoint=experiment.checkpoint,
        output=experiment.output,
        new_clients=experiment.new_clients,
        document=document,
        data=data.digest,
        note=choice.note,
    )


def _with_crossed(experiment: Experiment) -> EvalSection:
    """S- and G-accuracy are measured, whatever they cost, where the experiment asks for one of them."""
    asked = {*experiment.eval.also, *experiment.paper.metrics} & set(OF_OTHERS_DATA)
    automatic = experiment.eval.cross == "auto"
    return experiment.eval.model_copy(update={"cross": True}) if asked and automatic else experiment.eval


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made ({error}); give a folder that can be written to.") from None
