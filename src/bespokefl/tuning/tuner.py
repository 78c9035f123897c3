"""The trials of every method, one after another, and the experiment with the best values."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console

from bespokefl import assembly
from bespokefl.algorithms import Setup
from bespokefl.config import AlgorithmChoice, Experiment
from bespokefl.config_file import experiment_document
from bespokefl.data import FederatedData
from bespokefl.errors import InputError
from bespokefl.experiment import make_folder, make_plan
from bespokefl.interrupts import Interrupted, StopRequest, stop_on_signals
from bespokefl.progress import LineReporter, Reporter
from bespokefl.results import files
from bespokefl.run import Run, RunPlan
from bespokefl.selection import Rule, choose_rule
from bespokefl.tomlfile import dumps
from bespokefl.tuning.space import Space, chosen, read_spaces
from bespokefl.tuning.study import Proposal, need_optuna, propose
from bespokefl.tuning.trials import Trial, TrialFile, best_of
from bespokefl.tuning.validation import has_validation, without_test_samples

FOLDER, TUNED = "tuning", "tuned.toml"

Line = files.Line


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
    need_optuna()
    tuner = _Tuner(experiment, out, resume, reporter or LineReporter(Console(quiet=True)))
    methods = tuner.run()
    best = {method.label: method.best for method in methods}
    choices = [(choice, best[choice.label]) for choice in experiment.algorithms]
    tuned = replace(
        experiment, algorithms=tuple(chosen(choice, trial.parameters) if trial else choice for choice, trial in choices)
    )
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
            assembly.make_engine(experiment)
            loaded = {seed: assembly.load_data(self.experiment, seed) for seed in seeds}
            rule = choose_rule(experiment.eval.select, validated=has_validation(loaded[seeds[0]]))
            self.data = {seed: self._without_test(seed, data) for seed, data in loaded.items()}
        held_out = None if has_validation(loaded[seeds[0]]) else self.section.val
        self.criterion = Criterion(self.section.metric, held_out, self.experiment.train.rounds, rule, seeds)
        for choice in experiment.algorithms:
            with experiment.origin.located(choice.key):
                self._check_values(choice)
        self.stored = {choice.label: self._trial_file(choice, resume) for choice in experiment.algorithms}
        make_folder(out)

    def _without_test(self, seed: int, data: FederatedData) -> FederatedData:
        return without_test_samples(data, self.section.val, assembly.data_seed(self.experiment, seed))

    def _check_values(self, choice: AlgorithmChoice) -> None:
        """Refuses values that do not fit the model or the federation."""
        seed, data = next(iter(self.data.items()))
        kit = assembly.make_kit(self.experiment, choice, data)
        federation = assembly.make_federation(self.experiment, kit, seed, data)
        setup = Setup(data.clients, federation.cohort_size, seed, has_validation(data))
        for key, domain in self.spaces[choice.label].domains.items():
            for value in domain.examples:
                try:
                    variant = chosen(choice, {key: value})
                    assembly.make_algorithm(self.experiment, variant).check(federation.task, setup)
                except InputError as error:
                    raise InputError(f"{domain.where} holds {value!r}: {error}") from None

    def _trial_file(self, choice: AlgorithmChoice, resume: bool) -> TrialFile:
        path = self.folder / f"{choice.label}.json"
        for found in (path, self.folder / choice.label):
            if found.exists() and not resume:
                raise InputError(f"{found} exists; add --resume to go on with it, or give another --out.")
        seed, data = next(iter(self.data.items()))
        task = assembly.make_task(self.experiment, seed, data)
        setting = assembly.resolved(self.experiment, choice, seed, data, task) | {
            "seeds": list(self.data),
            "tune": {"metric": self.section.metric, "val": self.criterion.held_out, "prune": self.section.prune},
        }
        return TrialFile(path, choice.label, setting)

    # trials ------------------------------------------------------------------------------------------
    def run(self) -> list[MethodResult]:
        self.reporter.note(f"tuning by {self.criterion}; test samples take no part")

        def announce() -> None:
            self.reporter.note("stopping after this round; once more to stop at once")

        with stop_on_signals(announce) as stop:
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
        kit = assembly.make_kit(self.experiment, choice, self.data[self.criterion.seeds[0]])
        while len(history := stored.within(space)) < budget:
            name = f"{choice.label} {len(history) + 1}/{budget}"
            if stop.asked:
                raise Interrupted(f"before trial {name}")
            proposal = propose(
                space,
                history,
                trials=self.section.trials,
                seed=self.criterion.seeds[0],
                prune=self.section.prune,
                rounds=self.criterion.rounds,
            )
            stored.append(self._try(choice, kit, proposal, name, stop))
            shutil.rmtree(self.folder / choice.label, ignore_errors=True)

    def _try(
        self, choice: AlgorithmChoice, kit: assembly.Kit, proposal: Proposal, name: str, stop: StopRequest
    ) -> Trial:
        """One choice of values, with every seed. It is resumed where an earlier call left it."""
        variant = chosen(choice, proposal.parameters)
        values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in proposal.parameters.items())
        watch = _Watch(self.reporter, self.section.metric, proposal, stop)
        plans = [self._plan(variant, seed, f"{name} ({values})") for seed in self.data]
        try:
            kit = kit._replace(algorithm=assembly.make_algorithm(self.experiment, variant))
            for plan in plans:
                if not self._run(plan, kit, watch):
                    return watch.trial("pruned")
        except (Interrupted, OSError):  # a full disk says nothing about the values
            raise
        except Exception as error:
            return watch.trial("failed", reason=f"{type(error).__name__}: {error}")
        return _finished(watch, [files.read_json(plan.folder / files.SUMMARY) for plan in plans])

    def _plan(self, variant: AlgorithmChoice, seed: int, label: str) -> RunPlan:
        """A run in the method's working folder, emptied of any other run."""
        data = self.data[seed]
        document = assembly.resolved(
            self.experiment, variant, seed, data, assembly.make_task(self.experiment, seed, data)
        )
        plan = make_plan(self.experiment, variant, seed, self.folder, document)
        config = plan.folder / files.CONFIG
        if plan.folder.exists() and not (config.is_file() and config.read_text(encoding="utf-8") == dumps(document)):
            shutil.rmtree(plan.folder)
        return replace(plan, label=label)

    def _run(self, plan: RunPlan, kit: assembly.Kit, watch: "_Watch") -> bool:
        """True if the run came to its end, False if it was pruned; Interrupted if somebody asked to stop."""
        federation = assembly.make_federation(self.experiment, kit, plan.seed, self.data[plan.seed])
        ending = "stopped"
        watch.next_run(plan)
        try:
            complete = Run(plan, federation).execute(watch, watch.stop)
            ending = "" if complete else "pruned" if watch.pruned else "stopped"
        except Exception as error:
            ending = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            watch.finish(ending)
        if not complete and not watch.pruned:
            raise Interrupted(f"after round {federation.rounds_done} of {plan.label}, seed {plan.seed}")
        return complete


def _for_trials(experiment: Experiment, seeds: tuple[int, ...]) -> Experiment:
    rounds = experiment.tune.rounds or experiment.train.rounds
    return replace(
        experiment,
        seeds=seeds,
        train=experiment.train.model_copy(update={"rounds": rounds}),
        eval=experiment.eval.model_copy(update={"cross": False}),
        output=experiment.output.model_copy(update={"personal": False, "surface": False}),
    )


def _finished(watch: "_Watch", summaries: list[dict[str, Any]]) -> Trial:
    if any(summary[key] is None for summary in summaries for key in ("mean", "worst5")):
        return watch.trial("failed", reason="the validation accuracy is not a number")
    figures = {key: fmean(summary[key] for summary in summaries) for key in ("mean", "worst5")}
    return watch.trial("complete", figures)


class _Watch:
    """Passes a trial's rounds on to the reporter, notes its curve, and asks the run to stop when it is to end early."""

    def __init__(self, reporter: Reporter, metric: str, proposal: Proposal, stop_all: StopRequest) -> None:
        self._reporter, self._metric, self._proposal, self._stop_all = reporter, metric, proposal, stop_all
        self._plan: RunPlan | None = None
        self._rounds, self._seconds = 0, 0.0
        self._curve: list[tuple[int, float]] = []
        self.pruned, self.stop = False, StopRequest()

    def next_run(self, plan: RunPlan) -> None:
        self._plan = plan

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        assert self._plan is not None
        for line in files.read_rounds(self._plan.folder / files.ROUNDS)[:done]:
            self._note(line)
        self._reporter.start(label, seed, rounds, done)

    def round(self, line: Line) -> None:
        assert self._plan is not None
        self.pruned = self._note(line) and line["round"] < self._plan.rounds
        self._reporter.round(line)
        self.stop.asked = self.pruned or self._stop_all.asked

    def finish(self, outcome: str) -> None:
        self._reporter.finish(outcome)

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def _note(self, line: Line) -> bool:
        """Whether the trial is to end here."""
        self._rounds += 1
        self._seconds += line["seconds"]
        value = line[self._metric]
        if value is None:
            return False
        self._curve.append((self._rounds, value))
        return self._proposal.should_end(value, self._rounds)

    def trial(
        self,
        state: Literal["complete", "pruned", "failed"],
        figures: dict[str, float] | None = None,
        reason: str | None = None,
    ) -> Trial:
        found = figures or {}
        return Trial(
            self._proposal.parameters,
            state,
            value=found.get(self._metric),
            mean=found.get("mean"),
            worst5=found.get("worst5"),
            rounds=self._rounds,
            seconds=self._seconds,
            curve=self._curve,
            reason=reason,
        )
