"""Which batches a phase gets: covered, drawn from named streams, counted over the phases of a program."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bespokefl.core import Batches, Phase, Program, Rows, ordered, shuffled, stream
from bespokefl.core.program import plan_phases

ROWS = np.arange(100, 123, dtype=np.int64)  # 23 rows, not starting at 0

sizes = st.one_of(st.none(), st.integers(1, 40))


def joined(batches: list[Rows]) -> list[int]:
    return np.concatenate(batches).tolist()


def program(*batches: Batches) -> Program:
    return Program(lambda *a: {}, tuple(Phase(lambda *a: {}, b) for b in batches), lambda *a: ({}, {}))


@given(st.integers(1, 60), sizes, st.integers(1, 3))
def test_every_epoch_covers_the_split_once(n: int, size: int | None, epochs: int) -> None:
    rows = np.arange(n) * 3
    plan = shuffled(epochs, size).plan(rows, 0, 0, 0, 0)
    per_epoch = -(-n // (size or n))
    assert len(plan) == epochs * per_epoch
    for e in range(epochs):
        epoch = plan[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(joined(epoch)) == rows.tolist()
        assert all(len(b) == min(size or n, n) for b in epoch[:-1])


@given(st.integers(1, 60), st.integers(1, 40))
def test_drop_last_keeps_full_batches_and_never_loses_the_only_one(n: int, size: int) -> None:
    plan = shuffled(2, size, drop_last=True).plan(np.arange(n), 0, 0, 0, 0)
    assert len(plan) == 2 * max(1, n // size)
    assert {len(b) for b in plan} == {min(n, size)}
    assert all(len(set(b.tolist())) == len(b) for b in plan)


def test_orders_are_those_of_the_named_stream() -> None:
    plan = shuffled(2, 10).plan(ROWS, seed=4, round=5, client=6, drawn=3)
    for epoch in range(2):
        order = ROWS[stream(4, "batch", 5, 6, 3 + epoch).permutation(23)]
        assert joined(plan[3 * epoch : 3 * epoch + 3]) == order.tolist()


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_seed_round_client_and_position_each_change_the_order(other: tuple[int, int, int, int]) -> None:
    batches = shuffled(1, 10)
    assert joined(batches.plan(ROWS, 0, 0, 0, 0)) == joined(batches.plan(ROWS, 0, 0, 0, 0))
    assert joined(batches.plan(ROWS, *other)) != joined(batches.plan(ROWS, 0, 0, 0, 0))


def test_epochs_differ_from_each_other() -> None:
    first, second = shuffled(2).plan(ROWS, 0, 0, 0, 0)
    assert first.tolist() != second.tolist() and sorted(first) == sorted(second)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 20), st.booleans())
def test_steps_take_a_prefix_of_endless_epochs(n: int, size: int, steps: int, drop_last: bool) -> None:
    rows = np.arange(n)
    plan = shuffled(1, size, steps=steps, drop_last=drop_last).plan(rows, 0, 0, 0, 0)
    endless = shuffled(20, size, drop_last=drop_last).plan(rows, 0, 0, 0, 0)
    assert [b.tolist() for b in plan] == [b.tolist() for b in endless[:steps]]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_ordered_is_one_pass_in_stored_order_and_draws_nothing(split: str) -> None:
    batches = ordered(split, 10)
    assert batches.split == split
    for key in [(0, 0, 0, 0), (1, 2, 3, 4)]:
        plan = batches.plan(ROWS, *key)
        assert [len(b) for b in plan] == [10, 10, 3] and joined(plan) == ROWS.tolist()
    assert [b.tolist() for b in ordered().plan(ROWS, 0, 0, 0, 0)] == [ROWS.tolist()]


@pytest.mark.parametrize("batches", [shuffled(3, 5), shuffled(1, steps=4), ordered("test")])
def test_a_client_without_samples_has_no_batches(batches: Batches) -> None:
    assert batches.plan(np.empty(0, dtype=np.int64), 0, 0, 0, 0) == []


def test_a_stream_goes_on_over_the_phases_of_a_program() -> None:
    splits = {"train": [ROWS, ROWS[:7]], "val": [ROWS[:3], ROWS[:2]]}
    phases = (
        shuffled(2, 10),  # epochs 0 and 1
        ordered("val"),  # none
        shuffled(1, 10),  # epoch 2
        Batches("train", 1, 10, stream="other"),  # epoch 0 of a stream of its own
        shuffled(1, 10, steps=3),  # starts at epoch 3, may need up to 3
        shuffled(1),  # epoch 6
    )
    plans = plan_phases(program(*phases), splits, np.array([1, 0]), seed=2, round=8)
    for column, client in enumerate((1, 0)):
        rows = splits["train"][client]
        order = lambda name, epoch, rows=rows, i=client: (  # noqa: E731
            rows[stream(2, name, 8, i, epoch).permutation(len(rows))].tolist()
        )
        mine = [phase[column] for phase in plans]
        assert joined(mine[0]) == order("batch", 0) + order("batch", 1)
        assert joined(mine[1]) == splits["val"][client].tolist()
        assert joined(mine[2]) == order("batch", 2)
        assert joined(mine[3]) == order("other", 0)
        assert joined(mine[4]) == (order("batch", 3) + order("batch", 4) + order("batch", 5))[: len(joined(mine[4]))]
        assert len(mine[4]) == 3
        assert joined(mine[5]) == order("batch", 6)  # the same epoch for all clients, whatever their sizes
