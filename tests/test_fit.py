"""What of model, loss and data does not fit together is refused before the first round, on every engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms import build_algorithm
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData
from bespokefl.federation import Federation

F = nn.functional
BAD_LOSSES: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda out, y: F.cross_entropy(out, y), r'returns one number \(torch.float64\).*\(2,\).*reduction="none"'),
    (lambda out, y: F.cross_entropy(out, y, reduction="none").sum(), "returns one number"),
    (lambda out, y: F.cross_entropy(out, y, reduction="none")[:, None], r"returns the shape \(2, 1\)"),
    (lambda out, y: (out - F.one_hot(y, 2)) ** 2, r"returns the shape \(2, 2\)"),
    (lambda out, y: ((out - F.one_hot(y, 2)) ** 2).mean(0), r"of 1 sample, returns the shape \(2,\)"),  # by class
    (lambda out, y: (out.argmax(1) != y).long(), r"torch.int64"),
    (lambda out, y: 0.5, "returns a float"),
    (lambda out, y: F.cross_entropy(out, y).expand(len(y)), "what it returns for the first depends on the second"),
    (lambda out, y: ((out[:, 1:] - y) ** 2).mean(1), "depends on the second"),  # (n, 1) - (n,) is (n, n)
    (lambda out, y: out @ y, "fails: RuntimeError"),
]


def clinics() -> FederatedData:
    rng = np.random.default_rng(0)
    return FederatedData.from_arrays([(rng.normal(size=(12, 3)), np.arange(12) % 2) for _ in range(3)])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("loss", "message"), BAD_LOSSES)
def test_a_loss_that_is_not_one_value_per_sample(loss: Any, message: str, engine: str) -> None:
    task = Task(nn.Linear(3, 2), loss, classifies=True, dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        Federation(task, clinics(), build_algorithm("fedavg", {}, {}), engine=engine)


def test_squared_errors_need_as_many_outputs_as_targets() -> None:
    x, y = np.ones((8, 3)), np.linspace(0, 1, 8)
    data = FederatedData.from_arrays([(x, y)] * 2)
    task = Task(nn.Linear(3, 2), "squared_error", dtype=torch.float64)
    with pytest.raises(InputError, match=r"the loss, given the outputs \(2, 2\) and targets \(2,\).*fails"):
        Federation(task, data, build_algorithm("fedavg", {}, {}))


def test_floating_labels_are_no_classes() -> None:
    data = FederatedData.from_arrays([(np.ones((8, 3)), np.arange(8) % 2.0)] * 2)
    with pytest.raises(InputError, match=r"fails: .*class labels are whole numbers"):
        Federation(nn.Linear(3, 2).double(), data, build_algorithm("fedavg", {}, {}))


def test_a_model_that_does_not_take_the_samples() -> None:
    with pytest.raises(InputError, match=r"shape \(3,\) and dtype torch.float64: RuntimeError: .*mat1"):
        Federation(nn.Linear(4, 2), clinics(), build_algorithm("fedavg", {}, {}))


def test_a_model_that_answers_with_something_else() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(InputError, match="answers two samples with a tuple"):
        Federation(Pair(3, 2), clinics(), build_algorithm("fedavg", {}, {}))
    maps = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)))
    with pytest.raises(InputError, match=r"answers a sample with the shape \(2, 3\), but there is one label"):
        Federation(maps, clinics(), build_algorithm("fedavg", {}, {}))


def test_a_module_that_makes_tensors_of_the_default_type_fits() -> None:
    class Recurrent(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.matmul(x, torch.eye(3)))

    before = torch.get_default_dtype()
    federation = Federation(Recurrent(3, 2), clinics(), build_algorithm("fedavg", {"batch_size": 4}, {}))
    federation.run(1)
    assert torch.get_default_dtype() == before and np.isfinite(federation.evaluate().accuracy).all()
