"""How a federation did, from one accuracy per client: the mean, the spread, those at both ends, and curves.

Accuracies are fractions. NaN marks a client without test data: it is left out of every figure and counted.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from bespokefl.errors import InputError

Tail = Literal["mean", "quantile"]

# Of a client, beside its accuracy: of two classes, of more, and of masks (`sample_metrics` computes them).
SAMPLE_METRICS = ("auc", "sensitivity", "specificity", "f1", "balanced_accuracy", "dice", "hausdorff")


class Summary(TypedDict):
    """Figures over the clients that have test data."""

    mean: float  # unweighted: each client counts the same
    std: float  # population standard deviation over clients (ddof 0)
    worst5: float  # lowest 5 % of the clients
    top5: float  # highest 5 % of the clients
    left_out: int  # clients without test data


class Gain(NamedTuple):
    """What clients gain over a baseline, in percentage points."""

    mean: float
    std: float  # over clients, ddof 0
    per_client: npt.NDArray[np.float64]  # NaN where either accuracy is missing


class Average(NamedTuple):
    """A metric over the clients for which it exists."""

    mean: float  # unweighted; NaN where it exists for none
    std: float  # over clients, ddof 0
    left_out: int  # clients with NaN


class Curve(NamedTuple):
    """A quantity over several runs, point by point."""

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]  # over runs, ddof 0


class NewClients(NamedTuple):
    """How clients that were not in the training do, epoch by epoch of their own training."""

    mean: npt.NDArray[np.float64]  # over clients, after each epoch
    best: float  # the highest of these means
    epoch: int  # the first that reaches it, counted from 1
    left_out: int  # clients without test data


def summarise(acc: npt.ArrayLike, tail: Tail = "mean") -> Summary:
    """Mean, spread and both tails of the clients' accuracies; see `tails` for the meaning of ``tail``."""
    present = _present(acc)
    worst, top = tails(present, tail)
    return Summary(
        mean=float(present.mean()),
        std=float(present.std()),
        worst5=worst,
        top5=top,
        left_out=np.size(acc) - present.size,
    )


def tails(acc: npt.ArrayLike, tail: Tail = "mean") -> tuple[float, float]:
    """The lowest and the highest 5 % of the clients.

    ``mean``: the mean of the k worst and of the k best, k = max(1, round(N / 20)), half to even.
    ``quantile``: the 5th and the 95th percentile, the other reading of "5 %" in the papers.
    """
    ordered = np.sort(_present(acc))
    if tail == "quantile":
        worst, top = np.quantile(ordered, [0.05, 0.95])
        return float(worst), float(top)
    if tail == "mean":
        k = max(1, round(ordered.size / 20))
        return float(ordered[:k].mean()), float(ordered[-k:].mean())
    raise InputError(f"tail is {tail!r}; it must be 'mean' or 'quantile'")


def averages(scores: Mapping[str, npt.ArrayLike]) -> dict[str, Average]:
    """Each metric's mean and spread over clients, with its own count of those left out."""
    return {name: _average(np.asarray(values, dtype=np.float64).ravel()) for name, values in scores.items()}


def individual_gain(acc: npt.ArrayLike, baseline: npt.ArrayLike) -> Gain:
    """Each client's gain over its own baseline (in the papers: Local), 100 (acc_i - baseline_i)."""
    a, b = np.asarray(acc, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if a.shape != b.shape:
        raise InputError(f"individual gain: {a.size} accuracies against {b.size} of the baseline; give one per client")
    gain = 100 * (a - b)
    present = _present(gain)
    return Gain(float(present.mean()), float(present.std()), gain)


def rounds_to_target(mean_acc: npt.ArrayLike, target: float, rounds: Sequence[int] | None = None) -> int | None:
    """The first round whose mean accuracy reaches the target, None if none does.

    ``rounds`` names the rounds that were evaluated; by default 1, 2, 3, ...
    """
    curve = np.asarray(mean_acc, dtype=np.float64)
    numbers = range(1, curve.size + 1) if rounds is None else rounds
    if len(numbers) != curve.size:
        raise InputError(f"rounds to target: {curve.size} accuracies but {len(numbers)} round numbers; give one each")
    reached = np.flatnonzero(curve >= target)
    return int(numbers[int(reached[0])]) if reached.size else None


def speed_ups(rounds: Mapping[str, float | None]) -> dict[str, float | None]:
    """How many times sooner than the slowest each method reached the target; None stays None and slows nobody."""
    slowest = max((needed for needed in rounds.values() if needed is not None), default=0)
    return {name: None if needed is None else slowest / needed for name, needed in rounds.items()}


def over_seeds(curves: Sequence[npt.ArrayLike]) -> Curve:
    """Mean and spread of the runs' curves (one per seed, all of the same rounds), or of their final figures.

    NaN in one run is NaN in the result: a mean over fewer seeds at some points would bend the curve.
    """
    runs = [np.asarray(curve, dtype=np.float64) for curve in curves]
    if not runs or len({run.shape for run in runs}) > 1:
        raise InputError(
            f"curves over seeds: shapes {[run.shape for run in runs]}; give at least one, all of one shape"
        )
    stacked = np.stack(runs)
    return Curve(stacked.mean(0), stacked.std(0))


def new_clients(acc: npt.ArrayLike) -> NewClients:
    """The curve of clients that join after training, from a row of accuracies per epoch (one column per client).

    Its best is chosen by the test data themselves, as the papers do: an upper bound, not an estimate.
    """
    table = np.asarray(acc, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise InputError(f"new clients: accuracies have shape {table.shape}; give a row per epoch, a column per client")
    scored = ~np.isnan(table).any(0)  # the same clients in every epoch
    if not scored.any():
        raise InputError(f"new clients: none of the {scored.size} has an accuracy after every epoch")
    mean = table[:, scored].mean(1)
    best = int(mean.argmax())
    return NewClients(mean, float(mean[best]), best + 1, int((~scored).sum()))


def _average(values: npt.NDArray[np.float64]) -> Average:
    present = values[~np.isnan(values)]
    missing = values.size - present.size
    if not present.size:
        return Average(float("nan"), float("nan"), missing)
    return Average(float(present.mean()), float(present.std()), missing)


def _present(acc: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The accuracies that are not NaN, at least one."""
    values = np.asarray(acc, dtype=np.float64).ravel()
    present = values[~np.isnan(values)]
    if present.size == 0:
        raise InputError(f"none of the {values.size} clients has test data to score; give at least one a test split")
    return present
