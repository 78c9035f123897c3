"""What every engine takes and gives back, and the numerical setting it runs in."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.program import Program, Result, Rows, plan_phases
from bespokefl.core.rng import step_keys
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree, tree_map

Splits = Mapping[str, Sequence[Rows]]
Plans = list[list[list[Rows]]]  # the batches of each client in each phase


class Resident:
    """The federation's samples on the engine's device, gathered by row index."""

    def __init__(self, x: Tensor, y: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        x = x.to(device=device, dtype=dtype) if x.is_floating_point() else x.to(device)
        self.is_image = x.ndim == 4 and x.is_floating_point()
        # Images are kept channels last: convolutions are faster so, and a gathered batch comes out that way.
        self._x = x.permute(0, 2, 3, 1).contiguous() if self.is_image else x
        y = y.to(device)
        self._y = y.to(dtype) if y.is_floating_point() else y  # masks stay uint8: an eighth of the memory

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two of them must have in common to be joined."""
        return self._x.shape[1:], self._x.dtype, self._y.shape[1:], self._y.dtype

    @classmethod
    def joined(cls, parts: Sequence["Resident"]) -> tuple["Resident", tuple[int, ...]]:
        """The samples of several, equal ones once, and where those of each begin."""
        kept: list[Resident] = []
        starts: list[int] = []
        for part in parts:
            twin = next((k for k, one in enumerate(kept) if part is one or part._equals(one)), len(kept))
            if twin == len(kept):
                kept.append(part)
            starts.append(sum(len(one._y) for one in kept[:twin]))
        if len(kept) == 1:
            return kept[0], tuple(starts)
        whole = cls.__new__(cls)
        whole.is_image = kept[0].is_image
        whole._x, whole._y = torch.cat([one._x for one in kept]), torch.cat([one._y for one in kept])
        return whole, tuple(starts)

    def _equals(self, other: "Resident") -> bool:
        return torch.equal(self._y, other._y) and torch.equal(self._x, other._x)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the given rows; any leading shape (a batch, or one per client)."""
        x = self._x.index_select(0, rows.flatten())  # copies whole rows, which x[rows] does not
        x = x.view(*rows.shape, *x.shape[1:])
        y = self._y[rows]
        return (x.movedim(-1, -3) if self.is_image else x), y.long() if y.dtype == torch.uint8 else y


@dataclass(frozen=True)
class Job:
    """A program to run on some clients."""

    task: Task
    data: Resident
    splits: Splits
    program: Program
    clients: Rows  # ids
    shared: Mapping[str, Tree]  # the same for all
    per_client: Mapping[str, Tree]  # a row per client
    states: Tree  # a row per client
    seed: int
    round: int
    fails_whole: bool = False  # an error is for who gave the job; else the engine looks for the clients it comes from

    def select(self, positions: Rows) -> "Job":
        """The same job for some of its clients."""
        index = torch.as_tensor(positions)
        take = lambda v: v[index.to(v.device)]  # noqa: E731
        return replace(
            self,
            clients=self.clients[positions],
            per_client=tree_map(take, dict(self.per_client)),
            states=tree_map(take, self.states),
        )

    def plans(self) -> Plans:
        """The batches of each client in each phase, as rows of the data."""
        return plan_phases(self.program, self.splits, self.clients, self.seed, self.round)

    def keys(self, positions: Rows, phase: int, steps: int) -> Rows:
        """A key for each of the steps of some clients: their randomness inside a step."""
        return step_keys(self.seed, self.round, self.clients[positions], phase, steps)


class Engine(Protocol):
    name: str
    device: torch.device

    def run(self, job: Job) -> Result: ...

    def plan(self) -> dict[str, Any]:
        """The decisions that could depend on the machine's state, to be kept with a checkpoint."""

    def load_state(self, plan: Mapping[str, Any]) -> None:
        """Takes over decisions of an earlier process, so that a resumed run computes the same bits."""

    def release(self) -> None:
        """Gives memory back that it keeps only to be quicker; for when a run is over and others want the device."""


def as_tensors(tree: Tree, dtype: torch.dtype, device: torch.device) -> Tree:
    """Numbers that a program returned become tensors."""
    return tree_map(lambda v: v if isinstance(v, Tensor) else torch.tensor(v, dtype=dtype, device=device), tree)


def total_samples(plans: Plans) -> int:
    return sum(len(batch) for phase in plans for client in phase for batch in client)


@contextlib.contextmanager
def numerics(dtype: torch.dtype, device: torch.device, *, tf32: bool, threads: int | None = None) -> Iterator[None]:
    """Default type, TF32 and CPU threads for the length of a run; everything is put back afterwards.

    Programs may then write ``torch.zeros(())`` and get the type of the task. (Its device is set only where a program's
    Python runs, for ``torch.device`` as a context costs time on every operation.)
    """
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    torch.set_default_dtype(dtype)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        if threads is not None:
            torch.set_num_threads(before[1])
        if device.type == "cuda":
            torch.set_float32_matmul_precision(before[2])
            torch.backends.cudnn.allow_tf32 = cudnn_tf32


def no_clients(n: int = 0) -> Rows:
    return np.arange(n, dtype=np.int64)
