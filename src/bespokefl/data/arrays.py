"""A user's own arrays, one entry per client, checked and brought to one stack of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bespokefl.data.checks import MOST_CLASSES
from bespokefl.data.inputs import InputKind, stored_as
from bespokefl.errors import InputError

Array = npt.NDArray[Any] | torch.Tensor
Pair = tuple[Array, Array]
ClientArrays = Pair | Mapping[str, Pair]  # (x, y), or {"train": (x, y), "test": (x, y)} and optionally "val"


@dataclass(frozen=True)
class Block:
    """One (x, y) of one client: all its data (split "") or one of its splits."""

    client: int
    split: str
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


def read_blocks(clients: Sequence[ClientArrays], names: Sequence[str], inputs: InputKind | None = None) -> list[Block]:
    """Every (x, y) in client order; ragged shapes, differing lengths and kinds end in one clear message."""
    blocks = [
        _block(client, names[client], split, pair, inputs)
        for client, entry in enumerate(clients)
        for split, pair in _pairs(entry, names[client])
    ]
    first = blocks[0]
    for block in blocks[1:]:
        _same(first, block, names, "feature shape", first.x.shape[1:], block.x.shape[1:])
        _same(first, block, names, "dtype of x", first.x.dtype, block.x.dtype)
        _same(first, block, names, "target shape", first.y.shape[1:], block.y.shape[1:])
        _same(first, block, names, "kind of y", _kind(first.y), _kind(block.y))
    return blocks


def stack_inputs(blocks: Sequence[Block]) -> torch.Tensor:
    """All x as one tensor: float64 and tokens stay, pixels are scaled to [0, 1], everything else becomes float32."""
    x = np.concatenate([block.x for block in blocks])
    scaled = torch.from_numpy(x if x.dtype in (np.float64, np.int64) else x.astype(np.float32))
    return scaled / 255 if x.dtype == np.uint8 else scaled


def stack_targets(blocks: Sequence[Block], dtype: torch.dtype) -> torch.Tensor:
    """All y as one tensor: labels as int64, masks as uint8, regression targets in the inputs' dtype."""
    y = np.concatenate([block.y for block in blocks])
    if _kind(y) == "numbers":
        return torch.from_numpy(y).to(dtype)
    return torch.from_numpy(y.astype(np.uint8 if y.ndim == 3 else np.int64))


def check_named(blocks: Sequence[Block], names: Sequence[str], classes: Sequence[str]) -> None:
    """Every label has a class."""
    for block in blocks:
        wrong = np.flatnonzero((block.y >= len(classes)).reshape(len(block.y), -1).any(1))
        if len(wrong):
            raise InputError(
                f"{_where(names[block.client], block.split)}, sample {wrong[0]}: y holds the label "
                f"{block.y[wrong[0]].max()}, but classes has {len(classes)} names; name every class."
            )


def _where(name: str, split: str) -> str:
    return f"Client {name}" + (f", split {split!r}" if split else "")


def _pairs(entry: ClientArrays, name: str) -> list[tuple[str, Pair]]:
    if not isinstance(entry, Mapping):
        return [("", entry)]
    if not {"train", "test"} <= set(entry) <= {"train", "val", "test"}:
        raise InputError(
            f"Client {name} has the splits {sorted(entry)}; allowed: 'train' and 'test', and optionally 'val'."
        )
    return list(entry.items())


def _block(client: int, name: str, split: str, pair: Pair, inputs: InputKind | None) -> Block:
    where = _where(name, split)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(f"{where}: expected a pair (x, y) of arrays, got {type(pair).__name__}.")
    x, y = (_numpy(value, f"{where}: {field}") for value, field in zip(pair, "xy", strict=True))
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise InputError(
            f"{where}: x has shape {x.shape}; it needs an axis of samples and one of features, none of them 0 long."
        )
    if y.ndim < 1 or len(x) != len(y):
        raise InputError(f"{where}: x has {len(x)} rows but y has shape {y.shape}; give one target per row.")
    if len(x) == 0 and split != "val":
        raise InputError(f"{where} has no samples; leave the client out or give it data.")
    if y.ndim > 1 and _kind(y) == "labels" and (x.ndim != 4 or y.shape != (len(x), *x.shape[2:])):
        raise InputError(
            f"{where}: integer labels y have shape {y.shape} beside x of shape {x.shape}; allowed: one label per row, "
            f"({len(x)},), or masks (n, H, W) for images (n, C, H, W)."
        )
    for field, values in (("x", x), ("y", y)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
            raise InputError(f"{where}, sample {first}: {field} holds NaN or infinity; fill in or drop such rows.")
    if _kind(y) == "labels" and len(y) and (y.min() < 0 or y.max() >= MOST_CLASSES):
        wrong = y.min() if y.min() < 0 else y.max()
        first = int(np.flatnonzero((y == wrong).reshape(len(y), -1).any(1))[0])
        raise InputError(
            f"{where}, sample {first}: y holds the label {wrong}; number the classes from 0 (to {MOST_CLASSES - 1} at "
            "most)."
        )
    if y.ndim == 3 and _kind(y) == "labels" and y.max(initial=0) > 255:
        raise InputError(f"{where}: y holds the label {y.max()}; masks have at most 256 classes.")
    return Block(client, split, stored_as(x, inputs, f"{where}: x"), y)


def _numpy(value: Array, where: str) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{where} is ragged: all samples need the same shape.") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} has dtype {array.dtype}; allowed: numbers (floating, integer or bool).")
    return array


def _kind(y: npt.NDArray[Any]) -> str:
    return "numbers" if y.dtype.kind == "f" else "labels"


def _same(first: Block, other: Block, names: Sequence[str], what: str, expected: object, seen: object) -> None:
    if expected != seen:
        raise InputError(
            f"All clients need the same {what}: client {names[first.client]} has {expected}, "
            f"client {names[other.client]} has {seen}."
        )
