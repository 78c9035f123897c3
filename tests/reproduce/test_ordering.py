"""Kendall's tau against scipy; pairs of methods against numpy and by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, norm, sem, t, ttest_rel

from bespokefl.reproduce.ordering import Method, Ordering, compare_orderings, joined, standard_errors


def method(label: str, paper: float, *ours: float, spread: float | None = None) -> Method:
    return Method(label, paper, dict(enumerate(ours)), spread)


def ordering(paper: list[float], ours: list[float], higher: bool = True) -> Ordering:
    methods = [method(f"m{n}", a, b) for n, (a, b) in enumerate(zip(paper, ours, strict=True))]
    return compare_orderings(methods, higher_is_better=higher)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9), st.booleans())
def test_tau_is_scipy_s(pairs: list[tuple[int, int]], higher: bool) -> None:
    paper, ours = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = ordering(paper, ours, higher=higher)
    expected = kendalltau(paper, ours).statistic if len(set(paper)) > 1 and len(set(ours)) > 1 else np.nan
    if np.isnan(expected):
        assert found.tau is None
    else:
        assert found.tau == pytest.approx(expected)


def test_tau_of_several_columns_counts_their_pairs_together() -> None:
    first, second = ordering([1, 2, 3], [1, 2, 3]), ordering([1, 2], [2, 1])
    assert joined([first, second]).tau == pytest.approx((3 - 1) / 4)
    tied = ordering([1, 1, 2], [1, 2, 3])  # of three pairs one is tied in the paper
    assert joined([tied, second]).tau == pytest.approx((2 - 1) / np.sqrt((2 + 1) * (3 + 1)))
    assert joined([]).tau is None and joined([ordering([1], [2])]).tau is None


def test_few_seeds_need_more_standard_errors() -> None:
    assert [round(standard_errors(seeds), 2) for seeds in (2, 3, 4, 5, 10)] == [13.97, 4.53, 3.31, 2.87, 2.32]
    assert standard_errors(10**6) == pytest.approx(2, abs=1e-5)
    chance = 2 * norm.sf(2)  # 4.6 %: what two standard errors leave with many seeds, any number of seeds now leaves
    for seeds in range(2, 40):
        assert 2 * t.sf(standard_errors(seeds), seeds - 1) == pytest.approx(chance)
        assert standard_errors(seeds) > standard_errors(seeds + 1) > 2  # never laxer than two standard errors


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_methods_are_ordered_by_chance_as_seldom_with_few_seeds_as_with_many(seeds: int) -> None:
    """With two standard errors whatever the seeds, it was 30 % of two and 18 % of three."""
    generator, tries, ordered = np.random.default_rng(seeds), 2000, 0
    for _ in range(tries):
        a, b = generator.normal(size=(2, seeds))
        methods = [method("a", 2, *a, spread=0), method("b", 1, *b, spread=0)]
        (pair,) = compare_orderings(methods, higher_is_better=True).pairs
        ordered += pair.outcome != "open"
    assert abs(ordered / tries - 2 * norm.sf(2)) < 0.02


def test_a_pair_counts_beyond_chance_only() -> None:
    # differences of 3, 4 and 5 over the seeds: mean 4, standard deviation 1, standard error 1 / sqrt(3) = 0.577
    (clear,) = compare_orderings([method("a", 9, 13, 14, 15), method("b", 1, 10, 10, 10)], higher_is_better=True).pairs
    assert (clear.above, clear.below, clear.paper, clear.ours, clear.seeds) == ("a", "b", 8, 4, 3)
    assert clear.error == pytest.approx(1 / np.sqrt(3)) and clear.outcome == "same"
    # 1, 2 and 3: 3.46 standard errors, of the 4.53 that three seeds need
    (few,) = compare_orderings([method("a", 9, 11, 12, 13), method("b", 1, 10, 10, 10)], higher_is_better=True).pairs
    assert few.ours == 2 and few.outcome == "open"
    # differences of -1, 1 and 1.5: mean 0.5, standard error 0.764
    (close,) = compare_orderings([method("a", 9, 9, 11, 11.5), method("b", 1, 10, 10, 10)], higher_is_better=True).pairs
    assert close.outcome == "open"
    (turned,) = compare_orderings([method("a", 9, 3, 4, 5), method("b", 1, 8, 8, 8)], higher_is_better=True).pairs
    assert turned.ours == -4 and turned.outcome == "other"


def test_seeds_are_compared_one_by_one_and_only_those_that_both_have() -> None:
    a = Method("a", 2, {0: 50.0, 1: 60.0, 7: 0.0})
    b = Method("b", 1, {0: 49.0, 1: 58.9, 2: 99.0})
    (pair,) = compare_orderings([a, b], higher_is_better=True).pairs or [None]
    assert pair is None  # the paper prints no spread, and ours are larger than its difference of 1
    (pair,) = compare_orderings(
        [a._replace(paper_spread=0.1), b._replace(paper_spread=0.1)], higher_is_better=True
    ).pairs
    assert pair.ours == pytest.approx(1.05) and pair.error == pytest.approx(0.05)
    assert pair.seeds == 2 and pair.outcome == "same"  # 21 standard errors, of 13.97
    alone = a._replace(ours={5: 1.0}, paper_spread=0.0)
    (pair,) = compare_orderings([alone, b._replace(paper_spread=0.0)], higher_is_better=True).pairs
    assert pair.ours is None and pair.outcome == "open"


def test_one_seed_and_equal_seeds_decide_nothing() -> None:
    (pair,) = ordering([1, 9], [1, 90]).pairs
    assert pair.ours == 89 and pair.error is None and pair.outcome == "open"
    same = [method("a", 2, 5, 5, spread=0), method("b", 1, 5, 5, spread=0)]
    (pair,) = compare_orderings(same, higher_is_better=True).pairs
    assert pair.error == 0 and pair.outcome == "open"
    exact = [method("a", 2, 6, 6, spread=0), method("b", 1, 5, 5, spread=0)]
    (pair,) = compare_orderings(exact, higher_is_better=True).pairs
    assert pair.error == 0 and pair.outcome == "same"


def test_pairs_that_the_paper_does_not_separate_do_not_count() -> None:
    def pairs(spread: float | None) -> int:
        methods = [method("a", 70.3, 60, 61, spread=spread), method("b", 70.0, 65, 66, spread=0.1)]
        return len(compare_orderings(methods, higher_is_better=True).pairs)

    assert pairs(0.1) == 1 and pairs(0.2) == 0 and pairs(0.3) == 0  # 70.3 - 70.0 is 0.2 + 0.1
    assert pairs(None) == 0  # ours stands in: 0.5
    assert ordering([5, 5], [1, 2]).pairs == ()


def test_lower_can_be_better() -> None:
    methods = [method("a", 10, 7, 7.5, 8), method("b", 20, 5, 5.5, 6)]
    (pair,) = compare_orderings(methods, higher_is_better=False).pairs
    assert (pair.above, pair.below, pair.paper, pair.ours, pair.outcome) == ("a", "b", 10, -2, "other")


numbers = st.integers(0, 40).map(lambda n: n / 4)


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[Method], bool]:
    methods = []
    for n in range(draw(st.integers(2, 6))):
        seeds = draw(st.sets(st.integers(0, 3), min_size=1))
        spread = draw(st.none() | st.integers(0, 4).map(float))
        methods.append(Method(f"m{n}", draw(numbers), {seed: draw(numbers) for seed in seeds}, spread))
    return methods, draw(st.booleans())


@given(columns())
def test_pairs_are_those_of_a_search_with_numpy(column: tuple[list[Method], bool]) -> None:
    methods, higher = column
    expected = {}
    for a, b in itertools.permutations(methods, 2):
        gap = a.paper - b.paper if higher else b.paper - a.paper
        noise = [np.std(list(m.ours.values())) if m.paper_spread is None else m.paper_spread for m in (a, b)]
        if not gap > sum(noise) + 1e-9:
            continue
        common = sorted(set(a.ours) & set(b.ours))
        ours = np.array([[m.ours[seed] for seed in common] for m in (a, b)]) * (1 if higher else -1)
        outcome = "open"
        if len(common) > 1:
            gain = ours[0] - ours[1]
            if np.ptp(gain) < 1e-9:
                certain = abs(gain.mean()) > 1e-9
            else:
                certain = ttest_rel(ours[0], ours[1]).pvalue < 2 * norm.sf(2)
            if certain:
                assert abs(gain.mean()) > 2 * sem(gain)
                outcome = "same" if gain.mean() > 0 else "other"
        expected[a.label, b.label] = outcome
    found = compare_orderings(methods, higher_is_better=higher)
    assert {(pair.above, pair.below): pair.outcome for pair in found.pairs} == expected
    assert sum(len(found.among(outcome)) for outcome in ("same", "other", "open")) == len(found.pairs)
