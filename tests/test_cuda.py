"""The vectorized engine on a GPU; skipped where there is none."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import seats
from tests.flattening_networks import NETWORKS
from torch import nn

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import Task
from bespokefl.data import FederatedData
from bespokefl.engines import Engine, Sequential, Vectorized, steppers
from bespokefl.engines.together import SharedEngine
from bespokefl.experiments.running import side_by_side
from bespokefl.federation import Federation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*cannot run vectorized"),
]
every_algorithm = pytest.mark.parametrize("name", list(ALGORITHMS))

SIZES = (5, 12, 23, 2, 40, 17, 9)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, width, 3), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(width), nn.Dropout(0.2), nn.Flatten()
        )
        self.head = nn.Linear(4 * width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def federate(
    name: str,
    engine: Engine,
    dtype: torch.dtype = torch.float64,
    rounds: int = 2,
    fixed: bool = False,
    width: int = 4,
    **task: Any,
) -> Federation:
    """After some rounds of five clients, always the same ones if ``fixed``."""
    rng = np.random.default_rng(0)
    data = FederatedData.from_arrays(
        [
            {
                "train": (rng.normal(size=(n, 2, 6, 6)), np.arange(n) % 3),
                "test": (rng.normal(size=(4, 2, 6, 6)), [0, 1, 2, 0]),
            }
            for n in SIZES
        ]
    )
    torch.manual_seed(1)
    algorithm = build_algorithm(name, {"lr": 0.05, "momentum": 0.9, "local_epochs": 2, "batch_size": 8})
    federation = Federation(Task(Net(width), dtype=dtype, **task), data, algorithm, engine=engine, clients_per_round=5)
    for _ in range(rounds):
        federation.round(range(5) if fixed else None)
    return federation


def weights(federation: Federation) -> torch.Tensor:
    return torch.cat([v.flatten().cpu() for v in federation.personal_models().values()])


@every_algorithm
def test_gpu_equals_cpu(name: str) -> None:
    reference = federate(name, Sequential("cpu"))
    for engine in (Sequential("cuda"), Vectorized("cuda"), Vectorized("cuda", stack=2), Vectorized("cuda", stack=1)):
        federation = federate(name, engine)
        assert all(v.device.type == "cuda" for v in federation.personal_models().values())
        torch.testing.assert_close(weights(federation), weights(reference), rtol=1e-10, atol=1e-10)
        np.testing.assert_array_equal(federation.evaluate().accuracy, reference.evaluate().accuracy)


@every_algorithm
def test_captured_steps_are_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = federate(name, Vectorized("cuda"), rounds=5, fixed=True)
    monkeypatch.setattr(steppers, "CALLS_BEFORE_CAPTURE", 1)
    captured = federate(name, engine := Vectorized("cuda"), rounds=5, fixed=True)
    assert torch.equal(weights(captured), weights(eager))
    assert engine._steppers.release(), "nothing was captured"


@pytest.mark.parametrize("name", ["fedavg", "apfl", "lg-mix"])
def test_a_run_leaves_no_memory_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steppers, "CALLS_BEFORE_CAPTURE", 1)
    wide = 4096  # a model of a megabyte
    model = sum(p.numel() for p in Net(wide).parameters()) * 8
    engines: list[Engine] = []

    def run() -> tuple[int, int]:
        """Memory in use at a run's end and after it; the engine is still there, as those of an experiment's methods."""

        def go(engine: Engine) -> int:
            federate(name, engine, rounds=3, width=wide)
            return torch.cuda.memory_allocated()

        engines.append(Vectorized("cuda"))
        (at_its_end,) = side_by_side(engines[-1], [go])
        return at_its_end, torch.cuda.memory_allocated()

    _, once = run()  # libraries keep some for good
    at_its_end, after = run()
    assert at_its_end - after > 5 * model, "what captured steps work on: five clients' models at least"
    # The task's network and initial values, by which the engine knows its functions, and these functions' constants:
    # 3.4 models, however many clients and rounds there are.
    assert after - once <= 4 * model


def test_compiled_equals_eager() -> None:
    compiled = federate("fedavg", Vectorized("cuda", compile=True))
    torch.testing.assert_close(
        weights(compiled), weights(federate("fedavg", Vectorized("cuda"))), rtol=1e-10, atol=1e-10
    )


@every_algorithm
def test_float32_without_tf32(name: str) -> None:
    exact = weights(federate(name, Sequential("cpu")))
    single = weights(federate(name, Vectorized("cuda", tf32=False), torch.float32)).double()
    assert (single - exact).norm() / exact.norm() < 1e-4


def test_bf16() -> None:
    exact = weights(federate("fedavg", Sequential("cpu")))
    rough = weights(federate("fedavg", Vectorized("cuda"), torch.float32, bf16=True)).double()
    assert 0 < (rough - exact).norm() / exact.norm() < 0.1


@every_algorithm
def test_resumed_on_a_gpu_is_bit_equal(name: str) -> None:
    straight = federate(name, Vectorized("cuda"))
    tensors, meta = straight.state()
    straight.round()
    resumed = federate(name, Vectorized("cuda"))
    resumed.restore(tensors, meta)
    resumed.round()
    assert torch.equal(weights(resumed), weights(straight))


def test_memory_limit_cuts_the_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespokefl.engines.budget.free_bytes", lambda device: 100_000)
    engine = Vectorized("cuda")
    cut = federate("ditto", engine)
    assert engine.plan()["memory"] is not None
    torch.testing.assert_close(weights(cut), weights(federate("ditto", Vectorized("cuda"))), rtol=1e-10, atol=1e-10)


@every_algorithm
def test_runs_at_once_on_a_gpu_are_those_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steppers, "CALLS_BEFORE_CAPTURE", 1)
    settings = [{"lr": lr, "momentum": 0.9, "local_epochs": 1, "batch_size": 4} for lr in (0.05, 0.03, 0.05)]
    algorithms = [build_algorithm(name, own) for own in settings]
    alone = [seats.results(seats.federation(one, Sequential("cuda"), k), 3) for k, one in enumerate(algorithms)]
    work = [
        lambda seat, k=k, one=one: seats.results(seats.federation(one, seat, k), 3) for k, one in enumerate(algorithms)
    ]
    for found, expected in zip(seats.side_by_side(SharedEngine(Vectorized("cuda"), 3), work), alone, strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_view_is_reshape(network: str, engine: type, bf16: bool) -> None:
    """On a GPU the kernels choose layouts of their own; a network that flattens by view runs there, too."""
    rng = np.random.default_rng(0)
    found = []
    for reshape in (False, True):
        torch.manual_seed(0)
        net = NETWORKS[network]((2, 8, 8), 3, reshape=reshape)
        x, y = rng.normal(size=(20, 2, 8, 8)), np.arange(20) % 3
        data = FederatedData.from_arrays([{"train": (x[k:], y[k:]), "test": (x[:k], y[:k])} for k in (4, 7, 9)])
        method = build_algorithm("fedavg", {"lr": 0.1, "momentum": 0.9, "local_epochs": 1, "batch_size": 4})
        task = Task(net, dtype=torch.float32, bf16=bf16)
        federation = Federation(task, data, method, engine=engine("cuda", tf32=False), seed=1)
        assert federation.round().failed == {}
        found.append({**federation.global_model(), "loss": torch.as_tensor(federation.evaluate().loss)})
        rng = np.random.default_rng(0)
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)
