"""A federation of two small clients, and the same network in numpy: what hand-sized examples are worked out on.

The numpy side shares nothing with the library. It takes over only which rows a client's batches hold (`batches`), so
that training in shuffled mini-batches can be followed.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bespokefl.algorithms import Algorithm
from bespokefl.core import Program, Task
from bespokefl.core.program import plan_phases
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Engine
from bespokefl.federation import Federation

Array = NDArray[np.float64]
Weights = dict[str, Array]  # by the names of the module below
CLASSES = 3
SIZES = (7, 4)


class TanhNet(nn.Module):
    """out = W2 tanh(W1 x + b1) + b2, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


class Quadratic(nn.Module):
    """f(x) = (x - c)' A (x - c) / 2 in two dimensions, a row of data being (A, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        A, d = rows[:, :4].reshape(-1, 2, 2), self.x - rows[:, 4:]
        return torch.einsum("bi,bij,bj->b", d, A, d) / 2


def the_output(out: Tensor, y: Tensor) -> Tensor:
    return out


BODY, HEAD = ("body.weight", "body.bias"), ("head.weight", "head.bias")


def start() -> Weights:
    """The common initial model."""
    rng = np.random.default_rng(7)
    shapes = {"body.weight": (3, 2), "body.bias": (3,), "head.weight": (CLASSES, 3), "head.bias": (CLASSES,)}
    return {k: rng.normal(scale=0.5, size=shape) for k, shape in shapes.items()}


def samples() -> list[tuple[Array, NDArray[np.int64]]]:
    """The train samples of each client; labels are skewed, and client 1 has none of class 2."""
    rng = np.random.default_rng(3)
    labels = ([0, 1, 2, 2, 0, 2, 1], [1, 0, 1, 1])
    return [(rng.normal(size=(n, 2)) + i, np.array(labels[i])) for i, n in enumerate(SIZES)]


def federate(algorithm: Algorithm, engine: Engine | str = "sequential", **options: Any) -> Federation:
    """Both clients in every round, unless ``schedule`` says otherwise; the test split is the train split."""
    clients = [{"train": xy, "val": xy, "test": xy} for xy in samples()]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    initial = {k: torch.tensor(v) for k, v in start().items()}
    options = {"initial": initial, "seed": 11} | options
    return Federation(Task(TanhNet(), dtype=torch.float64), data, algorithm, engine=engine, **options)


def batches(federation: Federation, program: Program, client: int, round: int) -> list[list[NDArray[np.int64]]]:
    """Per phase of the program, the rows (into the client's train samples) of its batches."""
    splits = federation.data.splits
    plans = plan_phases(program, splits, np.array([client]), federation.seed, round)
    first = [int(splits[phase.batches.split][client][0]) for phase in program.phases]
    return [[rows - start for rows in plan[0]] for plan, start in zip(plans, first, strict=True)]


# the network in numpy ---------------------------------------------------------------------------------


def forward(w: Weights, x: Array) -> tuple[Array, Array]:
    """Logits and the head's input."""
    h = np.tanh(x @ w["body.weight"].T + w["body.bias"])
    return h @ w["head.weight"].T + w["head.bias"], h


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def loss(w: Weights, x: Array, y: NDArray[np.int64]) -> float:
    return float(-np.log(softmax(forward(w, x)[0])[np.arange(len(y)), y]).mean())


def gradient(w: Weights, x: Array, y: NDArray[np.int64]) -> Weights:
    """Of the mean cross-entropy, by hand."""
    logits, h = forward(w, x)
    return backward(w, x, h, (softmax(logits) - np.eye(CLASSES)[y]) / len(y))


def backward(w: Weights, x: Array, h: Array, d_logits: Array) -> Weights:
    """What a derivative by the logits (one row per sample) gives for all weights."""
    d_h = (d_logits @ w["head.weight"]) * (1 - h**2)
    return {
        "body.weight": d_h.T @ x,
        "body.bias": d_h.sum(0),
        "head.weight": d_logits.T @ h,
        "head.bias": d_logits.sum(0),
    }


def sgd(w: Weights, g: Weights, m: Weights, lr: float, momentum: float = 0.0) -> tuple[Weights, Weights]:
    """One step on the names in g; an empty m is a fresh optimiser."""
    m = {**m, **{k: momentum * m.get(k, np.zeros_like(v)) + v for k, v in g.items()}}
    return {**w, **{k: w[k] - lr * m[k] for k in g}}, m


def flat(w: Weights) -> Array:
    return np.concatenate([v.ravel() for v in w.values()])


def average(models: list[Weights], p: Any) -> Weights:
    return {k: np.asarray(sum(p[i] * w[k] for i, w in enumerate(models))) for k in models[0]}


def assert_models(ours: dict[str, Tensor], wanted: Weights, tolerance: float = 1e-12) -> None:
    assert set(ours) == set(wanted)
    for k, v in wanted.items():
        np.testing.assert_allclose(ours[k].numpy(), v, rtol=tolerance, atol=tolerance, err_msg=k)
