"""The hand-sized problem itself: its numpy network against autograd, and FedAvg worked out on it."""

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch.nn import functional as F

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.engines import Sequential, Vectorized


def test_gradient_is_autograds() -> None:
    net = small.TanhNet().double()
    net.load_state_dict({k: torch.tensor(v) for k, v in small.start().items()})
    x, y = small.samples()[0]
    F.cross_entropy(net(torch.tensor(x)), torch.tensor(y)).backward()
    g = small.gradient(small.start(), x, y)
    for k, parameter in net.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), g[k], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_fedavg(engine: type) -> None:
    algorithm = FedAvg(lr=0.1, momentum=0.9, local_epochs=2, batch_size=3)
    federation = small.federate(algorithm, engine())
    w = small.start()
    for t in range(2):
        federation.round()
        trained = []
        for i, (x, y) in enumerate(small.samples()):
            v, m = w, small.Weights()
            (rows,) = small.batches(federation, algorithm.train, i, t)
            assert [len(r) for r in rows] == ([3, 3, 1] if i == 0 else [3, 1]) * 2
            for r in rows:
                v, m = small.sgd(v, small.gradient(v, x[r], y[r]), m, lr=0.1, momentum=0.9)
            trained.append(v)
        w = small.average(trained, np.array(small.SIZES) / sum(small.SIZES))
    small.assert_models(federation.server["w"], w)
    for i, v in enumerate(trained):
        small.assert_models(federation.client_model(i), v)
