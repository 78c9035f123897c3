"""pFedMe: two clients by hand, the inner minimum on quadratics, and its options."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms.pfedme import PFedMe
from bespokefl.core import InputError, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

# Momentum is given to show that it has no part in this method.
TRAINING: dict[str, Any] = {"lr": 0.02, "local_epochs": 2, "batch_size": 3}
MOREAU: dict[str, Any] = {"lam": 6.0, "K": 3, "eta_p": 0.05}
SCHEDULE = [[0], [0, 1]]
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def trained(w: small.Weights, samples: Any, batches: Any, decay: float = 0.0) -> tuple[small.Weights, small.Weights]:
    """w_i and theta."""
    (x, y), w_i, theta = samples, w, w
    for r in batches:
        for _ in range(3):
            g = small.gradient(theta, x[r], y[r])
            theta = {k: theta[k] - 0.05 * (g[k] + 6.0 * (theta[k] - w_i[k]) + decay * theta[k]) for k in w}
        w_i = {k: w_i[k] - 0.02 * 6.0 * (w_i[k] - theta[k]) for k in w}
    return w_i, theta


@both_engines
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"weight_decay": 0.1}, ([3, 3, 1] * 2, [3, 1] * 2)),
        ({"beta": 1.6}, ([3, 3, 1] * 2, [3, 1] * 2)),
        ({"local_unit": "steps", "R": 4}, ([3, 3, 1, 3], [3, 1, 3, 1])),
        ({"personal": "w_i", "weights": "sample", "weight_decay": 0.001}, ([3, 3, 1] * 2, [3, 1] * 2)),
    ],
)
def test_by_hand(engine: type, options: dict[str, Any], steps: Any) -> None:
    unused = {"local_epochs"} if "R" in options else set()
    algorithm = PFedMe(**{k: v for k, v in TRAINING.items() if k not in unused}, **MOREAU, **options)
    federation = small.federate(algorithm, engine(), schedule=SCHEDULE)
    w, own, beta = small.start(), [small.start(), small.start()], options.get("beta", 1.0)
    n = [7, 4] if options.get("weights") == "sample" else [1, 1]
    for t, online in enumerate(SCHEDULE):
        federation.round()
        local = []
        for i in online:
            (rows,) = small.batches(federation, algorithm.train, i, t)
            assert [len(r) for r in rows] == steps[i]
            w_i, theta = trained(w, small.samples()[i], rows, options.get("weight_decay", 0.0))
            own[i] = w_i if options.get("personal") == "w_i" else theta
            local.append(w_i)
        average = small.average(local, [n[i] / sum(n[k] for k in online) for i in online])
        w = {k: (1 - beta) * w[k] + beta * average[k] for k in w}
        small.assert_models(federation.server["w"], w)
        for i in range(2):  # the initial model if it never took part
            small.assert_models(federation.client_model(i), own[i])


def test_many_inner_steps_reach_the_proximal_point() -> None:
    A, c, w = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([3.0, -1.0]), np.array([0.5, 2.0])
    row = np.concatenate([A.ravel(), c])[None]
    data = FederatedData.from_arrays([{"train": (row, np.zeros(1)), "test": (row, np.zeros(1))}])
    task = Task(small.Quadratic(), small.the_output, classifies=False, dtype=torch.float64)
    algorithm = PFedMe(lam=4.0, K=150, eta_p=0.2, lr=0.1, local_unit="steps", R=2, batch_size=None)
    federation = Federation(task, data, algorithm, engine="sequential", initial={"x": torch.tensor(w)})
    federation.round()
    for _ in range(2):
        theta = np.linalg.solve(A + 4.0 * np.eye(2), A @ c + 4.0 * w)
        w = w - 0.1 * 4.0 * (w - theta)
    np.testing.assert_allclose(federation.client_model(0)["x"].numpy(), theta, rtol=0, atol=1e-13)
    np.testing.assert_allclose(federation.server["w"]["x"].numpy(), w, rtol=0, atol=1e-13)


@both_engines
def test_all_train_and_the_sampled_are_averaged(engine: type) -> None:
    algorithm = PFedMe(**TRAINING, **MOREAU, train_all=True)
    federation = small.federate(algorithm, engine(), schedule=SCHEDULE)
    n, w = small.flat(small.start()).size, small.start()
    for t, online in enumerate(SCHEDULE):
        record = federation.round()
        assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * len(online) * n)
        rows = [small.batches(federation, algorithm.train, i, t)[0] for i in range(2)]
        all_of_them = [trained(w, small.samples()[i], rows[i]) for i in range(2)]
        w = small.average([all_of_them[i][0] for i in online], [1 / len(online)] * len(online))
        small.assert_models(federation.server["w"], w)
        for i, (_, theta) in enumerate(all_of_them):
            small.assert_models(federation.client_model(i), theta)


def test_a_broken_client_outside_the_cohort_does_not_stop_the_round() -> None:
    federation = small.federate(PFedMe(**TRAINING, **MOREAU, train_all=True))
    federation.data.x[torch.as_tensor(federation.data.splits["train"][1])] = torch.nan
    alone = small.federate(PFedMe(**TRAINING, **MOREAU))
    record = federation.round([0])
    alone.round([0])
    assert list(record.failed) == [1]
    for k, v in alone.server["w"].items():
        assert torch.equal(federation.server["w"][k], v)


def test_beta_does_not_push_running_statistics_beyond_the_mean() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    data = FederatedData.from_arrays([{"train": xy, "test": xy} for xy in small.samples()], classes=("a", "b", "c"))
    servers = []
    for beta in (1.0, 2.0):
        algorithm = PFedMe(**TRAINING, **MOREAU, beta=beta)
        run = Federation(Task(net, dtype=torch.float64), data, algorithm, engine="sequential")
        run.round()
        servers.append(run.server["w"])
    plain, beyond = servers
    start = net.state_dict()
    for k in plain:
        if k in ("1.running_mean", "1.running_var"):
            assert torch.equal(beyond[k], plain[k])
        else:
            torch.testing.assert_close(beyond[k], 2 * plain[k] - start[k].double(), rtol=0, atol=1e-14)


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    record = small.federate(PFedMe(**TRAINING, **MOREAU)).round([1])
    assert (record.bytes_down, record.bytes_up) == (4 * n, 4 * n)


@pytest.mark.parametrize("wrong", [{"K": 0}, {"beta": 0.0}, {"lam": -1.0}, {"R": 0}, {"local_unit": "rounds"}])
def test_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))} = "):
        PFedMe(**wrong)
