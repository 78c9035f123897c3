"""Trees over the wire: everything comes back as it was, and nothing that is wrong comes in."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.flower.memory import from_bytes, to_bytes

from bespokefl.core.tree_io import full_name
from bespokefl.flower.refusal import Refused
from bespokefl.flower.transport.codec import Leaf, check_rows, digest, packed, unpacked
from bespokefl.flower.transport.envelope import Envelope


class Kept(NamedTuple):
    v: dict[str, torch.Tensor]
    n: torch.Tensor


class Stranger(NamedTuple):
    v: torch.Tensor


TREE = {
    "model": {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor(2.5, dtype=torch.float64)},
    "a": {"weight": torch.zeros(0, 4)},
    "kept": Kept({"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, torch.tensor(7)),
    "list": [torch.tensor([True, False]), (torch.tensor([1, 2], dtype=torch.uint8), {})],
    "half": torch.tensor([0.5], dtype=torch.float16),
}


def message(**trees: Any) -> Envelope:
    header, arrays = packed(trees)
    return from_bytes(to_bytes(Envelope(header, arrays)))


def read(envelope: Envelope, *names: str, most: int = 10**6, finite: bool = True) -> dict[str, Any]:
    return unpacked(envelope, names or ("t",), {full_name(Kept): Kept}, most_bytes=most, finite=finite)


def test_trees_come_back_as_they_were() -> None:
    back = read(message(t=TREE, u=torch.ones(1)), "t", "u")
    flat, tree = torch.utils._pytree.tree_flatten(TREE)
    again, same = torch.utils._pytree.tree_flatten(back["t"])
    assert tree == same
    for a, b in zip(flat, again, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_tensors_that_share_memory_or_have_strides_travel_too() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    back = read(message(t={"whole": x, "column": x[:, 1], "turned": x.T}))["t"]
    assert torch.equal(back["column"], x[:, 1]) and torch.equal(back["turned"], x.T)


def spoiled(change: Any) -> Envelope:
    good = message(t={"w": torch.ones(2, 3), "n": torch.tensor(1)})
    header, arrays = dict(good.header), dict(good.arrays)
    change(header, arrays)
    return Envelope(header, arrays)


WRONG: dict[str, tuple[Any, str]] = {
    "an extra array": (lambda h, a: a.update(more=np.ones(1)), "extra more"),
    "a missing array": (lambda h, a: a.pop("t.w"), "missing t.w"),
    "another tree": (lambda h, a: h.update(trees={"x": h["trees"]["t"]}), r"should hold \['t'\]"),
    "no structure": (lambda h, a: h.pop("trees"), "should hold"),
    "text as an array": (lambda h, a: a.update({"t.w": np.array(["x"])}), "has the type"),
    "objects": (lambda h, a: a.update({"t.w": np.array([None], dtype=object)}), "has the type object"),
    "complex numbers": (lambda h, a: a.update({"t.w": np.ones(2, dtype=np.complex64)}), "complex64"),
    "another byte order": (lambda h, a: a.update({"t.w": np.ones(2, dtype=">f4")}), "has the type"),
    "NaN": (lambda h, a: a.update({"t.w": np.array([np.nan])}), "not finite"),
    "infinity": (lambda h, a: a.update({"t.w": np.array([np.inf], dtype=np.float32)}), "not finite"),
    "a class": (lambda h, a: h.update(trees={"t": {"named": "Stranger", "items": []}}), "unknown kind"),
    "a class with too few fields": (
        lambda h, a: h.update(trees={"t": {"named": full_name(Kept), "items": []}}),
        "unknown kind",
    ),
    "a class by its bare name": (lambda h, a: h.update(trees={"t": {"named": "Kept", "items": []}}), "unknown kind"),
    "an unknown entry": (lambda h, a: h.update(trees={"t": {"import": "os"}}), "unknown kind"),
    "a name twice": (
        lambda h, a: h.update(trees={"t": {"list": [{"tensor": "t.w"}, {"tensor": "t.w"}, {"tensor": "t.n"}]}}),
        "twice",
    ),
    "a deep structure": (lambda h, a: h.update(trees={"t": nested(50)}), "too deep"),
    "a text as a value": (lambda h, a: h.update(trees={"t": {"value": "x"}}), "unknown kind"),
}


def nested(depth: int) -> Any:
    return {"list": [nested(depth - 1)]} if depth else {"tensor": "t.w"}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_messages_are_refused_with_the_reason(what: str) -> None:
    change, words = WRONG[what]
    with pytest.raises(Refused, match=words):
        read(spoiled(change))


def test_size_and_finiteness_are_the_receivers_choice() -> None:
    with pytest.raises(Refused, match="32 bytes of arrays; at most 31"):
        read(message(t={"w": torch.ones(8)}), most=31)
    assert torch.isnan(read(message(t=torch.tensor([torch.nan])), finite=False)["t"]).all()


def test_answers_are_held_against_what_is_expected() -> None:
    expected = {".w": Leaf((3,), torch.float32), ".n": Leaf((), torch.int64)}
    good = {"w": torch.ones(2, 3), "n": torch.ones(2, dtype=torch.int64)}
    check_rows(good, expected, 2)
    for bad, words in [
        ({**good, "x": torch.ones(2)}, "extra .x"),
        ({"w": good["w"]}, "missing .n"),
        ({**good, "w": torch.ones(2, 4)}, r"'w' of the answer has the shape \(2, 4\)"),
        ({**good, "w": torch.ones(2, 3, dtype=torch.float64)}, "torch.float64"),
        ({k: v[:1] for k, v in good.items()}, r"\(1, 3\)"),
    ]:
        with pytest.raises(Refused, match=words):
            check_rows(bad, expected, 2)


def test_a_digest_is_of_the_content() -> None:
    header, arrays = {"a": 1, "b": [2]}, {"x": np.arange(6.0).reshape(2, 3), "y": np.zeros(0)}
    same = digest({"b": [2], "a": 1}, {"y": np.zeros(0), "x": np.arange(6.0).reshape(2, 3)})
    assert digest(header, arrays) == same > 0
    others = [
        digest({**header, "a": 2}, arrays),
        digest(header, {**arrays, "x": np.arange(6.0).reshape(3, 2)}),
        digest(header, {**arrays, "x": np.arange(6.0, dtype=np.float32).reshape(2, 3)}),
        digest(header, {"z": arrays["x"], "y": arrays["y"]}),
    ]
    assert len({same, *others}) == 5
