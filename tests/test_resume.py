"""A run may die at any moment: what --resume makes of it equals, byte for byte, a run that was never disturbed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bespokefl
from bespokefl.cli import app
from bespokefl.results.files import TIMED_KEYS

EXPERIMENT = """
algorithms = ["pgfed"]
[data]
clients = 6
max_samples = 400
val = 0.2
[model]
name = "linear"
[train]
rounds = 6
local_epochs = 1
batch_size = 20
lr = 0.5
participation = 0.5
[checkpoint]
every = 2
[output]
personal = true
"""

# Runs the command line, and kills the process when it is about to give a file its final name for the n-th time.
KILLED = """
import os, pathlib, signal, sys
name, left = sys.argv.pop(1), int(sys.argv.pop(1))
rename = pathlib.Path.replace
def replace(self, target):
    global left
    left -= pathlib.Path(target).name == name
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.replace = replace
from bespokefl.cli import main
main()
"""
PLAIN = "from bespokefl.cli import main; main()"


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    paths = [str(Path(bespokefl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def bespoke(*arguments: object) -> str:
    """The command line in this process; it must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "small.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def undisturbed(experiment: Path) -> Path:
    out = experiment.parent / "undisturbed"
    bespoke("run", experiment, "--out", out)
    return out


def assert_same_but_for_times(a: Path, b: Path) -> None:
    """All files of two output folders but the report, which tells the seconds."""
    names = {str(p.relative_to(a)) for p in a.rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(b)) for p in b.rglob("*") if p.is_file()}
    for name in sorted(names - {"report.html"}):
        if name.endswith((".json", ".jsonl")):
            for left, right in zip(_documents(a / name), _documents(b / name), strict=True):
                assert left == right, name
        else:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


def _documents(path: Path) -> list[Any]:
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [{k: v for k, v in json.loads(text).items() if k not in TIMED_KEYS} for text in texts]


def test_the_same_run_twice(undisturbed: Path, tmp_path: Path) -> None:
    config = undisturbed / "pgfed" / "seed-0" / "config.toml"
    bespoke("run", config, "--out", tmp_path / "again")
    assert_same_but_for_times(undisturbed, tmp_path / "again")


def test_killed_again_and_again(experiment: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    folder = out / "pgfed" / "seed-0"
    moments = [
        ("round-000002.json", 2),  # round 2's checkpoint: its tensors are there, its commit mark is not
        ("round-000004.safetensors", 4),  # rounds 3 and 4 are recorded, but in no checkpoint
        ("results.parquet", 6),  # the last checkpoint is there, the results are not
        ("summary.json", 6),  # all is done but the mark of a finished run
    ]
    for name, recorded in moments:
        process = start(KILLED, name, 1, "run", experiment, "--out", out, "--resume")
        _, errors = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, errors
        assert len((folder / "rounds.jsonl").read_text().splitlines()) == recorded
        assert not (folder / "summary.json").exists()
    assert "resumed after round 6" in bespoke("run", experiment, "--out", out, "--resume")
    assert_same_but_for_times(undisturbed, out)


def copy_unfinished(undisturbed: Path, out: Path) -> Path:
    """A finished run made to look as if it had died after its last checkpoint."""
    shutil.copytree(undisturbed, out)
    folder = out / "pgfed" / "seed-0"
    for name in ("summary.json", "clients.csv"):
        (folder / name).unlink()
    return folder


def test_a_line_that_was_cut_off(experiment: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_unfinished(undisturbed, tmp_path / "out")
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 7, "me')
    bespoke("run", experiment, "--out", tmp_path / "out", "--resume")
    assert_same_but_for_times(undisturbed, tmp_path / "out")


def test_a_last_save_that_was_killed_before_it_removed_the_one_before(
    experiment: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = copy_unfinished(undisturbed, tmp_path / "out") / "checkpoint"
    for suffix in ("safetensors", "json"):
        shutil.copy(folder / f"round-000006.{suffix}", folder / f"round-000004.{suffix}")
    (folder / ".unfinished").mkdir()
    bespoke("run", experiment, "--out", tmp_path / "out", "--resume")
    assert_same_but_for_times(undisturbed, tmp_path / "out")
    assert not (folder / ".unfinished").exists()


def test_a_damaged_newest_checkpoint(experiment: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(KILLED, "round-000006.safetensors", 1, "run", experiment, "--out", out)
    process.communicate(timeout=120)
    damaged = out / "pgfed" / "seed-0" / "checkpoint" / "round-000004.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    said = bespoke("run", experiment, "--out", out, "--resume")
    assert "round-000004.safetensors" in said and "going on from round 2" in said
    assert_same_but_for_times(undisturbed, out)


def test_lost_rounds_are_reported(experiment: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_unfinished(undisturbed, tmp_path / "out")
    (folder / "rounds.jsonl").write_text("")
    result = CliRunner().invoke(app, ["run", str(experiment), "--out", str(tmp_path / "out"), "--resume"])
    assert result.exit_code == 1
    assert "holds 0 whole rounds" in (folder / "error.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_keeps_the_last_round(experiment: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    settings = ("--set", "train.rounds=100000", "--set", "checkpoint.every=100000")
    process = start(PLAIN, "run", experiment, "--out", out, *settings)
    log = out / "pgfed" / "seed-0" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not log.exists() or len(log.read_text().splitlines()) < 3):
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    done = len(log.read_text().splitlines())
    assert re.search(rf"stopped after round {done} of pgfed, seed 0; continue with: bespoke run .* --resume", errors)
    assert (out / "pgfed" / "seed-0" / "checkpoint" / f"round-{done:06d}.json").exists()
    assert "Traceback" not in errors
