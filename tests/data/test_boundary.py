"""The boundary of a federation, fuzzed: what is given ends in the number of a plain loop, or in an InputError.

Which of the two is decided here, by rules of this file's own; the loop is numpy in float64, and shares with the library
only which rows are in a batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bespokefl.algorithms import build_algorithm
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData
from bespokefl.engines import build_engine
from bespokefl.federation import Federation

LR, ROUNDS, SEED, TABLE = 0.3, 2, 4, 5
DTYPES = ("f8", "f4", "f2", "i8", "i4", "u1", "u2", "?", "c16", "O", "U1", "M8[s]")


@dataclass(frozen=True)
class Given:
    """One example: what somebody might hand over."""

    sizes: tuple[int, ...]  # samples of each client
    held: int  # of them, the test samples of each, where the splits are given; 0: split at random
    shape: tuple[int, ...]  # of a sample
    dtype: str
    inputs: str | None
    spoilt: str | None  # nan, inf, ragged, short: what is wrong with the last client
    labels: tuple[int, ...]  # dealt in turn
    y_dtype: str
    classes: int | None  # names that are given
    outputs: int
    model: str
    method: str
    batch_size: int | None
    data_seed: int


AXES = ("sizes", "shape", "dtype", "inputs", "spoilt", "labels", "y_dtype", "classes", "outputs")


@st.composite
def examples(draw: st.DrawFn) -> Given:
    """Sound in most axes, anything in at most two of them, so that both ends are met often."""
    odd = draw(st.sets(st.sampled_from(AXES), max_size=2))

    def one_of(axis: str, usual: list[Any], others: list[Any]) -> Any:
        return draw(st.sampled_from(usual + others if axis in odd else usual))

    model = draw(st.sampled_from(["linear", "linear", "table"]))
    whole = ["i8", "i4", "u1", "u2"] if model == "table" else ["f8", "f4", "f2", "?"]
    dtype = one_of("dtype", whole, list(DTYPES))
    labels = one_of("labels", [(0, 1), (1, 0, 2)], [(0,), (1,), (0, -1), (0, 10**9), (0, 7)])
    count = max(labels) + 1
    named = one_of("classes", [None, count] if 0 < count < 9 else [None], [1, 2, 3])
    return Given(
        sizes=tuple(draw(st.lists(st.integers(1 if "sizes" in odd else 4, 7), min_size=1, max_size=3))),
        held=draw(st.sampled_from([0, 0, 1, 2])),
        shape=one_of("shape", [(3,), (1,), (1, 2, 2), (2, 3)], [(0,), ()]),
        dtype=dtype,
        inputs=one_of("inputs", ["tokens", None] if model == "table" else [None], ["image", "numbers", "tokens"]),
        spoilt=one_of("spoilt", [None], ["nan", "inf", "ragged", "short"]),
        labels=labels,
        y_dtype=one_of("y_dtype", ["i8"], ["u1", "i2", "?", "f4"]) if abs(count) < 100 else "i8",
        classes=named,
        outputs=one_of("outputs", [3] if count > 2 else [1, 2, 3], [1, 2, 3]),
        model=model,
        method=draw(st.sampled_from(["fedavg", "local"])),
        batch_size=draw(st.sampled_from([None, 1, 3, 100])),
        data_seed=draw(st.integers(0, 3)),
    )


class Table(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids.flatten(1)).mean(1)
        return out


def arrays(it: Given) -> list[tuple[Any, Any]]:
    rng, pairs = np.random.default_rng(it.data_seed), []
    for client, n in enumerate(it.sizes):
        whole = rng.integers(0, TABLE + (it.data_seed == 0), (n, *it.shape))
        x = (whole + rng.normal(size=whole.shape)).astype(it.dtype) if it.dtype[0] in "fc" else whole.astype(it.dtype)
        y = np.resize(it.labels, n).astype(it.y_dtype)
        if client == len(it.sizes) - 1:
            if it.spoilt in ("nan", "inf") and x.size and it.dtype[0] == "f":
                x.reshape(-1)[-1] = float(it.spoilt)
            x = x[..., :-1] if it.spoilt == "ragged" and x.ndim > 1 else x
            y = y[:-1] if it.spoilt == "short" else y
        pairs.append((x, y))
    return pairs


def handed_over(it: Given) -> list[Any]:
    return [
        (x, y) if not it.held else {"test": (x[: it.held], y[: it.held]), "train": (x[it.held :], y[it.held :])}
        for x, y in arrays(it)
    ]


def as_inputs(it: Given, pairs: list[tuple[Any, Any]]) -> list[np.ndarray] | None:
    """What the model is to be given; None if that cannot be known, or is nothing for this model."""
    whole, table = it.dtype[0] in "iu", it.model == "table"
    if it.dtype[0] not in "fiu?":
        return None
    if it.inputs == "tokens" or (it.inputs is None and whole and table and (it.dtype, len(it.shape)) != ("u1", 3)):
        return [x.astype(np.int64) for x, _ in pairs] if whole and table else None
    if table or (it.inputs == "image" and it.dtype not in ("u1", "f8", "f4", "f2")):
        return None
    if it.inputs is None and whole and (it.dtype, len(it.shape)) != ("u1", 3):
        return None
    scale = 255 if it.dtype == "u1" and it.inputs != "numbers" else 1
    if it.dtype == "f8":
        return [x for x, _ in pairs]
    return [(x.astype(np.float32) / np.float32(scale)).astype(np.float64) for x, _ in pairs]


def sound(it: Given) -> bool:
    pairs = arrays(it)
    inputs, met = as_inputs(it, pairs), np.concatenate([y for _, y in pairs])
    if inputs is None or not it.shape or 0 in it.shape or it.y_dtype == "f4":
        return False
    if any(x.shape[1:] != it.shape for x in inputs) and (it.model == "linear" or len(inputs) > 1):
        return False
    if any(0 in x.shape or len(x) != len(y) for x, (_, y) in zip(inputs, pairs, strict=True)):
        return False
    if not all(np.isfinite(x).all() for x in inputs) or min(it.sizes) < max(2, it.held + 1):
        return False
    if it.model == "table" and any(x.max() >= TABLE for x in inputs):
        return False
    classes = it.classes or int(met.max()) + 1
    if met.min() < 0 or met.max() >= classes or (classes, it.outputs) == (1, 1):
        return False
    return classes <= max(2, it.outputs)


def run(it: Given, engine: str) -> tuple[Federation, nn.Module]:
    names = None if it.classes is None else [f"class {k}" for k in range(it.classes)]
    data = FederatedData.from_arrays(handed_over(it), seed=SEED, classes=names, inputs=it.inputs)  # type: ignore[arg-type]
    features = int(np.prod(it.shape))
    torch.manual_seed(1)
    module = Table(it.outputs) if it.model == "table" else nn.Sequential(nn.Flatten(), nn.Linear(features, it.outputs))
    own = {"personal": "global"} if it.method == "fedavg" else {}
    algorithm = build_algorithm(it.method, {"lr": LR, "local_epochs": 2, "batch_size": it.batch_size}, own)
    task = Task(module, dtype=torch.float64)
    federation = Federation(task, data, algorithm, engine=build_engine(engine, "cpu"), seed=SEED)
    federation.run(ROUNDS, evaluate_every=0)
    return federation, module


def by_hand(it: Given, federation: Federation, module: nn.Module) -> list[np.ndarray]:
    """Each client's weights, (outputs, features and one), or (outputs, rows of the table)."""
    data, inputs = federation.data, as_inputs(it, arrays(it))
    assert inputs is not None
    if it.model == "table":
        x = np.concatenate([np.eye(TABLE)[rows.reshape(len(rows), -1)].mean(1) for rows in inputs])
        start = module.table.weight.detach().double().numpy().T  # type: ignore[union-attr, operator]
    else:
        flat = np.concatenate([rows.reshape(len(rows), -1) for rows in inputs])
        x = np.hstack([flat, np.ones((len(flat), 1))])
        start = np.hstack([p.detach().double().numpy().reshape(it.outputs, -1) for p in module.parameters()])
    if it.held:  # the test samples of a client came first in its mapping
        order = [r for c in range(data.clients) for split in ("test", "train") for r in data.splits[split][c]]
        place = np.empty(len(x), dtype=int)
        place[np.array(order)] = np.arange(len(x))
        x = x[place]
    y = np.concatenate([y for _, y in arrays(it)]).astype(int)
    y = y[place] if it.held else y
    np.testing.assert_array_equal(data.y.numpy(), y)
    w = [start] * data.clients
    for t in range(ROUNDS):
        for c, rows in enumerate(data.splits["train"]):
            for batch in federation.algorithm.epochs.plan(rows, SEED, t, c, 0):
                w[c] = w[c] - LR * gradient(w[c], x[batch], y[batch])
        if it.method == "fedavg":
            share = data.sizes("train") / data.sizes("train").sum()
            w = [sum(p * own for p, own in zip(share, w, strict=True))] * data.clients  # type: ignore[list-item]
    for c, rows in enumerate(data.splits["test"]):
        answers = probabilities(x[rows] @ w[c].T).argmax(1)
        assert federation.evaluate().accuracy[c] == (answers == y[rows]).mean()
    return w


def probabilities(z: np.ndarray) -> np.ndarray:
    """By class; one output is a sigmoid."""
    if z.shape[1] == 1:
        p = 1 / (1 + np.exp(-z))
        return np.hstack([1 - p, p])
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = probabilities(x @ w.T)
    residual = p - np.eye(p.shape[1])[y]
    return (residual[:, -1:] if len(w) == 1 else residual).T @ x / len(x)


def check(it: Given, engine: str) -> None:
    if not sound(it):
        with pytest.raises(InputError):
            run(it, engine)
        return
    federation, module = run(it, engine)
    for wanted, found in zip(by_hand(it, federation, module), rows_of(federation), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


def rows_of(federation: Federation) -> list[np.ndarray]:
    found = []
    for client in range(federation.data.clients):
        model = federation.client_model(client)
        parts = [v.numpy().T if k.startswith("table") else v.numpy().reshape(len(v), -1) for k, v in model.items()]
        found.append(np.hstack(parts))
    return found


def relaxed(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed(120)
@given(examples())
def test_in_sequence(it: Given) -> None:
    check(it, "sequential")


@relaxed(12)
@given(examples())
def test_vectorized(it: Given) -> None:
    check(it, "vectorized")


@pytest.mark.slow
@relaxed(4000)
@given(examples())
def test_many_in_sequence(it: Given) -> None:
    check(it, "sequential")


@pytest.mark.slow
@relaxed(300)
@given(examples())
def test_many_vectorized(it: Given) -> None:
    check(it, "vectorized")
