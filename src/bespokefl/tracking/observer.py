"""Between a run and its trackers: rounds that a tracker has are not told again, and its failures never stop a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bespokefl.progress import Line, Reporter
from bespokefl.results import files
from bespokefl.tracking.base import State, TrackedRun, Tracker, figures_of


class Tracking:
    """The trackers of an experiment."""

    def __init__(self, trackers: Sequence[Tracker], say: Callable[[str], None]) -> None:
        self._trackers, self._say = list(trackers), say

    def reporter(self, reporter: Reporter, run: TrackedRun) -> Reporter:
        """A reporter that also tells the trackers about a run."""
        return _Told(reporter, _Live(self, run)) if self._trackers else reporter

    def catch_up(self, run: TrackedRun) -> None:
        """Tell of a run that an earlier call finished; one that is tracked to its end stays as it is."""
        if self._trackers:
            live = _Live(self, run)
            live.start(len(files.read_rounds(run.folder / files.ROUNDS)))
            live.finish("")

    def report(self, path: Path) -> None:
        for tracker in list(self._trackers):
            self.attempt(tracker, tracker.report, path)

    def attempt(self, tracker: Tracker, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call to a tracker; one that fails is left alone from then on."""
        if tracker not in self._trackers:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # of any kind: a server may be gone, a disk full
            self._trackers.remove(tracker)
            self._say(f"warning: {tracker.name} is no longer told ({type(error).__name__}: {error}); the runs go on")
            return None

    @property
    def trackers(self) -> list[Tracker]:
        return list(self._trackers)


class _Live:
    """One run and the trackers that follow it."""

    def __init__(self, tracking: Tracking, run: TrackedRun) -> None:
        self._tracking, self._run = tracking, run
        self._has: dict[str, int] = {}  # by tracker: the last round it knows

    def start(self, done: int) -> None:
        lines = files.read_rounds(self._run.folder / files.ROUNDS)[:done]
        for tracker in self._tracking.trackers:
            self._has[tracker.name] = self._tracking.attempt(tracker, tracker.open, self._run) or 0
        for line in lines:
            self.round(line)

    def round(self, line: Line) -> None:
        for tracker in self._tracking.trackers:
            if line["round"] > self._has.get(tracker.name, line["round"]):
                self._tracking.attempt(tracker, tracker.log, line["round"], figures_of(line))

    def finish(self, outcome: str) -> None:
        if not self._has:  # it failed before it began
            return
        path = self._run.folder / files.SUMMARY
        summary = files.read_json(path) if not outcome and path.is_file() else None
        state: State = "finished" if summary else "stopped" if outcome == "stopped" else "failed"
        for tracker in self._tracking.trackers:
            self._tracking.attempt(tracker, tracker.close, state, summary)
        self._has = {}


class _Told:
    """A reporter for people, and the trackers beside it."""

    def __init__(self, reporter: Reporter, live: _Live) -> None:
        self._reporter, self._live = reporter, live

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._reporter.start(label, seed, rounds, done)
        self._live.start(done)

    def round(self, line: Line) -> None:
        self._reporter.round(line)
        self._live.round(line)

    def finish(self, outcome: str) -> None:
        self._reporter.finish(outcome)
        self._live.finish(outcome)

    def note(self, text: str) -> None:
        self._reporter.note(text)
