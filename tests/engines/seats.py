"""Small federations that share an engine, for tests."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn

from bespokefl.algorithms import Algorithm
from bespokefl.core import Task
from bespokefl.data import FederatedData
from bespokefl.engines import Engine
from bespokefl.engines.base import Job, Result
from bespokefl.engines.together import SharedEngine
from bespokefl.experiments.selection import g_rows
from bespokefl.federation import Federation

SEEDS = (0, 1, 2)
SIZES = ((5, 12, 3, 9), (4, 4, 10, 6), (8, 2, 7, 11))


def net() -> nn.Module:
    """Smooth: BatchNorm of a single sample meets ReLU at its kink, where rounding decides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))


def data(seed: int, sizes: Sequence[int]) -> FederatedData:
    rng = np.random.default_rng(seed)
    return FederatedData.from_arrays(
        [{split: (rng.normal(size=(n, 6)), np.arange(n) % 3) for split in ("train", "test", "val")} for n in sizes]
    )


TASK = Task(net(), dtype=torch.float64)


def federation(algorithm: Algorithm, engine: Engine, k: int, **options: Any) -> Federation:
    return Federation(TASK, data(k, SIZES[k]), algorithm, engine=engine, seed=SEEDS[k], clients_per_round=3, **options)


def results(run: Federation, rounds: int) -> list[torch.Tensor]:
    """The personal models and all scores after some rounds."""
    losses = []
    for _ in range(rounds):
        run.round()
        losses.append(torch.from_numpy(run.evaluate().loss))
    everybodys = run.evaluate(rows=g_rows(run.data.splits["test"])).loss
    return [*(v.double() for v in run.personal_models().values()), *losses, torch.from_numpy(everybodys)]


def side_by_side(together: SharedEngine, work: Sequence[Callable[[Engine], Any]]) -> list[Any]:
    """Each function in a thread of its own, with a seat; what it returns, or the error that it raises."""

    def seated(pair: tuple[Any, Callable[[Engine], Any]]) -> Any:
        seat, function = pair
        try:
            return function(seat)
        except Exception as error:
            return error
        finally:
            seat.leave()

    with ThreadPoolExecutor(len(work)) as threads:
        return list(threads.map(seated, zip(together.seats, work, strict=True)))


class Counting:
    """An engine that notes how many clients each job has."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name, self.device = engine, engine.name, engine.device
        self.jobs: list[int] = []
        self.released = 0

    def run(self, job: Job) -> Result:
        self.jobs.append(len(job.clients))
        return self.engine.run(job)

    def plan(self) -> dict[str, Any]:
        return self.engine.plan()

    def load_state(self, plan: Any) -> None:
        self.engine.load_state(plan)

    def release(self) -> None:
        self.released += 1
        self.engine.release()
