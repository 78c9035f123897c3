"""The clients' data for tuning: scored on validation samples, with no test sample left in it."""

from dataclasses import replace

import numpy as np

from bespokefl.core.rng import stream
from bespokefl.data import FederatedData
from bespokefl.data.dataset import IntArray
from bespokefl.data.splits import spread_by_class
from bespokefl.errors import InputError


def has_validation(data: FederatedData) -> bool:
    return bool(data.sizes("val").any())


def without_test_samples(data: FederatedData, share: float, seed: int) -> FederatedData:
    """The same clients, whose `test` split holds their validation samples.

    Where the data have none, a share of each client's train samples is held out instead (one at least; a client with
    a single sample keeps it, and is not scored). The split `val` stays as it is, for methods that train with it.
    """
    if has_validation(data):
        return replace(data, splits=data.splits | {"test": data.splits["val"]}, held_out=None)
    labels = data.y.cpu().numpy() if data.classes and not data.has_masks else None
    train, held = zip(
        *(_hold_out(rows, share, seed, client, labels) for client, rows in enumerate(data.splits["train"])), strict=True
    )
    if not any(len(rows) for rows in held):
        raise InputError("data.clients: every client has a single train sample, and none to validate with.")
    return replace(data, splits=data.splits | {"train": train, "test": held}, held_out=None)


def _hold_out(
    rows: IntArray, share: float, seed: int, client: int, labels: IntArray | None
) -> tuple[IntArray, IntArray]:
    """What a client trains on, and what it is scored on: about the same share of each class."""
    drawn = stream(seed, "validation", client).permutation(rows)
    if labels is not None:
        drawn = spread_by_class(drawn, labels[drawn])
    n = min(max(1, int(share * len(rows) + 1e-9)), max(0, len(rows) - 1))
    return np.sort(drawn[n:]), np.sort(drawn[:n])
