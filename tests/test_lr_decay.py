"""A learning rate that shrinks from round to round: in every method, on both engines, without tracing anew."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.engines.seats import TASK, Counting, data, federation, results, side_by_side
from torch import nn

from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedpg import FedPG
from bespokefl.core import Batch, Down, InputError, Model, Pass, Task
from bespokefl.data import FederatedData
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.engines.together import SharedEngine
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.resolve import make_algorithm
from bespokefl.federation import Federation

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "local_epochs": 1, "batch_size": 4, "lr_decay": 0.5}
FEW = ("fedavg", "apfl", "pgfedmo", "s-fedpg")  # of different kinds; the others take minutes


def stacked() -> Vectorized:
    return Vectorized("cpu", lanes=1)


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_engines_agree(name: str) -> None:
    algorithm = build_algorithm(name, SETTINGS)
    reference = results(federation(algorithm, Sequential(), 0), 3)
    assert_same(results(federation(algorithm, stacked(), 0), 3), reference)
    constant = results(federation(replace(algorithm, lr_decay=1.0), Sequential(), 0), 3)
    assert any(not torch.allclose(a, b) for a, b in zip(reference, constant, strict=True))


@pytest.mark.parametrize("engine", [Sequential, stacked, lambda: Vectorized("cpu", lanes=2, stack=1)])
def test_it_is_torchs_exponential_schedule(engine: Callable[[], Engine]) -> None:
    """One client that takes its whole split in a step, so that a round is a step of torch's SGD."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 6)), np.arange(9) % 3
    torch.manual_seed(0)
    net = nn.Linear(6, 3).double()
    whole = FederatedData.from_arrays([{split: (x, y) for split in ("train", "test")}])
    task = Task(net, dtype=torch.float64)
    run = Federation(task, whole, FedAvg(lr=0.5, lr_decay=0.8, local_epochs=1, batch_size=None), engine=engine())
    sgd = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.8)
    for _ in range(4):
        run.round()
        sgd.zero_grad()
        nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y)).backward()
        sgd.step()
        schedule.step()
    found = run.global_model()
    assert found is not None
    torch.testing.assert_close(dict(net.state_dict()), dict(found), rtol=0, atol=1e-12)


def test_nothing_is_traced_anew() -> None:
    engine = stacked()
    run = Federation(TASK, data(0, (8, 8)), build_algorithm("ditto", SETTINGS), engine=engine)
    run.round()
    before = len(engine._cache._graphs)
    for _ in range(3):
        run.round()
    assert len(engine._cache._graphs) == before > 0


def test_runs_at_once_have_their_own_rates() -> None:
    usual = build_algorithm("fedprox", SETTINGS)
    algorithms: list[Algorithm] = [usual, replace(usual, lr=0.03), replace(usual, lr=0.02, mu=0.7)]  # type: ignore[call-arg]
    counting = Counting(stacked())
    work: list[Any] = [lambda seat, a=a: results(federation(a, seat, 0), 3) for a in algorithms]
    for ours, algorithm in zip(side_by_side(SharedEngine(counting, 3), work), algorithms, strict=True):
        assert_same(ours, results(federation(algorithm, Sequential(), 0), 3))
    assert counting.jobs[:2] == [9, 12]


@dataclass(frozen=True)
class Deciding(FedAvg):
    """Python decides by the rate, which no tensor under vmap can stand for."""

    name: ClassVar[str] = "deciding"

    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        p = task.grad(x, batch)
        return p if self.lr > 0.03 else p._replace(grad={k: 2 * g for k, g in p.grad.items()})


def test_where_the_rate_decides_every_round_has_its_own_functions() -> None:
    algorithm = Deciding(**SETTINGS)
    engine = stacked()
    assert_same(results(federation(algorithm, engine, 0), 3), results(federation(algorithm, Sequential(), 0), 3))
    assert engine._variants._refused and not engine._refused


def test_where_the_rate_decides_seeds_still_run_at_once() -> None:
    algorithm = Deciding(**SETTINGS)
    counting = Counting(stacked())
    work: list[Any] = [lambda seat, k=k: results(federation(algorithm, seat, k), 3) for k in range(2)]
    for k, ours in enumerate(side_by_side(SharedEngine(counting, 2), work)):
        assert_same(ours, results(federation(algorithm, Sequential(), k), 3))
    assert counting.jobs[:3] == [6, 6, 8]  # tried with the rate as a tensor, then with it as a number


def test_a_methods_own_factor_stays_unless_told() -> None:
    def rate(train: dict[str, float], method: str) -> float:
        experiment = parse_experiment({"algorithms": [method], "train": train})
        return make_algorithm(experiment, experiment.algorithms[0]).lr_decay

    assert FedPG().lr_decay == rate({}, "fedpg") == 0.999
    assert rate({}, "fedavg") == 1
    assert rate({"lr_decay": 0.9}, "fedpg") == rate({"lr_decay": 0.9}, "fedavg") == 0.9


@pytest.mark.parametrize("value", [0.0, 1.1])
def test_rates_do_not_grow(value: float) -> None:
    with pytest.raises(InputError, match="lr_decay"):
        FedAvg(lr_decay=value)
