"""Every registered algorithm between silos: the numbers of the vectorized engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.flower.memory import Memory, experiment, remote, shards

from bespokefl import assembly
from bespokefl.algorithms import ALGORITHMS
from bespokefl.config import Experiment
from bespokefl.federation import Federation
from bespokefl.flower.remote import RemoteFederation

HOSTED = [[0, 3], [4], [1, 2]]


def simulated(it: Experiment) -> Federation:
    data = assembly.load_data(it, 0)
    return assembly.make_federation(it, assembly.make_kit(it, it.algorithms[0], data), 0, data)


def of_server(federation: Federation | RemoteFederation) -> dict[str, torch.Tensor]:
    return {k: v for k, v in federation.state()[0].items() if k.startswith("server")}


def assert_alike(here: Federation, there: RemoteFederation, tolerance: float) -> None:
    ours, theirs = of_server(here), of_server(there)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            theirs[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    for model in ("personal", "global") if here.has_global else ("personal",):
        a, b = here.evaluate(model=model), there.evaluate(model=model)
        np.testing.assert_array_equal(a.n, b.n)
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.0 if tolerance < 1e-8 else 0.1)
        np.testing.assert_allclose(a.loss, b.loss, rtol=100 * tolerance)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_silos_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    it = experiment(name, train={"participation": 0.8})
    transport = Memory(shards(tmp_path, it, HOSTED), shuffle=np.random.default_rng(1))
    here, there = simulated(it), remote(it, transport, tmp_path)
    for _ in range(2):
        record, asked = here.round(), there.round()
        assert asked.failed == {} and asked.clients.tolist() == record.clients.tolist()
    assert_alike(here, there, 1e-9)
