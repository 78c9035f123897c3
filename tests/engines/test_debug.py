"""The debug engine: the reference's numbers, breakpoints that work, and errors that say where they happened."""

import bdb
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from bespokefl.algorithms import build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.cli import app
from bespokefl.core import InputError, Program, Task
from bespokefl.data import FederatedData
from bespokefl.engines import Debug, Sequential, build_engine
from bespokefl.engines.debug import ClientError
from bespokefl.federation import Federation

SIZES = (3, 20, 9)
SETTINGS = {"lr": 0.1, "momentum": 0.9, "local_epochs": 1, "batch_size": 8}


class Net(nn.Module):
    """Tells ``seen`` of each of its batches, as Python does that runs."""

    def __init__(self, seen: Callable[[Tensor], None] = lambda x: None) -> None:
        super().__init__()
        self.seen = seen
        self.body, self.norm, self.head = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen(x)
        out: Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return out


def make_data() -> FederatedData:
    """Client i's first input is i everywhere, so that a batch tells whose it is."""
    rng = np.random.default_rng(0)
    draw = lambda i, n: (rng.normal(size=(n, 6)).round(3) / 8 + i, np.arange(n) % 2)  # noqa: E731
    return FederatedData.from_arrays([{"train": draw(i, n), "test": draw(i, 4)} for i, n in enumerate(SIZES)])


def federate(engine: Any, name: str = "fedavg", seen: Callable[[Tensor], None] = lambda x: None) -> Federation:
    torch.manual_seed(0)
    task = Task(Net(seen), dtype=torch.float64)
    return Federation(task, make_data(), build_algorithm(name, SETTINGS), engine=engine)


def client_of(x: Tensor) -> int:
    return round(float(x.mean()))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pgfed", "s-fedpg", "plgu-grep", "per-fedavg", "fedbabu"])
def test_numbers_are_those_of_the_reference(name: str) -> None:
    debug, reference = (federate(engine, name) for engine in (Debug(), Sequential()))
    for _ in range(2):
        debug.round()
        reference.round()
    ours, theirs = ({**one.state()[0], **one.personal_models()} for one in (debug, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert np.array_equal(debug.evaluate().accuracy, reference.evaluate().accuracy)
    assert np.array_equal(debug.evaluate().loss, reference.evaluate().loss)


def test_the_module_runs_for_every_batch_one_client_at_a_time() -> None:
    seen: list[tuple[int, int]] = []
    federation = federate(Debug(), seen=lambda x: seen.append((client_of(x), len(x))))
    seen.clear()  # of what a federation tries before the first round
    federation.round()
    assert seen == [(0, 3), (1, 8), (1, 8), (1, 4), (2, 8), (2, 1)]


def test_an_error_names_round_client_and_stage_and_ends_with_the_users_line() -> None:
    trouble = {"on": False}

    def seen(x: Tensor) -> None:
        if trouble["on"] and client_of(x) == 1 and len(x) == 4:
            raise ValueError("not of four")  # the user's line

    federation = federate(Debug(), seen=seen)
    federation.round()
    trouble["on"] = True
    with pytest.raises(ClientError) as caught:
        federation.round()
    first, *_, last = str(caught.value).splitlines()
    assert first == "round 2, client 1, phase 1, step 3 (LocalSGD.step): ValueError: not of four"
    assert last.strip().startswith('raise ValueError("not of four")')
    assert str(Path(__file__)) in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


class Stumbles(FedAvg):
    """Of the user's own; ``where`` is the stage at which it raises."""

    where = "begin"

    @property
    def train(self) -> Program:
        program = super().train
        if self.where == "enter":
            return program._replace(phases=(program.phases[0]._replace(enter=self.stumble),))
        return program._replace(**{self.where: self.stumble})

    def stumble(self, *values: Any) -> Any:
        raise KeyError(self.where)


@pytest.mark.parametrize(("where", "stage"), [("begin", "begin"), ("enter", "phase 1, enter"), ("finish", "finish")])
def test_every_stage_has_a_name(where: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stumbles, "where", where)
    federation = Federation(Net(), make_data(), Stumbles(lr=0.1), engine="debug")
    with pytest.raises(ClientError, match=rf"^round 1, client 0, {stage} \(.*stumble\): KeyError: '{where}'\n"):
        federation.round()


def test_breakpoints_stop_for_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    at = {"client": -1}

    def seen(x: Tensor) -> None:
        at["client"] = client_of(x)
        breakpoint()

    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(at["client"]))
    federation = federate(Debug(client=2), seen=seen)
    stopped.clear()
    federation.round()
    assert stopped == [2, 2]
    stopped.clear()
    everyone = federate(Debug(), seen=seen)
    stopped.clear()
    everyone.round()
    assert stopped == [0, 1, 1, 1, 2, 2]


def test_leaving_the_debugger_stops_the_run() -> None:
    leave = {"now": False}

    def seen(x: Tensor) -> None:
        if leave["now"]:
            raise bdb.BdbQuit

    federation = federate(Debug(), seen=seen)
    leave["now"] = True
    with pytest.raises(KeyboardInterrupt):
        federation.round()


def test_a_client_is_for_the_debug_engine() -> None:
    with pytest.raises(InputError, match=r"engine\.debug_client = 3 is for the engine 'debug', not 'sequential'"):
        build_engine("sequential", "cpu", debug_client=3)


RUN = ["--set", "algorithms=[fedavg]", "--set", "train.rounds=1", "--set", "data.clients=4", "--device", "cpu"]


def test_the_command_takes_the_engine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["run", "--debug-client", "3", "--out", str(out), *RUN])
    assert result.exit_code == 0, result.output
    config = (out / "fedavg" / "seed-0" / "config.toml").read_text()
    assert 'name = "debug"' in config and "debug_client = 3" in config
    again = CliRunner().invoke(app, ["run", "--debug-client", "1", "--resume", "--out", str(out), *RUN])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--debug-client", "4"], "engine.debug_client = 4, and the clients are 0 to 3"),
        (["--debug-client", "3", "--engine", "vectorized"], "engine.debug_client = 3 is for the engine 'debug'"),
        (["--engine", "debug", "--set", "engine.together=2"], "engine.together = 2, but the debug engine"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(more: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--out", str(tmp_path / "out"), *RUN, *more])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
