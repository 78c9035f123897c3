"""Runs of one method with different hyper-parameters that share an engine compute what each computes alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.engines.seats import Counting, federation, results, side_by_side

from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Batch, Down, Model, Pass, Task, hyper
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.engines.together import SharedEngine
from bespokefl.engines.variants import Variants, fingerprint

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "local_epochs": 1, "batch_size": 4}
OWN: dict[str, dict[str, float]] = {  # beside the learning rate, by method: values of the second and third run
    "apfl": {"alpha0": 0.3, "alpha_decay": 0.02},
    "ditto": {"lam": 0.4},
    "fedamp": {"lam": 0.3, "alpha": 0.6},
    "feddyn": {"alpha": 0.05},
    "fedhkd": {"lam": 0.1, "gamma": 0.02, "T": 0.7},
    "fedprox": {"mu": 0.7},
    "fedsam": {"rho": 0.02},
    "per-fedavg": {"alpha": 0.03},
    "pfedme": {"lam": 9.0, "eta_p": 0.05},
    "pgfed": {"mu": 0.4, "eta2": 0.05},
    "pgfedmo": {"mu": 0.4, "beta": 0.8},
    "plgu-lf": {"rho": 0.02},
    "splitgp": {"gamma": 0.3, "lam": 0.4},
}
FEW = ("fedprox", "pgfedmo")  # of different kinds; the others take minutes
SEEDS = (0, 0, 1)  # of the three runs: two with the same data, and two with the same hyper-parameters


def variants(name: str) -> list[Algorithm]:
    usual = build_algorithm(name, SETTINGS)
    other = replace(usual, lr=0.03, **OWN.get(name, {}))
    return [usual, other, replace(other)]


def alone(algorithms: Sequence[Algorithm], rounds: int = 2) -> list[list[torch.Tensor]]:
    return [results(federation(a, Sequential(), k), rounds) for a, k in zip(algorithms, SEEDS, strict=False)]


def at_once(
    algorithms: Sequence[Algorithm], engine: Engine, rounds: int, programs: Variants | None = None
) -> list[list[torch.Tensor]]:
    work = [
        lambda seat, a=a, k=k: results(federation(a, seat, k), rounds) for a, k in zip(algorithms, SEEDS, strict=False)
    ]
    return side_by_side(SharedEngine(engine, len(work), programs), work)


def assert_same(found: Sequence[Any], expected: Sequence[list[torch.Tensor]], tolerance: float = 1e-9) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert not isinstance(ours, Exception), ours
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


def vectorized() -> Vectorized:
    return Vectorized("cpu", lanes=1)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_every_method_computes_what_it_does_alone(name: str) -> None:
    counting, reference, programs = Counting(vectorized()), Counting(Sequential()), Variants()
    algorithms = variants(name)
    expected = [results(federation(algorithms[0], reference, SEEDS[0]), 2), *alone(algorithms)[1:]]
    assert_same(at_once(algorithms, counting, 2, programs), expected)
    assert counting.jobs[:2] == [3 * clients for clients in reference.jobs[:2]] and not programs._refused


@pytest.mark.parametrize("engine", [Sequential, lambda: Vectorized("cpu", lanes=2, stack=1)])
def test_on_engines_that_stack_nothing(engine: Callable[[], Engine]) -> None:
    algorithms = variants("ditto")
    counting = Counting(engine())
    assert_same(at_once(algorithms, counting, 2), alone(algorithms))
    assert counting.jobs[:4] == [9, 12, 9, 12]


@pytest.mark.parametrize("changes", [{"momentum": 0.0}, {"weight_decay": 0.1}, {"betas": (0.8, 0.99)}])
def test_every_setting_of_the_optimiser_may_differ(changes: dict[str, Any]) -> None:
    usual = FedAvg(**SETTINGS | ({"momentum": 0.0, "optimizer": "adam"} if "betas" in changes else {}))
    algorithms = [usual, replace(usual, **changes)]
    counting = Counting(vectorized())
    # The gradient of a bias before BatchNorm is 0, up to rounding, which Adam divides by its own size.
    tolerance = 1e-7 if "betas" in changes else 1e-9
    assert_same(at_once(algorithms, counting, 2), alone(algorithms), tolerance)
    assert counting.jobs[:4] == [6, 8, 6, 8]


def test_buffers_that_only_some_have_keep_runs_apart() -> None:
    algorithms = [FedAvg(**SETTINGS, opt_state="keep"), FedAvg(**SETTINGS | {"momentum": 0.0})]
    counting = Counting(vectorized())
    assert_same(at_once(algorithms, counting, 1), alone(algorithms, 1))
    assert counting.jobs[:4] == [3, 3, 4, 4]


def test_an_engine_knows_the_joined_functions_again() -> None:
    engine, programs = vectorized(), Variants()
    algorithms = [FedAvg(**SETTINGS | {"lr": lr}) for lr in (0.05, 0.03, 0.02)]

    def train(seat: Engine, algorithm: Algorithm, seed: int) -> None:
        run = federation(algorithm, seat, seed)
        run.round()
        run.evaluate()

    def traced() -> int:
        work = [lambda seat, a=a, k=k: train(seat, a, k) for a, k in zip(algorithms, SEEDS, strict=True)]
        side_by_side(SharedEngine(engine, 3, programs), work)
        return len(engine._cache._graphs)

    before = traced()
    algorithms = [replace(a, lr=a.lr / 2) for a in algorithms]
    assert traced() == before > 0


@dataclass(frozen=True)
class Deciding(FedAvg):
    """Python decides by a float, which no tensor under vmap can stand for."""

    name: ClassVar[str] = "deciding"

    strength: float = hyper(0.0, "a pull, from 1 on twice as strong")

    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        p = task.grad(x, batch)
        pull = 2 * self.strength if self.strength >= 1 else self.strength
        return p._replace(grad={k: g + pull * (x[k] - down.w[k]) for k, g in p.grad.items()})


def test_where_a_float_decides_only_equal_runs_are_joined() -> None:
    algorithms = [Deciding(**SETTINGS), *(Deciding(**SETTINGS, strength=1.0) for _ in range(2))]
    counting = Counting(vectorized())
    assert_same(at_once(algorithms, counting, 2), alone(algorithms))
    # It is tried once; scoring decides nothing.
    assert counting.jobs[:6] == [9, 3, 6, 12, 3, 6]


def test_what_a_program_is_made_of() -> None:
    a, b = FedAvg(**SETTINGS), FedAvg(**SETTINGS | {"lr": 0.5})
    ours, theirs = fingerprint(a.train), fingerprint(b.train)
    assert ours.shape == theirs.shape
    assert [pair for pair in zip(ours.floats, theirs.floats, strict=True) if pair[0] != pair[1]] == [(0.05, 0.5)]
    for other in (
        replace(a, local_epochs=3),
        replace(a, aggregation="clip", clip_norm=1.0),
        replace(a, personal="global"),
    ):
        assert fingerprint(other.train).shape != ours.shape
    assert fingerprint(build_algorithm("fedprox", SETTINGS).train).shape != ours.shape  # type: ignore[attr-defined]
    programs = Variants()
    variant = programs.of([a.train, b.train])
    assert variant is not None and variant.floats == [(0.05,), (0.5,)]
    assert programs.of([b.train, a.train]).program == variant.program  # type: ignore[union-attr]
    assert programs.of([a.train, replace(a).train]).program == a.train  # type: ignore[union-attr]
