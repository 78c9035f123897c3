"""The shapes of ragged cohorts, against a step by step count of what a stack computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bespokefl.core import Rows, shuffled, stream
from bespokefl.data.dataset import Dataset
from bespokefl.data.partitions import DirichletOptions, assign_dirichlet, rows_by_owner
from bespokefl.engines.buckets import TARGET_WASTE, Shape, group, padded_length, stack_width

WIDTHS = sorted({k << s for s in range(20) for k in (1, 2, 3)})  # 1, 2, 3, 4, 6, 8, 12, ...
LENGTHS = sorted({k << s for s in range(20) for k in range(1, 9)})  # 1 to 8, 10, 12, 14, 16, 20, ...


def count(plan: list[list[Rows]], size: int | None) -> int:
    """Samples that one stack computes: its width, which never grows, times the padded length, step by step."""
    steps = [len(batches) for batches in plan]
    longest = max((len(b) for batches in plan for b in batches), default=0)
    length = longest if longest == size else min(v for v in [*LENGTHS, *([size] if size else [])] if v >= longest)
    total, width = 0, len(plan)
    for k in range(max(steps)):
        active = sum(s > k for s in steps)
        width = min(width, next(w for w in WIDTHS if w >= active))
        total += width * length
    return total


def plans(sizes: list[int], batch: int | None, epochs: int) -> list[list[Rows]]:
    batches = shuffled(epochs, batch)
    return [batches.plan(np.arange(n), 0, 0, i, 0) for i, n in enumerate(sizes)]


# series ----------------------------------------------------------------------------------------------
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_stack_widths(active: int, more: int) -> None:
    largest = active + more
    width = stack_width(active, largest)
    assert width == min(largest, next(w for w in WIDTHS if w >= active))
    assert active <= width < 1.5 * active + 1
    assert width <= stack_width(active + 1, largest)
    assert stack_width(active, active) == active


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 5000)))
def test_padded_lengths(n: int, size: int | None) -> None:
    n = min(n, size or n)
    length = padded_length(n, size)
    assert n <= length < 1.25 * n + 1
    assert length <= padded_length(n + 1, None)
    assert size is None or length <= size
    assert length in (size, *LENGTHS)
    assert padded_length(n, n) == n


# groups ----------------------------------------------------------------------------------------------
cohorts = st.lists(st.integers(0, 80), min_size=1, max_size=20)


@given(cohorts, st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 3))
def test_shape_counts_what_a_stack_computes(sizes: list[int], batch: int | None, epochs: int) -> None:
    plan = plans(sizes, batch, epochs)
    assert Shape(plan, batch).computed(np.arange(len(sizes))) == count(plan, batch)


@given(cohorts, st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 3))
def test_groups_part_all_clients_until_waste_is_low_or_no_cut_helps(
    sizes: list[int], batch: int | None, epochs: int
) -> None:
    plan = plans(sizes, batch, epochs)
    closing = plans(sizes, None, 1)  # a second phase over the whole split
    useful = (epochs + 1) * sum(sizes)
    groups = group([Shape(plan, batch), Shape(closing, None)], useful)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))

    def cost(members: list[int]) -> int:
        return count([plan[i] for i in members], batch) + count([closing[i] for i in members], None)

    if sum(cost(list(g)) for g in groups) > TARGET_WASTE * useful:
        for g in groups:
            whole = list(g)
            assert all(cost(whole[:k]) + cost(whole[k:]) >= cost(whole) for k in range(1, len(whole)))


def test_alike_clients_stay_together() -> None:
    plan = plans([50] * 12, 10, 2)
    assert len(group([Shape(plan, 10)], 12 * 100)) == 1


@pytest.mark.parametrize("samples", [60_000, 1_797])
@pytest.mark.parametrize("seed", range(3))
def test_waste_of_a_real_cohort(samples: int, seed: int) -> None:
    """25 of 100 Dirichlet(0.3) clients, batch 50, 5 epochs: under a quarter of the work is padding."""
    y = np.arange(samples) % 10
    data = Dataset("labels", np.zeros((samples, 1), np.float32), y, tuple("0123456789"))
    owner = assign_dirichlet(data, 100, seed, DirichletOptions(alpha=0.3, top_up=True)).owner
    sizes = [max(1, len(rows) * 3 // 4) for rows in rows_by_owner(owner, 100)]
    for round in range(3):
        cohort = stream(seed, "sample", round).choice(100, 25, replace=False)
        plan = plans([sizes[i] for i in cohort], 50, 5)
        useful = 5 * sum(sizes[i] for i in cohort)
        groups = group([Shape(plan, 50)], useful)
        assert sum(count([plan[i] for i in g], 50) for g in groups) / useful < 1.25
        assert len(groups) <= 8
