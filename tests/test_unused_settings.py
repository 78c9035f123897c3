"""What a file says and does not say: settings that change nothing, and those that are left to the method."""

import io
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from bespokefl.algorithms import ALGORITHMS
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import parse_experiment, parse_setting, read_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.federation import Federation
from bespokefl.progress import LineReporter
from bespokefl.tuning.space import read_spaces

TRAIN = "[train]\nrounds = 1\nlocal_epochs = 1\nlr = 0.1\nmomentum = 0.5\n"
DATA = "[data]\nclients = 4\nmax_samples = 80\n[model]\nname = 'linear'\n"
SHARED = f"algorithms = ['pfedme', 'fedavg']\n[algorithm]\nopt_state = 'keep'\n{TRAIN}{DATA}"


def read(tmp_path: Path, text: str, *settings: str) -> Experiment:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path, [parse_setting(setting) for setting in settings])


def run(experiment: Experiment, out: Path, *, resume: bool = False) -> str:
    said = io.StringIO()
    run_experiment(experiment, out, resume=resume, reporter=LineReporter(Console(file=said, width=300)))
    return said.getvalue()


@pytest.mark.parametrize(
    ("text", "settings", "parts"),
    [
        (
            "algorithms = [\n'local',\n{name = 'fedavg', trim = 0.1}]\n",
            [],
            ["algorithm.trim = 0.1 (fedavg)", "aggregation = 'trimmed'", "aggregation is 'mean'", "exp.toml, line 3"],
        ),
        (
            "[algorithm]\nname = 'fedrep'\nlocal_epochs = 5\n",
            [],
            ["local_epochs = 5 (fedrep)", "head_epochs", "line 3"],
        ),
        (
            "[algorithm]\nname = 'pfedme'\n",
            ["algorithm.momentum=0.9"],
            ["momentum = 0.9 (pfedme)", "plain steps", "from the command line"],
        ),
    ],
)
def test_what_is_written_for_a_method_is_refused(
    tmp_path: Path, text: str, settings: list[str], parts: list[str]
) -> None:
    experiment = read(tmp_path, text + TRAIN + DATA, *settings)
    with pytest.raises(InputError) as error:
        run(experiment, tmp_path / "out")
    assert all(part in str(error.value) for part in ["changes nothing", *parts])
    assert not (tmp_path / "out").exists()


def test_what_is_shared_is_said_and_recorded(tmp_path: Path) -> None:
    experiment = read(tmp_path, SHARED)
    said = run(experiment, tmp_path / "out")
    assert said.count("changes nothing") == 2  # of pfedme, in one line
    assert "pfedme: momentum changes nothing (both of its updates are plain steps); opt_state changes nothing" in said
    config: dict[str, Any] = {}
    for label in ("pfedme", "fedavg"):
        config[label] = tomllib.loads((tmp_path / "out" / label / "seed-0" / "config.toml").read_text())
    assert config["pfedme"]["unused"].keys() == {"momentum", "opt_state"} and "unused" not in config["fedavg"]
    assert config["fedavg"]["algorithm"]["opt_state"] == "keep" and "opt_state" not in config["pfedme"]["algorithm"]

    assert "finished before, skipped" in run(experiment, tmp_path / "out", resume=True)
    again = parse_experiment(config["pfedme"])
    assert resolve.make_algorithm(again, again.algorithms[0]) == resolve.make_algorithm(
        experiment, experiment.algorithms[0]
    )
    run(again, tmp_path / "again")
    written = tomllib.loads((tmp_path / "again" / "pfedme" / "seed-0" / "config.toml").read_text())
    assert written == config["pfedme"] | {"unused": written["unused"]} and written["unused"].keys() == {"momentum"}


def test_what_is_said_of_new_clients_is_said_to_change_nothing_and_recorded(tmp_path: Path) -> None:
    """pfedme's new clients take plain steps: momentum for all methods' is fedavg's alone."""
    new = "[new_clients]\ncount = 1\nepochs = 1\nmomentum = 0.5\n"
    experiment = read(tmp_path, f"algorithms = ['pfedme', 'fedavg']\n{TRAIN.replace('momentum = 0.5', '')}{DATA}{new}")
    said = run(experiment, tmp_path / "out")
    assert said.count("changes nothing") == 1
    assert "pfedme: new_clients.momentum changes nothing (its steps are plain ones)" in said
    config: dict[str, Any] = {}
    for label in ("pfedme", "fedavg"):
        config[label] = tomllib.loads((tmp_path / "out" / label / "seed-0" / "config.toml").read_text())
    assert config["pfedme"]["unused"] == {"new_clients.momentum": "its steps are plain ones"}
    assert "momentum" not in config["pfedme"]["new_clients"]
    assert "unused" not in config["fedavg"] and config["fedavg"]["new_clients"]["momentum"] == 0.5
    assert "finished before, skipped" in run(experiment, tmp_path / "out", resume=True)


def test_what_is_tuned_acts_in_the_method(tmp_path: Path) -> None:
    grid = "[tune.grid]\ntrain.momentum = [0.0, 0.9]\nalgorithm.trim = [0.2, 0.3]\ntrain.lr = [0.1]\n"
    spaces = read_spaces(read(tmp_path, SHARED + grid))
    assert spaces["pfedme"].domains.keys() == {"train.lr"}
    assert spaces["fedavg"].domains.keys() == {"train.lr", "train.momentum"}
    both = read_spaces(read(tmp_path, SHARED + grid + "algorithm.aggregation = ['mean', 'trimmed']\n"))
    assert both["fedavg"].domains["algorithm.trim"].examples == (0.2, 0.3)
    with pytest.raises(InputError, match=r"tune\.own\.pfedme\.train\.momentum = \[0\.5\] changes nothing in pfedme"):
        read_spaces(read(tmp_path, SHARED + grid + "[tune.own.pfedme]\ntrain.momentum = [0.5]\n"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_python_and_a_file_that_only_names_it_give_the_same_run(name: str) -> None:
    """Equal to the last bit; what the file says besides is neither Python's default nor the method's matter."""
    keys = {"clients": 4, "max_samples": 80, "partition": "iid"}
    document = {"algorithms": [name], "data": keys, "model": {"name": "mlp", "hidden": [4]}}
    experiment = parse_experiment(document | {"train": {"participation": 0.75}})
    data = resolve.load_data(experiment, 0)
    module = resolve.make_module(experiment, 0, data)
    resources = resolve.make_resources(experiment, experiment.algorithms[0], data)
    of_file = resolve.make_federation(experiment, resources, 0, data)
    of_python = Federation(module, data, ALGORITHMS[name].cls(), participation=0.75)
    for federation in (of_file, of_python):
        federation.round()
    ours, theirs = of_file.state()[0], of_python.state()[0]
    assert ours.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in ours.items())
    assert np.array_equal(of_file.evaluate().loss, of_python.evaluate().loss)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_file_overrides_what_it_writes_and_nothing_else(name: str) -> None:
    own = ALGORITHMS[name].cls()
    experiment = parse_experiment({"algorithms": [name], "train": {"lr": 0.5, "batch_size": "full"}})
    told = resolve.make_algorithm(experiment, experiment.algorithms[0])
    assert {f.name for f in fields(own) if getattr(own, f.name) != getattr(told, f.name)} == {"lr", "batch_size"}
