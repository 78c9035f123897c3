"""`bespoke reproduce` that is killed: its processes end with it, and a resumed one makes the same files."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.test_resume import assert_same_but_for_times, bespoke

import bespokefl

TABLE = """
seeds = [0]
algorithms = [{name="sleeping:Sleeps", label="one"}, {name="sleeping:Sleeps", label="other", momentum=0.5}]
[data]
source = "digits"
clients = 4
max_samples = 200
[model]
name = "linear"
[train]
rounds = 2
local_epochs = 1
lr = 0.1
[engine]
name = "sequential"
[checkpoint]
every = 1
[paper]
title = "Nobody"
"""
METHOD = """
import pathlib, time
from dataclasses import dataclass
from typing import ClassVar
from bespokefl.algorithms.fedavg import FedAvg
@dataclass(frozen=True)
class Sleeps(FedAvg):
    name: ClassVar[str] = "sleeps"
    def round(self, server, cohort):
        if pathlib.Path("sleep").exists():
            time.sleep(600)
        return super().round(server, cohort)
"""


def processes_of(parent: int) -> list[int]:
    """Those that it has started and that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, its_parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found.append(int(path.parent.name))
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="lists processes in /proc")
def test_nobody_goes_on_in_the_folders_of_a_master_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sleeping.py").write_text(METHOD)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "table.toml").write_text(TABLE)
    bespoke("run", "experiments/table.toml", "--out", "whole")
    (tmp_path / "sleep").touch()
    command = [sys.executable, "-m", "bespokefl", "reproduce", "table", "--out", "killed", "--jobs", "2"]
    paths = [str(Path(bespokefl.__file__).parents[1]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    master = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("killed/*/seed-0/evaluations.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = processes_of(master.pid)
    assert len(workers) >= 2, master.poll()
    master.send_signal(signal.SIGKILL)
    master.wait()
    deadline = time.monotonic() + 20
    while (left := [process for process in workers if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left
    (tmp_path / "sleep").unlink()
    bespoke("reproduce", "table", "--out", "killed", "--jobs", 2)
    for label in ("one", "other"):
        assert_same_but_for_times(tmp_path / "whole" / label, tmp_path / "killed" / label)
