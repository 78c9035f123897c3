"""One client at a time through traced graphs: several such lanes run side by side in threads.

For models whose operations are large enough to fill a core (convolutions): stacking would only move more memory.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bespokefl.core import trees
from bespokefl.core.program import Rows
from bespokefl.core.task import Batch
from bespokefl.core.trees import Tree
from bespokefl.engines.base import Job, as_tensors
from bespokefl.engines.buckets import padded_length
from bespokefl.engines.graphs import GraphCache


def run_client(
    job: Job, r: int, plans: list[list[Rows]], cache: GraphCache, device: torch.device
) -> tuple[dict[str, Tree], Tree, int]:
    """Upload, state and computed samples of the job's client in row ``r``."""
    return _Client(job, r, cache, device).run(plans)


class _Client:
    def __init__(self, job: Job, r: int, cache: GraphCache, device: torch.device) -> None:
        self.job, self.r, self.cache, self.device = job, r, cache, device
        self.shared = dict(job.shared)
        self.own = trees.rows(dict(job.per_client), r)
        self.computed = 0

    def run(self, plans: list[list[Rows]]) -> tuple[dict[str, Tree], Tree, int]:
        program = self.job.program
        carry = self._call(program.begin, trees.rows(self.job.states, self.r))
        for f, (phase, batches) in enumerate(zip(program.phases, plans, strict=True)):
            if phase.enter is not None:
                carry = self._call(phase.enter, carry)
            carry = self._steps(f, phase.step, phase.batches.size, carry, batches)
        upload, state = self._call(program.finish, carry)
        return upload, state, self.computed

    def _call(self, fn: Any, tree: Tree) -> Tree:
        args = (self.shared, self.own, tree)
        graph = self.cache.get(
            ("solo", self.job.task, fn),
            lambda shared, own, value: self._tensors(fn(self.job.task, _down(shared, own), value)),
            args,
        )
        return graph.tree(graph(pytree.tree_leaves(args)))

    def _steps(self, phase: int, step: Any, size: int | None, carry: Tree, batches: list[Rows]) -> Tree:
        if not batches:
            return carry
        flat, spec = pytree.tree_flatten(carry)
        flat = [_private(v) for v in flat]
        constants = pytree.tree_leaves((self.shared, self.own))
        keys = torch.as_tensor(self.job.keys(np.array([self.r]), phase, len(batches)), device=self.device)
        graphs: dict[int, Any] = {}
        for k, rows in enumerate(batches):
            batch = self._batch(rows, size, keys[k, 0])
            if len(rows) not in graphs:
                args = (pytree.tree_unflatten(flat, spec), self.shared, self.own, batch)
                graphs[len(rows)] = self.cache.get(("solo", self.job.task, step), self._step_of(step), args, carry=True)
            flat = graphs[len(rows)]([*flat, *constants, *batch])
        return pytree.tree_unflatten(flat, spec)

    def _step_of(self, step: Any) -> Any:
        def one(carry: Tree, shared: Tree, own: Tree, batch: tuple[Tensor, ...]) -> Tree:
            x, y, key, *weights = batch
            return self._tensors(
                step(self.job.task, _down(shared, own), carry, Batch(x, y, weights[0] if weights else None, key))
            )

        return one

    def _batch(self, rows: Rows, size: int | None, key: Tensor) -> tuple[Tensor, ...]:
        """Inputs, targets, key, and weights where the batch is padded."""
        n, length = len(rows), padded_length(len(rows), size)
        self.computed += length
        index = torch.as_tensor(rows, device=self.device)
        if n == length:
            return *self.job.data.gather(index), key
        padded = torch.cat([index, index[:1].expand(length - n)])
        weights = torch.zeros(length, dtype=self.job.task.dtype, device=self.device)
        weights[:n] = 1
        return *self.job.data.gather(padded), key, weights

    def _tensors(self, tree: Tree) -> Tree:
        return as_tensors(tree, self.job.task.dtype, self.device)


def _down(shared: dict[str, Tree], own: dict[str, Tree]) -> SimpleNamespace:
    return SimpleNamespace(**shared, **own)


def _private(v: Tensor) -> Tensor:
    """A copy that steps may overwrite; kernels of convolutions in the layout that is fastest on a CPU."""
    return v.clone(memory_format=torch.channels_last if v.ndim == 4 else torch.contiguous_format)
