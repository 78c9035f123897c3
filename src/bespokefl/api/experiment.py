"""Running an experiment from Python, and what its runs have found."""

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespokefl.api.reading import Document, read, reporter_for
from bespokefl.errors import RunError
from bespokefl.evaluation.history import Row, Shown
from bespokefl.experiments.running import Outcome
from bespokefl.experiments.running import run_experiment as run_all
from bespokefl.progress import Line, Reporter, as_text
from bespokefl.results.evaluations import EVALUATIONS, all_series
from bespokefl.results.files import StoredRun, read_runs
from bespokefl.results.methods import by_method, metric
from bespokefl.results.table import caption, columns, method_rows, rich_table

if TYPE_CHECKING:
    from bespokefl.results.files import Columns

SUMMARY = ("mean", "std", "worst5", "top5", "gm_acc", "rounds", "selected_round", "bytes_total", "train_seconds")


class ExperimentHistory(Shown):
    """What the runs of an experiment have found, all methods and seeds. A notebook shows it as a table of the methods.

    Attributes:
        folder: where the files are: config, checkpoints, rounds, scores.
        runs: what the folder of each finished run holds.
        finished: folders of the runs that went well.
        failed: folders of those that failed, with error.txt.
        diverged: folders of those whose models were lost, with error.txt.
        notes: what was said while it ran, such as settings that change nothing.
    """

    def __init__(self, folder: Path, outcome: Outcome, notes: Sequence[str], *, temporary: bool) -> None:
        self.folder, self.notes = folder, tuple(notes)
        self.finished, self.failed, self.diverged = outcome.finished, outcome.failed, outcome.diverged
        self.runs: list[StoredRun] = [run for run in read_runs(folder) if run.folder in outcome.finished]
        self._troubles = outcome.troubles(folder)
        if temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def methods(self) -> list[str]:
        """The labels of the methods, the best mean first."""
        return list(by_method(self.runs))

    def summary(self) -> dict[str, dict[str, float]]:
        """By method: mean, std, worst and top 5 % of the clients in the selected round, averaged over the seeds."""
        return {
            row.label: {
                key: figure.mean / 100
                for key, figure in (("mean", row.mean), ("std", row.std), ("worst5", row.worst5), ("top5", row.top5))
            }
            for row in method_rows(self.runs)
        }

    def table(self) -> list[Row]:
        """One row per method and seed: the figures of its selected round (fractions), and what it cost."""
        return [
            {"method": label, "seed": run.seed, "metric": metric(run)} | {key: run.summary.get(key) for key in SUMMARY}
            for label, runs in by_method(self.runs).items()
            for run in runs
            if run.summary is not None
        ]

    def rows(self) -> list[Row]:
        """One row per method, seed, evaluated round and client: its scores on its own test samples."""
        return [row for run in self.runs for row in _scores(run)]

    def results(self, sql: str | None = None) -> "Columns":
        """Everything that was measured, or the rows of a query about it; see `bespokefl.results`."""
        from bespokefl.results.store import frame

        return frame(self.folder, sql)

    def report(self, *, figures: bool = False) -> Path:
        """Write the report, one interactive HTML file, and return its path; `figures` writes its charts, too."""
        from bespokefl.report.publish import publish

        return publish(self.folder, figures=figures)

    def _course(self) -> list[Row]:
        return [
            {"method": run.label, "seed": run.seed, "metric": metric(run), **line}
            for run in self.runs
            for line in run.rounds
            if line["mean"] is not None
        ]

    def __repr__(self) -> str:
        return "\n".join([as_text(rich_table(self.runs)), *self._troubles])

    def _cells(self) -> tuple[list[str], list[list[str]], str]:
        rows = method_rows(self.runs)
        shown = columns(rows)
        below = [caption(self.runs), *self._troubles]
        return list(shown), [[cell(row) for cell in shown.values()] for row in rows], "\n".join(below)


def run_experiment(
    experiment: str | Path | Document,
    out: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: bool = False,
) -> ExperimentHistory:
    """Run every method of an experiment with every seed, as `bespoke run` does, and return what they have found.

    Args:
        experiment: the path of a TOML file, or a dict with the same keys.
        out: the folder for the files; without one they go to a temporary folder, which is removed with the result.
        settings: keys with their values on top, as {"train.rounds": 10}.
        resume: go on with what ``out`` holds, and skip what is finished.
        progress: show how far it is, on standard error.

    A run that fails or diverges is told by a warning, and the others go on; if none is left, RunError is raised.

    >>> history = bfl.run_experiment(
    ...     {
    ...         "algorithms": ["fedavg"],
    ...         "data": {"clients": 3, "max_samples": 150},
    ...         "model": {"name": "linear"},
    ...         "train": {"rounds": 2, "local_epochs": 1},
    ...     }
    ... )
    >>> history.methods
    ['fedavg']
    >>> history.table()[0].keys() >= {"method", "seed", "mean", "worst5"}
    True
    >>> len(history.rows())  # rounds and clients
    6
    """
    read_in = read(experiment, settings)
    folder = Path(tempfile.mkdtemp(prefix="bespokefl-")) if out is None else Path(out)
    reporter = _Noted(reporter_for(progress))
    try:
        outcome = run_all(read_in, folder, resume=resume, reporter=reporter)
        troubles = outcome.troubles(folder)
        if troubles and not outcome.finished:
            raise RunError(_told(outcome, folder))
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for text in troubles:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return ExperimentHistory(folder, outcome, reporter.notes, temporary=out is None)


def _told(outcome: Outcome, folder: Path) -> str:
    """What went wrong in each run, with the last line of its error."""
    lines = []
    for run in read_runs(folder):
        if run.folder in (*outcome.failed, *outcome.diverged):
            last = (run.error or "").strip().splitlines()[-1:] or ["the reason is not known"]
            lines.append(f"{run.label}, seed {run.seed}: {last[0]}")
    return "no run is left. " + "; ".join(lines)


def _scores(run: StoredRun) -> list[Row]:
    """The scores of personal models on their clients' test samples, a row per evaluated round and client."""
    assert run.clients is not None and run.summary is not None
    sizes = run.clients["n_test"]
    rounds: dict[int, list[Row]] = {}
    for series in all_series(run.folder / EVALUATIONS, run.clients, run.summary.get("selected_round")):
        if series.split == "test" and series.model == "personal":
            rows = rounds.setdefault(
                series.round,
                [
                    {"method": run.label, "seed": run.seed, "round": series.round, "client": client, "n_test": int(n)}
                    for client, n in enumerate(sizes)
                ],
            )
            for row, value in zip(rows, series.values, strict=True):
                row[series.metric] = float(value)
    return [row for number in sorted(rounds) for row in rounds[number]]


class _Noted:
    """A reporter that remembers what was said."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.notes: list[str] = []

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._reporter.start(label, seed, rounds, done)

    def round(self, line: Line) -> None:
        self._reporter.round(line)

    def finish(self, outcome: str) -> None:
        self._reporter.finish(outcome)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._reporter.note(text)
