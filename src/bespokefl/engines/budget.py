"""How many clients of a program fit into memory at once."""

from typing import Any

import numpy as np
import torch

from bespokefl.core import trees
from bespokefl.core.program import Rows
from bespokefl.engines.base import Job, Plans
from bespokefl.engines.graphs import GraphCache
from bespokefl.engines.memory import free_bytes
from bespokefl.engines.stacked import Stack
from bespokefl.engines.steppers import Steppers

SHARE_OF_FREE_MEMORY = 0.5
# Bounds that no common network exceeds: a cohort within them fits without a closer look.
MODEL_COPIES, INPUT_COPIES = 16, 1000


class Budget:
    """Chunk sizes from the device's free memory, looked at once.

    ``used_limit`` is that memory if it ever cut a cohort (then a resumed run must cut it alike), else None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used_limit: int | None = None
        self._limit: int | None = None
        self._client_bytes: dict[Any, int] = {}

    def load_state(self, limit: int | None) -> None:
        if limit is not None:
            self._limit = self.used_limit = int(limit)

    def clients(self, job: Job, plans: Plans, lanes: int, cache: GraphCache) -> int:
        """The most clients of one stack when ``lanes`` of them run side by side."""
        n = len(job.clients)
        if n <= lanes:
            return max(1, n)
        if self._limit is None:
            self._limit = int(free_bytes(self.device) * SHARE_OF_FREE_MEMORY)
        if n * self._bound(job, plans) < self._limit:
            return n
        fitting = max(1, self._limit // max(1, self._measured(job, plans, cache)) // lanes)
        if fitting >= n:
            return n
        self.used_limit = self._limit
        return 1 << (fitting.bit_length() - 1)  # a power of two: few shapes, whatever is free

    def _bound(self, job: Job, plans: Plans) -> int:
        sample = job.data.gather(torch.zeros(1, dtype=torch.int64, device=self.device))[0]
        longest = max((_longest(batches) for plan in plans for batches in plan), default=0)
        model = trees.nbytes((job.task.initial, trees.rows((dict(job.per_client), job.states), 0)))
        return MODEL_COPIES * model + INPUT_COPIES * longest * trees.nbytes(sample)

    def _measured(self, job: Job, plans: Plans, cache: GraphCache) -> int:
        """Peak bytes of one client's largest step, traced with the client that has most to do."""
        batch = tuple(
            phase.batches.size or max(map(_longest, plan), default=0)
            for phase, plan in zip(job.program.phases, plans, strict=True)
        )
        downloads = trees.nbytes(dict(job.shared)), trees.nbytes(trees.rows(dict(job.per_client), 0))
        key = (job.task, job.program, downloads, batch)
        if key not in self._client_bytes:
            busiest = int(np.argmax([sum(len(plan[r]) for plan in plans) for r in range(len(job.clients))]))
            one = job.select(np.array([busiest]))
            stack = Stack(one, cache, self.device, lambda phase: False, Steppers(self.device))
            try:
                self._client_bytes[key] = stack.bytes_per_client([[plan[busiest]] for plan in plans])
            except Exception:  # what cannot be traced is met again, and handled, when it runs
                return 1
        return self._client_bytes[key]


def _longest(batches: list[Rows]) -> int:
    return max((len(b) for b in batches), default=0)
