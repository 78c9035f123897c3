"""Client states against a plain dict of them."""

import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bespokefl.core import trees
from bespokefl.federation.states import ClientStates


class State(NamedTuple):
    x: dict[str, Tensor]
    seen: Tensor


def initial() -> State:
    return State({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "n": torch.tensor([7])}, torch.zeros(()))


def some(rows: int, value: int) -> State:
    """Distinct states, one per row."""
    base = value * 100 + torch.arange(rows)
    return State(
        {"w": base.view(-1, 1, 1) + torch.rand(2, 2), "n": base.view(-1, 1)}, base.to(torch.get_default_dtype())
    )


def equal(a: Any, b: Any) -> bool:
    return all(u.dtype == v.dtype and torch.equal(u, v) for u, v in zip(trees.leaves(a), trees.leaves(b), strict=True))


cohorts = st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)


@given(st.lists(st.tuples(st.booleans(), cohorts), max_size=12))
def test_behaves_as_a_dict_with_a_default(operations: list[tuple[bool, list[int]]]) -> None:
    states, reference = ClientStates(initial()), dict[int, State]()
    for value, (write, cohort) in enumerate(operations):
        ids = np.array(cohort)
        if write:
            new = some(len(ids), value)
            states.scatter(ids, new)
            reference |= {c: trees.rows(new, r) for r, c in enumerate(cohort)}
        assert equal(states.gather(ids), trees.stack([reference.get(c, initial()) for c in cohort]))
        assert states.clients == list(reference)  # in the order they first took part
    if reference:
        assert equal(states.rows(), trees.stack(list(reference.values())))


def test_an_id_that_repeats_has_one_row() -> None:
    states = ClientStates({"w": torch.zeros(1)})
    states.scatter(np.array([3, 3]), {"w": torch.ones(2, 1)})
    states.scatter(np.array([4]), {"w": torch.full((1, 1), 2.0)})
    assert states.clients == [3, 4] and equal(states.rows(), {"w": torch.tensor([[1.0], [2.0]])})


def test_growing_has_one_leaf_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ClientStates({name: torch.zeros(3) for name in "abcd"})
    states.scatter(np.array([5]), {name: torch.ones(1, 3) for name in "abcd"})
    old = [weakref.ref(v) for v in trees.leaves(states._slab)]
    there: list[int] = []
    allocate = Tensor.new_empty

    def counted(like: Tensor, *shape: int) -> Tensor:
        there.append(sum(v() is not None for v in old))
        return allocate(like, *shape)

    monkeypatch.setattr(Tensor, "new_empty", counted)
    states.scatter(np.array([7, 8]), {name: torch.full((2, 3), 2.0) for name in "abcd"})
    assert there == [4, 3, 2, 1]
    assert equal(states.rows(), {name: torch.tensor([[1.0] * 3, [2.0] * 3, [2.0] * 3]) for name in "abcd"})


def test_memory_that_is_not_there_leaves_the_states_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ClientStates({name: torch.zeros(3) for name in "ab"})
    states.scatter(np.array([5]), {name: torch.ones(1, 3) for name in "ab"})
    allocate, calls = Tensor.new_empty, iter(range(9))

    def second_fails(like: Tensor, *shape: int) -> Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError
        return allocate(like, *shape)

    monkeypatch.setattr(Tensor, "new_empty", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        states.scatter(np.array([7]), {name: torch.full((1, 3), 2.0) for name in "ab"})
    assert states.clients == [5] and equal(states.rows(), {name: torch.ones(1, 3) for name in "ab"})
    states.scatter(np.array([7]), {name: torch.full((1, 3), 3.0) for name in "ab"})
    assert equal(states.rows(), {name: torch.tensor([[1.0] * 3, [3.0] * 3]) for name in "ab"})


def test_memory_is_taken_only_for_participants() -> None:
    states = ClientStates({"w": torch.zeros(1000)})
    states.gather(np.arange(50))
    assert trees.numel(states.rows()) == 0 and states.clients == []
    for k in range(10):
        states.scatter(np.array([10_000 + k]), {"w": torch.full((1, 1000), float(k))})
    assert states.clients == list(range(10_000, 10_010))
    assert states.rows()["w"].shape == (10, 1000)
    assert states.rows()["w"].untyped_storage().nbytes() <= 1.25 * 10 * 1000 * 4


def test_what_was_gathered_is_a_copy() -> None:
    states = ClientStates(initial())
    states.scatter(np.array([3]), some(1, 1))
    before = states.gather(np.array([3, 4]))
    for ids in (np.array([3]), np.array([3, 4]), np.array([4])):
        gathered = states.gather(ids)
        for v in trees.leaves(gathered):
            v.zero_()
    assert equal(states.gather(np.array([3, 4])), before) and equal(states.initial, initial())


def test_scatter_keeps_the_types_of_the_initial_state() -> None:
    states = ClientStates({"w": torch.zeros(2)})
    states.scatter(np.array([0]), {"w": torch.ones(1, 2, dtype=torch.float64)})
    assert states.gather(np.array([0]))["w"].dtype == torch.float32


def test_load_replaces_everything_and_growth_goes_on_from_there() -> None:
    states, rows = ClientStates(initial()), some(3, 5)
    states.scatter(np.array([8, 9]), some(2, 1))
    states.load([4, 1, 9], rows)
    assert states.clients == [4, 1, 9] and equal(states.rows(), rows)
    assert equal(states.gather(np.array([8])), trees.stack([initial()]))
    for v in trees.leaves(rows):  # the loaded rows are copied
        v.zero_()
    states.scatter(np.array([8, 1]), some(2, 6))
    expected = some(2, 6)._replace(x={})
    assert states.clients == [4, 1, 9, 8]
    assert states.gather(np.array([4, 1, 9, 8])).seen.tolist() == [500, expected.seen[1], 502, expected.seen[0]]


def test_loading_nobody_starts_afresh() -> None:
    states = ClientStates(initial())
    states.scatter(np.array([1]), some(1, 1))
    states.load([], trees.rows(states.rows(), slice(0, 0)))
    assert states.clients == [] and equal(states.gather(np.array([1])), trees.stack([initial()]))
    states.scatter(np.array([2]), some(1, 2))
    assert states.gather(np.array([2])).seen.tolist() == [200]


def test_a_stateless_method_keeps_nothing() -> None:
    states = ClientStates({"x": {}})
    states.scatter(np.array([0, 1]), {"x": {}})
    assert states.gather(np.array([0, 5])) == {"x": {}}
    assert trees.numel(states.rows()) == 0
