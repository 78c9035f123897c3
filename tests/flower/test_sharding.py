"""A simulation on several nodes, and means that a node makes of its clients' uploads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.flower.memory import Memory, experiment, remote, shards
from tests.flower.test_contract import assert_alike, simulated

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Cohort, Tree

# Read from the methods' rounds: of these uploads they take the weighted mean and nothing else.
AVERAGING = {
    "apfl", "ditto", "fedavg", "fedbabu", "fedbn", "fedper", "fedprox", "fedrep", "fedrod", "fedsam",
    "l2sgd", "lg-fedavg", "lg-mix", "per-fedavg", "pfedme", "plgu-grep", "plgu-lf", "splitgp",
}  # fmt: skip


def test_methods_that_only_average_say_so() -> None:
    said = {name for name in ALGORITHMS if build_algorithm(name).averaged()}
    assert said == AVERAGING
    assert build_algorithm("fedavg", {}, {"aggregation": "median"}).averaged() == ()


def test_a_subclass_with_another_round_is_not_believed() -> None:
    @dataclass(frozen=True)
    class Curious(FedAvg):
        name: ClassVar[str] = "curious"

        def round(self, server: Tree, cohort: Cohort) -> Tree:
            return super().round(server, cohort)

    assert Curious().averaged() == () and FedAvg().averaged() == ("train",)


@pytest.mark.parametrize(("name", "weights"), [*((name, "sample") for name in sorted(AVERAGING)), ("ditto", "uniform")])
def test_means_of_a_node_give_the_same_numbers(name: str, weights: str, tmp_path: Path) -> None:
    method = {"name": name, "weights": weights}
    it = experiment([method], train={"participation": 0.8}, federation={"cohort": "seed"})
    transport = Memory(shards(tmp_path, it, [[0, 1, 3, 4], [2]]))
    here, there = simulated(it), remote(it, transport, tmp_path)
    here.round()
    there.round()
    assert {h["mean"] for _, h, _, _ in transport.sent if h["kind"] == "run" and h["program"] == "train"} == {weights}
    assert_alike(here, there, 1e-9)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_hundred_clients_on_four_nodes_are_one_process(precision: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"train": {"participation": 0.3}, "federation": {"cohort": "seed"}}
    it = experiment("ditto", clients=100, precision=precision, data={"max_samples": 1500}, **more)
    hosted = np.array_split(np.random.default_rng(0).permutation(100), 4)
    transport = Memory(shards(tmp_path, it, [part.tolist() for part in hosted]), shuffle=np.random.default_rng(2))
    here, there = simulated(it), remote(it, transport, tmp_path)
    for _ in range(2):
        here.round()
        there.round()
    assert_alike(here, there, 1e-9 if precision == "float64" else 1e-5)


def test_means_save_bytes(tmp_path: Path) -> None:
    """With 25 clients a node, what comes up is one model a node instead of 25; what goes down is one, either way."""
    up, down = {}, {}
    for aggregation in ("mean", "clip"):
        algorithm: dict[str, Any] = {"name": "fedavg", "aggregation": aggregation}
        it = experiment([algorithm], clients=50, data={"max_samples": 800}, model={"hidden": [50]}, precision="float32")
        transport = Memory(shards(tmp_path / aggregation, it, [list(range(25)), list(range(25, 50))]))
        record = remote(it, transport, tmp_path / aggregation).round()
        up[aggregation], down[aggregation] = record.bytes_up, record.bytes_down
    model = 4 * (64 * 50 + 50 + 50 * 10 + 10)
    assert 50 * model < up["clip"] < 50 * model * 1.05 and 2 * model < up["mean"] < 2 * model + 8000
    assert 2 * model < down["mean"] < 2 * model + 8000


def test_failures_in_a_node_leave_the_mean_of_the_others(tmp_path: Path) -> None:
    it = experiment("fedavg")
    here, transport = simulated(it), Memory(shards(tmp_path, it, [[0, 1, 2], [3, 4]]))
    there = remote(it, transport, tmp_path)
    for silo in transport.handlers.values():
        (shop,) = silo._open.values()  # type: ignore[attr-defined]
        if 1 in shop.agreed.clients:
            shop._resident._x[shop.data.splits["train"][1]] = np.nan
    here.round(silent=[1])
    assert there.round().failed == {1: "answered with values that are not finite"}
    here.round(silent=[1])
    there.round()
    for name, value in here.server["w"].items():
        np.testing.assert_allclose(there.server["w"][name], value, rtol=1e-9)
