"""Tree algebra against numpy on plain arrays."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bespokefl.core import trees


class Pair(NamedTuple):
    left: dict[str, Tensor]
    right: Tensor


def draw(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A dict, a named tuple and a list, nested."""
    g = torch.Generator().manual_seed(seed)
    t = lambda *shape: torch.randn(shape, generator=g, dtype=dtype)  # noqa: E731
    return {"p": Pair({"w": t(2, 3), "b": t(3)}, t()), "q": [t(4)]}


def vector(tree: Any) -> np.ndarray:
    """All numbers of a tree made by ``draw``, in a fixed order."""
    parts = (tree["p"].left["w"], tree["p"].left["b"], tree["p"].right, tree["q"][0])
    return np.concatenate([v.numpy().ravel() for v in parts])


# one client ------------------------------------------------------------------------------------------
def test_linear_operations_are_those_of_the_flat_vectors() -> None:
    a, b = draw(0), draw(1)
    u, v = vector(a), vector(b)
    for tree, expected in (
        (trees.add(a, b), u + v),
        (trees.sub(a, b), u - v),
        (trees.scale(-2.5, a), -2.5 * u),
        (trees.scale(torch.tensor(3.0), a), 3 * u),
        (trees.axpy(0.5, a, b), 0.5 * u + v),
        (trees.zeros(a), 0 * u),
    ):
        np.testing.assert_array_equal(vector(tree), expected)
        assert isinstance(tree["p"], Pair) and isinstance(tree["q"], list)
    np.testing.assert_array_equal(vector(a), u)


def test_dot_and_norms() -> None:
    a, b = draw(0), draw(1)
    u, v = vector(a), vector(b)
    np.testing.assert_allclose(trees.dot(a, b), u @ v, rtol=1e-14)
    np.testing.assert_allclose(trees.squared_norm(a), u @ u, rtol=1e-14)
    np.testing.assert_allclose(trees.norm(a), np.linalg.norm(u), rtol=1e-14)
    assert trees.dot({}, {}) == 0


def test_names_not_their_order_pair_the_leaves() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 20.0])}
    b = {"b": torch.tensor([3.0, 4.0]), "w": torch.tensor([5.0, 6.0])}
    assert trees.dot(a, b) == 1 * 5 + 2 * 6 + 10 * 3 + 20 * 4
    assert trees.add(a, b)["w"].tolist() == [6.0, 8.0]


def test_shift_moves_only_the_names_of_the_direction() -> None:
    x = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0]), "mean": torch.tensor([4.0])}
    moved = trees.shift(x, -0.5, {"b": torch.tensor([2.0]), "w": torch.tensor([4.0, 6.0])})
    assert {k: v.tolist() for k, v in moved.items()} == {"w": [-1.0, -1.0], "b": [2.0], "mean": [4.0]}
    assert list(moved) == list(x) and x["w"].tolist() == [1.0, 2.0]


def test_where_chooses_per_client_under_vmap() -> None:
    a, b = trees.stack([draw(k) for k in range(3)]), trees.stack([draw(k) for k in range(3, 6)])
    chosen = torch.func.vmap(trees.where)(torch.tensor([True, False, True]), a, b)
    for r, seed in enumerate((0, 4, 2)):
        np.testing.assert_array_equal(vector(trees.rows(chosen, r)), vector(draw(seed)))


def test_pick_and_drop_are_complements() -> None:
    x = {"a": torch.zeros(1), "b": torch.ones(1), "c": torch.ones(1)}
    assert list(trees.pick(x, ["c", "a"])) == ["c", "a"]
    assert list(trees.drop(x, ["c", "a"])) == ["b"]


# the server ------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0, 10), min_size=1, max_size=5), st.integers(0, 99))
def test_mean_is_the_weighted_sum(weights: list[float], seed: int) -> None:
    models = [draw(seed + k) for k in range(len(weights))]
    averaged = trees.mean(trees.stack(models), torch.tensor(weights))
    expected = sum(np.float32(p).astype(np.float64) * vector(m) for p, m in zip(weights, models, strict=True))
    np.testing.assert_allclose(vector(averaged), expected, rtol=1e-12, atol=1e-12)


def test_mean_accumulates_in_float64_and_keeps_the_type() -> None:
    x = torch.tensor([[1e8], [1.0], [-1e8]], dtype=torch.float32)
    averaged = trees.mean({"w": x}, torch.ones(3))
    assert averaged["w"].tolist() == [1.0] and averaged["w"].dtype == torch.float32
    assert (x[0] + x[1] + x[2]).tolist() != [1.0]  # what float32 accumulators give


def test_combine_is_the_matrix_times_the_models() -> None:
    models = [draw(k) for k in range(3)]
    matrix = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]])
    combined = trees.combine(matrix, trees.stack(models))
    expected = matrix.double().numpy() @ np.stack([vector(m) for m in models])
    for r in range(2):
        np.testing.assert_allclose(vector(trees.rows(combined, r)), expected[r], rtol=1e-14)


def test_rows_stack_concat_repeat() -> None:
    models = [draw(k) for k in range(4)]
    stacked = trees.concat([trees.stack(models[:1]), trees.stack(models[1:])])
    for r in range(4):
        np.testing.assert_array_equal(vector(trees.rows(stacked, r)), vector(models[r]))
    picked = trees.rows(stacked, torch.tensor([3, 0]))
    np.testing.assert_array_equal(vector(trees.rows(picked, 0)), vector(models[3]))
    repeated = trees.repeat(models[2], 5)
    assert all(v.shape[0] == 5 for v in trees.leaves(repeated))
    np.testing.assert_array_equal(vector(trees.rows(repeated, 4)), vector(models[2]))


def test_flat_and_like_are_inverse() -> None:
    models = [{"w": torch.randn(2, 3), "s": torch.randn(()), "b": torch.randn(3)} for _ in range(4)]
    matrix = trees.flat(trees.stack(models))
    assert matrix.shape == (4, 10)
    np.testing.assert_array_equal(matrix[2].numpy(), np.concatenate([v.numpy().ravel() for v in models[2].values()]))
    for name, v in trees.like(matrix[2], models[0]).items():
        assert torch.equal(v, models[2][name])
    for name, v in trees.like(matrix, models[0]).items():
        assert torch.equal(v, torch.stack([m[name] for m in models]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_rows_finds_the_one_that_is_not(bad: float) -> None:
    tree = {"w": torch.zeros(4, 2, 2), "count": torch.zeros(4, dtype=torch.int64), "none": torch.zeros(4, 0)}
    tree["w"][2, 1, 0] = bad
    assert trees.finite_rows(tree, 4).tolist() == [True, True, False, True]
    assert trees.finite_rows({}, 2).tolist() == [True, True]


def test_finite_rows_may_be_large() -> None:
    """Their sum is infinite, they are not."""
    large = torch.full((3, 8), torch.finfo(torch.float32).max)
    large[1, 0] = -torch.inf
    assert trees.finite_rows({"w": large}, 3).tolist() == [True, False, True]
    assert trees.is_finite(large[0]) and not trees.is_finite(large[1])
    assert trees.is_finite(torch.tensor(1)) and trees.is_finite(torch.zeros(0))


def test_sizes() -> None:
    tree = [torch.zeros(3, 4), {"half": torch.zeros(5, dtype=torch.bfloat16), "n": torch.zeros((), dtype=torch.int64)}]
    assert trees.numel(tree) == 18
    assert trees.nbytes(tree) == 12 * 4 + 5 * 2 + 8
