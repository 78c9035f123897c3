"""An experiment: every algorithm with every seed, each in a folder of its own.

All that can be checked is checked before the first round. Data are loaded once per seed and shared by the algorithms.
"""

import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bespokefl import assembly
from bespokefl.config import AlgorithmChoice, Experiment
from bespokefl.data import FederatedData
from bespokefl.engines import Engine
from bespokefl.engines.peak import PeakMemory
from bespokefl.engines.together import Together
from bespokefl.engines.variants import Variants
from bespokefl.errors import EndedEarly, InputError, RunError, in_short
from bespokefl.interrupts import Interrupted, StopRequest, stop_on_signals
from bespokefl.progress import Reporter, SideBySide
from bespokefl.results import files
from bespokefl.results.partition import partition_file, write_partition
from bespokefl.rounds import RoundLoop
from bespokefl.run import Run, RunPlan
from bespokefl.selection import choose_rule
from bespokefl.tomlfile import dumps
from bespokefl.tracking import TrackedRun, Tracking, make_tracking

Result = TypeVar("Result")
# Keys of how a run is operated: they may change while it is going, and its numbers by no more than their rounding.
OPERATION = ("federation.", "engine.together", "engine.stack")


@dataclass
class Outcome:
    """The folders of the runs, by how they ended."""

    finished: list[Path] = field(default_factory=list)  # also those that an earlier call had finished
    failed: list[Path] = field(default_factory=list)
    tracking: Tracking | None = None  # who was told


@dataclass(frozen=True)
class Prepared:
    """What the checks before the start leave for the runs."""

    plans: dict[tuple[str, int], RunPlan]  # by label and seed
    kits: dict[str, assembly.Kit]  # by label
    finished: frozenset[Path]  # folders that need no work
    first: FederatedData  # of the first seed


def run_experiment(experiment: Experiment, out: Path, *, resume: bool, reporter: Reporter) -> Outcome:
    """Run all that is not finished; a run that fails is recorded, and the others go on."""
    with experiment.origin.located():
        tracking = make_tracking(experiment.track, out, reporter.note)
    prepared = prepare(experiment, out, resume)
    outcome = Outcome(tracking=tracking)
    if prepared.first.note:
        reporter.note(f"data: {prepared.first.note}")

    def announce() -> None:
        reporter.note("stopping after this round; once more to stop at once")

    with stop_on_signals(announce) as stop:
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
                        data[plan.seed] = prepared.first if first else assembly.load_data(experiment, plan.seed)
                        write_partition(partition_file(out, plan.seed), data[plan.seed])
                    plans.append(plan)
                if not plans:
                    continue
                if stop.asked:
                    raise Interrupted(f"before {choice.label}, seed {plans[0].seed}")
                shown = [reporter] if len(plans) == 1 else SideBySide(reporter, len(plans)).of_runs
                told = [tracking.reporter(one, tracked(plan)) for one, plan in zip(shown, plans, strict=True)]
                done = _run_group(experiment, prepared.kits[choice.label], plans, data, told, stop)
                for plan, finished in zip(plans, done, strict=True):
                    (outcome.finished if finished else outcome.failed).append(plan.folder)
    return outcome


def at_once(experiment: Experiment) -> list[tuple[int, ...]]:
    """Groups of seeds whose runs of a method share the engine."""
    seeds, together = experiment.seeds, experiment.engine.together
    return [seeds[k : k + together] for k in range(0, len(seeds), together)]


def _run_group(
    experiment: Experiment,
    kit: assembly.Kit,
    plans: Sequence[RunPlan],
    data: Mapping[int, FederatedData],
    reporters: Sequence[Reporter],
    stop: StopRequest,
) -> list[bool]:
    """Runs of one method at the same time, as `_run_one` does each of them."""

    def run(plan: RunPlan, reporter: Reporter, engine: Engine) -> bool:
        return _run_one(experiment, kit._replace(engine=engine), plan, data[plan.seed], reporter, stop)

    return side_by_side(kit.engine, [partial(run, *pair) for pair in zip(plans, reporters, strict=True)])


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
    seats = Together(engine, len(runs), variants).seats

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
) -> list[bool]:
    """Runs of an experiment that `prepare` found in order, at the same time: one for each seed that has data here.

    True for each that finished, False if it failed; Interrupted if somebody asked to stop.
    """
    choice = next(choice for choice in experiment.algorithms if choice.label == label)
    plans = []
    for seed, own in data.items():
        document = assembly.resolved(experiment, choice, seed, own, assembly.make_task(experiment, seed, own))
        plans.append(make_plan(experiment, choice, seed, out, document))
    kit = assembly.make_kit(experiment, choice, data[plans[0].seed])
    return _run_group(experiment, kit, plans, data, reporters, stop)


def _run_one(
    experiment: Experiment,
    kit: assembly.Kit,
    plan: RunPlan,
    data: FederatedData,
    reporter: Reporter,
    stop: StopRequest,
) -> bool:
    """True if the run finished, False if it failed; Interrupted if somebody asked to stop."""
    return run_planned(plan, lambda: assembly.make_federation(experiment, kit, plan.seed, data), reporter, stop)


def run_planned(plan: RunPlan, make: Callable[[], RoundLoop], reporter: Reporter, stop: StopRequest) -> bool:
    """True if the run finished, False if it failed; Interrupted if somebody asked to stop."""
    ending, done = "stopped", 0
    try:
        with PeakMemory() as memory:
            federation = make()
            complete = Run(plan, federation, memory).execute(reporter, stop)
        ending, done = "" if complete else "stopped", federation.rounds_done
    except EndedEarly as reason:
        files.write_atomically(plan.folder / files.ERROR, explain(reason))
        ending = f"ended early: {reason}"
        return False
    except Exception as error:
        files.write_atomically(plan.folder / files.ERROR, explain(error))
        ending = f"failed: {in_short(error)} (see {plan.folder / files.ERROR})"
        return False
    finally:
        reporter.finish(ending)
    if not complete:
        raise Interrupted(f"after round {done} of {plan.label}, seed {plan.seed}")
    return True


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
            assembly.make_algorithm(experiment, choice)
    plans: dict[tuple[str, int], RunPlan] = {}
    with experiment.origin.located():
        assembly.make_engine(experiment)
        first = assembly.load_data(experiment, experiment.seeds[0])
        for seed in experiment.seeds:
            data = first if seed == experiment.seeds[0] else assembly.load_data(experiment, seed)
            choose_rule(experiment.eval.select, validated=bool(data.sizes("val").any()))
            task = assembly.make_task(experiment, seed, data)
            for choice in experiment.algorithms:
                document = assembly.resolved(experiment, choice, seed, data, task)
                plans[choice.label, seed] = make_plan(experiment, choice, seed, out, document)
    kits = {}
    for choice in experiment.algorithms:
        with experiment.origin.located(choice.key):
            kits[choice.label] = kit = assembly.make_kit(experiment, choice, first)
            assembly.make_federation(experiment, kit, experiment.seeds[0], first)
    finished = frozenset(plan.folder for plan in plans.values() if is_finished(plan, resume))
    make_folder(out)
    return Prepared(plans, kits, finished, first)


def make_plan(experiment: Experiment, choice: AlgorithmChoice, seed: int, out: Path, document: Any) -> RunPlan:
    return RunPlan(
        folder=out / choice.label / f"seed-{seed}",
        name=choice.name,
        label=choice.label,
        seed=seed,
        rounds=experiment.train.rounds,
        eval=experiment.eval,
        checkpoint=experiment.checkpoint,
        output=experiment.output,
        new_clients=experiment.new_clients,
        document=document,
    )


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made ({error}); give a folder that can be written to.") from None


def is_finished(plan: RunPlan, resume: bool) -> bool:
    """Whether an earlier call finished this very run; refuses a folder that holds something else."""
    folder = plan.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not resume:
        raise InputError(f"{folder} is not empty; add --resume to go on with what it holds, or give another --out.")
    config = folder / files.CONFIG
    if not config.is_file():
        return False
    try:
        stored = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{config} cannot be read ({error}); remove the folder to start this run afresh.") from None
    differing = sorted(differences(stored, plan.document))
    if differing:
        listed = "; ".join(differing)
        raise InputError(
            f"{folder} holds a run of another configuration, so --resume cannot go on with it: {listed}. "
            "Use the same configuration, or give another --out."
        )
    return (folder / files.SUMMARY).is_file() and "ended_early" not in files.read_json(folder / files.SUMMARY)


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose values differ, with both values."""
    before, now = dict(_flat(stored)), dict(_flat(tomllib.loads(dumps(wanted))))
    for key in before.keys() | now.keys():
        if key.startswith(OPERATION):
            continue
        if key not in before or key not in now or before[key] != now[key]:
            yield f"{key} was {before.get(key, 'absent')!r} and is now {now.get(key, 'absent')!r}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
