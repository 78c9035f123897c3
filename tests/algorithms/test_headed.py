"""A head that does not give the model's answer is refused before the first round, by methods that take it for that."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower import memory
from torch import Tensor, nn

from bespokefl.algorithms import build_algorithm
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import prepare
from bespokefl.federation import Federation

METHODS = ("fedrod", "fedhkd", "splitgp")
METHODS_AND_ENGINES = [(name, engine) for name in METHODS for engine in ("sequential", "vectorized")]
CLASSES = 3


class Tail(nn.Module):
    """A linear layer that is called the head, and what comes behind it."""

    def __init__(self, width: int, *behind: nn.Module) -> None:
        super().__init__()
        self.body, self.head, self.behind = nn.Linear(4, 6), nn.Linear(6, width), nn.Sequential(*behind)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.head(torch.tanh(self.body(x))))
        return out


def federate(name: str, model: nn.Module, engine: str = "sequential") -> Federation:
    rng = np.random.default_rng(0)
    data = FederatedData.from_arrays([(rng.normal(size=(30, 4)), np.arange(30) % CLASSES) for _ in range(2)])
    return Federation(Task(model, dtype=torch.float64), data, build_algorithm(name, {}, {}), engine=engine)


@pytest.mark.parametrize(("name", "engine"), METHODS_AND_ENGINES)
@pytest.mark.parametrize(
    "model",
    [
        lambda: Tail(5, nn.Tanh(), nn.Linear(5, CLASSES)),
        lambda: Tail(CLASSES, nn.Tanh(), nn.Linear(CLASSES, CLASSES)),  # as many: FedRoD added features to logits
        lambda: Tail(2 * CLASSES, nn.MaxPool1d(2)),
    ],
)
def test_a_head_that_is_not_the_models_end(name: str, engine: str, model: Any) -> None:
    with pytest.raises(InputError, match=rf"model.head = 'head' .*the model's answer .*algorithm.name = '{name}'"):
        federate(name, model(), engine)


@pytest.mark.parametrize(("name", "engine"), METHODS_AND_ENGINES)
@pytest.mark.parametrize("model", [lambda: Tail(CLASSES), lambda: Tail(CLASSES, nn.LogSoftmax(1))])
def test_what_does_not_change_the_answer_may_be_behind_it(name: str, engine: str, model: Any) -> None:
    assert federate(name, model(), engine).round().failed == {}


def test_others_take_any_head() -> None:
    model = Tail(5, nn.Tanh(), nn.Linear(5, CLASSES))
    assert federate("fedper", model).round().failed == {}


@pytest.mark.parametrize("name", METHODS)
def test_the_same_from_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.head = 'body.fc1' \(layers of 200 outputs\).*\(10 outputs\)"):
        prepare(parse_experiment(document(name)), tmp_path / "out", resume=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", METHODS)
def test_the_same_in_a_real_federation(name: str, tmp_path: Path) -> None:
    it = memory.experiment(name, model={"head": "body.fc1"}, clients=3)
    transport = memory.Memory(memory.shards(tmp_path, it, [[0, 1], [2]]))
    with pytest.raises(InputError, match=r"model.head = 'body.fc1' \(layers of 7 outputs\).*\(10 outputs\)"):
        memory.remote(it, transport, tmp_path / "server")


def document(name: str) -> dict[str, Any]:
    return {
        "algorithms": [name],
        "data": {"source": "digits", "clients": 3},
        "model": {"name": "mlp", "head": "body.fc1"},
        "train": {"rounds": 1},
    }
