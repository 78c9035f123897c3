"""Every registered algorithm between silos: the numbers of the vectorized engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.memory import Memory, experiment, remote, shards

from bespokefl.algorithms import ALGORITHMS
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.federation import Federation
from bespokefl.flower.server.remote_federation import RemoteFederation

HOSTED = [[0, 3], [4], [1, 2]]


def simulated(it: Experiment) -> Federation:
    data = resolve.load_data(it, 0)
    return resolve.make_federation(it, resolve.make_resources(it, it.algorithms[0], data), 0, data)


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
    it = experiment(name, train={"participation": 0.8}, federation={"cohort": "seed"})
    transport = Memory(shards(tmp_path, it, HOSTED), shuffle=np.random.default_rng(1))
    here, there = simulated(it), remote(it, transport, tmp_path)
    for _ in range(2):
        record, asked = here.round(), there.round()
        assert asked.failed == {} and asked.clients.tolist() == record.clients.tolist()
    assert_alike(here, there, 1e-9)


VARIANTS: list[dict[str, Any]] = [
    {"name": "fedavg", "personal": "finetune", "opt_state": "keep", "momentum": 0.9},
    {"name": "fedavg", "aggregation": "krum"},
    {"name": "fedavg", "optimizer": "adam", "opt_state": "keep"},
    {"name": "fedpg", "pers_backtrack": True},
    {"name": "fedpg", "pm_eval": "rebuild", "grad_mode": "exact"},
    {"name": "fedpg", "pm_base": "persistent"},
    {"name": "fedrep", "last_head_epochs": 1},
    {"name": "fedrod", "head": "hyper"},
    {"name": "l2sgd", "form": "coin", "p": 0.4, "flips": 8},
    {"name": "local", "local_every_round": True},
    {"name": "pfedhn", "server_step": "cohort", "private_head": True},
    {"name": "pfedme", "train_all": True},
    {"name": "plgu-ghn", "ghn_delta": "recompute"},
]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: "-".join(str(v) for v in m.values()))
def test_other_settings_too(method: dict[str, Any], tmp_path: Path) -> None:
    share = 1.0 if "aggregation" in method else 0.6
    it = experiment([method], train={"participation": share}, federation={"cohort": "seed"})
    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, HOSTED)), tmp_path)
    for _ in range(2):
        here.round()
        assert there.round().failed == {}
    assert_alike(here, there, 1e-9)


@pytest.mark.parametrize("kind", ["noise", "scale", "labels"])
def test_simulated_attackers(kind: str, tmp_path: Path) -> None:
    it = experiment("ditto", attack={"kind": kind, "share": 0.4, "factor": 3.0})
    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, HOSTED)), tmp_path)
    for _ in range(2):
        here.round()
        there.round()
    assert there.malicious.tolist() == here.malicious.tolist() and len(there.malicious) == 2
    assert_alike(here, there, 1e-9)


@pytest.mark.slow
def test_masks_and_running_statistics(tmp_path: Path) -> None:
    """A segmentation network with BatchNorm: its Dice is the silo's own figure."""
    data = {"source": "blobs", "partition": "domain", "domains": 3, "samples": 24, "size": 16, "val": 0.0}
    model = {"name": "unet", "width": 2}
    it = parse_experiment(
        {
            "algorithms": ["fedbn"],
            "data": data,
            "model": model,
            "train": {"rounds": 1, "local_epochs": 1, "batch_size": 4},
            "engine": {"precision": "float64", "device": "cpu"},
            "federation": {"wait": 1.0},
        }
    )
    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, [[0, 2], [1]])), tmp_path)
    here.round()
    assert there.round().failed == {}
    assert_alike(here, there, 1e-9)
    a, b = here.evaluate(closer=True), there.evaluate(closer=True)
    assert set(b.further) == {"dice", "hausdorff"}
    for name in a.further:
        np.testing.assert_allclose(b.further[name], a.further[name], rtol=1e-9)


def test_bfloat16_runs(tmp_path: Path) -> None:
    it = experiment("fedavg", precision="bf16")
    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, HOSTED)), tmp_path)
    here.round()
    assert there.round().failed == {}
    assert_alike(here, there, 1e-2)
