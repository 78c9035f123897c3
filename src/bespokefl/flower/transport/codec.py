"""Trees in envelopes: how tensors travel, and what is checked before anything that arrived is used.

A tree is JSON for its structure and arrays by name for its tensors. Nothing of it can name code, files or types other
than the named tuples that the receiver itself offers.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.tree_io import pack, unpack
from bespokefl.core.trees import Tree, is_finite
from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused, reading
from bespokefl.flower.transport.envelope import Array, Envelope

DTYPES = frozenset(["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
BFLOAT16 = "bfloat16"  # numpy has none: it travels as uint16, and the header names such arrays
KEYS = frozenset({"trees", BFLOAT16})  # of a header that belong to this module


class Leaf(NamedTuple):
    """What is expected of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def packed(trees: Mapping[str, Tree]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The part of a header, and the arrays."""
    structures: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    rough: list[str] = []
    for name, tree in trees.items():
        structures[name], tensors = pack(tree, name)
        for path, value in tensors.items():
            value = value.detach().cpu().contiguous()
            if value.dtype == torch.bfloat16:
                rough.append(path)
                value = value.view(torch.uint16)
            arrays[path] = value.numpy()
    return {"trees": structures, **({BFLOAT16: rough} if rough else {})}, arrays


def unpacked(
    message: Envelope, wanted: tuple[str, ...], classes: Mapping[str, type], *, most_bytes: int, finite: bool
) -> dict[str, Tree]:
    """The trees of a message, by name: exactly the wanted ones, of plain tensors, none left over."""
    with reading("the message"):
        return _trees(message, wanted, classes, most_bytes, finite)


def _trees(
    message: Envelope, wanted: tuple[str, ...], classes: Mapping[str, type], most_bytes: int, finite: bool
) -> dict[str, Tree]:
    structures, rough = message.header.get("trees"), message.header.get(BFLOAT16, [])
    if not isinstance(structures, dict) or set(structures) != set(wanted):
        seen = _some(structures) if isinstance(structures, dict) else str(structures)[: limits.NAME]
        raise Refused(f"the message holds the trees {seen}; it should hold {sorted(wanted)}")
    total = sum(array.nbytes for array in message.arrays.values())
    if total > most_bytes:
        raise Refused(f"the message holds {total:,} bytes of arrays; at most {most_bytes:,} are taken")
    if not isinstance(rough, list) or not all(isinstance(name, str) and name in message.arrays for name in rough):
        raise Refused("the header names bfloat16 arrays that are not there")
    named = _tensors_named(structures, classes, finite)
    if named != set(message.arrays):
        raise Refused(
            f"arrays and structure disagree: extra {_some(set(message.arrays) - named)}, "
            f"missing {_some(named - set(message.arrays))}"
        )
    as_bfloat16 = set(rough)
    tensors = {name: _tensor(name, array, name in as_bfloat16, finite) for name, array in message.arrays.items()}
    return {name: unpack(structure, tensors, classes) for name, structure in structures.items()}


def _tensor(name: str, array: Array, rough: bool, finite: bool) -> Tensor:
    kind = np.asarray(array).dtype
    if not (kind.name == "uint16" if rough else kind.name in DTYPES) or not kind.isnative:
        raise Refused(f"the array {name!r} has the type {kind}; allowed: {', '.join(sorted(DTYPES))}, {BFLOAT16}")
    tensor = torch.from_numpy(np.array(array, copy=None if array.flags.writeable else True, order="C"))
    tensor = tensor.view(torch.bfloat16) if rough else tensor
    if finite and not is_finite(tensor):
        raise Refused(f"the array {name!r} holds values that are not finite")
    return tensor


def _tensors_named(structures: Mapping[str, Any], classes: Mapping[str, type], finite: bool) -> set[str]:
    """The tensors that well-formed structures name, each once."""
    found: list[str] = []
    entries = 0

    def visit(node: Any, depth: int) -> None:
        nonlocal entries
        entries += 1
        if depth > limits.DEEPEST or entries > limits.ARRAYS or not isinstance(node, dict) or not node:
            raise Refused("the structure of a tree is damaged, or too deep or too long")
        kind, content = next(iter(node.items()))
        if kind == "tensor" and len(node) == 1 and isinstance(content, str):
            found.append(content)
        elif kind == "value" and len(node) == 1 and _is_value(content, finite):
            pass
        elif kind == "dict" and len(node) == 1 and _are_items(content):
            for _, value in content:
                visit(value, depth + 1)
        elif kind in ("list", "tuple") and len(node) == 1 and isinstance(content, list):
            for value in content:
                visit(value, depth + 1)
        elif kind == "named" and set(node) == {"named", "items"} and _is_known(content, node["items"], classes):
            for value in node["items"]:
                visit(value, depth + 1)
        else:
            raise Refused(f"the structure of a tree has an entry of an unknown kind: {str(kind)[:40]!r}")

    for structure in structures.values():
        visit(structure, 0)
    if len(set(found)) != len(found):
        raise Refused("the structure of a tree names an array twice")
    return set(found)


def _is_value(content: Any, finite: bool) -> bool:
    if isinstance(content, float):
        return not finite or math.isfinite(content)
    return content is None or (isinstance(content, int) and -(2**63) <= content < 2**63)


def _are_items(content: Any) -> bool:
    """Pairs of different names and values."""
    pairs = isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    if not pairs or not all(isinstance(key, str | int) for key, _ in content):
        return False
    return len({key for key, _ in content}) == len(content)


def _is_known(name: Any, items: Any, classes: Mapping[str, type]) -> bool:
    known = classes.get(name) if isinstance(name, str) else None
    return known is not None and isinstance(items, list) and len(items) == len(known._fields)  # type: ignore[attr-defined]


def leaves_by_name(tree: Tree) -> dict[str, Tensor]:
    return pack(tree, "")[1]


class Form(NamedTuple):
    """What is expected of a client's upload."""

    leaves: Mapping[str, Leaf]
    structure: Any  # JSON

    @classmethod
    def of(cls, stacked: Tree) -> "Form":
        """That of a stacked tree's rows."""
        structure, tensors = pack(stacked, "")
        return cls({k: Leaf(tuple(v.shape[1:]), v.dtype) for k, v in tensors.items()}, structure)

    def taken(self, tree: Tree, rows: int, classes: Mapping[str, type]) -> Tree:
        """The tensors of a tree, of so many rows each, in the structure that is expected; or it is refused."""
        check_rows(tree, self.leaves, rows)
        return unpack(self.structure, leaves_by_name(tree), classes)


def check_rows(tree: Tree, expected: Mapping[str, Leaf], rows: int) -> None:
    """Refuses a stacked tree whose tensors are not those that are expected, with so many rows each."""
    found = leaves_by_name(tree)
    if found.keys() != expected.keys():
        extra, missing = found.keys() - expected.keys(), expected.keys() - found.keys()
        raise Refused(f"the answer has other tensors than it should: extra {_some(extra)}, missing {_some(missing)}")
    for name, leaf in expected.items():
        shape, dtype = tuple(found[name].shape), found[name].dtype
        if shape != (rows, *leaf.shape) or dtype != leaf.dtype:
            raise Refused(
                f"{name.lstrip('.')!r} of the answer has the shape {shape} and type {dtype}; "
                f"expected {(rows, *leaf.shape)} and {leaf.dtype}"
            )


def digest(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> int:
    """A positive 63-bit number of a message's content: the same content gives the same number."""
    content = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=8)
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        content.update(f"{name} {array.dtype.str} {array.shape}".encode())
        content.update(array.reshape(-1).view(np.uint8).data)
    return (int.from_bytes(content.digest(), "little") >> 1) or 1


def _some(names: Any) -> str:
    listed = sorted(str(name)[:80] for name in names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") if listed else "none"
