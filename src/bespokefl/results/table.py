"""The comparison as a table: methods by mean accuracy, what clients gain over training alone, and what it cost."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from bespokefl.metrics import individual_gain
from bespokefl.results.files import StoredRun
from bespokefl.results.pictures import by_method

BASELINE = "local"


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
    mean: Figure
    worst5: Figure
    top5: Figure
    gain: Figure | None  # mean individual gain over Local, percentage points
    worse_off: Figure | None  # share of clients below what they reach alone
    gm_acc: Figure | None
    g_acc: Figure | None  # mean accuracy of a personal model on all clients' test data together
    megabytes: Figure
    seconds: Figure


def method_rows(runs: Sequence[StoredRun]) -> list[MethodRow]:
    """One row per method, the best mean first; unfinished runs are left out."""
    alone = {run.seed: run for run in runs if run.summary is not None and run.summary["algorithm"] == BASELINE}
    return [_row(label, own, alone) for label, own in by_method(runs).items()]


def _row(label: str, runs: Sequence[StoredRun], alone: dict[int, StoredRun]) -> MethodRow:
    summaries = [run.summary for run in runs if run.summary is not None]
    gains = [_gain(run, alone[run.seed]) for run in runs if run.seed in alone]
    is_baseline = all(run in alone.values() for run in runs)
    compared = bool(gains) and not is_baseline
    with_global = all(summary["gm_acc"] is not None for summary in summaries)
    crossed = all(summary["g_acc"] is not None for summary in summaries)
    return MethodRow(
        label=label,
        seeds=len(runs),
        mean=_over_seeds([100 * s["mean"] for s in summaries]),
        worst5=_over_seeds([100 * s["worst5"] for s in summaries]),
        top5=_over_seeds([100 * s["top5"] for s in summaries]),
        gain=_over_seeds([float(np.nanmean(gain)) for gain in gains]) if compared else None,
        worse_off=_over_seeds([_share_below_zero(gain) for gain in gains]) if compared else None,
        gm_acc=_over_seeds([100 * s["gm_acc"] for s in summaries]) if with_global else None,
        g_acc=_over_seeds([100 * s["g_acc"] for s in summaries]) if crossed else None,
        megabytes=_over_seeds([s["bytes_total"] / 1e6 for s in summaries]),
        seconds=_over_seeds([s["train_seconds"] for s in summaries]),
    )


def _gain(run: StoredRun, baseline: StoredRun) -> npt.NDArray[np.float64]:
    assert run.clients is not None and baseline.clients is not None
    return individual_gain(run.clients["accuracy"], baseline.clients["accuracy"]).per_client


def _share_below_zero(gain: npt.NDArray[np.float64]) -> float:
    present = gain[~np.isnan(gain)]
    return 100 * float((present < 0).mean())


def _over_seeds(values: Sequence[float]) -> Figure:
    return Figure.over_seeds(values)


# for people ------------------------------------------------------------------------------------------

DASH = "-"
NARROW = 10  # letters of a heading that stand in one line
Cell = Callable[[MethodRow], str]


def columns(rows: Sequence[MethodRow]) -> dict[str, Cell]:
    """Headings and cells; a column that would be empty is left out."""
    wanted: dict[str, Cell] = {
        "method": lambda row: row.label,
        "mean %": lambda row: row.mean.show(2),
        "worst 5 %": lambda row: row.worst5.show(),
        "top 5 %": lambda row: row.top5.show(spread=False),
        "gain over Local": lambda row: DASH if row.gain is None else row.gain.show(2, sign=True),
        "clients worse off": lambda row: DASH if row.worse_off is None else f"{row.worse_off.mean:.0f} %",
        "global model %": lambda row: DASH if row.gm_acc is None else row.gm_acc.show(spread=False),
        "on all data %": lambda row: DASH if row.g_acc is None else row.g_acc.show(spread=False),
        "MB sent": lambda row: row.megabytes.show(spread=False),
        "seconds": lambda row: row.seconds.show(spread=False),
    }
    return {name: cell for name, cell in wanted.items() if any(cell(row) != DASH for row in rows)}


def caption(runs: Sequence[StoredRun]) -> str:
    """Which models the numbers belong to."""
    finished = [run for run in runs if run.summary is not None]
    summaries = [run.summary for run in finished if run.summary is not None]
    scored = _listed(summary["scored"] for summary in summaries)
    selection = _listed(_SELECTED[summary["selection"]] for summary in summaries)
    models: dict[str, list[str]] = {}
    for label, own in by_method(runs).items():
        model = own[0].summary["model"] if own[0].summary else ""
        models.setdefault(_MODELS.get(model, model), []).append(label)
    which = "; ".join(f"{model} for {', '.join(labels)}" for model, labels in models.items())
    seeds = len({run.seed for run in finished})
    spread = f" ± is the standard deviation over {seeds} seeds." if seeds > 1 else ""
    return f"Scored: {scored} ({selection}): {which}.{spread}"


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
