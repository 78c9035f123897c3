import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bespokefl.algorithms.local import Local
from bespokefl.data import FederatedData
from bespokefl.errors import InputError
from bespokefl.evaluation.metrics import (
    averages,
    individual_gain,
    new_clients,
    over_seeds,
    rounds_to_target,
    speed_ups,
    summarise,
    tails,
)
from bespokefl.experiments.selection import g_rows, s_rows
from bespokefl.federation import Federation

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=150)


def test_twenty_evenly_spaced_clients() -> None:
    summary = summarise(np.arange(50, 70) / 100)
    assert summary == pytest.approx(
        {"mean": 0.595, "std": 0.057662812973, "worst5": 0.50, "top5": 0.69, "left_out": 0}, abs=1e-12
    )


def test_a_hundred_clients() -> None:
    summary = summarise(np.arange(100) / 100)
    assert (summary["mean"], summary["top5"], summary["worst5"]) == pytest.approx((0.495, 0.97, 0.02), abs=1e-12)


def test_s_accuracy_goes_from_own_data_to_all_data() -> None:
    """L-accuracy with none of the others; G-accuracy with all of them, where test splits are equally large."""
    rng = np.random.default_rng(0)
    clients = {str(k): (rng.normal(k / 2, 1, size=(40, 3)), rng.integers(0, 3, size=40)) for k in range(5)}
    data = FederatedData.from_arrays(clients, test=0.5, seed=0)
    federation = Federation(nn.Linear(3, 3), data, Local(lr=0.5), engine="sequential")
    federation.round()
    test = data.splits["test"]
    own = federation.evaluate().accuracy
    everywhere = federation.evaluate(rows=g_rows(test)).accuracy
    assert (own != everywhere).any()
    np.testing.assert_array_equal(federation.evaluate(rows=s_rows(test, 0, seed=0)).accuracy, own)
    np.testing.assert_array_equal(federation.evaluate(rows=s_rows(test, 1, seed=0)).accuracy, everywhere)


@pytest.mark.parametrize(("clients", "k"), [(1, 1), (9, 1), (10, 1), (29, 1), (30, 2), (50, 2), (70, 4), (110, 6)])
def test_tail_size_rounds_half_to_even(clients: int, k: int) -> None:
    acc = np.random.default_rng(0).permutation(clients) / clients
    worst, top = tails(acc)
    assert worst == pytest.approx((k - 1) / 2 / clients)
    assert top == pytest.approx((clients - 1 - (k - 1) / 2) / clients)


@given(accuracies)
def test_against_plain_python(acc: list[float]) -> None:
    k = max(1, round(Fraction(len(acc), 20)))
    summary = summarise(acc)
    assert summary["mean"] == pytest.approx(statistics.fmean(acc))
    assert summary["std"] == pytest.approx(statistics.pstdev(acc), abs=1e-9)
    assert summary["worst5"] == pytest.approx(statistics.fmean(sorted(acc)[:k]))
    assert summary["top5"] == pytest.approx(statistics.fmean(sorted(acc, reverse=True)[:k]))


@given(accuracies, st.integers(0, 5), st.randoms(use_true_random=False))
def test_clients_without_test_data_are_left_out_and_counted(acc: list[float], missing: int, random) -> None:
    mixed = acc + [float("nan")] * missing
    random.shuffle(mixed)
    assert summarise(mixed) == pytest.approx(summarise(acc) | {"left_out": missing})


def test_quantile_tails_interpolate() -> None:
    # Positions 0.05 * 10 = 0.5 and 9.5 among eleven ordered values.
    assert tails(np.arange(11) ** 2, tail="quantile") == pytest.approx((0.5, 90.5))
    summary = summarise(np.arange(11) ** 2, tail="quantile")
    assert (summary["worst5"], summary["top5"]) == pytest.approx((0.5, 90.5))


@pytest.mark.parametrize("acc", [[], [float("nan")] * 3])
def test_nothing_to_score(acc: list[float]) -> None:
    with pytest.raises(InputError, match=f"none of the {len(acc)} clients has test data"):
        summarise(acc)


def test_unknown_tail() -> None:
    with pytest.raises(InputError, match="tail is 'median'; it must be 'mean' or 'quantile'"):
        tails([0.5], tail="median")  # type: ignore[arg-type]


def test_gain_by_hand() -> None:
    gain = individual_gain([0.9, 0.5, 0.7], [0.8, 0.6, 0.5])
    assert gain.per_client == pytest.approx([10, -10, 20])
    assert gain.mean == pytest.approx(20 / 3)
    assert gain.std == pytest.approx(statistics.pstdev([10, -10, 20]))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_mean_gain_is_the_difference_of_the_means(pairs: list[tuple[float, float]]) -> None:
    acc, local = zip(*pairs, strict=True)
    difference = 100 * (summarise(acc)["mean"] - summarise(local)["mean"])
    assert individual_gain(acc, local).mean == pytest.approx(difference, abs=1e-9)


def test_gain_leaves_out_clients_without_both_accuracies() -> None:
    gain = individual_gain([0.5, np.nan, 0.75], [0.25, 0.5, np.nan])
    assert (gain.mean, gain.std) == (25, 0)
    assert np.isnan(gain.per_client).tolist() == [False, True, True]


def test_gain_needs_the_same_clients() -> None:
    with pytest.raises(InputError, match="3 accuracies against 2"):
        individual_gain([0.1, 0.2, 0.3], [0.1, 0.2])


def test_rounds_to_target_counts_from_one_and_takes_the_first() -> None:
    curve = [0.2, 0.69, 0.70, 0.65, 0.8]
    assert rounds_to_target(curve, 0.70) == 3
    assert rounds_to_target(curve, 0.1) == 1
    assert rounds_to_target(curve, 0.81) is None
    assert rounds_to_target([], 0.5) is None
    assert rounds_to_target([np.nan, 0.6], 0.5) == 2
    assert rounds_to_target(curve, 0.70, rounds=[5, 10, 15, 20, 25]) == 15
    with pytest.raises(InputError, match="5 accuracies but 2 round numbers"):
        rounds_to_target(curve, 0.70, rounds=[1, 2])


def test_speed_up_is_against_the_slowest_that_arrived() -> None:
    assert speed_ups({"fedavg": 90, "pgfed": 30, "local": None}) == {"fedavg": 1.0, "pgfed": 3.0, "local": None}
    assert speed_ups({"a": None, "b": None}) == {"a": None, "b": None}
    assert speed_ups({}) == {}


@given(accuracies, st.integers(0, 5))
def test_averages_are_the_mean_and_spread_of_a_summary(acc: list[float], missing: int) -> None:
    figure = averages({"x": acc + [float("nan")] * missing})["x"]
    assert figure == pytest.approx((statistics.fmean(acc), statistics.pstdev(acc), missing), abs=1e-9)


def test_curves_over_seeds() -> None:
    curve = over_seeds([[0.1, 0.5, np.nan], [0.3, 0.5, 0.9], [0.2, 0.8, 0.9]])
    assert curve.mean == pytest.approx([0.2, 0.6, np.nan], nan_ok=True)
    assert curve.std == pytest.approx([np.sqrt(0.02 / 3), np.sqrt(0.06 / 3), np.nan], nan_ok=True)
    alone = over_seeds([[0.1, 0.5]])
    assert alone.mean.tolist() == [0.1, 0.5] and alone.std.tolist() == [0, 0]
    final = over_seeds([0.9, 0.7])  # a figure per run
    assert (float(final.mean), float(final.std)) == pytest.approx((0.8, 0.1))


@pytest.mark.parametrize("curves", [[], [[0.1, 0.2], [0.1]]])
def test_curves_over_seeds_are_of_the_same_rounds(curves: list) -> None:
    with pytest.raises(InputError, match="all of one shape"):
        over_seeds(curves)


def test_new_clients_best_is_of_the_mean_curve() -> None:
    joined = new_clients([[0.2, 0.4, np.nan], [0.9, 0.5, np.nan], [0.6, 0.8, 0.9], [0.5, 0.6, 0.0]])
    assert joined.mean == pytest.approx([0.3, 0.7, 0.7, 0.55])  # the third client is not in any of them
    assert (joined.best, joined.epoch, joined.left_out) == (pytest.approx(0.7), 2, 1)


@pytest.mark.parametrize(
    ("acc", "says"),
    [([0.1, 0.2], "a row per epoch"), (np.zeros((0, 3)), "a row per epoch"), ([[np.nan, np.nan]], "none of the 2")],
)
def test_new_clients_needs_accuracies(acc: list, says: str) -> None:
    with pytest.raises(InputError, match=says):
        new_clients(acc)
