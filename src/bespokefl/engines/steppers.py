"""How the steps of a phase are run on a carry: operation by operation, or as one captured CUDA graph."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bespokefl.core.trees import nbytes
from bespokefl.engines.graphs import Graph
from bespokefl.engines.memory import card_bytes

CALLS_BEFORE_CAPTURE = 24  # capturing costs as much as some dozens of steps
SHARE_OF_ONE = 0.1  # of the memory that this process may take, at most, for what one captured graph keeps
SHARE_OF_ALL = 0.25  # and for what all keep together: cohorts of many sizes have a graph each


class Eager:
    """Every operation of the graph is launched in turn."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def load(self, carry: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        """What the next steps start from, and what stays the same in them; the carry is overwritten."""
        self.carry, self._constants = list(carry), constants

    def step(self, batch: Sequence[Tensor]) -> None:
        self.carry = self._graph([*self.carry, *self._constants, *batch])


class Captured:
    """All operations of the graph are one launch: what small stacks need, whose kernels are shorter than a launch.

    It works on memory of its own; ``carry`` is valid until the next ``load``.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], donated: int, pool: Any) -> None:
        self._inputs = [v.clone() for v in inputs]
        self.nbytes = nbytes(self._inputs)
        self._donated = donated
        self.carry = self._inputs[:donated]
        side = _side_stream(self._inputs[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside of the capture
            graph(list(self._inputs))
        torch.cuda.current_stream().wait_stream(side)
        self._replayed = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._replayed, pool=pool, stream=side, capture_error_mode="thread_local"):
            for mine, new in zip(self.carry, graph(list(self._inputs)), strict=True):
                if new.data_ptr() != mine.data_ptr():
                    mine.copy_(new)

    def load(self, carry: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        self._copy(0, [*carry, *constants])

    def step(self, batch: Sequence[Tensor]) -> None:
        self._copy(len(self._inputs) - len(batch), batch)
        self._replayed.replay()

    def _copy(self, first: int, values: Sequence[Tensor]) -> None:
        for mine, value in zip(self._inputs[first:], values, strict=False):
            mine.copy_(value)


class Steppers:
    """One engine's ways to run its graphs; captured ones share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._pool: Any = None
        self._captured: dict[Graph, Captured] = {}

    def of(self, graph: Graph, inputs: Sequence[Tensor], donated: int) -> Eager | Captured:
        """For inputs (carry, constants, batch) like the given ones; the first ``donated`` are the carry."""
        if graph in self._captured:
            return self._captured[graph]
        if not self._captures or graph.calls < CALLS_BEFORE_CAPTURE or not self._fits(inputs):
            return Eager(graph)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._captured[graph] = Captured(graph, inputs, donated, self._pool)
        return self._captured[graph]

    def release(self) -> bool:
        """Gives the memory of captured graphs back; whether there were any."""
        had, self._captured, self._pool = bool(self._captured), {}, None
        if had:
            torch.cuda.empty_cache()
        return had

    def _fits(self, inputs: Sequence[Tensor]) -> bool:
        own, kept = nbytes(inputs), sum(captured.nbytes for captured in self._captured.values())
        all_memory = card_bytes(inputs[0].device)
        return own <= SHARE_OF_ONE * all_memory and kept + own <= SHARE_OF_ALL * all_memory


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for good: libraries keep tens of megabytes of work space for every stream that they have met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
