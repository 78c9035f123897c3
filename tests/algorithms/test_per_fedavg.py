"""Per-FedAvg: two clients by hand, its batches, and its Hessian on a quadratic."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms.per_fedavg import PerFedAvg, shared_out
from bespokefl.core import Batch, InputError, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

# Momentum is given to show that it has no part in this method.
TRAINING: dict[str, Any] = {"lr": 0.1, "local_epochs": 2, "batch_size": 2}
ALPHA, DELTA = 0.3, 0.01
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def meta_step(w: small.Weights, x: small.Array, y: Any, variant: str) -> small.Weights:
    parts = 3 if variant == "hf" else 2
    rows = np.resize(np.arange(len(y)), max(parts, len(y)))  # fewer samples than batches: over again
    first, second, third = rows[0::parts], rows[1::parts], rows[2::parts]
    g = small.gradient(w, x[first], y[first])
    g = small.gradient({k: w[k] - ALPHA * g[k] for k in w}, x[second], y[second])
    step = g
    if variant == "hf":
        ahead, behind = (small.gradient({k: w[k] + s * g[k] for k in w}, x[third], y[third]) for s in (DELTA, -DELTA))
        step = {k: g[k] - ALPHA * (ahead[k] - behind[k]) / (2 * DELTA) for k in w}
    return {k: w[k] - 0.1 * (step[k] + 0.05 * w[k]) for k in w}


@both_engines
@pytest.mark.parametrize(
    ("variant", "sizes", "adapt_by", "size", "weights", "n"),
    [
        ("hf", ([6, 1], [4]), "alpha", ALPHA, "uniform", (1, 1)),
        ("fo", ([4, 3], [4]), "beta", 0.1, "sample", (7, 4)),
    ],
)
def test_by_hand(
    engine: type, variant: Any, sizes: Any, adapt_by: Any, size: float, weights: Any, n: tuple[int, int]
) -> None:
    algorithm = PerFedAvg(
        **TRAINING,
        weight_decay=0.05,
        alpha=ALPHA,
        variant=variant,
        adapt_by=adapt_by,
        weights=weights,
        **({"delta": DELTA} if variant == "hf" else {}),
    )
    schedule = [[1], [0, 1]]
    federation = small.federate(algorithm, engine(), schedule=schedule)
    w = small.start()
    for t, online in enumerate(schedule):
        federation.round()
        models = []
        for i in online:
            (x, y), v = small.samples()[i], w
            (batches,) = small.batches(federation, algorithm.train, i, t)
            assert [len(r) for r in batches] == sizes[i] * 2
            for r in batches:
                v = meta_step(v, x[r], y[r], variant)
            models.append(v)
        w = small.average(models, [n[i] / sum(n[k] for k in online) for i in online])
        small.assert_models(federation.server["w"], w)
    program = algorithm.personal_model(federation.server, None).program  # type: ignore[arg-type]
    for i, (x, y) in enumerate(small.samples()):
        ((r,),) = small.batches(federation, program, i, len(schedule))
        assert len(r) == 2
        g = small.gradient(w, x[r], y[r])
        small.assert_models(federation.client_model(i), {k: w[k] - size * g[k] for k in w})


def dealt(n: int, parts: int, length: int | None = None) -> list[list[float]]:
    """What each batch holds of the samples 0 .. n - 1, padded with -1 to a length."""
    x = torch.full((length or n,), -1.0)
    x[:n] = torch.arange(n)
    weights = None if length is None else (torch.arange(length) < n).double()
    parted = shared_out(Batch(x, x, weights, torch.tensor(7)), parts)
    assert len({int(b.key) for b in parted}) == parts
    return [(b.x if b.weights is None else b.x[b.weights > 0]).tolist() for b in parted if torch.equal(b.x, b.y)]


@pytest.mark.parametrize("length", [None, 8])
def test_batches_are_disjoint_and_none_is_empty(length: int | None) -> None:
    assert dealt(7, 3, length) == [[0, 3, 6], [1, 4], [2, 5]]
    assert dealt(7, 2, length) == [[0, 2, 4, 6], [1, 3, 5]]
    assert dealt(3, 3, length) == [[0], [1], [2]]
    assert dealt(2, 3, length) == [[0], [1], [0]]
    assert dealt(1, 3, length) == [[0], [0], [0]]
    assert dealt(1, 2, length) == [[0], [0]]


def test_padding_to_less_than_a_sample_per_batch() -> None:
    assert dealt(1, 3, 2) == [[0], [0], [0]]


@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_on_a_quadratic_the_meta_gradient_is_that_of_the_objective(variant: Any) -> None:
    """Of f(w - alpha grad f(w)), with its factor I - alpha A only in "hf"."""
    A, c, w = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([3.0, -1.0]), np.array([0.5, 2.0])
    row = np.concatenate([A.ravel(), c])[None]
    data = FederatedData.from_arrays([{"train": (row, np.zeros(1)), "test": (row, np.zeros(1))}])
    task = Task(small.Quadratic(), small.the_output, classifies=False, dtype=torch.float64)
    algorithm = PerFedAvg(lr=0.2, alpha=0.3, local_epochs=1, variant=variant, batch_size=None)
    federation = Federation(task, data, algorithm, engine="sequential", initial={"x": torch.tensor(w)})
    federation.round()
    inner = np.eye(2) - 0.3 * A
    g = A @ (w - 0.3 * A @ (w - c) - c)
    expected = w - 0.2 * (inner @ g if variant == "hf" else g)
    np.testing.assert_allclose(federation.server["w"]["x"].numpy(), expected, rtol=0, atol=1e-11)


def test_running_statistics_are_those_of_the_pass_at_w() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(2, momentum=0.1), nn.Linear(2, 3))
    data = FederatedData.from_arrays([{"train": xy, "test": xy} for xy in small.samples()], classes=("a", "b", "c"))
    algorithm = PerFedAvg(lr=0.1, local_epochs=1, batch_size=None)
    federation = Federation(Task(net, dtype=torch.float64), data, algorithm, engine="sequential", seed=11)
    federation.round([0])
    x, _ = small.samples()[0]
    ((rows,),) = small.batches(federation, algorithm.train, 0, 0)
    np.testing.assert_allclose(federation.server["w"]["0.running_mean"], 0.1 * x[rows[0::3]].mean(0), rtol=1e-12)


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    record = small.federate(PerFedAvg(**TRAINING)).round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"alpha": -0.1}, {"variant": "maml"}])
def test_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))} = "):
        PerFedAvg(**wrong)
