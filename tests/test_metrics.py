import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bespokefl.errors import InputError
from bespokefl.metrics import individual_gain, rounds_to_target, speed_ups, summarise, tails

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=150)


def test_twenty_evenly_spaced_clients() -> None:
    summary = summarise(np.arange(50, 70) / 100)
    assert summary == pytest.approx(
        {"mean": 0.595, "std": 0.057662812973, "worst5": 0.50, "top5": 0.69, "left_out": 0}, abs=1e-12
    )


def test_a_hundred_clients() -> None:
    summary = summarise(np.arange(100) / 100)
    assert (summary["mean"], summary["top5"], summary["worst5"]) == pytest.approx((0.495, 0.97, 0.02), abs=1e-12)


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
