"""APFL: two clients by hand, and its limits FedAvg and Local."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms import Algorithm
from bespokefl.algorithms.apfl import APFL
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
SCHEDULE = [[0, 1], [0], [0, 1]]
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def mixed(v: small.Weights, w: small.Weights, alpha: float) -> small.Weights:
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in v}


@both_engines
@pytest.mark.parametrize(
    ("lr", "options"),
    [(0.1, {}), (0.1, {"adaptive": False}), (0.1, {"alpha_decay": 0.3, "alpha0": 0.2}), (3.0, {"momentum": 0.0})],
)
def test_by_hand(engine: type, lr: float, options: dict[str, Any]) -> None:
    settings = {**TRAINING, "lr": lr, **options}
    algorithm = APFL(**settings)
    federation = small.federate(algorithm, engine(), schedule=SCHEDULE)
    w, v, momentum = small.start(), [small.start(), small.start()], settings["momentum"]
    alpha, unclipped = [options.get("alpha0", 0.5)] * 2, []
    for t, online in enumerate(SCHEDULE):
        federation.round()
        copies = []
        for i in online:
            x, y = small.samples()[i]
            w_i, mw, mv = w, small.Weights(), small.Weights()
            (batches,) = small.batches(federation, algorithm.train, i, t)
            for step, r in enumerate(batches):
                old_v, old_w, old_alpha = v[i], w_i, alpha[i]
                g = small.gradient(mixed(old_v, old_w, old_alpha), x[r], y[r])
                w_i, mw = small.sgd(w_i, small.gradient(w_i, x[r], y[r]), mw, lr, momentum)
                v[i], mv = small.sgd(v[i], {k: old_alpha * g[k] for k in g}, mv, lr, momentum)
                if step == 0 and settings.get("adaptive", True):
                    slope = sum(((old_v[k] - old_w[k]) * g[k]).sum() for k in g)
                    unclipped.append(old_alpha - lr * (slope + options.get("alpha_decay", 0.0) * old_alpha))
                    alpha[i] = min(1.0, max(0.0, unclipped[-1]))
            copies.append(w_i)
        n = np.array([small.SIZES[i] for i in online])
        w = small.average(copies, n / n.sum())
        small.assert_models(federation.server["w"], w)
        np.testing.assert_allclose(federation.facts()["alpha"], alpha, rtol=0, atol=1e-12)
        if t == 1:  # with the newest w, also for the client that was absent
            small.assert_models(federation.client_model(1), mixed(v[1], w, alpha[1]))
    for i in range(2):
        small.assert_models(federation.client_model(i), mixed(v[i], w, alpha[i]))
    if lr > 1:
        assert min(unclipped) < 0 or max(unclipped) > 1  # the clipping was met
    elif settings.get("adaptive", True):
        assert len(set(alpha)) == 2 and all(0 < a < 1 and a != algorithm.alpha0 for a in alpha)


def batchnorm(algorithm: Algorithm, **options: Any) -> Federation:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    data = FederatedData.from_arrays([{"train": xy, "test": xy} for xy in small.samples()], classes=("a", "b", "c"))
    return Federation(Task(net, dtype=torch.float64), data, algorithm, engine="sequential", **options)


def plain(algorithm: Algorithm, **options: Any) -> Federation:
    return small.federate(algorithm, "vectorized", **options)


limits = pytest.mark.parametrize(("federate", "opt_state"), [(batchnorm, "keep"), (plain, "reset"), (plain, "keep")])


@limits
def test_nothing_of_its_own_is_fedavg_bit_for_bit(federate: Any, opt_state: Any) -> None:
    ours = federate(APFL(**TRAINING, opt_state=opt_state, alpha0=0.0, adaptive=False), schedule=SCHEDULE)
    fedavg = federate(FedAvg(**TRAINING, opt_state=opt_state), schedule=SCHEDULE)
    for _ in SCHEDULE:
        ours.round()
        fedavg.round()
    models = ours.personal_models()
    for k, v in fedavg.server["w"].items():
        assert torch.equal(ours.server["w"][k], v)
        assert all(torch.equal(row, v) for row in models[k])


@limits
def test_all_its_own_is_local_bit_for_bit(federate: Any, opt_state: Any) -> None:
    ours = federate(APFL(**TRAINING, opt_state=opt_state, alpha0=1.0, adaptive=False), schedule=SCHEDULE)
    local = federate(Local(**TRAINING, opt_state=opt_state), schedule=SCHEDULE)
    for _ in SCHEDULE:
        ours.round()
        local.round()
    models = ours.personal_models()
    for k, v in local.personal_models().items():
        assert torch.equal(models[k], v)


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    record = small.federate(APFL(**TRAINING)).round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)


@pytest.mark.parametrize("wrong", [{"alpha0": 1.5}, {"alpha0": -0.1}, {"alpha_decay": -1.0}])
def test_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))} = "):
        APFL(**wrong)
