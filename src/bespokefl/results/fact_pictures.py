"""Pictures of what an algorithm showed of its state, drawn by the shape of each fact, not by its method."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bespokefl.results.facts import Fact
from bespokefl.results.pictures import COLOURS, SETTINGS

MOST_LINES = 200  # clients drawn one by one


def facts_figure(facts: Mapping[str, Fact]) -> Figure:
    """A panel per fact: a number over rounds, a line per client, a map of layers, or how a matrix has changed."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(5.6 * len(facts), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(facts), squeeze=False)[0]
        for axes, (name, fact) in zip(panels, facts.items(), strict=True):
            _DRAW[fact.values.ndim - 1](axes, name, fact)
    return figure


def _number(axes: Axes, name: str, fact: Fact) -> None:
    axes.plot(fact.rounds, fact.values, color=COLOURS[0], linewidth=1.8)
    axes.set(title=name, xlabel="round")


def _per_client(axes: Axes, name: str, fact: Fact) -> None:
    for client in range(min(fact.values.shape[1], MOST_LINES)):
        axes.plot(fact.rounds, fact.values[:, client], color=COLOURS[0], linewidth=0.8, alpha=0.35)
    known = ~np.isnan(fact.values).all(axis=1)
    mean = np.nanmean(fact.values[known], axis=1)
    axes.plot(fact.rounds[known], mean, color=COLOURS[1], linewidth=2.4, label="mean of the clients")
    axes.set(title=f"{name} of every client", xlabel="round")
    axes.legend(frameon=False, fontsize=9)


def _square_or_layers(axes: Axes, name: str, fact: Fact) -> None:
    rows, columns = fact.values.shape[1:]
    if rows == columns:
        change = fact.values[-1] - fact.values[0]
        _map(axes, change, float(np.abs(change).max()) or 1.0)
        axes.set(title=f"{name}: change from round {fact.rounds[0]} to {fact.rounds[-1]}")
        axes.set(xlabel="client j", ylabel="client i")
    else:
        _map(axes, fact.values.mean(axis=1).T, None)
        axes.set(title=f"{name}: mean of the clients", xlabel="recorded round", ylabel="layer")
        places = np.unique(np.linspace(0, len(fact.rounds) - 1, min(6, len(fact.rounds))).astype(int))
        axes.set_xticks(places, [str(fact.rounds[place]) for place in places])


def _map(axes: Axes, values: npt.NDArray[Any], around_zero: float | None) -> None:
    """A heat map; one around zero is blue below and red above."""
    span: dict[str, Any] = {"cmap": "viridis"}
    if around_zero is not None:
        span = {"cmap": "RdBu_r", "vmin": -around_zero, "vmax": around_zero}
    for axis in (axes.xaxis, axes.yaxis):  # clients, layers and rounds are counted
        axis.set_major_locator(MaxNLocator(integer=True))
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **span)
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes)


_DRAW = (_number, _per_client, _square_or_layers)
