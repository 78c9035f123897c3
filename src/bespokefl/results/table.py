"""The comparison as a table: methods by mean accuracy, what clients gain over training alone, and what it cost."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from bespokefl.evaluation.metrics import SAMPLE_METRICS, speed_ups
from bespokefl.results.files import StoredRun
from bespokefl.results.methods import baseline_runs, by_method, gains, metric


@dataclass(frozen=True)
class Figure:
    """A quantity over seeds."""

    mean: float
    std: float | None  # over seeds (ddof 0); None with one seed

    @classmethod
    def over_seeds(cls, values: Sequence[float]) -> "Figure":
        return cls(float(np.mean(values)), float(np.std(values)) if len(values) > 1 else None)

    def show(self, decimals: int = 1, *, sign: bool = False, spread: bool = True) -> str:
        head = f"{self.mean:+.{decimals}f}" if sign else f"{self.mean:.{decimals}f}"
        return f"{head} ±{self.std:.{decimals}f}" if spread and self.std is not None else head


@dataclass(frozen=True)
class MethodRow:
    """A method's line; percentages, None where there is nothing to say."""

    label: str
    seeds: int
    metric: str  # what mean, worst5, top5 and the gain are of: accuracy, or dice
    mean: Figure
    worst5: Figure
    top5: Figure
    std: Figure  # over the clients
    gain: Figure | None  # mean individual gain over Local, percentage points
    worse_off: Figure | None  # share of clients below what they reach alone
    harmed: Figure | None  # the same as a number of clients
    gm_acc: Figure | None
    l_acc: Figure | None  # mean accuracy of a personal model on its client's own test data
    s_acc: Figure | None  # on its own and some others' test data
    g_acc: Figure | None  # mean accuracy of a personal model on all clients' test data together
    further: dict[str, Figure]  # other metrics by name, means over the clients that have them
    target: float | None  # mean accuracy that rounds are counted to
    rounds_to_target: Figure | None  # None also if a seed never gets there
    speed_up: float | None  # over the slowest method that gets there
    new_last: Figure | None  # clients that joined after the training, after their last epoch
    new_best: Figure | None  # after the epoch that is best for them on their test data
    megabytes: Figure  # sent by all, in both directions
    seconds: Figure  # of training
    gpu_megabytes: Figure | None  # peak


def method_rows(runs: Sequence[StoredRun]) -> list[MethodRow]:
    """One row per method, the best mean first; unfinished runs are left out."""
    alone = baseline_runs(runs)
    rows = [_row(label, own, alone) for label, own in by_method(runs).items()]
    faster = speed_ups({row.label: None if row.rounds_to_target is None else row.rounds_to_target.mean for row in rows})
    ranked = sorted(rows, key=lambda row: -row.mean.mean)
    return [replace(row, speed_up=faster[row.label]) for row in ranked]


def _row(label: str, runs: Sequence[StoredRun], alone: Mapping[int, StoredRun]) -> MethodRow:
    summaries = [run.summary for run in runs if run.summary is not None]
    gained = [] if all(run in alone.values() for run in runs) else list(gains(runs, alone).values())
    on_gpu = all(str(summary.get("device")).startswith("cuda") for summary in summaries)

    def surely(key: str, factor: float = 100) -> Figure:
        return _over_seeds([factor * summary[key] for summary in summaries])

    def measured(key: str, factor: float = 100) -> Figure | None:
        return None if any(summary.get(key) is None for summary in summaries) else surely(key, factor)

    def over_gains(figure: Callable[[npt.NDArray[np.float64]], float]) -> Figure | None:
        return _over_seeds([figure(gain[~np.isnan(gain)]) for gain in gained]) if gained else None

    further = {name: measured(name, 1) for name in SAMPLE_METRICS}
    return MethodRow(
        label=label,
        seeds=len(runs),
        metric=metric(runs[0]),
        mean=surely("mean"),
        worst5=surely("worst5"),
        top5=surely("top5"),
        std=surely("std"),
        gain=over_gains(lambda gain: float(gain.mean())),
        worse_off=over_gains(lambda gain: 100 * float((gain < 0).mean())),
        harmed=over_gains(lambda gain: float((gain < 0).sum())),
        gm_acc=measured("gm_acc"),
        l_acc=measured("l_acc"),
        s_acc=measured("s_acc"),
        g_acc=measured("g_acc"),
        further={name: figure for name, figure in further.items() if figure is not None},
        target=summaries[0].get("target"),
        rounds_to_target=measured("rounds_to_target", 1),
        speed_up=None,
        new_last=_of_new_clients(summaries, "last"),
        new_best=_of_new_clients(summaries, "best"),
        megabytes=surely("bytes_total", 1e-6),
        seconds=surely("train_seconds", 1),
        gpu_megabytes=measured("peak_memory_bytes", 1e-6) if on_gpu else None,
    )


def _of_new_clients(summaries: Sequence[dict[str, Any]], key: str) -> Figure | None:
    figures = [summary["new_clients"][key] for summary in summaries if "new_clients" in summary]
    return _over_seeds([100 * figure for figure in figures]) if figures else None


def _over_seeds(values: Sequence[float]) -> Figure:
    return Figure.over_seeds(values)


# for people ------------------------------------------------------------------------------------------

DASH = "-"
NARROW = 10  # letters of a heading that stand in one line
Cell = Callable[[MethodRow], str]


def columns(rows: Sequence[MethodRow]) -> dict[str, Cell]:
    """Headings and cells; a column that would be empty is left out."""
    of_masks = any(row.metric == "dice" for row in rows)
    mean, accuracy = ("mean Dice %", " acc.") if of_masks else ("mean %", "")
    target = next((row.target for row in rows if row.target is not None), None)
    wanted: dict[str, Cell] = {
        "method": lambda row: row.label,
        mean: lambda row: row.mean.show(2),
        "worst 5 %": lambda row: row.worst5.show(),
        "top 5 %": lambda row: row.top5.show(spread=False),
        "gain over Local": lambda row: DASH if row.gain is None else row.gain.show(2, sign=True),
        "clients worse off": lambda row: DASH if row.worse_off is None else f"{row.worse_off.mean:.0f} %",
        **{shown.heading: _further(name, shown) for name, shown in FURTHER.items()},
        f"global model{accuracy} %": lambda row: DASH if row.gm_acc is None else row.gm_acc.show(spread=False),
        f"{accuracy.strip()} on all data %".strip(): lambda row: (
            DASH if row.g_acc is None else row.g_acc.show(spread=False)
        ),
        f"rounds to {100 * (target or 0):g} %": _rounds_to_target,
        "speed-up": lambda row: DASH if row.speed_up is None else f"{row.speed_up:.2f}x",
        "new clients %": lambda row: DASH if row.new_last is None else row.new_last.show(2),
        "new at best %": lambda row: DASH if row.new_best is None else row.new_best.show(2),
        "MB sent": lambda row: row.megabytes.show(spread=False),
        "seconds": lambda row: row.seconds.show(spread=False),
        "GPU MB": lambda row: DASH if row.gpu_megabytes is None else row.gpu_megabytes.show(0, spread=False),
    }
    return {name: cell for name, cell in wanted.items() if any(cell(row) != DASH for row in rows)}


class _Shown(NamedTuple):
    heading: str
    factor: float
    decimals: int


# Further metrics of the table. Dice is its mean already; the others are in summary.json.
FURTHER = {
    "auc": _Shown("AUC", 1, 3),
    "sensitivity": _Shown("sensitivity %", 100, 1),
    "specificity": _Shown("specificity %", 100, 1),
    "hausdorff": _Shown("HD, pixels", 1, 1),
}


def _further(name: str, shown: _Shown) -> Cell:
    def cell(row: MethodRow) -> str:
        found = row.further.get(name)
        return DASH if found is None else f"{shown.factor * found.mean:.{shown.decimals}f}"

    return cell


def _rounds_to_target(row: MethodRow) -> str:
    if row.target is None:
        return DASH
    return "never" if row.rounds_to_target is None else f"{row.rounds_to_target.mean:g}"


def caption(runs: Sequence[StoredRun], *, costs: bool = True) -> str:
    """Which models the numbers belong to, what costs mean where they are shown, and what is said of the methods."""
    finished = [run for run in runs if run.summary is not None]
    summaries = [run.summary for run in finished if run.summary is not None]
    scored = _listed(summary["scored"] for summary in summaries)
    of = ", Dice and Hausdorff distance (HD) without the background" if metric(finished[0]) == "dice" else ""
    selection = _listed(_SELECTED.get(summary["selection"], summary["selection"]) for summary in summaries)
    models: dict[str, list[str]] = {}
    for label, own in by_method(runs).items():
        model = own[0].summary["model"] if own[0].summary else ""
        models.setdefault(_MODELS.get(model, model), []).append(label)
    which = "; ".join(f"{model} for {', '.join(labels)}" for model, labels in models.items())
    seeds = len({run.seed for run in finished})
    spread = f" ± is the standard deviation over {seeds} seeds." if seeds > 1 else ""
    cost = " MB sent: both ways, all rounds; seconds: training without evaluation." if costs else ""
    of_some = f"{_of_whom_untrained(summaries)}{cost}{_of_whom_joined(summaries)}"
    return "\n".join([f"Scored: {scored} ({selection}){of}: {which}.{spread}{of_some}", *_notes(runs)])


def _notes(runs: Sequence[StoredRun]) -> list[str]:
    """What stands beside a method in the experiment's file, in the order of the table."""
    told = {label: [run.summary.get("note") for run in own if run.summary] for label, own in by_method(runs).items()}
    return [f"{label}: {note}" for label, notes in told.items() for note in dict.fromkeys(notes) if note]


def _of_whom_untrained(summaries: Sequence[dict[str, Any]]) -> str:
    """A warning: clients that were never asked look like a method's worst ones."""
    counts = sorted({count for summary in summaries if (count := summary.get("clients_untrained", 0))})
    if not counts:
        return ""
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f" {number} of the clients had not taken part until then: they count with what the method gives to such, "
        "as the first model or the newest global one."
    )


def _of_whom_joined(summaries: Sequence[dict[str, Any]]) -> str:
    """What the columns of new clients mean."""
    new = [summary["new_clients"] for summary in summaries if "new_clients" in summary]
    if not new:
        return ""
    start = "from the global model" if new[0]["start"] == "global" else "each method's own way"
    return (
        f" New clients: {new[0]['clients']} that training never saw, after {new[0]['epochs']} epochs of their own "
        f"({start}); at best: the epoch with the best mean TEST accuracy, an optimistic choice."
    )


_MODELS = {
    "own": "the method's own personal model",
    "global": "the global model",
    "local_before_agg": "the client's model before aggregation",
    "finetune": "the global model fine-tuned by the client",
}
_SELECTED = {
    "last": "the last round",
    "val": "the round with the best validation accuracy",
    "best_test": "the round with the best TEST accuracy, an optimistic choice",
}


def _listed(texts: Any) -> str:
    """Different texts once each; too many are cut to what they share."""
    different = sorted(set(texts))
    if len(different) <= 2:
        return " / ".join(different)
    return f"{different[0].split(', round')[0]}, each in its selected round, test split"


def rich_table(runs: Sequence[StoredRun]) -> Table:
    rows = method_rows(runs)
    table = Table(caption=caption(runs), caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = columns(rows)
    for place, name in enumerate(shown):
        heading = "\n".join(textwrap.wrap(name, NARROW))
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(cell(row) for cell in shown.values()))
    return table


def markdown_table(runs: Sequence[StoredRun]) -> str:
    """The table for a page."""
    rows = method_rows(runs)
    shown = columns(rows)
    lines = [shown, ["---", *("---:" for _ in range(len(shown) - 1))]]
    lines += [[cell(row) for cell in shown.values()] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
