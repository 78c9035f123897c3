"""FedMGDA+: two clients by hand, its limits, clients without an update, and normalisation statistics."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms import build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedmgda import FedMGDAPlus
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.errors import InputError
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
P0 = 7 / 11


def two_rounds(run: Federation, lam0: float, eta_g: tuple[float, float]) -> tuple[small.Weights, list[small.Weights]]:
    """w and the clients' models after two rounds with the weights lam0 and 1 - lam0."""
    w, models = small.start(), list[small.Weights]()
    for t in range(2):
        models, d = [], dict.fromkeys(w, np.zeros(()))
        for i, (x, y) in enumerate(small.samples()):
            v, m = w, small.Weights()
            (rows,) = small.batches(run, FedAvg(**TRAINING).train, i, t)
            for r in rows:
                v, m = small.sgd(v, small.gradient(v, x[r], y[r]), m, lr=0.1, momentum=0.9)
            weight = (lam0, 1 - lam0)[i] / np.linalg.norm(small.flat(w) - small.flat(v))
            d = {k: d[k] + weight * (w[k] - v[k]) for k in w}
            models.append(v)
        w = {k: w[k] - eta_g[t] * d[k] for k in w}
    return w, models


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize(
    ("epsilon", "lam0"),
    [
        (0.1, P0 - 0.1),  # of two unit vectors the shortest average is the half of both, but it is too far away
        (0.2, 0.5),
        (0.0, P0),  # FedAvg on normalised updates
        (1.0, 0.5),  # MGDA
    ],
)
def test_two_rounds_by_hand(engine: type, epsilon: float, lam0: float) -> None:
    run = small.federate(FedMGDAPlus(**TRAINING, epsilon=epsilon, eta_g=0.5), engine())
    run.round()
    run.round()
    w, models = two_rounds(run, lam0, (0.5, 0.5))
    small.assert_models(run.server["w"], w, 1e-11)
    for i, model in enumerate(models):
        small.assert_models(run.client_model(i), model, 1e-11)  # local, before aggregation


def test_step_size_decays_from_round_to_round() -> None:
    run = small.federate(FedMGDAPlus(**TRAINING, eta_g=0.8, eta_g_decay=0.25))
    run.round()
    run.round()
    small.assert_models(run.server["w"], two_rounds(run, P0 - 0.1, (0.8, 0.2))[0], 1e-11)


def test_step_size_may_fall_in_stairs() -> None:
    """With a tenth in ten rounds, every second one: 1, 1, 10^-0.2, 10^-0.2, ..."""
    falling = FedMGDAPlus(eta_g=2.0, eta_g_decay=10**-0.1, eta_g_every=2)
    steps = [falling.step_size(t) for t in range(5)]
    np.testing.assert_allclose(steps, [2, 2, 2 * 10**-0.2, 2 * 10**-0.2, 2 * 10**-0.4], rtol=1e-14)


def test_defaults_are_the_papers_and_uniform_weights_centre_on_the_middle() -> None:
    assert (FedMGDAPlus().epsilon, FedMGDAPlus().eta_g, FedMGDAPlus().eta_g_decay) == (0.1, 1.0, 1.0)
    run = small.federate(FedMGDAPlus(**TRAINING, weights="uniform"))
    run.round()
    run.round()
    small.assert_models(run.server["w"], two_rounds(run, 0.5, (1.0, 1.0))[0], 1e-11)


def test_without_freedom_and_at_equal_lengths_the_direction_is_fedavgs() -> None:
    updates = {"x": torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, -5.0]], dtype=torch.float64)}
    p = np.array([0.5, 0.3, 0.2])
    d = FedMGDAPlus(epsilon=0.0).direction(updates, p)["x"].numpy()
    np.testing.assert_allclose(d, p @ updates["x"].numpy() / 5, rtol=1e-15)


def test_mgda_hurts_nobody_and_little_freedom_may() -> None:
    """Two alike and one against them: MGDA gives the one its say; near p = 1/3 the two win."""
    g = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 1.0]], dtype=torch.float64)
    slopes = {}
    for epsilon in (0.05, 1.0):
        d = FedMGDAPlus(epsilon=epsilon).direction({"x": g}, np.full(3, 1 / 3))["x"]
        slopes[epsilon] = (g @ d).numpy()
    assert slopes[1.0].min() >= 0 and slopes[1.0].max() > 0
    assert slopes[0.05][2] < -0.01


def test_a_client_without_an_update_is_left_out() -> None:
    algorithm = FedMGDAPlus(epsilon=0.1)
    g = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 7.0]], dtype=torch.float64)
    d = algorithm.direction({"x": g}, np.array([0.4, 0.4, 0.2]))["x"].numpy()
    # p of the others is 2/3 and 1/3; their shortest average would be 1/2 each
    np.testing.assert_allclose(d, [2 / 3 - 0.1, 1 / 3 + 0.1], rtol=1e-14)
    assert not algorithm.direction({"x": torch.zeros(2, 3)}, np.array([0.5, 0.5]))["x"].any()


def test_without_any_update_the_model_stays() -> None:
    run = small.federate(FedMGDAPlus(**{**TRAINING, "lr": 0.0}))
    run.round()
    assert all(torch.equal(run.server["w"][k], torch.tensor(v)) for k, v in small.start().items())


def test_running_statistics_are_averaged_as_in_fedavg() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    clients = [{"train": (x, y), "test": (x, y)} for x, y in small.samples()]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    runs = [
        Federation(model, data, a, seed=3, engine="sequential") for a in (FedMGDAPlus(**TRAINING), FedAvg(**TRAINING))
    ]
    for run in runs:
        run.round()
    for k in ("1.running_mean", "1.running_var"):
        assert torch.equal(runs[0].server["w"][k], runs[1].server["w"][k])
        assert not torch.equal(runs[0].server["w"][k], runs[0].task.initial[k])
    assert not torch.equal(runs[0].server["w"]["1.weight"], runs[1].server["w"]["1.weight"])


def test_bytes_of_a_round() -> None:
    record = small.federate(FedMGDAPlus(**TRAINING)).round()
    assert record.bytes_down == record.bytes_up == 4 * 2 * 21  # 21 parameters


@pytest.mark.parametrize(("key", "value"), [("epsilon", -0.1), ("epsilon", 1.5), ("eta_g", 0.0), ("eta_g_decay", 1.1)])
def test_refusals(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"algorithm.{key} = "):
        build_algorithm("fedmgda+", {}, {key: value})
