"""What people add from outside the package, in the fewest lines: it runs on both engines from a file, over a kill."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from bespokefl.algorithms import build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.cli import app
from bespokefl.core import OPTIMIZERS, SGD, InputError, Registry
from bespokefl.core.hyper import refuse_code
from bespokefl.experiments.overrides import overlaid
from bespokefl.experiments.reading import parse_experiment, read_experiment
from bespokefl.experiments.resolve import make_algorithm
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import LineReporter
from bespokefl.results.files import Line

LION = """
from dataclasses import dataclass
import torch

@dataclass(frozen=True)
class Lion:
    lr: float
    beta: float = 0.5
    beta2: float = 0.9

    def init(self, params):
        return {k: torch.zeros_like(v) for k, v in params.items()}

    def step(self, x, grad, buffers):
        signs = {k: torch.lerp(g, buffers[k], self.beta).sign() for k, g in grad.items()}
        buffers = buffers | {k: torch.lerp(g, buffers[k], self.beta2) for k, g in grad.items()}
        return x | {k: x[k] - self.lr * s for k, s in signs.items()}, buffers
"""
EXPERIMENT = """
seeds = [0]
algorithms = ["fedavg", {name = "ditto", lam = 0.5}]

[data]
source = "digits"
max_samples = 80
clients = 4
partition = "iid"

[model]
name = "linear"

[train]
rounds = 3
local_epochs = 1
batch_size = 10
lr = 0.01

[eval]
cross = false

[checkpoint]
every = 1

[engine]
precision = "float64"
device = "cpu"
"""
ENGINES = ["sequential", "vectorized"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that the extensions are written to, gone without a trace."""
    import sys

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    yield tmp_path / "mine_for_tests.py"
    sys.modules.pop("mine_for_tests", None)


class Killed(BaseException):
    pass


class Killing(LineReporter):
    """Ends the process, as far as a test can, while the second round of the first method is told."""

    def round(self, line: Line) -> None:
        if line["round"] == 2:
            raise Killed


def run(folder: Path, engine: str, settings: dict[str, Any], name: str, *, killed: bool = False) -> dict[str, Any]:
    """What the last checkpoints hold of server and clients, in float64."""
    experiment = read_experiment(folder / "exp.toml", [*settings.items(), ("engine.name", engine)])
    out, console = folder / f"{name}-{engine}", Console(quiet=True)
    if killed:
        with pytest.raises(Killed):
            run_experiment(experiment, out, resume=False, reporter=Killing(console))
    outcome = run_experiment(experiment, out, resume=killed, reporter=LineReporter(console))
    assert not outcome.failed
    found = {p.parts[-4]: load_file(p) for p in out.glob("*/seed-0/checkpoint/*-000003.safetensors")}
    assert found.keys() == {"fedavg", "ditto"}
    return {f"{method} {k}": v for method, tensors in found.items() for k, v in tensors.items() if "score/" not in k}


def assert_runs(mine: Path, settings: dict[str, Any], plain: dict[str, Any] | None = None) -> None:
    """On both engines alike, otherwise than without it, and over an interruption bit for bit."""
    ends = {engine: run(mine.parent, engine, settings, "whole") for engine in ENGINES}
    torch.testing.assert_close(ends["vectorized"], ends["sequential"], rtol=1e-9, atol=1e-10)
    for engine, whole in ends.items():
        resumed = run(mine.parent, engine, settings, "cut", killed=True)
        assert resumed.keys() == whole.keys() and all(torch.equal(resumed[k], v) for k, v in whole.items())
    if plain is not None:
        without = run(mine.parent, "sequential", plain, "without")
        assert any(not torch.allclose(without[k], v) for k, v in whole.items() if k in without)


# optimisers ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "mine_for_tests:Lion", "beta": 0.9},
        {"name": "adamw", "weight_decay": 0.5},
        {"name": "sgd", "nesterov": True},
    ],
    ids=lambda o: o["name"],
)
def test_an_optimiser(mine: Path, optimizer: dict[str, Any]) -> None:
    mine.write_text(LION)
    momentum = {"train.momentum": 0.9} if optimizer["name"] == "sgd" else {}
    settings = {"train.optimizer": optimizer, "algorithm.opt_state": "keep", **momentum}
    assert_runs(mine, settings, momentum)
    config = tomllib.loads((mine.parent / "whole-sequential" / "fedavg" / "seed-0" / "config.toml").read_text())
    assert config["train"]["optimizer"] == optimizer


def test_a_method_has_its_own(mine: Path) -> None:
    mine.write_text(LION)
    algorithms = ["local", {"name": "fedavg", "optimizer": {"name": "mine_for_tests:Lion", "beta": 0.9}}]
    experiment = parse_experiment({"algorithms": algorithms, "train": {"lr": 0.3, "optimizer": "rmsprop"}})
    local, fedavg = (make_algorithm(experiment, choice) for choice in experiment.algorithms)
    assert local.opt == OPTIMIZERS["rmsprop"](0.3)  # type: ignore[call-arg]
    assert str(fedavg.opt) == "Lion(lr=0.3, beta=0.9, beta2=0.9)"
    assert hash(fedavg) == hash(make_algorithm(experiment, experiment.algorithms[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr: float": "rate: float", "self.lr": "self.rate"}, "is the class Lion, not a dataclass with the field lr"),
        ({"zeros_like": "ones_like"}, "init gives buffers other than zeros"),
        ({"return x |": "return"}, "x with all names and shapes"),
        ({"self.lr * s ": "self.lr * s[None] "}, "x with all names and shapes"),
        ({"for k, s in signs.items()": "for k, s in {k: 1 for k in x}.items()"}, "moves a parameter that is not in"),
        ({"buffers = buffers |": "buffers ="}, "step returns other buffers than init gives"),
        ({"import torch": "import torhc"}, "importing 'mine_for_tests' failed: ModuleNotFoundError"),
        ({"def step(self, x, grad, buffers)": "def step(self, x, grad)"}, "fails: TypeError: .*positional arguments"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said_before_anything_runs(
    mine: Path, change: dict[str, str], message: str
) -> None:
    text = LION
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    mine.write_text(text)
    with pytest.raises(InputError, match=message):
        build_algorithm("fedavg", {"optimizer": "mine_for_tests:Lion"})


def test_what_stands_beside_an_optimiser_that_has_it_itself_is_refused() -> None:
    told = r"algorithm\.weight_decay = 0\.1 \(fedavg\) stands beside optimizer = 'adamw'.*optimizer = {name = 'adamw'"
    with pytest.raises(InputError, match=told):
        build_algorithm("fedavg", {"optimizer": "adamw", "weight_decay": 0.1})
    assert build_algorithm("fedavg", {"optimizer": "adamw", "momentum": 0.1}).momentum == 0  # AdamW has none
    with pytest.raises(
        InputError, match=r"weight_decay = 0\.1 \(fedavg\) changes nothing: .* optimizer = 'sgd' or 'adam'"
    ):
        FedAvg(optimizer="adamw", weight_decay=0.1)


@pytest.mark.parametrize("name", ["fedpg", "pfedme", "per-fedavg", "plgu-grep"])
@pytest.mark.parametrize("optimizer", ["adamw", {"name": "sgd", "nesterov": True}])
def test_methods_of_plain_sgd_refuse_the_others(name: str, optimizer: Any) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.optimizer = .* \({name}\): .*; it must be 'sgd'"):
        build_algorithm(name, {"optimizer": optimizer, "momentum": 0.9})


def test_an_option_that_needs_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"optimizer = {'name': 'sgd'.*nesterov = true needs a momentum above 0"):
        build_algorithm("fedavg", {"optimizer": {"name": "sgd", "nesterov": True}})


def test_a_file_says_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text("algorithms = ['fedavg']\n[train]\noptimizer = {name = 'adamw', beta = 1}")
    with pytest.raises(InputError, match=r"train\.optimizer\.beta = 1 is not an option of 'adamw'.*exp\.toml, line 3"):
        read_experiment(path)


def test_a_choice_is_replaced_with_its_options() -> None:
    document = {"algorithms": ["fedavg"], "train": {"optimizer": {"name": "adamw", "amsgrad": True}}}
    over = {"train": {"optimizer": {"name": "rmsprop"}}}
    assert overlaid(document, over)["train"] == over["train"]


def test_a_server_names_none_but_ours_to_a_silo() -> None:
    for value in ("mine:Lion", {"name": "mine:Lion"}, "nobody", 3):
        with pytest.raises(InputError, match=r"algorithm\.optimizer = .* is not one of ours .*never from a server"):
            refuse_code(FedAvg, {"optimizer": value}, "never from a server")
    refuse_code(FedAvg, {"optimizer": {"name": "adamw"}}, "never from a server")


def test_installed_packages_add_names(mine: Path) -> None:
    """A distribution is a folder with its metadata."""
    mine.write_text(LION)
    info = mine.parent / "lions-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lions\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bespokefl.optimizers]\nlion = mine_for_tests:Lion\nlost = no_such_module:X\nsgd = mine_for_tests:Lion\n"
    )
    known = Registry("optimizers", "x", {"sgd": SGD}, lambda name, value: value, "a class")
    assert known.find("lion").__name__ == "Lion" and known.find("sgd") is SGD
    assert list(known.installed) == ["lion", "lost"]
    with pytest.raises(InputError, match=r"x = 'lost' \(of the installed package lions: no_such_module:X\) cannot be"):
        known.find("lost")
    with pytest.raises(InputError, match=r"x = 'lions' is not known.*Did you mean lion"):
        known.find("lions")


def test_optimisers_are_listed_with_their_options() -> None:
    result = CliRunner().invoke(app, ["list", "optimizers", "--json"])
    found = {entry["name"]: entry["options"] for entry in json.loads(result.output)}
    assert {*OPTIMIZERS} <= found.keys()
    assert found["sgd"] == {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    assert found["adamw"]["weight_decay"] == 0.01
    assert "torch's AdamW" in CliRunner().invoke(app, ["list", "optimizers", "adamw"]).output
