"""Following a trial while its runs go: its curve, and whether it is to end early."""

import threading
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from bespokefl.experiments.one_run import RunPlan
from bespokefl.interrupts import StopRequest
from bespokefl.progress import Reporter
from bespokefl.results import files
from bespokefl.tuning.space import Parameters
from bespokefl.tuning.study import Proposal
from bespokefl.tuning.trials import Trial


class TrialWatch:
    """Notes a trial's curve, asks its runs to stop when it is to end early, and says what came out of it.

    Its runs, one with each seed, may go side by side. It is judged as if they came one after another: a round counts
    once the runs before have come to their end.
    """

    def __init__(self, metric: str, proposal: Proposal, plans: Sequence[RunPlan], stop_all: StopRequest) -> None:
        self._metric, self._proposal, self._stop_all = metric, proposal, stop_all
        self.runs = [RunWatch(self, plan) for plan in plans]
        self.stop = StopRequest()
        self.pruned = False
        self._lock = threading.Lock()
        self._rounds, self._seconds = 0, 0.0
        self._curve: list[tuple[int, float]] = []

    @property
    def parameters(self) -> Parameters:
        return self._proposal.parameters

    @property
    def is_over(self) -> bool:
        """Whether further runs would change nothing."""
        return self.pruned or any(run.error for run in self.runs)

    def look(self) -> None:
        """Judges what is new."""
        with self._lock:
            for run in self.runs:
                while not self.pruned and run.judged < len(run.lines):
                    line = run.lines[run.judged]
                    run.judged += 1
                    self.pruned = self._note(line) and line["round"] < run.plan.rounds
                if run.judged < run.plan.rounds:
                    break
            self.stop.asked = self.pruned or self._stop_all.asked

    def _note(self, line: files.Line) -> bool:
        """Whether the trial is to end here."""
        self._rounds += 1
        self._seconds += line["seconds"]
        value = line[self._metric]
        if value is None:
            return False
        self._curve.append((self._rounds, value))
        return self._proposal.should_end(value, self._rounds)

    def trial(self) -> Trial:
        """What there is to say when its runs are over."""
        if self.pruned:
            return self._trial("pruned")
        errors = [run.error for run in self.runs if run.error]
        if errors:
            return self._trial("failed", reason=f"{type(errors[0]).__name__}: {errors[0]}")
        summaries = [files.read_json(run.plan.folder / files.SUMMARY) for run in self.runs]
        if any(summary[key] is None for summary in summaries for key in ("mean", "worst5")):
            return self._trial("failed", reason="the validation accuracy is not a number")
        return self._trial("complete", {key: fmean(s[key] for s in summaries) for key in ("mean", "worst5")})

    def _trial(
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


class RunWatch:
    """What one of a trial's runs reports to; all is passed on to who shows it."""

    def __init__(self, trial: TrialWatch, plan: RunPlan) -> None:
        self.trial, self.plan = trial, plan
        self.lines: list[files.Line] = []
        self.judged = 0  # lines
        self.error: Exception | None = None  # why it failed
        self.shown: Reporter | None = None

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self.lines = files.read_rounds(self.plan.folder / files.ROUNDS)[:done]
        self.trial.look()
        if self.shown:
            self.shown.start(label, seed, rounds, done)

    def round(self, line: files.Line) -> None:
        self.lines.append(line)
        if self.shown:
            self.shown.round(line)
        self.trial.look()

    def finish(self, outcome: str) -> None:
        if self.shown:
            self.shown.finish(outcome)

    def note(self, text: str) -> None:
        if self.shown:
            self.shown.note(text)
