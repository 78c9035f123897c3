"""Pictures of a partition and of a comparison, as PNG and SVG; the same numbers always give the same bytes."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bespokefl.metrics import tails
from bespokefl.results.files import Line, StoredRun, write_atomically

# Okabe and Ito's colours, told apart by nearly everybody; yellow is left out, too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))  # the second, third, ... seven methods
GREY = "#555555"
MOST_SHAPES = 3000  # that an SVG draws one by one; more become an image in it
SETTINGS: Any = {
    "svg.hashsalt": "bespokefl",  # without it, the ids in an SVG are drawn at random
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
}


def save(figure: Figure, path: Path) -> None:
    """path.png and path.svg."""
    for suffix, content in render(figure).items():
        write_atomically(path.with_name(f"{path.name}.{suffix}"), content)


def render(figure: Figure) -> dict[str, bytes]:
    """The picture as PNG and SVG, without a date or a version in them."""
    rendered = {}
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    with matplotlib.rc_context(SETTINGS):
        for suffix, nothing in metadata.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=150, metadata=nothing)
            rendered[suffix] = buffer.getvalue()
    return rendered


# the partition ---------------------------------------------------------------------------------------


def partition_figure(counts: npt.NDArray[Any], classes: Sequence[str]) -> Figure:
    """Which client holds how many samples of which label: dots whose area is the count, and totals beside them."""
    clients, labels = counts.shape
    with matplotlib.rc_context(SETTINGS):
        height = float(np.clip(1.6 + 0.2 * clients, 3.0, 12.0))
        figure = Figure(figsize=(float(np.clip(4.2 + 0.33 * labels, 6.0, 14.0)), height), layout="constrained")
        FigureCanvasAgg(figure)
        dots, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        row, column = np.nonzero(counts)
        most = 0.8 * min(72 * height / (clients + 3), 20) ** 2
        sizes = most * counts[row, column] / counts.max()
        many = len(row) > MOST_SHAPES
        dots.scatter(column, row, s=sizes, color=COLOURS[0], linewidths=0, rasterized=many)
        step = max(1, -(-clients // 40))
        dots.set(title="Samples per label (dot area)", xlabel="label", ylabel="client")
        dots.set(xlim=(-0.7, labels - 0.3), ylim=(clients - 0.3, -0.7), yticks=range(0, clients, step))
        if labels <= 20:
            slant: dict[str, Any] = {"rotation": 45, "ha": "right"} if max(map(len, classes)) > 3 else {}
            dots.set_xticks(range(labels), list(classes), **slant)
        bars.barh(range(clients), counts.sum(axis=1), color=COLOURS[0], height=0.7)
        bars.set(title="Samples", xlabel="train + val + test")
        bars.tick_params(axis="y", length=0)
    return figure


# the comparison --------------------------------------------------------------------------------------


def result_figure(runs: Sequence[StoredRun]) -> Figure:
    """Every client of every method, beside how the mean and the worst 5 % came about; finished runs only."""
    methods = by_method(runs)
    with matplotlib.rc_context(SETTINGS):
        height = float(np.clip(1.7 + 0.5 * len(methods), 4.4, 14.0))
        figure = Figure(figsize=(11.0, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplot_mosaic([["clients", "mean"], ["clients", "worst5"]], width_ratios=(1.2, 1))
        for place, (label, own) in enumerate(methods.items()):
            colour = COLOURS[place % len(COLOURS)]
            style = STYLES[place // len(COLOURS) % len(STYLES)]
            _draw_clients(panels["clients"], place, [_accuracies(run) for run in own], colour)
            for key in ("mean", "worst5"):
                _draw_curve(panels[key], key, [run.rounds for run in own], colour, style, label)
        _finish_clients(panels["clients"], list(methods))
        panels["mean"].sharex(panels["worst5"])
        panels["mean"].tick_params(labelbottom=False)
        panels["mean"].set(ylabel="accuracy, %", title="Mean of the clients, by round")
        panels["worst5"].set(ylabel="accuracy, %", xlabel="round", title="Mean of the worst 5 %")
        panels["worst5"].legend(frameon=False, fontsize=9, ncols=1 + len(methods) // 9, loc="best")
    return figure


def by_method(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Finished runs by label, the best mean first."""
    methods: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.summary is not None:
            methods.setdefault(run.label, []).append(run)
    ranked = sorted(methods, key=lambda label: -float(np.mean([_accuracies(run).mean() for run in methods[label]])))
    return {label: methods[label] for label in ranked}


def _accuracies(run: StoredRun) -> npt.NDArray[np.float64]:
    """In percent, of the clients that have test data."""
    assert run.clients is not None
    accuracy = 100 * run.clients["accuracy"]
    present: npt.NDArray[np.float64] = accuracy[~np.isnan(accuracy)]
    return present


def _draw_clients(axes: Axes, place: int, per_seed: Sequence[npt.NDArray[np.float64]], colour: str) -> None:
    """A dot per client and seed, spread by rank so that equal values do not hide each other; mean and tail on top."""
    pooled = np.concatenate(per_seed)
    spread = (np.arange(len(pooled)) * 0.618034) % 1 - 0.5  # golden ratio: even, without a random draw
    size = float(np.clip(2400 / len(pooled), 3, 26))
    many = len(pooled) > MOST_SHAPES
    axes.scatter(pooled, place + 0.52 * spread, s=size, color=colour, alpha=0.45, linewidths=0, rasterized=many)
    worst = float(np.mean([tails(values)[0] for values in per_seed]))
    mean = float(np.mean([values.mean() for values in per_seed]))
    axes.plot([mean, mean], [place - 0.36, place + 0.36], color=colour, linewidth=2.6, solid_capstyle="butt")
    axes.scatter([worst], [place], marker="<", s=62, color="white", edgecolors=colour, linewidths=1.8, zorder=4)


def _finish_clients(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.45, -0.55), xlabel="test accuracy of a client, %", title="Every client")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    marks = [
        Line2D([], [], color=GREY, marker="o", linestyle="", markersize=4, alpha=0.6, label="a client"),
        Line2D([], [], color=GREY, marker="|", linestyle="", markersize=12, markeredgewidth=2.6, label="mean"),
        Line2D([], [], color=GREY, marker="<", linestyle="", markersize=7, markerfacecolor="white", label="worst 5 %"),
    ]
    beside_title: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.985), "ncols": 3, "columnspacing": 1}
    axes.legend(handles=marks, frameon=False, fontsize=9, **beside_title)


def _draw_curve(axes: Axes, key: str, per_seed: Sequence[Sequence[Line]], colour: str, style: Any, label: str) -> None:
    """The mean over seeds; a band from the lowest to the highest seed where there are several."""
    curves = [{line["round"]: 100 * line[key] for line in rounds if line[key] is not None} for rounds in per_seed]
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[r] for r in common] for curve in curves])
    axes.plot(common, values.mean(axis=0), color=colour, linestyle=style, linewidth=1.8, label=label)
    if len(curves) > 1:
        axes.fill_between(common, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
