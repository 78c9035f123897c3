"""The Dirichlet partition as PGFed's released generator draws it: classes, proportions and splits from one stream.

It is that of NumPy's legacy generator, whose numbers NumPy keeps, seeded with 1 there. Class after class is shuffled
and then dealt out by proportions, and the whole is drawn again, further along the stream, while a client has too few;
after the last client has its rows, each client's are shuffled for its split.
"""

from typing import NamedTuple

import numpy as np

from bespokefl.data.dataset import IntArray


class ReleasedDraw(NamedTuple):
    rows: tuple[IntArray, ...]  # of each client, in the order in which its split takes them: test rows first
    redraws: int


def released_draw(
    labels: IntArray, classes: int, clients: int, alpha: float, least: int, seed: int, most_redraws: int
) -> ReleasedDraw | None:
    """Each client's rows; None if no draw gave every client at least ``least``."""
    rng = np.random.RandomState(seed)
    for redraws in range(most_redraws):
        held = _dealt(labels, classes, clients, alpha, rng)
        if held is not None and min(map(len, held)) >= least:
            return ReleasedDraw(tuple(rows[rng.permutation(len(rows))] for rows in held), redraws)
    return None


def _dealt(
    labels: IntArray, classes: int, clients: int, alpha: float, rng: np.random.RandomState
) -> list[IntArray] | None:
    """One draw: class by class, contiguous pieces of its shuffled rows; None where proportions are left for nobody."""
    pieces: list[list[IntArray]] = [[] for _ in range(clients)]
    held = np.zeros(clients, dtype=np.int64)
    usable = True
    for label in range(classes):
        rows = np.flatnonzero(labels == label).astype(np.int64)
        rng.shuffle(rows)
        share = rng.dirichlet(np.full(clients, alpha)) * (held < len(labels) / clients)
        if not share.sum() > 0:
            usable = False
            continue  # the stream goes on as if it had been
        cuts = (np.cumsum(share / share.sum()) * len(rows)).astype(np.int64)[:-1]
        for own, piece in zip(pieces, np.split(rows, cuts), strict=True):
            own.append(piece)
        held = np.array([sum(map(len, own)) for own in pieces])
    return [np.concatenate(own) for own in pieces] if usable else None
