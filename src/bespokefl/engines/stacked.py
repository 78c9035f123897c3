"""A group of clients at once: parameters stacked on a leading axis, ``vmap`` over the program's functions.

Clients are sorted by their number of steps. The carry of a finished one is put aside at once; its row leaves the stack
when the next smaller size is reached, and what is computed on it until then is thrown away (a zeroed learning rate
would not do: momentum still moves).
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from bespokefl.core import trees
from bespokefl.core.program import Batches, Phase, Rows
from bespokefl.core.task import Batch
from bespokefl.core.trees import Tree
from bespokefl.engines.base import Job, Plans, as_tensors
from bespokefl.engines.buckets import padded_length, stack_width
from bespokefl.engines.graphs import GraphCache, default_device
from bespokefl.engines.steppers import Captured, Eager, Steppers
from bespokefl.nn.stand_ins import stacked_clients

OUTSIDE_OF_STEPS = (None, 0, 0, 0)  # which arguments of `begin`, `enter` and `finish` have a client axis
CALLS_BEFORE_TRACING = 16  # of a function that is called once a round: a trace costs as much as some twenty calls


class Stack:
    """Runs one job with all its clients stacked."""

    def __init__(
        self,
        job: Job,
        cache: GraphCache,
        device: torch.device,
        compiles: Callable[[Phase], bool],
        steppers: Steppers,
    ) -> None:
        self.job, self.cache, self.device, self.compiles, self.steppers = job, cache, device, compiles, steppers
        self.shared = dict(job.shared)
        self.computed = 0

    def run(self, plans: Plans) -> tuple[dict[str, Tree], Tree, int]:
        """Stacked uploads, stacked states and computed samples; ``plans`` per phase and client."""
        program = self.job.program
        carry = self._call(program.begin, self.job.states)
        for f, (phase, plan) in enumerate(zip(program.phases, plans, strict=True)):
            if phase.enter is not None:
                carry = self._call(phase.enter, carry)
            carry = self._phase(f, phase, plan, carry)
        upload, state = self._call(program.finish, carry)
        return upload, state, self.computed

    def bytes_per_client(self, plans: Plans) -> int:
        """Peak memory of what one client computes at once, from a stack of one."""
        program = self.job.program
        peak, carry = self._measured(program.begin, self.job.states)
        for phase, plan in zip(program.phases, plans, strict=True):
            if phase.enter is not None:
                entering, carry = self._measured(phase.enter, carry)
                peak = max(peak, entering)
            if plan[0]:
                batches = _Padded(self, plan, phase.batches, self.job.keys(np.zeros(1, np.int64), 0, len(plan[0])))
                args = (carry, self.shared, dict(self.job.per_client), batches.at(0, 1))
                name = ("stacked", self.job.task, phase.step, batches.padded, batches.shared)
                peak = max(peak, self.cache.get(name, self._step_of(phase, batches), args, carry=True).peak_bytes)
        finishing, _ = self._measured(program.finish, carry)
        return max(peak, finishing)

    def _measured(self, fn: Any, tree: Tree) -> tuple[int, Tree]:
        """Peak memory of a function outside of the steps, and its result."""
        name, one, args = self._outside_of_steps(fn, tree)
        graph = self.cache.get(name, _stacked(one, OUTSIDE_OF_STEPS), args)
        result = graph.tree(graph(pytree.tree_leaves(args)))
        return max(graph.peak_bytes, 2 * trees.nbytes(result)), result

    def _call(self, fn: Any, tree: Tree) -> Tree:
        name, one, args = self._outside_of_steps(fn, tree)
        if self.cache.is_new(name, args, CALLS_BEFORE_TRACING):
            # Once a round for each shape of a group: tracing pays only where shapes come again and again.
            # Whatever goes wrong, tracing tells it better.
            with self.cache.module_lock, default_device(self.device), contextlib.suppress(Exception):
                return _stacked(one, OUTSIDE_OF_STEPS, randomness="error")(*args)
        graph = self.cache.get(name, _stacked(one, OUTSIDE_OF_STEPS), args)
        return graph.tree(graph(pytree.tree_leaves(args)))

    def _outside_of_steps(self, fn: Any, tree: Tree) -> tuple[Any, Callable[..., Tree], tuple[Tree, ...]]:
        """A program's ``begin``, ``enter`` or ``finish``: its name, itself for one client, and all its arguments."""
        clients = torch.arange(len(self.job.clients))  # vmap needs one mapped tensor even if all else is shared

        def one(shared: Tree, own: Tree, value: Tree, _: Tensor) -> Tree:
            return self._tensors(fn(self.job.task, _down(shared, own), value))

        return ("stacked", self.job.task, fn), one, (self.shared, dict(self.job.per_client), tree, clients)

    def _phase(self, f: int, phase: Phase, plan: list[list[Rows]], carry: Tree) -> Tree:
        steps = np.array([len(batches) for batches in plan])
        if not steps.any():
            return carry
        order = np.argsort(-steps, kind="stable")
        in_order = bool((np.diff(order) > 0).all())
        index = torch.as_tensor(order, device=self.device)
        steps, plan = steps[order], [plan[r] for r in order]
        keys = self.job.keys(order, f, int(steps[0]))
        batches = _Padded(self, plan, phase.batches, keys)
        flat, spec = pytree.tree_flatten(trees.rows(carry, index))  # indexing copies: steps may overwrite it
        mine: Tree = dict(self.job.per_client)  # of others' models, say: no copy without need
        mine = trees.tree_map(Tensor.contiguous, mine) if in_order else trees.rows(mine, index)
        own, own_spec = pytree.tree_flatten(mine)
        shared = pytree.tree_leaves(self.shared)
        done: list[list[Tensor]] = []  # carries of finished clients, the first to finish first
        active, width = len(plan), 0
        stepper: Eager | Captured | None = None
        for k in range(int(steps[0])):
            still = int((steps > k).sum())
            smaller = stack_width(still, len(plan))
            if still < active:
                # Their rows are computed on or overwritten: what they hold now must be saved.
                done.append([v[still:active].clone() for v in flat])
                active = still
            batch = batches.at(k, smaller)
            if stepper is None or smaller < width:
                flat, own, width = [v[:smaller] for v in flat], [v[:smaller] for v in own], smaller
                graph = self.cache.get(
                    ("stacked", self.job.task, phase.step, batches.padded, batches.shared),
                    self._step_of(phase, batches),
                    (pytree.tree_unflatten(flat, spec), self.shared, pytree.tree_unflatten(own, own_spec), batch),
                    carry=True,
                    compiled=self.compiles(phase),
                )
                stepper = self.steppers.of(graph, [*flat, *shared, *own, *batch], len(flat))
                stepper.load(flat, [*shared, *own])
            stepper.step(batch)
            flat = stepper.carry
            self.computed += width * batches.length
        parts = zip([v[:active] for v in flat], *reversed(done), strict=True)
        flat = [torch.cat(rows) for rows in parts]  # a copy in any case: a stepper may overwrite its carry
        result = pytree.tree_unflatten(flat, spec)
        return result if in_order else trees.rows(result, torch.argsort(index))

    def _step_of(self, phase: Phase, batches: "_Padded") -> Any:
        padded = batches.padded

        def one(carry: Tree, shared: Tree, own: Tree, batch: tuple[Tensor, ...]) -> Tree:
            x, y, key, *weights = batch
            step = phase.step(
                self.job.task, _down(shared, own), carry, Batch(x, y, weights[0] if padded else None, key)
            )
            return self._tensors(step)

        return _stacked(one, (0, None, 0, batches.in_dims))

    def _tensors(self, tree: Tree) -> Tree:
        return as_tensors(tree, self.job.task.dtype, self.device)


class _Padded:
    """The batches of one phase as index arrays of one shape, on the device.

    Where all clients meet the same rows, these are kept and gathered once, without a client axis.
    """

    def __init__(self, stack: Stack, plan: list[list[Rows]], wanted: Batches, keys: Rows) -> None:
        self._data, self.shared = stack.job.data, wanted.shared
        plan = plan[:1] if self.shared else plan
        steps, clients = len(keys), len(plan)
        self.length = padded_length(max(len(b) for batches in plan for b in batches), wanted.size)
        index = np.empty((steps, clients, self.length), np.int64)
        weights = np.zeros((steps, clients, self.length), bool)
        for r, batches in enumerate(plan):
            # A client's padding repeats its own sample: one with broken data harms no other.
            index[:, r] = batches[0][0] if batches else 0
            for k, rows in enumerate(batches):
                index[k, r, : len(rows)] = rows
                weights[k, r, : len(rows)] = True
        self.padded = not weights.all()
        device = stack.device
        self._index = torch.as_tensor(index).to(device)
        self._weights = torch.as_tensor(weights).to(device).to(stack.job.task.dtype) if self.padded else None
        self._keys = torch.as_tensor(keys).to(device)

    @property
    def in_dims(self) -> tuple[int | None, ...]:
        """Which parts of a batch have a client axis."""
        rows = None if self.shared else 0
        return (rows, rows, 0, rows) if self.padded else (rows, rows, 0)

    def at(self, k: int, width: int) -> tuple[Tensor, ...]:
        """Inputs, targets, keys, and weights where there is padding, of the first ``width`` clients."""
        mine = 0 if self.shared else slice(width)
        parts = (*self._data.gather(self._index[k, mine]), self._keys[k, :width])
        return parts if self._weights is None else (*parts, self._weights[k, mine])


def _stacked(fn: Callable[..., Tree], in_dims: tuple[Any, ...], randomness: str = "different") -> Callable[..., Tree]:
    """``fn`` over the client axis. Random operations may pass: the graph refuses them with a better text."""
    mapped = vmap(fn, in_dims=in_dims, randomness=randomness)

    def over_clients(*args: Tree) -> Tree:
        with stacked_clients():
            return mapped(*args)

    return over_clients


def _down(shared: dict[str, Tree], own: dict[str, Tree]) -> SimpleNamespace:
    return SimpleNamespace(**shared, **own)
