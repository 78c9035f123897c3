"""The clients' answers as they come in, in one stacked tree."""

import threading

import numpy as np
import torch

from bespokefl.core import trees
from bespokefl.core.program import Result, Rows
from bespokefl.core.trees import Tree


class Collector:
    """Lanes write their clients' rows side by side; memory for all is allocated when the first comes."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self._whole: Tree = None
        self._answered = np.zeros(clients, bool)
        self._failed: dict[int, BaseException] = {}
        self._computed = 0

    def add(self, rows: Rows, result: Result) -> None:
        """The result of a part of the job; ``rows`` are its clients' places in the job."""
        places = rows[result.positions]
        with self._lock:
            self._computed += result.computed
            self._failed |= result.failed
            self._answered[places] = True
            if len(places) == self._clients and (np.diff(places) > 0).all():  # the whole job at once: nothing to copy
                self._whole = (result.uploads, result.states)
                return
            if self._whole is None and len(places):
                empty = lambda v: v.new_empty(self._clients, *v.shape[1:])  # noqa: E731
                self._whole = trees.tree_map(empty, (result.uploads, result.states))
        if len(places):
            index = torch.as_tensor(places)
            answer = (result.uploads, result.states)
            trees.tree_map(lambda whole, v: whole.index_copy_(0, index.to(v.device), v), self._whole, answer)

    def result(self, useful: int) -> Result:
        """All answers in the job's order, those of failed clients left out."""
        positions = np.flatnonzero(self._answered)
        uploads, states = self._whole if self._whole is not None else ({}, {})
        if len(positions) and len(positions) < self._clients:
            uploads, states = trees.rows((uploads, states), torch.as_tensor(positions))
        return Result(positions, uploads, states, self._failed, self._computed, useful)
