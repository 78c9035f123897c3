"""FedDyn: two clients by hand, the invariant of its server, and where it converges."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import Tensor, nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.feddyn import FedDyn
from bespokefl.core import InputError, Model, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "local_epochs": 2, "batch_size": 3}
SCHEDULE = [[0], [0, 1], [1]]
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def trained(w: small.Weights, s: small.Weights, samples: Any, batches: Any, alpha: float) -> small.Weights:
    (x, y), v, m = samples, w, small.Weights()
    for r in batches:
        g = small.gradient(v, x[r], y[r])
        v, m = small.sgd(v, {k: g[k] - s[k] + alpha * (v[k] - w[k]) for k in g}, m, lr=0.1, momentum=0.5)
    return v


def state(federation: Federation, client: int) -> Any:
    """A client's s_i."""
    s = federation.clients.states.gather(np.array([client])).s
    return {k: v[0] for k, v in s.items()}


@both_engines
@pytest.mark.parametrize("personal", ["local_before_agg", "global", "finetune"])
def test_by_hand(engine: type, personal: Any) -> None:
    alpha, clients = 0.2, 2
    algorithm = FedDyn(**TRAINING, alpha=alpha, personal=personal)
    federation = small.federate(algorithm, engine(), schedule=SCHEDULE)
    w = small.start()
    h = {k: np.zeros_like(v) for k, v in w.items()}
    s = [h, h]
    last = [w, w]
    for t, online in enumerate(SCHEDULE):
        federation.round()
        for i in online:
            (rows,) = small.batches(federation, algorithm.train, i, t)
            last[i] = trained(w, s[i], small.samples()[i], rows, alpha)
            s[i] = {k: s[i][k] - alpha * (last[i][k] - w[k]) for k in w}
        h = {k: h[k] - alpha / clients * sum(last[i][k] - w[k] for i in online) for k in w}
        w = {k: sum(last[i][k] for i in online) / len(online) - h[k] / alpha for k in w}
        small.assert_models(federation.server["w"], w)
        small.assert_models(federation.server["h"], h)
    for i in range(clients):
        small.assert_models(state(federation, i), s[i])
        tuning = small.batches(federation, algorithm.tuned, i, len(SCHEDULE))[0]
        expected = {
            "local_before_agg": last[i],
            "global": w,
            "finetune": trained(w, s[i], small.samples()[i], tuning, alpha),
        }
        small.assert_models(federation.client_model(i), expected[personal])


def some_clients(sizes: tuple[int, ...]) -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 2)), rng.integers(0, 3, n))  # noqa: E731
    return FederatedData.from_arrays([{"train": arrays(n), "test": arrays(2)} for n in sizes], classes=("a", "b", "c"))


@both_engines
@pytest.mark.parametrize("weights", ["uniform", "sample"])
def test_the_server_knows_the_mean_of_what_all_clients_remember(engine: type, weights: Any) -> None:
    algorithm = FedDyn(**TRAINING, alpha=0.1, weights=weights)
    task = Task(small.TanhNet(), dtype=torch.float64)
    federation = Federation(task, some_clients((5, 9, 3, 12, 6)), algorithm, engine=engine())
    for online, silent in (([0, 3], []), ([1], []), (range(5), [3]), ([0, 1, 4], [0]), ([2, 3], [])):
        federation.round(online, silent=silent)
        s = federation.clients.states.gather(np.arange(5)).s
        for k, h in federation.server["h"].items():
            torch.testing.assert_close(h, s[k].mean(0), rtol=0, atol=1e-13)
        assert any(h.abs().max() > 1e-3 for h in federation.server["h"].values())


class Quadratic(nn.Module):
    """f(x) = A (x - c)^2 / 2, a row of data being (A, c)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows[:, 0] * (self.x - rows[:, 1]) ** 2 / 2


def the_output(out: Tensor, y: Tensor) -> Tensor:
    return out


def test_it_converges_to_the_minimum_of_the_mean_risk_where_fedavg_does_not() -> None:
    rows = [np.array([[1.0, 0.0]]), np.array([[3.0, 2.0]])]
    data = FederatedData.from_arrays([{"train": (r, np.zeros(1)), "test": (r, np.zeros(1))} for r in rows])
    many_steps: dict[str, Any] = {"lr": 0.3, "local_epochs": 15, "batch_size": None}

    def limit(algorithm: FedAvg) -> Model:
        task = Task(Quadratic(), the_output, classifies=False, dtype=torch.float64)
        federation = Federation(task, data, algorithm, engine="sequential")
        for _ in range(40):
            federation.round()
        return federation.global_model() or {}

    best = 3 * 2 / (1 + 3)
    assert abs(float(limit(FedDyn(**many_steps, alpha=1.0))["x"]) - best) < 1e-8
    assert abs(float(limit(FedAvg(**many_steps))["x"]) - best) > 0.1


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    federation = small.federate(FedDyn(**TRAINING), schedule=SCHEDULE)
    for online in SCHEDULE:
        record = federation.round()
        assert (record.bytes_down, record.bytes_up) == (4 * len(online) * n, 4 * len(online) * n)


def test_alpha_must_be_positive() -> None:
    with pytest.raises(InputError, match=r"algorithm.alpha = 0.0 \(feddyn\): it must be a number above 0"):
        FedDyn(alpha=0.0)
