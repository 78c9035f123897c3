"""Whole federations of real processes: the numbers of one process, and what is left when it is stopped or killed."""

import csv
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from rich.console import Console
from tests.flower.commands import nothing_left, processes, running

from bespokefl.experiments.reading import read_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import LineReporter

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks into /proc")

EXPERIMENT = """
seeds = [0]
algorithms = {algorithms}
[data]
source = "digits"
clients = 4
partition = "dirichlet"
alpha = 0.5
max_samples = 400
[model]
name = "mlp"
hidden = [16]
[train]
rounds = {rounds}
local_epochs = 1
batch_size = 20
lr = 0.05
momentum = 0.9
participation = 0.75
[engine]
precision = "float64"
device = "cpu"
[federation]
deadline = 60
"""
TEN = ["fedavg", "ditto", "fedrep", "pgfedmo", "plgu-lf", "plgu-ghn", "s-fedpg", "lg-mix", "pfedme", "fedfomo"]


def written(folder: Path, algorithms: list[str], rounds: int) -> Path:
    path = folder / "experiment.toml"
    path.write_text(EXPERIMENT.format(algorithms=json.dumps(algorithms), rounds=rounds), encoding="utf-8")
    return path


def simulated(path: Path, out: Path) -> None:
    run_experiment(read_experiment(path), out, resume=False, reporter=LineReporter(Console(quiet=True)))


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def assert_same_numbers(ours: Path, theirs: Path, algorithms: list[str]) -> None:
    for name in algorithms:
        here, there = (rows(out / name / "seed-0" / "clients.csv") for out in (ours, theirs))
        for column in ("client", "n_train", "n_test", "accuracy", "loss", "rounds_asked"):
            values = [[float(row[column] or "nan") for row in table] for table in (here, there)]
            np.testing.assert_allclose(values[0], values[1], rtol=1e-9, err_msg=f"{name}, {column}")
        losses = [
            [json.loads(line)["loss"] for line in (out / name / "seed-0" / "rounds.jsonl").read_text().splitlines()]
            for out in (ours, theirs)
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9, err_msg=name)


def federation_equals_simulation(tmp_path: Path, algorithms: list[str]) -> None:
    path, out = written(tmp_path, algorithms, 2), tmp_path / "federation"
    with running(tmp_path, "federate", path, "--nodes", 2, "--out", out) as command:
        assert command.finished(300) == 0, command.text
        assert "node-1: " in command.text and "node-2: " in command.text  # progress of each
        assert "answers in" in command.text and "no answer" not in command.text
    nothing_left(tmp_path)
    simulated(path, tmp_path / "simulation")
    assert_same_numbers(out, tmp_path / "simulation", algorithms)
    there = {path.name for path in (tmp_path / "simulation" / algorithms[0] / "seed-0").iterdir()}
    assert there <= {path.name for path in (out / algorithms[0] / "seed-0").iterdir()}
    assert (out / "report.html").is_file()
    assert not list(out.rglob("*.key")) and not list(out.rglob("*.secret"))


def test_a_federation_computes_what_one_process_does(tmp_path: Path) -> None:
    federation_equals_simulation(tmp_path, ["pgfedmo"])


@pytest.mark.slow
def test_ten_methods_compute_what_one_process_does(tmp_path: Path) -> None:
    federation_equals_simulation(tmp_path, TEN)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_federation_that_is_stopped_leaves_nothing_behind_and_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    path, out = written(tmp_path, ["pgfedmo"], 6), tmp_path / "federation"
    told = out / "pgfedmo" / "seed-0" / "rounds.jsonl"
    with running(tmp_path, "federate", path, "--nodes", 2, "--out", out) as command:
        command.until(lambda: told.is_file() and len(told.read_text().splitlines()) >= 2)
        command.kill(number)
        if number != signal.SIGKILL:
            assert command.process.returncode == 130, command.text
            assert "continue with: bespoke federate" in command.text and "--resume" in command.text
    nothing_left(tmp_path)
    before = told.read_text().splitlines()
    with running(tmp_path, "federate", path, "--nodes", 2, "--out", out, "--resume") as command:
        assert command.finished() == 0, command.text
        assert "resumed after round" in command.text
    nothing_left(tmp_path)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    kept = [json.loads(line) for line in before[:-1]]
    assert lines[: len(kept)] == kept  # a finished round is not done again
    simulated(path, tmp_path / "simulation")
    assert_same_numbers(out, tmp_path / "simulation", ["pgfedmo"])


def test_a_superlink_that_dies_ends_the_run_with_a_line(tmp_path: Path) -> None:
    """Within seconds, and without a traceback of Flower's."""
    path = written(tmp_path, ["fedavg"], rounds=1000)
    with running(tmp_path, "federate", path, "--nodes", "2", "--out", tmp_path / "out") as command:
        command.until_said("round 1 ")
        (superlink,) = [pid for pid, line in processes(tmp_path / "out").items() if "transport.superlink" in line]
        os.kill(superlink, signal.SIGKILL)
        assert command.finished(60) == 1
        assert "a process of the federation ended (signal 9); its log is" in command.text
        assert "Traceback" not in command.text and "retrying" not in command.text
    nothing_left(tmp_path / "out")
