"""What a person sees while runs are going: a progress bar on a terminal, a few plain lines elsewhere."""

import contextlib
import io
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bespokefl.plain import printable

Line = dict[str, Any]
LINES_PER_RUN = 20  # in a log, about
NARROWEST_LOG = 120  # columns of a table that goes to a file


def make_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; a log is wide enough for tables."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=NARROWEST_LOG)


def quiet_console() -> Console:
    """Shows nothing."""
    return Console(quiet=True, force_terminal=False)


def as_text(shown: RenderableType) -> str:
    """What a log would have of it."""
    console = Console(width=NARROWEST_LOG, file=io.StringIO(), force_jupyter=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


class Reporter(Protocol):
    def start(self, label: str, seed: int, rounds: int, done: int) -> None: ...

    def round(self, line: Line) -> None: ...

    def finish(self, outcome: str) -> None:
        """The run is over, one way or the other."""

    def note(self, text: str) -> None: ...


def make_reporter(console: Console, lines_per_run: int = LINES_PER_RUN) -> Reporter:
    return BarReporter(console) if console.is_terminal else LineReporter(console, lines_per_run)


def describe(line: Line) -> str:
    """The figures of an evaluated round."""
    return f"mean {100 * line['mean']:.1f} %, worst 5 % {100 * line['worst5']:.1f} %"


class LineReporter:
    """A few lines per run, for logs."""

    def __init__(self, console: Console, lines_per_run: int = LINES_PER_RUN) -> None:
        self._console, self._lines = console, max(1, lines_per_run - 2)  # beside these: resumed, failed
        self._name, self._rounds, self._said, self._began = "", 1, 0, 0.0
        self._evaluated: Line | None = None

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._name, self._rounds, self._said, self._began = f"{label}, seed {seed}", rounds, done, time.monotonic()
        self._evaluated = None
        if done:
            self.note(f"{self._name}: resumed after round {done} of {rounds}")

    def round(self, line: Line) -> None:
        if line["mean"] is not None:
            self._evaluated = line
        due = line["round"] - self._said >= self._rounds / self._lines or line["round"] == self._rounds
        if due and self._evaluated:
            seconds = time.monotonic() - self._began
            figures = describe(self._evaluated)
            self.note(f"{self._name}: round {line['round']}/{self._rounds}, {figures}, {seconds:.0f} s")
            self._said, self._evaluated = line["round"], None

    def finish(self, outcome: str) -> None:
        if outcome:
            self.note(f"{self._name}: {outcome}")

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class BarReporter:
    """A bar with the newest figures and the time left; one line stays of each run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._name, self._last, self._began = "", "", 0.0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._name, self._last, self._began = f"{label}, seed {seed}", "", time.monotonic()
        self._progress = _bars(self._console)
        self._task = self._progress.add_task(self._name, total=rounds, completed=done, figures="")
        self._progress.start()

    def round(self, line: Line) -> None:
        if line["mean"] is not None:
            self._last = describe(line)
        if self._progress:
            self._progress.update(self._task, completed=line["round"], figures=self._last)

    def finish(self, outcome: str) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
        figures = ", ".join(part for part in (self._last, f"{time.monotonic() - self._began:.0f} s", outcome) if part)
        self.note(f"{self._name}: {figures}")

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class Countdown:
    """How many runs there are, and after each how long those to come will take, at the pace of the rounds so far."""

    def __init__(self, reporter: Reporter, rounds: Sequence[int]) -> None:
        self._reporter, self._left, self._runs = reporter, sum(rounds), len(rounds)
        self._over, self._began, self._rounds, self._of_run, self._seconds = 0, 0.0, 0, 0, 0.0
        least, most = min(rounds), max(rounds)
        counted = f"{most} round{'' if most == 1 else 's'}" if least == most else f"{least} to {most} rounds"
        reporter.note(f"{_runs(self._runs)} of {counted}, one after another")

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._left -= rounds
        self._began, self._of_run = time.monotonic(), 0
        self._reporter.start(label, seed, rounds, done)

    def round(self, line: Line) -> None:
        self._of_run += 1
        self._reporter.round(line)

    def finish(self, outcome: str) -> None:
        self._reporter.finish(outcome)
        self._over += 1
        self._rounds += self._of_run
        self._seconds += time.monotonic() - self._began
        if self._rounds and self._over < self._runs:
            left = _duration(self._left * self._seconds / self._rounds)
            self.note(f"{self._over} of {_runs(self._runs)}, about {left} to go")

    def note(self, text: str) -> None:
        self._reporter.note(text)


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class SideBySide:
    """One progress for several runs that go on at the same time: that of one of them, and what any has to say.

    The first is shown; if it ends before the others, the next one that reports a round takes its place.
    """

    def __init__(self, reporter: Reporter, runs: int) -> None:
        self._reporter, self._lock, self._going = reporter, threading.Lock(), runs
        self.of_runs = [_OneOf(self) for _ in range(runs)]
        self._shown = self.of_runs[0]

    def start(self, run: "_OneOf") -> None:
        with self._lock:
            if run is self._shown:
                self._reporter.start(run.label, run.seed, run.rounds, run.done)

    def round(self, run: "_OneOf", line: Line) -> None:
        with self._lock:
            if self._shown.is_over:
                self._reporter.finish("")
                self._shown = run
                self._reporter.start(run.label, run.seed, run.rounds, line["round"] - 1)
            if run is self._shown:
                self._reporter.round(line)

    def finish(self, outcome: str) -> None:
        """A run is over; the progress is, with the last of them."""
        with self._lock:
            self._going -= 1
            if outcome:
                self._reporter.note(outcome)
            if not self._going:
                self._reporter.finish("")

    def note(self, text: str) -> None:
        with self._lock:
            self._reporter.note(text)


class _OneOf:
    """What one of the runs reports to."""

    def __init__(self, group: SideBySide) -> None:
        self._group, self.is_over = group, False
        self.label, self.seed, self.rounds, self.done = "", 0, 1, 0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self.label, self.seed, self.rounds, self.done = label, seed, rounds, done
        self._group.start(self)

    def round(self, line: Line) -> None:
        self._group.round(self, line)

    def finish(self, outcome: str) -> None:
        self.is_over = True
        self._group.finish(f"{self.label}, seed {self.seed}: {outcome}" if outcome else "")

    def note(self, text: str) -> None:
        self._group.note(text)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


# several runs at a time --------------------------------------------------------------------------------


@contextlib.contextmanager
def several_reporters(console: Console, count: int, runs: int, lines_per_run: int = 4) -> Iterator[list[Reporter]]:
    """A reporter for each of so many runs that go side by side, out of so many in all."""
    if not console.is_terminal:
        yield [LineReporter(console, lines_per_run) for _ in range(count)]
        return
    with _bars(console) as bars:
        done = bars.add_task("all runs", total=runs, figures="")
        yield [_SharedBar(bars, done) for _ in range(count)]


class _SharedBar:
    """A bar among others for the run that is going; one line stays of each run."""

    def __init__(self, bars: Progress, done: TaskID) -> None:
        self._bars, self._done = bars, done
        self._task: TaskID | None = None
        self._name, self._last, self._began = "", "", 0.0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._name, self._last, self._began = f"{label}, seed {seed}", "", time.monotonic()
        self._task = self._bars.add_task(self._name, total=rounds, completed=done, figures="")

    def round(self, line: Line) -> None:
        if line["mean"] is not None:
            self._last = describe(line)
        if self._task is not None:
            self._bars.update(self._task, completed=line["round"], figures=self._last)

    def finish(self, outcome: str) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._bars.advance(self._done)
        seconds = f"{time.monotonic() - self._began:.0f} s"
        self.note(f"{self._name}: {', '.join(part for part in (self._last, seconds, outcome) if part)}")

    def note(self, text: str) -> None:
        self._bars.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
