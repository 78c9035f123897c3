"""The ordering check against scipy and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from bespokefl.reproduce.ordering import compare_orderings
from bespokefl.results.table import Figure


def ordering(paper: list[float], ours: list[float], spread: float | None = None, higher: bool = True):
    names = [f"m{place}" for place in range(len(paper))]
    figures = {name: Figure(value, spread) for name, value in zip(names, ours, strict=True)}
    return compare_orderings(dict(zip(names, paper, strict=True)), figures, higher_is_better=higher)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9), st.booleans())
def test_tau_is_scipy_s(pairs: list[tuple[int, int]], higher: bool) -> None:
    paper, ours = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = ordering(paper, ours, higher=higher)
    expected = kendalltau(paper, ours).statistic if len(set(paper)) > 1 and len(set(ours)) > 1 else np.nan
    if np.isnan(expected):
        assert found.tau is None
    else:
        assert found.tau == pytest.approx(expected)


@given(st.permutations(range(6)))
def test_swapped_pairs_are_all_inversions(ours: list[int]) -> None:
    found = ordering([float(n) for n in range(6)], [float(n) for n in ours])
    inversions = {(f"m{j}", f"m{i}") for i in range(6) for j in range(i + 1, 6) if ours[j] < ours[i]}
    assert {(pair.above, pair.below) for pair in found.swapped} == inversions
    assert found.holds is (not inversions)


def test_a_swap_within_the_spread_over_seeds_is_no_contradiction() -> None:
    close, far = ordering([1, 2], [2.0, 1.9], 0.06), ordering([1, 2], [2.0, 1.9], 0.04)
    assert close.swapped[0].within_spread is True and close.holds is True
    assert far.swapped[0].within_spread is False and far.holds is False
    one_seed = ordering([1, 2], [2.0, 1.9])
    assert one_seed.swapped[0].within_spread is None and one_seed.holds is False


def test_what_one_side_lacks_does_not_count() -> None:
    found = compare_orderings({"a": 1, "b": 2}, {"a": Figure(1, None), "c": Figure(5, None)}, higher_is_better=True)
    assert found.methods == 1 and found.tau is None and found.holds is None


def test_lower_can_be_better() -> None:
    found = ordering([10, 20], [7, 5], higher=False)
    assert [(pair.above, pair.below, pair.paper, pair.ours) for pair in found.swapped] == [("m0", "m1", 10, -2)]
