"""The trials of every method, and the experiment with the best values."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from bespokefl.data import FederatedData
from bespokefl.engines import Engine
from bespokefl.engines.peak import PeakMemory
from bespokefl.engines.variants import Variants
from bespokefl.errors import InputError, in_short
from bespokefl.experiments import resolve
from bespokefl.experiments.lock import working_in
from bespokefl.experiments.one_run import RunPlan, execute
from bespokefl.experiments.reading import experiment_document
from bespokefl.experiments.running import make_folder, make_plan, side_by_side
from bespokefl.experiments.schema import AlgorithmChoice, Experiment
from bespokefl.experiments.selection import Rule, choose_rule
from bespokefl.interrupts import Interrupted, StopRequest, stop_on_signals
from bespokefl.progress import LineReporter, Reporter, SideBySide, quiet_console
from bespokefl.results import files
from bespokefl.results.tomlfile import dumps
from bespokefl.tuning.space import Space, chosen, read_spaces
from bespokefl.tuning.study import Proposal, need_optuna, propose
from bespokefl.tuning.trials import Trial, TrialFile, best_of
from bespokefl.tuning.validation import has_validation, without_test_samples
from bespokefl.tuning.watching import RunWatch, TrialWatch

FOLDER, TUNED = "tuning", "tuned.toml"


@dataclass(frozen=True)
class MethodResult:
    """The trials of one method that count."""

    label: str
    space: Space
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        return best_of(self.trials)

    @property
    def failed(self) -> bool:
        return bool(self.trials) and self.best is None


@dataclass(frozen=True)
class Criterion:
    """What the values were chosen by."""

    metric: Literal["mean", "worst5"]
    held_out: float | None  # share of the train samples; None: the data's own validation samples
    rounds: int
    rule: Rule  # which round counts
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        figure = {"mean": "mean accuracy", "worst5": "mean accuracy of the worst 5 % of the clients"}[self.metric]
        samples = "the validation samples"
        if self.held_out is not None:
            samples = f"{100 * self.held_out:g} % of each client's train samples, held out for validation"
        round_ = f"after {self.rounds} rounds" if self.rule == "last" else f"in the best of {self.rounds} rounds"
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        return f"{figure} on {samples}, {round_}, {seeds}"


@dataclass(frozen=True)
class Tuning:
    """What came out of it."""

    methods: list[MethodResult]
    criterion: Criterion
    experiment: Experiment  # with the best values
    file: Path  # the same as TOML


def tune(experiment: Experiment, out: Path, *, resume: bool = False, reporter: Reporter | None = None) -> Tuning:
    """Tune every method as [tune] says; a trial that fails is recorded, and the others go on."""
    tuner = _Tuner(experiment, out, resume, reporter or LineReporter(quiet_console()))
    methods = tuner.run()
    best = {method.label: method.best for method in methods}
    choices = [(choice, best[choice.label]) for choice in experiment.algorithms]
    picked = (chosen(choice, trial.parameters) if trial else choice for choice, trial in choices)
    tuned = replace(experiment, algorithms=tuple(resolve.without_unused(experiment, choice) for choice in picked))
    tuning = Tuning(methods, tuner.criterion, tuned, out / TUNED)
    files.write_atomically(tuning.file, "".join(_tuned_lines(tuning)))
    return tuning


def _tuned_lines(tuning: Tuning) -> Iterator[str]:
    yield f"# Written by `bespoke tune`. Chosen by {tuning.criterion}; test samples took no part.\n"
    for method in tuning.methods:
        if method.best:
            values = ", ".join(f"{key} = {value}" for key, value in method.best.parameters.items())
            yield f"# {method.label}: {values} (the best of {len(method.trials)} trials)\n"
    yield dumps(experiment_document(tuning.experiment))


class _Tuner:
    """Everything that can go wrong because of the input goes wrong in `__init__`, before any work and any file."""

    def __init__(self, experiment: Experiment, out: Path, resume: bool, reporter: Reporter) -> None:
        self.folder, self.reporter, self.section = out / FOLDER, reporter, experiment.tune
        seeds = tuple(self.section.seeds or experiment.seeds[:1])
        self.experiment = _for_trials(experiment, seeds)
        with experiment.origin.located():
            if len(set(seeds)) < len(seeds):
                raise InputError(f"tune.seeds = {list(seeds)!r}: should be different whole numbers.")
            self.spaces = read_spaces(experiment)
            if self.section.prune or not all(space.is_grid for space in self.spaces.values()):
                need_optuna()
            resolve.make_engine(experiment)
            loaded = {seed: resolve.load_data(self.experiment, seed) for seed in seeds}
            rule = choose_rule(experiment.eval.select, validated=has_validation(loaded[seeds[0]]))
            self.data = {seed: self._without_test(seed, data) for seed, data in loaded.items()}
        held_out = None if has_validation(loaded[seeds[0]]) else self.section.val
        self.criterion = Criterion(self.section.metric, held_out, self.experiment.train.rounds, rule, seeds)
        for choice in experiment.algorithms:
            with experiment.origin.located(choice.key):
                resolve.refuse_unused(self.experiment, choice)
                self._check_values(choice)
        self.stored = {choice.label: self._trial_file(choice, resume) for choice in experiment.algorithms}
        make_folder(out)

    def _without_test(self, seed: int, data: FederatedData) -> FederatedData:
        return without_test_samples(data, self.section.val, resolve.data_seed(self.experiment, seed))

    def _check_values(self, choice: AlgorithmChoice) -> None:
        """Refuses values that do not fit the model or the federation."""
        seed, data = next(iter(self.data.items()))
        resources = resolve.make_resources(self.experiment, choice, data)
        federation = resolve.make_federation(self.experiment, resources, seed, data)
        for key, domain in self.spaces[choice.label].domains.items():
            for value in domain.examples:
                try:
                    variant = chosen(choice, {key: value})
                    resolve.make_algorithm(self.experiment, variant).check(federation.task, federation.setup)
                except InputError as error:
                    raise InputError(f"{domain.where} holds {value!r}: {error}") from None

    def _trial_file(self, choice: AlgorithmChoice, resume: bool) -> TrialFile:
        path = self.folder / f"{choice.label}.json"
        for found in (path, self.folder / choice.label):
            if found.exists() and not resume:
                raise InputError(f"{found} exists; add --resume to go on with it, or give another --out.")
        seed, data = next(iter(self.data.items()))
        task = resolve.make_task(self.experiment, seed, data)
        setting = resolve.resolved(self.experiment, choice, seed, data, task) | {
            "seeds": list(self.data),
            "tune": {"metric": self.section.metric, "val": self.criterion.held_out, "prune": self.section.prune},
        }
        return TrialFile(path, choice.label, setting)

    # trials ------------------------------------------------------------------------------------------
    def run(self) -> list[MethodResult]:
        self.reporter.note(f"tuning by {self.criterion}; test samples take no part")

        def announce() -> None:
            self.reporter.note("stopping after this round; once more to stop at once")

        with stop_on_signals(announce) as stop, working_in(self.folder / label for label in self.stored):
            for choice in self.experiment.algorithms:
                self._tune_method(choice, stop)
        return [
            MethodResult(label, self.spaces[label], stored.within(self.spaces[label]))
            for label, stored in self.stored.items()
        ]

    def _tune_method(self, choice: AlgorithmChoice, stop: StopRequest) -> None:
        space, stored = self.spaces[choice.label], self.stored[choice.label]
        budget = space.budget(self.section.trials)
        if before := len(stored.within(space)):
            self.reporter.note(f"{choice.label}: {before} of {budget} trials done before")
        resources = resolve.make_resources(self.experiment, choice, self.data[self.criterion.seeds[0]])
        variants = Variants()
        while len(history := stored.within(space)) < budget:
            if stop.asked:
                raise Interrupted(f"before trial {choice.label} {len(history) + 1}/{budget}")
            watches = []
            for number in range(len(history) + 1, min(len(history) + self._trials_at_once(space), budget) + 1):
                proposal = propose(
                    space,
                    history,
                    trials=self.section.trials,
                    seed=self.criterion.seeds[0],
                    prune=self.section.prune,
                    rounds=self.criterion.rounds,
                    ahead=number - len(history) - 1,
                )
                watches.append(self._watch(choice, proposal, number, budget, stop))
            self._try(choice, resources, variants, watches, stop)
            stored.append(*(watch.trial() for watch in watches))
            shutil.rmtree(self.folder / choice.label, ignore_errors=True)

    def _trials_at_once(self, space: Space) -> int:
        """The points of a grid are known ahead; a sampler waits for the trial before."""
        return max(1, self.experiment.engine.together // len(self.data)) if space.is_grid else 1

    def _watch(
        self, choice: AlgorithmChoice, proposal: Proposal, number: int, budget: int, stop: StopRequest
    ) -> TrialWatch:
        """A trial with its runs, which are resumed where an earlier call left them."""
        variant = chosen(choice, proposal.parameters)
        values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in proposal.parameters.items())
        folder = self.folder / choice.label / f"trial-{number}"
        label = f"{choice.label} {number}/{budget} ({values})"
        plans = [self._plan(variant, seed, folder, label) for seed in self.data]
        return TrialWatch(self.section.metric, proposal, plans, stop)

    def _plan(self, variant: AlgorithmChoice, seed: int, folder: Path, label: str) -> RunPlan:
        """A run in the trial's working folder, emptied of any other run."""
        data = self.data[seed]
        document = resolve.resolved(
            self.experiment, variant, seed, data, resolve.make_task(self.experiment, seed, data)
        )
        plan = make_plan(self.experiment, variant, seed, self.folder, document, data)
        plan = replace(plan, label=label, folder=folder / plan.folder.name)
        config = plan.folder / files.CONFIG
        if plan.folder.exists() and not (config.is_file() and config.read_text(encoding="utf-8") == dumps(document)):
            shutil.rmtree(plan.folder)
        return plan

    def _try(
        self,
        choice: AlgorithmChoice,
        resources: resolve.RunResources,
        variants: Variants,
        trials: Sequence[TrialWatch],
        stop: StopRequest,
    ) -> None:
        """Trials with every seed, as many runs at the same time as may share the engine."""
        runs: list[tuple[RunWatch, resolve.RunResources]] = []
        for trial in trials:
            algorithm = resolve.make_algorithm(self.experiment, chosen(choice, trial.parameters))
            runs += [(run, resources._replace(algorithm=algorithm)) for run in trial.runs]
        together = self.experiment.engine.together
        for first in range(0, len(runs), together):
            going = [(run, own) for run, own in runs[first : first + together] if not run.trial.is_over]
            if not going:
                continue
            shown = SideBySide(self.reporter, len(going)).of_runs if len(going) > 1 else [self.reporter]
            pairs = zip(going, shown, strict=True)
            side_by_side(
                resources.engine,
                [partial(self._run, run, own, reporter, stop) for (run, own), reporter in pairs],
                variants,
            )

    def _run(
        self, run: RunWatch, resources: resolve.RunResources, reporter: Reporter, stop: StopRequest, engine: Engine
    ) -> None:
        """To the run's end or failure, which it remembers, or to its trial's end; Interrupted if asked to stop."""
        plan, trial, ending = run.plan, run.trial, "stopped"
        run.shown = reporter
        try:
            resources = resources._replace(engine=engine)
            with PeakMemory() as memory:
                federation = resolve.make_federation(self.experiment, resources, plan.seed, self.data[plan.seed])
                complete = execute(plan, federation, memory, run, trial.stop)
            ending = "" if complete else "pruned" if trial.pruned else "stopped"
        except OSError as error:  # a full disk says nothing about the values
            ending, stop.asked = f"failed: {in_short(error)}", True
            raise
        except Exception as error:
            ending, run.error = f"failed: {in_short(error)}", error
            return
        finally:
            run.finish(ending)
        if not complete and not trial.pruned:
            raise Interrupted(f"after round {federation.rounds_done} of {plan.label}, seed {plan.seed}")


def _for_trials(experiment: Experiment, seeds: tuple[int, ...]) -> Experiment:
    rounds = experiment.tune.rounds or experiment.train.rounds
    return replace(
        experiment,
        seeds=seeds,
        train=experiment.train.model_copy(update={"rounds": rounds}),
        eval=experiment.eval.model_copy(update={"cross": False}),
        output=experiment.output.model_copy(update={"personal": False, "surface": False}),
    )
