"""FedAMP: rounds against numpy, its limits, the gradient of the proximal term, and the self weight."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms import Algorithm
from bespokefl.algorithms.fedamp import FedAMP
from bespokefl.algorithms.fedprox import FedProx
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Model, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
PARAMETERS = 21
ENGINES = ["sequential", "vectorized"]


def cloud(models: list[small.Weights], i: int, alpha: float, sigma: float, mean: bool = False) -> small.Weights:
    """u_i by the paper's formula; others' weights beyond 1 in sum are scaled down."""
    xi = {}
    for j, w in enumerate(models):
        if j != i:
            d = sum(float(((models[i][k] - w[k]) ** 2).sum()) for k in w) / (PARAMETERS if mean else 1)
            xi[j] = alpha * np.exp(-d / sigma) / sigma
    total = sum(xi.values())
    xi = {j: v / max(1, total) for j, v in xi.items()}
    own = 1 - sum(xi.values())
    return {k: own * models[i][k] + sum(v * models[j][k] for j, v in xi.items()) for k in models[i]}


def reference(run: Federation, schedule: list[list[int]], **settings: Any) -> list[small.Weights]:
    alpha, sigma, lam = (settings.get(k, 1.0) for k in ("alpha", "sigma", "lam"))
    models = [small.start(), small.start()]
    buffers = [small.Weights(), small.Weights()]
    for t, ids in enumerate(schedule):
        clouds = {i: cloud(models, i, alpha, sigma, settings.get("distance") == "mean_squared") for i in ids}
        for i in ids:
            x, y = small.samples()[i]
            u = clouds[i]
            v, m = u if settings.get("start") == "cloud" else models[i], small.Weights()
            m = buffers[i] if settings.get("opt_state") == "keep" else m
            (rows,) = small.batches(run, FedAMP(**TRAINING).train, i, t)
            for r in rows:
                g = small.gradient(v, x[r], y[r])
                v, m = small.sgd(v, {k: g[k] + lam / alpha * (v[k] - u[k]) for k in g}, m, lr=0.1, momentum=0.9)
            models[i], buffers[i] = v, m
    return models


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("schedule", [[[0, 1], [0, 1], [0, 1]], [[0], [0, 1], [1]]])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"alpha": 0.5, "sigma": 2.0, "lam": 0.3, "start": "cloud"},
        {"alpha": 5.0, "sigma": 1.5, "lam": 2.0, "distance": "mean_squared", "opt_state": "keep"},
    ],
)
def test_rounds_by_hand(engine: type, schedule: list[list[int]], settings: dict[str, Any]) -> None:
    run = small.federate(FedAMP(**TRAINING, **settings), engine(), schedule=schedule)
    for _ in schedule:
        run.round()
    for i, w in enumerate(reference(run, schedule, **settings)):
        small.assert_models(run.client_model(i), w, 1e-11)
        small.assert_models({k: v[i] for k, v in run.server["w"].items()}, w, 1e-11)
    assert run.global_model() is None


# limits ----------------------------------------------------------------------------------------------
def models_after(algorithm: Algorithm, rounds: int = 2, **options: Any) -> Model:
    run = small.federate(algorithm, **options)
    for _ in range(rounds):
        run.round()
    return run.personal_models()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_lambda_it_is_local_bit_for_bit(engine: str) -> None:
    schedule = [[0, 1], [1], [0, 1]]
    amp, local = (
        models_after(a, 3, engine=engine, schedule=schedule) for a in (FedAMP(**TRAINING, lam=0.0), Local(**TRAINING))
    )
    assert all(torch.equal(v, local[k]) for k, v in amp.items())


def test_the_proximal_term_has_a_gradient() -> None:
    """Detached, it would leave clients alone, whatever lambda is."""
    local = models_after(Local(**TRAINING))
    amp = models_after(FedAMP(**TRAINING, lam=1.0))
    assert all((v - local[k]).abs().max() > 1e-3 for k, v in amp.items())


@pytest.mark.parametrize("start", ["own", "cloud"])
def test_the_first_round_is_fedprox(start: Any) -> None:
    """All models are still equal, so that u_i is the initial one."""
    amp = models_after(FedAMP(**TRAINING, alpha=0.5, lam=2.0, start=start), 1)
    prox = models_after(FedProx(**TRAINING, mu=4.0), 1)
    for k, v in amp.items():
        torch.testing.assert_close(v, prox[k], rtol=1e-12, atol=1e-13)


def test_a_strong_pull_brings_clients_to_the_cloud() -> None:
    """With lambda / alpha = 9 and lr 0.1 a step goes to u_i but for a tenth, the gradient aside."""
    far = models_after(FedAMP(lr=0.1, batch_size=None, lam=0.0))
    near = models_after(FedAMP(lr=0.1, batch_size=None, lam=9.0))
    distance = [float(sum(((v[0] - v[1]) ** 2).sum() for v in m.values())) for m in (far, near)]
    assert distance[1] < 0.1 * distance[0]


# the weights -----------------------------------------------------------------------------------------
def task_of(n: int) -> Task:
    return Task(nn.Linear(n, 1, bias=False), "squared_error", dtype=torch.float64)


def stacked(rows: Any) -> Model:
    return {"weight": torch.as_tensor(rows, dtype=torch.float64).reshape(len(rows), 1, -1)}


def test_weights_by_hand() -> None:
    w = stacked([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    xi = FedAMP(alpha=0.5, sigma=2.0).attention(task_of(2), w, np.array([0, 2])).numpy()
    to_1, to_2, between = 0.25 * np.exp(-0.5), 0.25 * np.exp(-2.0), 0.25 * np.exp(-2.5)
    expected = [[1 - to_1 - to_2, to_1, to_2], [to_2, between, 1 - to_2 - between]]
    np.testing.assert_allclose(xi, expected, rtol=1e-14)
    mean = FedAMP(alpha=0.5, sigma=2.0, distance="mean_squared").attention(task_of(2), w, np.array([0]))
    assert float(mean[0, 1]) == pytest.approx(0.25 * np.exp(-0.25), rel=1e-14)


def test_no_own_weight_is_negative() -> None:
    w = stacked([[0.0], [0.1], [0.2], [3.0]])
    xi = FedAMP().attention(task_of(1), w, np.arange(4)).numpy()
    assert (xi >= 0).all() and xi.sum(1) == pytest.approx(np.ones(4), abs=1e-15)
    near = np.exp(-np.array([0.01, 0.04, 9.0]))
    np.testing.assert_allclose(xi[0], [0, *(near / near.sum())], rtol=1e-13, atol=1e-15)  # they sum to nearly 2: scaled
    assert xi[3, 3] == pytest.approx(1 - np.exp(-np.array([9.0, 8.41, 7.84])).sum(), rel=1e-13)  # as they are


def test_strict_refuses_what_could_make_it_negative() -> None:
    small.federate(FedAMP(self_weight="strict", alpha=2.0, sigma=2.0))  # sigma / (N - 1)
    with pytest.raises(InputError, match=r"alpha = 2.1 .*negative weight.* sigma = 2 and 2 clients.*most 2$"):
        small.federate(FedAMP(self_weight="strict", alpha=2.1, sigma=2.0))
    small.federate(FedAMP(alpha=2.1, sigma=2.0))
    one = FederatedData.from_arrays([{"train": small.samples()[0], "test": small.samples()[0]}])
    Federation(small.TanhNet(), one, FedAMP(self_weight="strict", alpha=0.9)).round()  # nobody to be attracted by


def test_nearly_equal_models_attract_fully_and_far_ones_not_at_all() -> None:
    torch.manual_seed(0)
    middle = 30 * torch.randn(1, 5000, dtype=torch.float64)
    w = stacked((middle + 1e-7 * torch.randn(3, 5000, dtype=torch.float64)).numpy())
    x = w["weight"].numpy().reshape(3, -1)
    sigma = 1e-10  # in the range of their squared distances
    xi = FedAMP(alpha=sigma / 4, sigma=sigma).attention(task_of(5000), w, np.array([0])).numpy()
    expected = np.exp(-((x[0] - x[1:]) ** 2).sum(1) / sigma) / 4
    np.testing.assert_allclose(xi[0, 1:], expected, rtol=1e-9)
    assert 0.05 < expected.min() < expected.max() < 0.2
    w["weight"][2] += 1.0
    assert FedAMP().attention(task_of(5000), w, np.array([2])).tolist() == [[0.0, 0.0, 1.0]]


# traffic and normalisation ---------------------------------------------------------------------------
def test_bytes_of_a_round() -> None:
    run = small.federate(FedAMP(**TRAINING))
    for clients in ([0, 1], [1]):
        record = run.round(clients)
        assert record.bytes_down == record.bytes_up == 4 * len(clients) * PARAMETERS


@pytest.mark.parametrize(("start", "travelling"), [("own", 32), ("cloud", 40)])  # 12 + 8 + 12, and 8 statistics
def test_running_statistics_travel_only_from_the_cloud(start: Any, travelling: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    clients = [{"train": (x, y), "test": (x, y)} for x, y in small.samples()]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    run = Federation(model, data, FedAMP(**TRAINING, start=start), engine="sequential")
    record = run.round()
    assert record.bytes_down == record.bytes_up == 4 * 2 * travelling
    assert ("1.running_mean" in run.server["w"]) == (start == "cloud")
    mean = run.personal_models()["1.running_mean"]
    assert not torch.equal(mean[0], mean[1])
