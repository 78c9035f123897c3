"""What must hold of clients' rows, whoever made them: own rows once each, finite numbers, labels of the classes."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.data.splits import SPLITS, Splits
from bespokefl.errors import InputError

MOST_CLASSES = 100_000


def check_rows(splits: Splits, names: Sequence[str], rows: int) -> None:
    """A client has a row at most once in a split, and its train rows in no other one.

    Several clients may share rows, and so may what a client is validated and tested on (as in tuning).
    """
    for name, per_client in splits.items():
        for client, found in zip(names, per_client, strict=True):
            if len(found) and np.asarray(found).dtype.kind not in "iu":
                raise InputError(
                    f"splits[{name!r}] of client {client} has the dtype {np.asarray(found).dtype}; give row numbers "
                    "(np.flatnonzero makes them of a mask)."
                )
    owner, split, own = _flat(splits)
    if not len(own):
        return
    if own.min() < 0 or own.max() >= rows:
        raise InputError(
            f"splits names rows {own.min()} to {own.max()}, but x and y have {rows} rows; give row numbers inside them."
        )
    key = owner * rows + own
    order = np.argsort(key, kind="stable")
    before, after = split[order[:-1]], split[order[1:]]  # of equal keys, in the order of SPLITS
    again = np.flatnonzero((np.diff(key[order]) == 0) & ((before == after) | (before == SPLITS.index("train"))))
    if len(again):
        first, second = order[again[0]], order[again[0] + 1]
        a, b = SPLITS[split[first]], SPLITS[split[second]]
        where = f"twice in {a}" if a == b else f"in {a} and in {b}"
        raise InputError(
            f"Client {names[owner[first]]} has the row {own[first]} {where}; each split has a row once, and no other "
            "has those of train. To weigh a sample double, store it twice in x and y."
        )


def check_values(x: torch.Tensor, y: torch.Tensor, splits: Splits, names: Sequence[str], classes: int) -> None:
    """Finite inputs and targets, and labels from 0 to the last class."""
    for field, values in (("x", x), ("y", y)):
        if values.numel() and values.is_floating_point():
            low, high = torch.aminmax(values)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
                raise InputError(
                    f"{found_at(bad, splits, names)}: {field} holds NaN or infinity; fill in or drop such rows."
                )
    if y.is_floating_point() or not y.numel():
        return
    lowest, highest = (int(v) for v in torch.aminmax(y))
    if lowest < 0 or (classes and highest >= classes):
        seen = lowest if lowest < 0 else highest
        allowed = f"0 to {classes - 1}" if classes else "whole numbers from 0"
        raise InputError(
            f"{found_at((y == seen).reshape(len(y), -1).any(1), splits, names)}: y holds the label {seen}; allowed: "
            f"{allowed}. Number the classes from 0, or name them all (classes)."
        )


def check_token_range(x: torch.Tensor, splits: Splits, names: Sequence[str], size: int) -> None:
    """Token ids of the clients' rows that an embedding of this size holds."""
    low, high = (int(v) for v in torch.aminmax(x))
    if low >= 0 and high < size:
        return
    bad = ((x < 0) | (x >= size)).reshape(len(x), -1).any(1)
    used = torch.zeros(len(x), dtype=torch.bool)
    used[torch.as_tensor(_flat(splits)[2])] = True
    bad &= used.to(bad.device)
    if bad.any():
        ids = x[int(bad.nonzero()[0])]
        wrong = int(ids[(ids < 0) | (ids >= size)].flatten()[0])
        raise InputError(
            f"{found_at(bad, splits, names)}: x holds the token {wrong}, but the model's embedding has {size} rows; "
            f"allowed: 0 to {size - 1}."
        )


def found_at(bad: torch.Tensor, splits: Splits, names: Sequence[str]) -> str:
    """The client, split and place of the first such row (there is one), or its number if no client has it."""
    marked = bad.cpu().numpy()
    owner, split, own = _flat(splits)
    met = np.flatnonzero(marked[own])
    if not len(met):
        return f"row {int(np.flatnonzero(marked)[0])}, which no client has"
    k = int(met[0])
    place = k - int(np.flatnonzero((owner == owner[k]) & (split == split[k]))[0])
    return f"Client {names[owner[k]]}, split {SPLITS[split[k]]!r}, sample {place} (row {own[k]})"


def _flat(splits: Splits) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Client, number of the split, and row of each entry."""
    parts = [rows for name in SPLITS for rows in splits[name]]
    lengths = [len(rows) for rows in parts]
    clients = len(splits[SPLITS[0]])
    owner = np.repeat(np.tile(np.arange(clients), len(SPLITS)), lengths)
    split = np.repeat(np.repeat(np.arange(len(SPLITS)), clients), lengths)
    own = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
    return owner, split, own
