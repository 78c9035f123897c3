"""The example scripts run, and the method in them computes what its paper says."""

import contextlib
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import nn

import bespokefl
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LR, EPOCHS = 0.3, 3


@contextlib.contextmanager
def imported(name: str) -> Iterator[Any]:
    """An example as a module, gone without a trace."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop(name, None)
        sys.dont_write_bytecode = before


@pytest.fixture(scope="module")
def scaffold() -> Iterator[Any]:
    with imported("own_algorithm") as module:
        yield module.Scaffold


@pytest.fixture(scope="module")
def q_fedavg() -> Iterator[Any]:
    with imported("q_fedavg") as module:
        yield module.QFedAvg


@pytest.fixture(scope="module")
def data() -> FederatedData:
    rng = np.random.default_rng(0)
    return FederatedData.from_arrays([(rng.normal(size=(n, 4)) + 0.3 * n, rng.integers(0, 3, n)) for n in (9, 20, 14)])


def test_own_data_prints_every_client(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_data.py"), run_name="__main__")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["client", "north", "east", "south", "west", "centre"]
    accuracy = {line.split()[0]: np.array(re.findall(r"([\d.]+)%", line), dtype=float) for line in lines}
    assert list(accuracy) == ["local", "fedavg", "ditto"]
    assert all(len(values) == 5 for values in accuracy.values())
    assert accuracy["ditto"].mean() > max(accuracy["local"].mean(), accuracy["fedavg"].mean())


def test_own_algorithm_prints_both_models(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_algorithm.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fedavg", "scaffold"]
    assert all(float(value) > 80 for line in lines for value in re.findall(r"([\d.]+) %", line))


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_scaffold_is_algorithm_1(scaffold: Any, data: FederatedData, engine: Any) -> None:
    """Against the paper's pseudo-code in plain PyTorch, full batches, two of three clients in a round."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    schedule = [[0, 1], [1, 2], [0, 2]]
    method = scaffold(lr=LR, local_epochs=EPOCHS, batch_size=None, eta_g=0.7)
    federation = Federation(Task(net, dtype=torch.float64), data, method, engine=engine("cpu"), schedule=schedule)

    w, c = [p.detach().clone() for p in net.parameters()], [torch.zeros_like(p) for p in net.parameters()]
    own = [[torch.zeros_like(v) for v in w] for _ in range(3)]
    for cohort in schedule:
        federation.round()
        dw, dc = [torch.zeros_like(v) for v in w], [torch.zeros_like(v) for v in w]
        for i in cohort:
            y = trained(net, data, i, w, c, own[i])
            new = [ci - cc + (x - yy) / (EPOCHS * LR) for ci, cc, x, yy in zip(own[i], c, w, y, strict=True)]
            dw = [d + (yy - x) / 2 for d, yy, x in zip(dw, y, w, strict=True)]
            dc = [d + (n - o) / 2 for d, n, o in zip(dc, new, own[i], strict=True)]
            own[i] = new
        w = [x + 0.7 * d for x, d in zip(w, dw, strict=True)]
        c = [x + 2 / 3 * d for x, d in zip(c, dc, strict=True)]
        torch.testing.assert_close(list(federation.global_model().values()), w, rtol=1e-10, atol=1e-12)
    personal = list(federation.client_model(1).values())
    torch.testing.assert_close(personal, trained(net, data, 1, w, c, own[1]), rtol=1e-10, atol=1e-12)


def trained(net: nn.Module, data: FederatedData, client: int, w: Any, c: Any, c_i: Any) -> list[torch.Tensor]:
    """Lines 7 to 11: corrected gradient steps from w."""
    rows = torch.as_tensor(data.splits["train"][client])
    y = [v.clone() for v in w]
    for _ in range(EPOCHS):
        for p, v in zip(net.parameters(), y, strict=True):
            p.data = v
        loss = nn.functional.cross_entropy(net(data.x[rows]), data.y[rows])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        y = [v - LR * (g - mine + all_) for v, g, mine, all_ in zip(y, grads, c_i, c, strict=True)]
    return y


def test_scaffold_refuses_momentum(scaffold: Any, data: FederatedData) -> None:
    with pytest.raises(InputError, match=r"momentum = 0\.9"):
        Federation(nn.Linear(4, 3), data, scaffold(momentum=0.9))


def test_own_algorithm_on_the_command_line(tmp_path: Path) -> None:
    """The command of its docstring, with less to do; resumed, so its state goes through a checkpoint."""
    words = (EXAMPLES / "own_algorithm.py").read_text(encoding="utf-8").split("&& bespoke ")[1].splitlines()[0].split()
    less = ["--set", "train.rounds=2", "--set", "data.clients=5", "--set", "checkpoint.every=1", "--seed", "0"]
    paths = [str(Path(bespokefl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "from bespokefl.cli import main; main()", *words, *less, "--out", str(tmp_path)]
    for extra in ([], ["--resume"]):
        done = subprocess.run([*command, *extra], env=environment, cwd=EXAMPLES, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (summary,) = tmp_path.glob("*/seed-0/summary.json")
        assert json.loads(summary.read_text())["algorithm"] == "own_algorithm:Scaffold"
        summary.unlink()  # unfinished, as if it had stopped before the end


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("q", [0.5, 2.0])
def test_q_fedavg_is_algorithm_2(q_fedavg: Any, engine: Any, q: float) -> None:
    algorithm = q_fedavg(lr=0.1, momentum=0.9, local_epochs=2, batch_size=3, q=q)
    federation = small.federate(algorithm, engine("cpu"))
    w = small.start()
    for t in range(2):
        federation.round()
        weights, steps, h = [], [], 0.0
        for i, (x, y) in enumerate(small.samples()):
            F, v, m = small.loss(w, x, y), w, small.Weights()
            _, batches = small.batches(federation, algorithm.train, i, t)
            for rows in batches:
                v, m = small.sgd(v, small.gradient(v, x[rows], y[rows]), m, lr=0.1, momentum=0.9)
            dw = {k: (w[k] - v[k]) / 0.1 for k in w}
            weights.append(F**q)
            steps.append(dw)
            h += q * F ** (q - 1) * float((small.flat(dw) ** 2).sum()) + F**q / 0.1
        w = {k: w[k] - sum(a * d[k] for a, d in zip(weights, steps, strict=True)) / h for k in w}
    small.assert_models(federation.server["w"], w, 1e-11)


def test_q_fedavg_without_q_is_fedavg(q_fedavg: Any) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 2, "batch_size": 3, "weights": "uniform"}
    ours, fedavg = small.federate(q_fedavg(**settings, q=0.0)), small.federate(FedAvg(**settings))
    for federation in (ours, fedavg):
        federation.run(rounds=2)
    for k, v in fedavg.server["w"].items():
        torch.testing.assert_close(ours.server["w"][k], v, rtol=1e-12, atol=1e-14)


def test_the_tutorial_is_short() -> None:
    assert len((EXAMPLES / "q_fedavg.py").read_text().splitlines()) < 60
