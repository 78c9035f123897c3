"""One client's work as a program of pure functions, and the batches its phases ask for.

A program is written for ONE client: ``begin`` makes a carry, each phase steps it over batches, ``finish`` hands out the
upload and the state that the client keeps. No client index, no device, no branch on a tensor: the engines run it one
client at a time, side by side, stacked under ``vmap``, or in a real federation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.core.rng import stream
from bespokefl.core.trees import Tree, tree_map

Rows = NDArray[np.int64]
Down = SimpleNamespace  # the download, by attribute: shared entries and the client's own ones


class Batches(NamedTuple):
    """What a phase asks for. Shuffled passes draw from a named stream; ordered ones draw nothing."""

    split: str = "train"
    epochs: int = 1
    size: int | None = None  # None: the whole split in one batch
    stream: str | None = "batch"  # None: in order
    drop_last: bool = False  # drop an incomplete last batch (never the only one)
    steps: int | None = None  # stop after so many batches, wrapping over epochs
    shared: bool = False  # the split is the same rows for every client, in order: gathered once for a stack of them

    def plan(self, rows: Rows, seed: int, round: int, client: int, drawn: int) -> list[Rows]:
        """The batches of one client; ``drawn`` epochs were taken from the stream by earlier phases of the program."""
        n = len(rows)
        if not n:
            return []
        size = n if self.size is None else min(self.size, n)
        per_epoch = n // size if self.drop_last else -(-n // size)
        epochs = self.epochs if self.steps is None else -(-self.steps // per_epoch)
        batches: list[Rows] = []
        for epoch in range(epochs):
            order = rows
            if self.stream is not None:
                order = rows[stream(seed, self.stream, round, client, drawn + epoch).permutation(n)]
            batches += [order[k * size : (k + 1) * size] for k in range(per_epoch)]
        return batches if self.steps is None else batches[: self.steps]

    def epochs_drawn(self) -> int:
        """How many epochs this phase takes from its stream, as later phases of the program count them."""
        return self.epochs if self.steps is None else max(self.epochs, self.steps)


def shuffled(epochs: int, size: int | None = None, *, steps: int | None = None, drop_last: bool = False) -> Batches:
    """Epochs of the train split, each in a fresh order."""
    return Batches("train", epochs, size, steps=steps, drop_last=drop_last)


def ordered(split: str = "train", size: int | None = None, *, shared: bool = False) -> Batches:
    """One pass over a split in its stored order; draws nothing."""
    return Batches(split, 1, size, stream=None, shared=shared)


class Phase(NamedTuple):
    """A loop of one client: a step for each of some batches."""

    step: Callable[..., Tree]  # (task, down, carry, batch) -> carry
    batches: Batches
    enter: Callable[..., Tree] | None = None  # (task, down, carry) -> carry, before the first batch


class Program(NamedTuple):
    """What one client does in a round, as pure functions: it begins, goes through phases of steps, and finishes."""

    begin: Callable[..., Tree]  # (task, down, state) -> carry
    phases: tuple[Phase, ...]
    finish: Callable[..., tuple[dict[str, Tree], Tree]]  # (task, down, carry) -> (upload, state)


class Call(NamedTuple):
    """A program with its downloads: how ``personal`` names the model that is scored."""

    program: Program
    shared: Mapping[str, Tree] = {}
    per_client: Mapping[str, Tree] = {}


@dataclass(frozen=True)
class Order:
    """A program for some clients in a round."""

    program: Program
    clients: Rows  # ids
    shared: Mapping[str, Tree]  # downloads: the same for all,
    per_client: Mapping[str, Tree]  # and a row for each client
    round: int
    write: bool = False  # whether the states that come of it may be kept

    def select(self, positions: Rows) -> "Order":
        """The same for some of its clients."""
        index = torch.as_tensor(positions)
        own = tree_map(lambda v: v[index.to(v.device)], dict(self.per_client))
        return replace(self, clients=self.clients[positions], per_client=own)


class Result(NamedTuple):
    """Uploads and new states of the clients that finished, a row each, in the order of ``positions``."""

    positions: Rows  # into the job's clients, ascending
    uploads: dict[str, Tree]
    states: Tree
    failed: dict[int, BaseException]  # by client id
    computed: int = 0  # samples that went through the model, padding included
    useful: int = 0
    groups: Rows | None = None  # the row of the uploads that holds each client's, as part of a mean; None: its own
    traffic: tuple[int, int] | None = None  # bytes down and up, where they were measured


def plan_phases(
    program: Program, splits: Mapping[str, Any], clients: Rows, seed: int, round: int
) -> list[list[list[Rows]]]:
    """Per phase, per client, the list of batches; a stream goes on over the phases of a program."""
    plans, drawn = [], dict[str | None, int]()
    for phase in program.phases:
        b = phase.batches
        first = drawn.get(b.stream, 0)
        if b.shared and len(clients):
            plans.append([b.plan(splits[b.split][clients[0]], seed, round, int(clients[0]), first)] * len(clients))
        else:
            plans.append([b.plan(splits[b.split][i], seed, round, int(i), first) for i in clients])
        drawn[b.stream] = first + b.epochs_drawn()
    return plans
