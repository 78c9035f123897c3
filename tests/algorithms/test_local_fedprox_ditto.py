"""Local, FedProx and Ditto worked out in numpy: two clients, three rounds of which one is without client 1."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.algorithms import small
from tests.algorithms.small import Weights

from bespokefl.algorithms.ditto import Ditto
from bespokefl.algorithms.fedprox import FedProx
from bespokefl.algorithms.local import Local
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

SCHEDULE = [[0, 1], [0], [0, 1]]
TRAINING = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])

Gradient = Callable[[Weights, Weights], Weights]  # of the objective at a model, on a batch's plain gradient


def trained(run: Federation, start: Weights, client: int, round_: int, objective: Gradient) -> Weights:
    x, y = small.samples()[client]
    v, m = start, Weights()
    (batches,) = small.batches(run, run.algorithm.train, client, round_)  # type: ignore[attr-defined]
    for rows in batches:
        v, m = small.sgd(v, objective(v, small.gradient(v, x[rows], y[rows])), m, lr=0.1, momentum=0.9)
    return v


def pull(strength: float, centre: Weights) -> Gradient:
    return lambda v, g: {k: g[k] + strength * (v[k] - centre[k]) for k in g}


@both_engines
def test_local(engine: type) -> None:
    run = small.federate(Local(**TRAINING), engine(), schedule=SCHEDULE)
    own = [small.start(), small.start()]
    for t, clients in enumerate(SCHEDULE):
        assert run.round().bytes_down == 0
        for i in clients:
            own[i] = trained(run, own[i], i, t, lambda v, g: g)
    for i in range(2):
        small.assert_models(run.client_model(i), own[i])


@both_engines
def test_fedprox(engine: type) -> None:
    run = small.federate(FedProx(**TRAINING, mu=0.7), engine(), schedule=SCHEDULE)
    w, last = small.start(), [small.start(), small.start()]
    for t, clients in enumerate(SCHEDULE):
        run.round()
        for i in clients:
            last[i] = trained(run, w, i, t, pull(0.7, w))
        n = np.array([small.SIZES[i] for i in clients])
        w = small.average([last[i] for i in clients], n / n.sum())
    small.assert_models(run.server["w"], w)
    for i in range(2):
        small.assert_models(run.client_model(i), last[i])


@both_engines
def test_ditto(engine: type) -> None:
    run = small.federate(Ditto(**TRAINING, lam=0.7), engine(), schedule=SCHEDULE)
    w, own = small.start(), [small.start(), small.start()]
    for t, clients in enumerate(SCHEDULE):
        run.round()
        copies = [trained(run, w, i, t, lambda v, g: g) for i in clients]
        for i in clients:
            own[i] = trained(run, own[i], i, t, pull(0.7, w))  # w of the round's start, not the copy that moves
        w = small.average(copies, np.full(len(clients), 1 / len(clients)))
    small.assert_models(run.server["w"], w)
    for i in range(2):
        small.assert_models(run.client_model(i), own[i])
