"""What a program's answer looks like, found by running it once on made-up samples."""

from typing import Any

import numpy as np
import torch

from bespokefl.core.program import Order, Phase, Program
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree, repeat, rows, tree_map
from bespokefl.data.federated import FederatedData
from bespokefl.data.splits import SPLITS, Splits
from bespokefl.engines import Sequential
from bespokefl.engines.base import Job, Resident
from bespokefl.engines.variants import fingerprint
from bespokefl.errors import RunError
from bespokefl.flower.transport.codec import Form, leaves_by_name

SAMPLES = 2  # of a made-up client, in each of its splits: what normalises over a batch needs more than one


class Expectation:
    """Names, shapes and types of the uploads of programs: their first step on a made-up client gives them.

    The number of steps, and the values, have no influence on these.
    """

    def __init__(self, task: Task, initial_state: Tree, sample: FederatedData) -> None:
        self._task, self._state, self._data = task, initial_state, sample
        self._resident = Resident(sample.x, sample.y, torch.device("cpu"), task.dtype)
        self._known: dict[Any, Form] = {}

    def upload(self, order: Order) -> Form:
        """Of one client."""
        own = rows(dict(order.per_client), 0)
        shapes = {k: (v.shape, v.dtype) for k, v in leaves_by_name({**order.shared, **own}).items()}
        key = fingerprint(order.program).shape, tuple(sorted(shapes.items(), key=lambda item: item[0]))
        if key not in self._known:
            self._known[key] = self._found(order, own)
        return self._known[key]

    def _found(self, order: Order, own: dict[str, Tree]) -> Form:
        states = tree_map(lambda v: v[None], self._state)
        job = Job(
            self._task,
            self._resident,
            self._data.splits,
            shortened(order.program),
            np.array([0]),
            order.shared,
            repeat(own, 1),
            states,
            seed=0,
            round=order.round,
        )
        result = Sequential("cpu").run(job)
        for error in result.failed.values():
            raise RunError(f"a program fails on made-up samples: {type(error).__name__}: {error}") from error
        return Form.of(result.uploads)


def shortened(program: Program) -> Program:
    """The same with at most one batch a phase."""

    def one(phase: Phase) -> Phase:
        b = phase.batches
        steps = b.steps if b.steps is None else min(b.steps, 1)
        return phase._replace(batches=b._replace(epochs=min(b.epochs, 1), steps=steps, shared=False))

    return program._replace(phases=tuple(one(phase) for phase in program.phases))


def made_up(input_shape: tuple[int, ...], classes: tuple[str, ...], target: str, inputs: str) -> FederatedData:
    """A client of a few samples in every split: random ones, or the token 0 all over.

    ``target`` is labels, masks or numbers; ``inputs`` is numbers or tokens.
    """
    rng, rows = np.random.default_rng(0), SAMPLES * len(SPLITS)
    numbers = torch.as_tensor(rng.normal(size=(rows, *input_shape)), dtype=torch.float32)
    labels = torch.arange(rows) % max(1, len(classes))
    if target == "masks":
        labels = labels.to(torch.uint8)[:, None, None].expand(rows, *input_shape[1:]).contiguous()
    y = numbers.reshape(rows, -1)[:, 0] if target == "numbers" else labels
    splits: Splits = {split: (np.arange(k, rows, len(SPLITS)),) for k, split in enumerate(SPLITS)}
    if inputs == "tokens":
        x = torch.zeros(rows, *input_shape, dtype=torch.int64)
        return FederatedData(x, y, splits, classes, ("made up",), {}, inputs="tokens")
    return FederatedData(numbers, y, splits, classes, ("made up",), {})
