"""Loss surfaces: against the closed form of a quadratic, against plain PyTorch, and in a run's files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import Batch, InputError, Task
from bespokefl.data import FederatedData, load
from bespokefl.experiments import loss_surface as surface_module
from bespokefl.experiments.loss_surface import directions, loss_surface, surfaces
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.federation import Federation
from bespokefl.progress import LineReporter
from bespokefl.results.files import read_csv
from bespokefl.results.surfaces import Surface, read_surfaces

KEY = torch.zeros((), dtype=torch.int64)


def conv_task() -> Task:
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()]
    return Task(nn.Sequential(*body, nn.Linear(48, 2)), dtype=torch.float64)


def test_a_linear_model_has_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 2))
    torch.manual_seed(0)
    task = Task(nn.Linear(3, 2), "squared_error", dtype=torch.float64)
    along = directions(task.initial, set(), seed=3)
    parts = [slice(0, 25), slice(25, 40)]
    batches = [Batch(torch.as_tensor(x[p]), torch.as_tensor(y[p]), None, KEY) for p in parts]
    a, b = np.linspace(-2, 2, 5), np.linspace(-1, 1, 3)
    found = loss_surface(task, task.initial, batches, along, a, b)
    w, c = task.initial["weight"].numpy(), task.initial["bias"].numpy()
    d, e = (x @ direction["weight"].numpy().T for direction in along)
    residual = x @ w.T + c - y
    # |r + a d + b e|^2 / 2 = a quadratic form whose coefficients are means of products
    half = [[0.5 * (u * v).sum(1).mean() for v in (residual, d, e)] for u in (residual, d, e)]
    for i, s in enumerate(a):
        for j, t in enumerate(b):
            weights = np.array([1, s, t])
            assert found[i, j] == pytest.approx(weights @ np.array(half) @ weights, rel=1e-12)


def test_directions_have_the_lengths_of_filters() -> None:
    task = conv_task()
    first, second = directions(task.initial, set(task.buffer_names), seed=0)
    assert sorted(first) == ["0.weight", "4.weight"]  # no bias, no normalisation, no running statistics
    for name, d in first.items():
        for row, filter_ in zip(d, task.initial[name], strict=True):
            np.testing.assert_allclose(row.norm().item(), filter_.norm().item(), rtol=1e-12)
        cosine = (d * second[name]).sum() / d.norm() / second[name].norm()
        assert abs(cosine) < 0.5
    again, other = directions(task.initial, set(), seed=0)[0], directions(task.initial, set(), seed=1)[0]
    assert torch.equal(again["0.weight"], first["0.weight"]) and not torch.equal(other["0.weight"], first["0.weight"])


def test_models_share_their_directions() -> None:
    task = conv_task()
    model = {k: torch.randn_like(v) for k, v in task.initial.items()}
    mine, theirs = (directions(m, set(task.buffer_names), seed=0)[0] for m in (model, task.initial))
    for name, d in mine.items():
        for row, other in zip(d.flatten(1), theirs[name].flatten(1), strict=True):
            assert torch.dot(row, other) / row.norm() / other.norm() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("at_once", [1, 4, None])
def test_points_are_those_of_a_moved_module(at_once: int | None) -> None:
    task = conv_task()
    x, y = torch.randn(7, 2, 4, 4, dtype=torch.float64), torch.randint(0, 2, (7,))
    along = directions(task.initial, set(task.buffer_names), seed=0)
    a = np.array([-1.0, 0.0, 0.5])
    found = loss_surface(task, task.initial, [Batch(x, y, None, KEY)], along, a, a, at_once=at_once)
    module = conv_task()._nets[False].module
    for i, s in enumerate(a):
        for j, t in enumerate(a):
            moved = {k: v + s * along[0].get(k, 0) + t * along[1].get(k, 0) for k, v in task.initial.items()}
            module.load_state_dict(moved, strict=False)
            with torch.no_grad():
                expected = nn.functional.cross_entropy(module(x), y)
            assert found[i, j] == pytest.approx(expected.item(), rel=1e-10)


class Stubborn(nn.Module):
    """Asks for a value, which vmap forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum().item() > -1e9 else -out


def test_a_network_that_vmap_cannot_take_goes_point_by_point() -> None:
    task = Task(Stubborn(), dtype=torch.float64)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    along, a = directions(task.initial, set(), seed=0), np.array([0.0, 1.0])
    found = loss_surface(task, task.initial, [Batch(x, y, None, KEY)], along, a, a)
    assert found[0, 0] == pytest.approx(task.loss(task.initial, Batch(x, y, None, KEY)).item())
    assert found[1, 0] != found[0, 0]


def test_surfaces_of_a_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (40, 60, 30, 50)]
    data = FederatedData.from_arrays(clients)
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    federation = Federation(module, data, FedAvg(lr=0.5, personal="finetune"))
    federation.round()
    scores = federation.evaluate()
    a = np.array([-1.0, 0.0, 1.0])
    found = surfaces(federation, a, a)
    order = np.argsort(scores.accuracy, kind="stable")
    assert {name: s.about["client"] for name, s in found.items()} == {
        "global": None,
        "worst": order[0],
        "median": order[1],
        "best": order[3],
    }
    for name in ("worst", "median", "best"):
        about = found[name].about
        assert found[name].loss[1, 1] == pytest.approx(scores.loss[about["client"]], rel=1e-12)
        assert about["rows"] == about["rows_available"] == scores.n[about["client"]]
        assert about["score"] == scores.accuracy[about["client"]]
    together = federation.evaluate(model="global")
    assert found["global"].loss[1, 1] == pytest.approx((together.loss * together.n).sum() / together.n.sum(), rel=1e-12)
    monkeypatch.setattr(surface_module, "MOST_ROWS", 5)
    few = surfaces(federation, a, a)["global"].about
    assert (few["rows"], few["rows_available"]) == (5, data.sizes("test").sum())
    alone = Federation(module, data, Local(lr=0.5))
    assert list(surfaces(alone, a, a)) == ["worst", "median", "best"]  # no global model


def test_a_run_writes_its_surfaces(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "algorithms": ["ditto"],
        "data": {"clients": 4, "max_samples": 200},
        "model": {"name": "linear"},
        "train": {"rounds": 2, "local_epochs": 1},
        "output": {"surface": True},
    }
    reporter = LineReporter(Console(quiet=True))
    assert not run_experiment(parse_experiment(document), tmp_path, resume=False, reporter=reporter).failed
    run = tmp_path / "ditto" / "seed-0"
    found, clients = read_surfaces(run), read_csv(run / "clients.csv")
    assert list(found) == ["global", "worst", "median", "best"]
    for surface in found.values():
        assert isinstance(surface, Surface) and surface.loss.shape == (21, 21) and np.isfinite(surface.loss).all()
        assert surface.a[10] == surface.b[10] == 0 and surface.about["round"] == 2
        if surface.about["client"] is not None:
            assert surface.loss[10, 10] == pytest.approx(clients["loss"][surface.about["client"]], rel=1e-5)
            assert surface.about["score"] == clients["accuracy"][surface.about["client"]]
    with pytest.raises(InputError, match=r"output\.surface = true"):
        read_surfaces(tmp_path)


def test_masks_have_surfaces_too() -> None:
    data = load("blobs", partition="domain", samples=24, domains=2, size=8)
    torch.manual_seed(0)
    task = Task(nn.Conv2d(3, 2, 3, padding=1), "dice")
    federation = Federation(task, data, FedAvg())
    found = surfaces(federation, np.zeros(1), np.zeros(1))
    scores = federation.evaluate()
    worst = found["worst"].about
    assert worst["metric"] == "dice" and worst["score"] == scores.further["dice"].min()
    assert found["worst"].loss[0, 0] == pytest.approx(scores.loss[worst["client"]], rel=1e-5)
