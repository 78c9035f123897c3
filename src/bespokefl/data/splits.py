"""Train, validation and test rows of each client, drawn from its own rows."""

from collections.abc import Sequence

import numpy as np

from bespokefl.core.rng import stream
from bespokefl.data.dataset import IntArray
from bespokefl.errors import InputError

SPLITS = ("train", "val", "test")
Splits = dict[str, tuple[IntArray, ...]]


def check_fractions(test: float, val: float) -> None:
    """Each client keeps something to train on and something to be tested on."""
    if not 0 < test < 1:
        raise InputError(f"data.test = {test!r}: the test fraction must lie between 0 and 1, both excluded.")
    if not 0 <= val < 1 or test + val >= 1:
        raise InputError(
            f"data.val = {val!r}: the validation fraction must lie in [0, 1) and leave samples to train on "
            f"(data.test is {test!r}; together they must be below 1)."
        )


def split_sizes(n: int, test: float, val: float) -> tuple[int, int, int]:
    """Sizes of train, val, test: train and val rounded down, test takes the rest; none is empty unless val is 0.

    Needs n >= 2, or n >= 3 with a validation set.
    """
    n_val = min(max(1, int(val * n + 1e-9)), n - 2) if val > 0 else 0
    n_train = min(max(1, int((1 - test - val) * n + 1e-9)), n - n_val - 1)
    return n_train, n_val, n - n_train - n_val


def spread_by_class(rows: IntArray, labels: IntArray) -> IntArray:
    """Order rows so that every prefix holds about the same share of each class (rows keep their order in a class)."""
    order = np.argsort(labels, kind="stable")
    counts = np.unique(labels, return_counts=True)[1]
    rank = np.concatenate([(np.arange(m) + 0.5) / m for m in counts])
    position = np.empty(len(rows))
    position[order] = rank
    return rows[np.argsort(position, kind="stable")]


def split_client(
    rows: IntArray,
    client: int,
    name: str,
    test: float,
    val: float,
    seed: int,
    labels: IntArray | None = None,
    *,
    shuffled: bool = False,
) -> tuple[IntArray, IntArray, IntArray]:
    """Train, val and test rows of one client, at random (stream: seed, "split", client).

    With `labels`, one per row of the dataset, each class is split in about the same proportions. Rows that are
    `shuffled` already are taken in their order: first the test rows, then the validation rows.
    """
    needed = 3 if val > 0 else 2
    if len(rows) < needed:
        raise InputError(
            f"Client {name} has {len(rows)} sample(s) but needs at least {needed} "
            f"(one each to train, test{' and validate' if val > 0 else ''}): "
            "use fewer clients (data.clients), more data, or another partition."
        )
    drawn = rows if shuffled else stream(seed, "split", client).permutation(rows)
    if labels is not None:
        drawn = spread_by_class(drawn, labels[drawn])
    _, n_val, n_test = split_sizes(len(rows), test, val)
    test_rows, val_rows, train_rows = np.split(drawn, [n_test, n_test + n_val])
    return np.sort(train_rows), np.sort(val_rows), np.sort(test_rows)


def split_clients(
    rows: Sequence[IntArray],
    names: Sequence[str],
    test: float,
    val: float,
    seed: int,
    labels: IntArray | None = None,
    *,
    shuffled: bool = False,
) -> Splits:
    """Split every client's rows by `split_client`."""
    check_fractions(test, val)
    parts = [
        split_client(own, client, name, test, val, seed, labels, shuffled=shuffled)
        for client, (own, name) in enumerate(zip(rows, names, strict=True))
    ]
    return dict(zip(SPLITS, zip(*parts, strict=True), strict=True))
