"""Trees as JSON and named tensors, and back."""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from bespokefl.core.tree_io import full_name, pack, unpack


class Inner(NamedTuple):
    m: dict[str, Any]


class Outer(NamedTuple):
    w: dict[str, Any]
    inner: Inner
    note: str | None


CLASSES = {full_name(cls): cls for cls in (Inner, Outer)}


def same(a: Any, b: Any) -> bool:
    """Equal in structure, in the types of all nodes, and bit for bit in the tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(u, v) for u, v in zip(a, b, strict=True))
    return bool(a == b)


def through_json(tree: Any, prefix: str = "server") -> Any:
    structure, tensors = pack(tree, prefix)
    return unpack(json.loads(json.dumps(structure)), tensors, CLASSES)


TREES = [
    torch.arange(3),
    {},
    (),
    [],
    None,
    {"w": {"0.weight": torch.randn(2, 3), "0.bias": torch.zeros(0)}},
    Outer({"a": torch.ones(2, dtype=torch.bfloat16)}, Inner({}), None),
    [(torch.tensor(True), 1), [2.5, "text", False, None, -0.1, 1e300]],
    {1: torch.zeros(1), "1": torch.ones(1)},
    {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a.b.c": [torch.tensor(2)]},
    {"t": (Inner({"x": torch.ones(1)}), Inner({"x": torch.zeros(1)}))},
]


@pytest.mark.parametrize("tree", TREES)
def test_round_trip(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_tensors_are_named_after_their_place() -> None:
    _, tensors = pack(Outer({"0.weight": torch.ones(1)}, Inner({"k": [torch.zeros(2)]}), "n"), "server")
    assert list(tensors) == ["server.w.0.weight", "server.inner.m.k.0"]


def test_every_tensor_has_a_name_of_its_own() -> None:
    _, tensors = pack({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 1: torch.ones(1), "1": torch.ones(1)}, "p")
    assert len(tensors) == 4


@pytest.mark.parametrize("value", [{1, 2}, object(), np.zeros(2), 1j, b"bytes"])
def test_what_json_and_tensors_cannot_hold_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"server\.a\.0 holds a {type(value).__name__}"):
        pack({"a": [value]}, "server")
