"""FedFV: projections by hand on plain vectors, rounds against a loop that projects vectors, and its limits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedfv import FedFV
from bespokefl.core import Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
PARAMETERS = 21

Array = Any


def fair(algorithm: FedFV, g: Array, losses: Any, ages: Any = None) -> Array:
    """The projected g, before it is rescaled; all rows beyond the losses are absent clients'."""
    g, losses = np.asarray(g, dtype=float), np.asarray(losses, dtype=float)
    m = len(losses)
    ages = np.concatenate([np.zeros(m), ages if ages is not None else []])
    return algorithm.fair_weights(g @ g.T, losses, np.full(m, 1 / m), ages) @ g


def projected(v: Array, g: Array) -> Array:
    return v - (v @ g) / (g @ g) * g


def reference(g: dict[int, Array], losses: dict[int, float], alpha: float, past: list[list[Array]]) -> Array:
    """Algorithms 2 and 3 on vectors; ``past`` are the absent clients' updates by round, the oldest first."""
    order = sorted(g, key=lambda i: losses[i])
    keep = order[int(np.ceil((len(order) - 1) * (1 - alpha))) :] if alpha > 0 else []
    total = np.zeros_like(next(iter(g.values())))
    for i in order:
        v = g[i]
        for j in order:
            if i not in keep and j != i and v @ g[j] < 0:
                v = projected(v, g[j])
        total = total + v / len(order)
    for updates in past:
        against = [u for u in updates if total @ u < 0]
        if against:
            total = projected(total, sum(against))
    return total / np.linalg.norm(total) * np.linalg.norm(sum(g.values()) / len(g))


# internal conflicts ----------------------------------------------------------------------------------
def test_projections_by_hand() -> None:
    g = [[1.0, 0.0], [-1.0, 1.0]]
    # each loses what points against the other: (1, 0) -> (1/2, 1/2), (-1, 1) -> (0, 1)
    np.testing.assert_allclose(fair(FedFV(alpha=0.0), g, [0.3, 0.2]), [0.25, 0.75], rtol=1e-15)
    # the one with the larger loss keeps its own
    np.testing.assert_allclose(fair(FedFV(alpha=0.1), g, [0.3, 0.2]), [0.5, 0.5], rtol=1e-15)
    np.testing.assert_allclose(fair(FedFV(alpha=0.1), g, [0.2, 0.3]), [-0.25, 0.75], rtol=1e-15)
    # all keep
    np.testing.assert_allclose(fair(FedFV(alpha=1.0), g, [0.3, 0.2]), [0.0, 0.5], rtol=1e-15)


def test_projections_run_in_the_order_of_losses_against_the_originals() -> None:
    g = np.array([[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 1.0]])
    by_order = [fair(FedFV(alpha=0.0), g, losses) for losses in ([1, 2, 3], [3, 2, 1], [2, 1, 3])]
    for losses, found in zip(([1, 2, 3], [3, 2, 1], [2, 1, 3]), by_order, strict=True):
        expected = reference(dict(enumerate(g)), dict(enumerate(losses)), 0.0, [])
        found = found / np.linalg.norm(found) * np.linalg.norm(g.mean(0))
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert np.abs(by_order[0] - by_order[1]).max() > 0.01


@pytest.mark.parametrize(("m", "alpha", "kept"), [(11, 0.1, 2), (11, 0.7, 8), (10, 0.1, 1), (5, 0.0, 0), (1, 0.1, 1)])
def test_how_many_keep_their_update(m: int, alpha: float, kept: int) -> None:
    """Positions from ceil((m - 1)(1 - alpha)) on; 10 (1 - 0.7) is 3.0000000000000004 in floating point."""
    g = np.random.default_rng(0).normal(size=(m, 3))
    losses = np.arange(m)[::-1]
    products = g @ g.T
    found = 0
    for i in range(m):  # with all weight on client i, the sum is its update alone
        weights = FedFV(alpha=alpha).fair_weights(products, losses, np.eye(m)[i], np.zeros(m))
        conflict = (np.delete(products[i], i) < 0).any()
        assert conflict or m == 1
        found += bool((weights == np.eye(m)[i]).all())
    assert found == kept


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_two_clients_end_without_conflict(seed: int, dim: int) -> None:
    g = np.random.default_rng(seed).normal(size=(2, dim))
    d = fair(FedFV(alpha=0.0), g, [0.1, 0.2])
    assert (g @ d >= -1e-12).all()


# external conflicts ----------------------------------------------------------------------------------
def test_external_projection_by_hand() -> None:
    g, absent = [[2.0, 0.0]], [[-1.0, 1.0], [-1.0, 0.0], [1.0, 5.0]]
    # the third does not conflict; the sum of the others is (-2, 1): (2, 0) + 4/5 (-2, 1)
    np.testing.assert_allclose(fair(FedFV(), g + absent, [1.0], [1, 1, 1]), [0.4, 0.8], rtol=1e-14)
    # one after the other, the older round first: (2, 0) -> (0, 0) against (-1, 0), then nothing is left
    np.testing.assert_allclose(fair(FedFV(tau=2), g + absent, [1.0], [1, 2, 1]), [0, 0], atol=1e-15)
    # the other way round: (2, 0) -> (1, 1), then -> (0, 1)
    np.testing.assert_allclose(fair(FedFV(tau=2), g + absent, [1.0], [2, 1, 1]), [0, 1], atol=1e-15)
    # too old
    np.testing.assert_allclose(fair(FedFV(tau=1), g + absent, [1.0], [2, 2, 2]), [2, 0], rtol=1e-15)
    np.testing.assert_allclose(fair(FedFV(tau=0), g + absent, [1.0], [1, 1, 1]), [2, 0], rtol=1e-15)


def test_the_codes_loop_revisits_the_current_round() -> None:
    code, g = FedFV(alpha=0.1, external="code"), [[1.0, 0.0], [-4.0, 1.0]]
    # client 1 keeps (-4, 1), client 0 becomes (1, 0) + 4/17 (-4, 1); their mean conflicts with (1, 0), and is projected
    np.testing.assert_allclose(fair(code, g, [0.1, 0.2]), [0, (4 / 17 + 1) / 2], atol=1e-15)
    assert fair(FedFV(alpha=0.1), g, [0.1, 0.2])[0] < -1
    # an absent client counts only from tau = 2 on
    absent = [[0.0, -1.0]]
    np.testing.assert_allclose(fair(code, [[0.0, 1.0], *absent], [0.1], [1]), [0, 1], rtol=1e-15)
    tau2 = FedFV(alpha=0.1, tau=2, external="code")
    np.testing.assert_allclose(fair(tau2, [[0.0, 1.0], *absent], [0.1], [1]), [0, 0], atol=1e-15)


# whole rounds ----------------------------------------------------------------------------------------
def federate(algorithm: FedFV | FedAvg, clients: Any, engine: Any = "sequential", **options: Any) -> Federation:
    splits = [{"train": xy, "test": xy} for xy in clients]
    options = {"initial": {k: torch.tensor(v) for k, v in small.start().items()}, "seed": 11} | options
    data = FederatedData.from_arrays(splits, classes=("a", "b", "c"))
    return Federation(Task(small.TanhNet(), dtype=torch.float64), data, algorithm, engine=engine, **options)


def conflicting(algorithm: FedFV | FedAvg, engine: Any = "sequential", **options: Any) -> Federation:
    """The two clients with labels that contradict each other."""
    return federate(algorithm, [(small.samples()[i][0], labels()[i]) for i in range(2)], engine, **options)


def labels() -> list[Any]:
    return [small.samples()[0][1], np.array([1, 2, 1, 2])]


def update(run: Federation, w: Any, i: int, t: int, plan: Any) -> tuple[Array, float]:
    """g_i and the loss at w, in numpy."""
    x, y = small.samples()[i][0], labels()[i]
    told, rows = small.batches(run, plan, i, t)
    assert np.concatenate(told).tolist() == list(range(len(y)))  # in order, all of them
    v, m = w, small.Weights()
    for r in rows:
        v, m = small.sgd(v, small.gradient(v, x[r], y[r]), m, lr=0.1, momentum=0.9)
    return small.flat(w) - small.flat(v), small.loss(w, x, y)


def unflat(vector: Array) -> Any:
    out, k = {}, 0
    for name, v in small.start().items():
        out[name] = vector[k : k + v.size].reshape(v.shape)
        k += v.size
    return out


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [[[0, 1], [0, 1], [0, 1]], [[0], [1], [0, 1], [0]]])
def test_rounds_against_the_reference(engine: type, alpha: float, schedule: list[list[int]]) -> None:
    algorithm = FedFV(**TRAINING, alpha=alpha, tau=1)
    run = conflicting(algorithm, engine(), schedule=schedule)
    w = small.start()
    last: dict[int, tuple[Array, int]] = {}
    internal, external = 0, 0
    for t, ids in enumerate(schedule):
        run.round()
        told = {i: update(run, w, i, t, algorithm.train) for i in ids}
        g = {i: v for i, (v, _) in told.items()}
        past = [v for i, (v, r) in last.items() if i not in ids and r == t - 1]
        internal += len(ids) == 2 and g[0] @ g[1] < 0
        external += any(v @ g[ids[0]] < 0 for v in past)
        w = unflat(small.flat(w) - reference(g, {i: loss for i, (_, loss) in told.items()}, alpha, [past]))
        last |= {i: (v, t) for i, v in g.items()}
        small.assert_models(run.server["w"], w, 1e-10)
    assert internal if len(schedule) == 3 else external  # the example does show conflicts


def test_longer_memory_changes_the_direction() -> None:
    ends = []
    for tau in (0, 1, 2):
        run = conflicting(FedFV(**TRAINING, tau=tau), schedule=[[0], [0], [1], [1], [0]])
        for _ in range(5):
            run.round()
        ends.append(torch.cat([v.flatten() for v in run.server["w"].values()]))
        assert max(run.server["last"].rounds) == 4 and min(run.server["last"].rounds) >= 4 - tau
    assert all((a - b).abs().max() > 1e-4 for a, b in ((ends[0], ends[1]), (ends[1], ends[2])))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_without_conflict_it_is_uniform_fedavg(engine: str) -> None:
    x, y = small.samples()[0]
    alike = [(x[:6] + 0.01 * i, y[:6]) for i in range(3)]
    settings = {**TRAINING, "batch_size": None}
    algorithms = FedFV(**settings), FedAvg(**settings, weights="uniform")
    runs = [federate(a, alike, engine) for a in algorithms]
    for _ in range(2):
        for run in runs:
            run.round()
    for k, v in runs[0].server["w"].items():
        torch.testing.assert_close(v, runs[1].server["w"][k], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(runs[0].personal_models(), runs[1].personal_models(), rtol=1e-12, atol=1e-13)


def test_the_step_is_as_long_as_the_mean_update() -> None:
    run, plain = (conflicting(a) for a in (FedFV(**TRAINING), FedAvg(**TRAINING, weights="uniform")))
    run.round()
    plain.round()
    step, mean = ([r.server["w"][k] - torch.tensor(v) for k, v in small.start().items()] for r in (run, plain))
    size = [float(torch.cat([v.flatten() for v in d]).norm()) for d in (step, mean)]
    assert size[0] == pytest.approx(size[1], rel=1e-12)
    assert (step[0] - mean[0]).abs().max() > 1e-3


def test_without_any_update_the_model_stays() -> None:
    run = conflicting(FedFV(**{**TRAINING, "lr": 0.0}))
    run.round()
    run.round()
    assert all(torch.equal(run.server["w"][k], torch.tensor(v)) for k, v in small.start().items())


def test_running_statistics_are_averaged_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    clients = [{"train": (x, y), "test": (x, y)} for x, y in small.samples()]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    runs = [
        Federation(model, data, a, seed=3, engine="sequential")
        for a in (FedFV(**TRAINING), FedAvg(**TRAINING, weights="uniform"))
    ]
    for run in runs:
        run.round()
    for k in ("1.running_mean", "1.running_var"):
        assert torch.equal(runs[0].server["w"][k], runs[1].server["w"][k])
        assert not torch.equal(runs[0].server["w"][k], runs[0].task.initial[k])


def test_finetuning_trains_as_fedavg_does() -> None:
    runs = [
        conflicting(a)
        for a in (FedFV(**TRAINING, personal="finetune"), FedAvg(**TRAINING, weights="uniform", personal="finetune"))
    ]
    for k, v in runs[0].personal_models().items():
        assert torch.equal(v, runs[1].personal_models()[k])


def test_bytes_of_a_round() -> None:
    record = conflicting(FedFV(**TRAINING)).round()
    assert record.bytes_down == 4 * 2 * PARAMETERS
    assert record.bytes_up == 4 * 2 * (PARAMETERS + 1)
