"""How a federation did, from one accuracy per client: the mean, the spread, and those at both ends.

Accuracies are fractions. NaN marks a client without test data: it is left out of every figure and counted.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from bespokefl.errors import InputError

Tail = Literal["mean", "quantile"]


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


def speed_ups(rounds: Mapping[str, int | None]) -> dict[str, float | None]:
    """How many times sooner than the slowest each method reached the target; None stays None and slows nobody."""
    slowest = max((needed for needed in rounds.values() if needed is not None), default=0)
    return {name: None if needed is None else slowest / needed for name, needed in rounds.items()}


def _present(acc: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The accuracies that are not NaN, at least one."""
    values = np.asarray(acc, dtype=np.float64).ravel()
    present = values[~np.isnan(values)]
    if present.size == 0:
        raise InputError(f"none of the {values.size} clients has test data to score; give at least one a test split")
    return present
