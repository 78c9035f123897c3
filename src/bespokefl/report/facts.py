"""What methods show of their state, told apart by shape: a matrix of clients, numbers of clients, of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bespokefl.report.gather import Comparison, Problem, thinned
from bespokefl.report.tables import Table, plain
from bespokefl.results.facts import Fact, read_facts, read_layers
from bespokefl.results.files import StoredRun

MOST_CLIENTS = 200  # drawn one by one
MOST_ROUNDS = 60
MOST_CELLS = 150  # rows and columns of a matrix that is drawn
Kind = Literal["matrix", "clients", "layers", "number", "constant"]
Floats = npt.NDArray[np.float64]


class Regression(NamedTuple):
    """A least-squares line."""

    slope: float
    intercept: float
    r: float  # Pearson's correlation; NaN where the values are all the same


@dataclass(frozen=True)
class Shown:
    """One fact of one run: as many tables as it needs, and what is said beside the chart."""

    method: str
    seed: int
    name: str
    kind: Kind
    table: Table
    rounds: tuple[int, int]  # the first and the last that are known
    clients: int = 0
    left_out: int = 0  # clients that are not drawn
    means: Table | None = None  # of a matrix: row and column means of the change against n
    lines: Mapping[str, Regression] | None = None  # by side, "row" and "column"


def shown_facts(comparison: Comparison) -> tuple[list[Shown], list[Problem]]:
    """Of the first seed of each method that has facts (the other seeds' lie in their folders), and damaged files."""
    found, problems = [], []
    for label, own in comparison.methods.items():
        for run in own:
            damaged: list[str] = []
            facts = read_facts(run.folder, damaged)
            if damaged:
                what = f"facts are damaged ({', '.join(damaged)}); the other rounds are shown."
                problems.append(Problem(f"{label}, seed {run.seed}", what))
            layers = read_layers(run.folder)
            drawn = (_show(label, run, name, fact, layers) for name, fact in facts.items())
            found += [shown for shown in drawn if shown is not None]
            if facts:
                break
    return found, problems


def _show(label: str, run: StoredRun, name: str, fact: Fact, layers: Sequence[str]) -> Shown | None:
    values = fact.values.astype(np.float64)
    rounds = (int(fact.rounds[0]), int(fact.rounds[-1]))
    if values.size == 0 or not np.isfinite(values).any():
        return None
    if values.ndim == 3 and values.shape[1] == values.shape[2] and not _is_by_layer(name):
        assert run.clients is not None
        return _matrix(Shown(label, run.seed, name, "matrix", {}, rounds), values, run.clients["n_train"])
    kept = np.array([list(fact.rounds).index(r) for r in thinned(fact.rounds.tolist(), MOST_ROUNDS)])
    at = fact.rounds[kept].tolist()
    if values.ndim == 3:
        return Shown(label, run.seed, name, "layers", _layers(at, values[kept], layers), rounds, values.shape[1])
    if values.ndim == 2:
        clients = min(values.shape[1], MOST_CLIENTS)
        table = _clients(at, values[kept], clients)
        return Shown(label, run.seed, name, "clients", table, rounds, clients, values.shape[1] - clients)
    if values.ndim == 1 and np.ptp(values[np.isfinite(values)]) == 0:
        return Shown(label, run.seed, name, "constant", {"value": plain(values[-1:])}, rounds)
    if values.ndim == 1:
        return Shown(label, run.seed, name, "number", {"round": at, "value": plain(values[kept])}, rounds)
    return None  # nothing here knows how to draw it


def _matrix(shown: Shown, values: Floats, n: Floats) -> Shown:
    """How it has changed from the first to the last round that is known, and whether that goes with n."""
    change = values[-1] - values[0]
    drawn = min(len(change), MOST_CELLS)
    i, j = (place.ravel() for place in np.indices((drawn, drawn)))
    table = {"i": plain(i), "j": plain(j), "change": plain(change[:drawn, :drawn].ravel())}
    means, lines = None, None
    if len(n) == len(change) and np.isfinite(change).all():
        sides = {"row": change.mean(axis=1), "column": change.mean(axis=0)}
        means = {"client": plain(range(len(n))), "n": plain(n), **{side: plain(mean) for side, mean in sides.items()}}
        lines = {side: line for side, mean in sides.items() if (line := regression(n, mean)) is not None}
    return Shown(
        shown.method,
        shown.seed,
        shown.name,
        "matrix",
        table,
        shown.rounds,
        clients=len(change),
        left_out=len(change) - drawn,
        means=means,
        lines=lines,
    )


def regression(x: npt.ArrayLike, y: npt.ArrayLike) -> Regression | None:
    """The least-squares line of y against x; None where all x are the same, so that there is no line."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    da, db = a - a.mean(), b - b.mean()
    if len(a) < 2 or not da.any():
        return None
    slope = float(da @ db / (da @ da))
    r = float(da @ db / np.sqrt((da @ da) * (db @ db))) if db.any() else float("nan")
    return Regression(slope, float(b.mean() - slope * a.mean()), r)


def _is_by_layer(name: str) -> bool:
    """By its name, since a model may have as many layers as there are clients."""
    return name == "scores" or name.startswith("layer")


def _layers(rounds: Sequence[int], values: Floats, names: Sequence[str]) -> Table:
    """By round and layer, the mean of the clients that have a number, and the lowest and the highest of them."""
    layers = values.shape[2]
    figures: dict[str, list[Any]] = {"mean": [], "low": [], "high": []}
    for of_round in values:
        for layer in range(layers):
            known = of_round[:, layer][np.isfinite(of_round[:, layer])]
            figures["mean"].append(known.mean() if len(known) else None)
            figures["low"].append(known.min() if len(known) else None)
            figures["high"].append(known.max() if len(known) else None)
    return {
        "round": [round_ for round_ in rounds for _ in range(layers)],
        "layer": [layer + 1 for _ in rounds for layer in range(layers)],
        "name": [_layer_name(names, layer, layers) for _ in rounds for layer in range(layers)],
        **{name: plain(found) for name, found in figures.items()},
    }


def _layer_name(names: Sequence[str], layer: int, layers: int) -> str:
    return f"{layer + 1} {names[layer]}" if len(names) == layers else str(layer + 1)


def _clients(rounds: Sequence[int], values: Floats, clients: int) -> Table:
    """By round and client; the mean is of all clients that have a number."""
    counted = np.isfinite(values).sum(axis=1)
    mean = np.where(counted > 0, np.nansum(values, axis=1) / np.maximum(counted, 1), np.nan)
    return {
        "round": [round_ for round_ in rounds for _ in range(clients)],
        "client": list(range(clients)) * len(rounds),
        "value": plain(values[:, :clients].ravel()),
        "mean": plain(np.repeat(mean, clients)),
    }
