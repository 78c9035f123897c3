"""Cells, mean difference and verdict, by hand and against numpy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.ordering import Method
from bespokefl.reproduce.verdict import Tally, tally, total

MEAN, STD, SECONDS = measure("mean"), measure("std"), measure("seconds")


def method(label: str, paper: float, *ours: float, spread: float | None = None) -> Method:
    return Method(label, paper, dict(enumerate(ours)), spread)


# ours: 80.0 ±0.5, 75.0 ±0.5, 70.0 ±0.5 over two seeds; every difference is 5 or 10 in both seeds
CLEAR = [
    method("a", 82.0, 79.5, 80.5, spread=0.2),
    method("b", 75.6, 74.5, 75.5, spread=0.1),
    method("c", 70.2, 69.5, 70.5, spread=0.3),
]


def test_what_holds() -> None:
    found = tally(CLEAR, 3, MEAN)
    assert (found.cells, found.printed, found.judged, found.paper_spreads) == (3, 3, 3, 3)
    assert found.mean_difference == {"points": pytest.approx((2.0 + 0.6 + 0.2) / 3)}
    assert found.outside == 1  # 2.0 is beyond 0.5 + 0.2; 0.6 is what 0.5 and 0.1 allow
    assert found.ordering.tau == 1
    needed = "13.97 standard errors (2 seeds, 1 degree of freedom)"
    assert found.verdict == ("holds", f"all 3 pairs that the paper separates, the same way beyond {needed}")


def test_a_pair_the_other_way_round_is_enough() -> None:
    found = tally([*CLEAR, method("d", 60.0, 90.0, 91.0, spread=0.1)], 4, MEAN)
    assert found.verdict.answer == "does not hold" and found.verdict.why.startswith("3 of 6 pairs")
    few = tally([CLEAR[0], method("d", 60.0, 90.0, 91.0, spread=0.1)], 14, MEAN)
    assert few.verdict.answer == "does not hold"  # whatever the other twelve are
    lower = tally(CLEAR, 3, STD)
    assert lower.verdict.answer == "holds" and lower.ordering.tau == 1  # both prefer c
    turned = [m._replace(paper=100 - m.paper) for m in CLEAR]
    assert tally(turned, 3, STD).verdict.answer == "does not hold"


def test_what_cannot_be_told() -> None:
    def why(methods: list[Method], printed: int | None = None) -> str:
        verdict = tally(methods, len(methods) if printed is None else printed, MEAN).verdict
        assert verdict.answer == "cannot tell"
        return verdict.why

    one_seed = [m._replace(ours={0: m.ours[0]}) for m in CLEAR]
    assert why(one_seed) == "3 of 3 pairs that the paper separates, with fewer than two seeds in common"
    assert "within 13.97 standard errors (2 seeds, 1 degree of freedom)" in why(
        [CLEAR[0], CLEAR[1]._replace(ours={0: 71.0, 1: 79.0})]
    )
    # 5 points, and over two seeds a standard error of 0.5: ten of them are no more than chance makes of two seeds
    two_seeds = [CLEAR[0], CLEAR[1]._replace(ours={0: 74.0, 1: 76.0})]
    assert tally(two_seeds, 2, MEAN).ordering.pairs[0].error == pytest.approx(0.5)
    assert why(two_seeds).startswith("1 of 1 pair ")
    three = [method("a", 80, 7.0, 8.0, 9.0, spread=1), method("b", 70, 6.9, 7.7, 8.6, spread=1)]  # 3.5 standard errors
    assert "within 4.53 standard errors (3 seeds, 2 degrees of freedom)" in why(three)
    assert (
        "within 13.97 standard errors (2 seeds, 1 degree of freedom) or 4.53 standard errors (3 seeds, 2 degrees of "
        "freedom) or with fewer than two seeds in common"
    ) in why([*three, method("c", 60, 7.0, 7.5, spread=1), method("d", 50, 7.0, spread=1)])
    assert "2 of the paper's 5 numbers have none of ours beside them" in why(CLEAR, 5)
    assert "no two methods" in why([]) and "no two methods" in why(CLEAR[:1])
    assert "no two methods" in why([m._replace(paper_spread=20.0) for m in CLEAR])
    assert "2 of 3 pairs" in why([*CLEAR[:2], CLEAR[2]._replace(ours={0: 69.0, 1: 78.0})])


def test_spreads_that_the_paper_does_not_print() -> None:
    found = tally([m._replace(paper_spread=None) for m in CLEAR], 3, MEAN)
    assert (found.judged, found.paper_spreads, found.outside) == (3, 0, 2)  # beyond our 0.5 alone
    one_seed = tally([m._replace(ours={0: 1.0}) for m in CLEAR], 3, MEAN)
    assert (one_seed.judged, one_seed.outside, one_seed.paper_spreads) == (0, 0, 0)


def test_columns_together() -> None:
    hours = [method("a", 2.0, 1.0, 1.0), method("b", 4.0, 3.0, 3.0)]
    found = total([tally(CLEAR, 3, MEAN), tally(CLEAR[:2], 3, STD), tally(hours, 2, SECONDS)])
    assert (found.cells, found.printed, found.judged, found.paper_spreads) == (7, 8, 7, 5)
    assert found.mean_difference == {
        "points": pytest.approx((2.0 + 0.6 + 0.2 + 2.0 + 0.6) / 5),
        SECONDS.heading: pytest.approx(1.0),
    }
    assert found.ordering.tau == 1 and len(found.ordering.pairs) == 3 + 1 + 1
    assert found.verdict == ("cannot tell", "1 of the paper's 8 numbers have none of ours beside them")
    assert total([]) == Tally() and total([]).verdict.answer == "cannot tell"


values = st.integers(0, 200).map(lambda n: n / 4)


@given(
    st.lists(
        st.lists(
            st.tuples(values, st.lists(values, min_size=1, max_size=4), st.none() | st.integers(0, 9).map(float)),
            max_size=5,
        ),
        max_size=3,
    ),
    st.integers(0, 2),
)
def test_against_numpy(drawn: list[list[tuple[float, list[float], float | None]]], missing: int) -> None:
    columns = [
        [method(f"m{n}", paper, *ours, spread=spread) for n, (paper, ours, spread) in enumerate(column)]
        for column in drawn
    ]
    found = total(tally(column, len(column) + missing, MEAN) for column in columns)
    every = [cell for column in drawn for cell in column]
    gaps = [abs(np.mean(ours) - paper) for paper, ours, _ in every]
    assert found.cells == len(every) and found.printed == len(every) + missing * len(drawn)
    assert found.mean_difference.get("points") == (pytest.approx(np.mean(gaps)) if gaps else None)
    known = [
        (gap, np.std(ours) + (spread or 0)) for gap, (_, ours, spread) in zip(gaps, every, strict=True) if len(ours) > 1
    ]
    assert found.outside == sum(gap > limit + 1e-9 for gap, limit in known)
    same = other = 0
    pairs = 0
    for column in drawn:
        for (p, a, s), (q, b, t) in itertools.combinations(column, 2):
            noise = sum(np.std(ours) if spread is None else spread for ours, spread in ((a, s), (b, t)))
            if abs(p - q) <= noise + 1e-9:
                continue
            pairs += 1
            seeds = min(len(a), len(b))
            gain = (np.array(a[:seeds]) - np.array(b[:seeds])) * np.sign(p - q)
            needed = student.ppf(0.9772498680518208, seeds - 1) if seeds > 1 else np.inf
            if seeds > 1 and abs(gain.mean()) > needed * gain.std(ddof=1) / np.sqrt(seeds) + 1e-9:
                same, other = same + (gain.mean() > 0), other + (gain.mean() < 0)
    complete = found.printed == found.cells
    expected = "does not hold" if other else "holds" if pairs and same == pairs and complete else "cannot tell"
    assert found.verdict.answer == expected
