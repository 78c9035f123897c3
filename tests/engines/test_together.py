"""Federations that share an engine compute what each computes alone."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engines.seats import SIZES, TASK, Counting, data, federation, results, side_by_side

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.engines.base import Job, Result
from bespokefl.engines.together import SharedEngine
from bespokefl.errors import RunError
from bespokefl.federation import Federation

FEW = ("fedavg", "fedrep", "pgfedmo", "s-fedpg", "lg-mix", "pfedhn")  # of different kinds; the others take minutes


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_every_method_computes_what_it_does_alone(name: str) -> None:
    settings = {"lr": 0.05, "momentum": 0.9, "local_epochs": 2, "batch_size": 4}
    algorithm = build_algorithm(name, settings)
    alone = [results(federation(algorithm, Vectorized("cpu", lanes=1), k), 3) for k in range(3)]
    together = SharedEngine(Vectorized("cpu", lanes=1), 3)
    work = [lambda seat, k=k: results(federation(algorithm, seat, k), 3) for k in range(3)]
    for found, expected in zip(side_by_side(together, work), alone, strict=True):
        assert not isinstance(found, Exception), found
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("engine", [Sequential, lambda: Vectorized("cpu", lanes=2, stack=1)])
def test_on_engines_that_stack_nothing(engine: Callable[[], Engine]) -> None:
    algorithm = build_algorithm("ditto", {"lr": 0.05, "local_epochs": 1, "batch_size": 4})
    alone = [results(federation(algorithm, engine(), k), 2) for k in range(3)]
    work = [lambda seat, k=k: results(federation(algorithm, seat, k), 2) for k in range(3)]
    for found, expected in zip(side_by_side(SharedEngine(engine(), 3), work), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_jobs_are_joined_while_all_are_seated() -> None:
    algorithm = build_algorithm("fedavg", {"lr": 0.05, "local_epochs": 1, "batch_size": 4})
    counting = Counting(Vectorized("cpu", lanes=1))
    rounds = (1, 2, 4)  # some leave sooner than others

    def train(seat: Engine, k: int) -> None:
        run = federation(algorithm, seat, k)
        for _ in range(rounds[k]):
            run.round()

    side_by_side(SharedEngine(counting, 3), [lambda seat, k=k: train(seat, k) for k in range(3)])
    assert counting.jobs == [9, 6, 3, 3]


def test_equal_data_are_held_once() -> None:
    algorithm = build_algorithm("fedavg", {"lr": 0.05})
    together = SharedEngine(Vectorized("cpu", lanes=1), 2)
    same, other = data(0, SIZES[0]), data(0, SIZES[0])
    runs = [Federation(TASK, d, algorithm, engine=together.seats[k]) for k, d in enumerate((same, other))]
    joined, offsets = together._joined_data([run.clients.data for run in runs])
    assert joined is runs[0].clients.data and offsets == (0, 0)
    third = Federation(TASK, data(1, SIZES[1]), algorithm, engine=together.seats[0])
    joined, offsets = together._joined_data([runs[0].clients.data, third.clients.data, runs[1].clients.data])
    assert offsets == (0, len(same.y), 0) and len(joined._y) == len(same.y) + len(third.data.y)


def test_a_run_that_fails_does_not_disturb_the_others() -> None:
    algorithm = build_algorithm("fedavg", {"lr": 0.05, "local_epochs": 1, "batch_size": 4})
    alone = results(federation(algorithm, Vectorized("cpu", lanes=1), 0), 3)

    def broken(seat: Engine) -> Any:
        poisoned = data(1, SIZES[1])
        poisoned.x[:] = float("nan")
        return results(Federation(TASK, poisoned, algorithm, engine=seat, clients_per_round=3), 3)

    found = side_by_side(
        SharedEngine(Vectorized("cpu", lanes=1), 2), [lambda seat: results(federation(algorithm, seat, 0), 3), broken]
    )
    torch.testing.assert_close(found[0], alone, rtol=1e-9, atol=1e-10)
    assert isinstance(found[1], RunError) and "not finite" in str(found[1])


def test_what_ran_out_of_memory_is_let_go_before_others_run() -> None:
    """All at once, and then the first of them alone, take more than there is."""
    held: list[weakref.ref[torch.Tensor]] = []

    class Scarce(Counting):
        def run(self, job: Job) -> Result:
            alive.extend(ref for ref in held if ref() is not None)
            if len(held) == 2:
                return super().run(job)
            mine = torch.zeros(1)
            held.append(weakref.ref(mine))
            raise torch.OutOfMemoryError("no more")

    algorithm = build_algorithm("fedavg", {"lr": 0.05, "local_epochs": 1, "batch_size": 4})
    engine, alive = Scarce(Vectorized("cpu", lanes=1)), list[Any]()
    found = side_by_side(
        SharedEngine(engine, 3), [lambda seat, k=k: federation(algorithm, seat, k).round().failed for k in range(3)]
    )
    assert [isinstance(one, torch.OutOfMemoryError) for one in found] == [True, False, False]
    assert engine.released == 1 and not alive


def test_who_fell_out_is_told_to_its_own_run() -> None:
    algorithm = build_algorithm("fedavg", {"lr": 0.05, "local_epochs": 1, "batch_size": 4})

    def one_poisoned(seat: Engine, k: int) -> dict[int, str]:
        own = data(k, SIZES[k])
        own.x[own.splits["train"][k]] = float("nan")
        return Federation(TASK, own, algorithm, engine=seat).round().failed

    found = side_by_side(
        SharedEngine(Vectorized("cpu", lanes=1), 3), [lambda s, k=k: one_poisoned(s, k) for k in range(3)]
    )
    assert [list(failed) for failed in found] == [[0], [1], [2]]
