"""What --resume meets in a folder: another process, another configuration, other data, files that were damaged."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.test_resume import PLAIN, assert_same_but_for_times, start
from typer.testing import CliRunner

import bespokefl
from bespokefl.cli import app

EXPERIMENT = """
algorithms = ["ditto"]
[data]
source = "npz"
root = "{root}"
clients = 4
partition = "dirichlet"
alpha = 1.0
[model]
name = "linear"
[train]
rounds = 4
local_epochs = 1
batch_size = 10
lr = 0.1
[checkpoint]
every = 2
[output]
personal = true
"""


def write_data(path: Path, changed: int = 0) -> None:
    """Two hundred points in three classes; ``changed`` labels are another one."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    x = rng.normal(size=(200, 5)).astype(np.float32) + y[:, None]
    y[:changed] = (y[:changed] + 1) % 3
    np.savez(path, x=x, y=y)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_data(folder / "points.npz")
    (folder / "small.toml").write_text(EXPERIMENT.format(root=folder / "points.npz"))
    return folder / "small.toml"


@pytest.fixture(scope="module")
def undisturbed(experiment: Path) -> Path:
    out = experiment.parent / "undisturbed"
    assert call("run", experiment, "--out", out)[0] == 0
    return out


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of a finished output folder."""
    return Path(shutil.copytree(undisturbed, tmp_path / "out"))


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and all that was said, in one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def run_folder(out: Path) -> Path:
    return out / "ditto" / "seed-0"


def unfinished(out: Path) -> Path:
    """Without the mark of a finished run."""
    (run_folder(out) / "summary.json").unlink()
    return run_folder(out)


# two processes ---------------------------------------------------------------------------------------
def test_a_second_process_is_refused_and_a_dead_one_is_not_in_the_way(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("run", experiment, "--out", out, "--set", "train.rounds=100000")
    process = start(PLAIN, *arguments)
    log = run_folder(out) / "rounds.jsonl"
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not (log.exists() and log.stat().st_size):
            time.sleep(0.02)
        before = log.read_bytes()
        code, said = call(*arguments, "--resume")
        assert code == 2 and f"is in use by process {process.pid} on " in said and "--out" in said
        assert log.read_bytes().startswith(before) and process.poll() is None
        code, said = call(*arguments[:-1], "train.rounds=100000", "--resume", "--set", "algorithms=[local, ditto]")
        assert code == 2 and not (out / "local" / "seed-0").exists()  # before the first round of any method
    finally:
        process.kill()
        process.communicate()
    assert not (run_folder(out) / "summary.json").exists()
    lock = run_folder(out).with_name(".seed-0.lock")
    assert json.loads(lock.read_text())["process"] == process.pid  # left behind, but nobody holds it
    shutil.rmtree(run_folder(out))
    assert call("run", experiment, "--out", out, "--resume")[0] == 0
    assert not lock.exists()


def test_a_dead_process_leaves_no_lock_beside_finished_runs(
    experiment: Path, undisturbed: Path, finished: Path
) -> None:
    run_folder(finished).with_name(".seed-0.lock").write_text("{}")
    assert call("run", experiment, "--out", finished, "--resume")[0] == 0
    assert_same_but_for_times(undisturbed, finished)


# another configuration, other data -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "config"), [("finished", "edited"), ("unfinished", "deleted"), ("unfinished", "garbled")]
)
def test_the_checkpoint_knows_its_configuration(experiment: Path, finished: Path, state: str, config: str) -> None:
    path = run_folder(finished) / "config.toml"
    if state == "unfinished":
        unfinished(finished)
    changes: dict[str, Callable[[], object]] = {
        "deleted": path.unlink,
        "garbled": lambda: path.write_text("seeds = ["),
        "edited": lambda: path.write_text(re.sub(r"(?m)^lr = .*", "lr = 0.3", path.read_text())),
    }
    changes[config]()
    before = (run_folder(finished) / "rounds.jsonl").read_bytes()
    code, said = call("run", experiment, "--out", finished, "--resume", "--set", "train.lr=0.3")
    assert code == 2 and "train.lr was 0.1 and is now 0.3" in said
    assert (run_folder(finished) / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_a_lost_configuration_is_written_anew(experiment: Path, undisturbed: Path, finished: Path, state: str) -> None:
    (run_folder(finished) / "config.toml").unlink()
    if state == "unfinished":
        unfinished(finished)
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 0 and "config.toml is missing" in said
    assert_same_but_for_times(undisturbed, finished)


def test_without_configuration_and_checkpoint_nobody_goes_on(experiment: Path, finished: Path) -> None:
    folder = unfinished(finished)
    (folder / "config.toml").unlink()
    shutil.rmtree(folder / "checkpoint")
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 2 and "config.toml is missing" in said and "--out" in said


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_other_labels_in_the_same_file_are_refused(
    experiment: Path, undisturbed: Path, finished: Path, state: str
) -> None:
    if state == "unfinished":
        unfinished(finished)
    data = experiment.parent / "points.npz"
    write_data(data, changed=1)
    try:
        code, said = call("run", experiment, "--out", finished, "--resume")
    finally:
        write_data(data)
    assert code == 2 and "labels" in said and "other data" in said
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 0
    assert_same_but_for_times(undisturbed, finished)


# damaged files ---------------------------------------------------------------------------------------
DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(b"\x00{]" + path.read_bytes()[3:]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
MADE_AGAIN = [
    ("summary.json", "garbled"),
    ("clients.csv", "deleted"),
    ("clients.csv", "truncated"),
    ("results.parquet", "truncated"),
    ("config.toml", "garbled"),
    ("personal/client-2.safetensors", "deleted"),
    ("personal/client-2.safetensors", "garbled"),
    ("personal/client-2.safetensors", "truncated"),
]


@pytest.mark.parametrize(("name", "how"), MADE_AGAIN)
def test_what_a_checkpoint_can_make_is_made_again(
    experiment: Path, undisturbed: Path, finished: Path, name: str, how: str
) -> None:
    DAMAGE[how](run_folder(finished) / name)
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 0 and name.partition("/")[0] in said and "made again" in said
    assert_same_but_for_times(undisturbed, finished)


@pytest.mark.parametrize(
    ("state", "how"), [("finished", "deleted"), ("unfinished", "garbled"), ("finished", "truncated")]
)
def test_lost_scores_are_told(experiment: Path, finished: Path, state: str, how: str) -> None:
    if state == "unfinished":
        unfinished(finished)
    DAMAGE[how](run_folder(finished) / "evaluations.jsonl")
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 0 and re.search(r"evaluations\.jsonl has lost the scores of rounds? [\d, ]+", said)


def test_nothing_is_told_of_whole_files(experiment: Path, finished: Path) -> None:
    code, said = call("run", experiment, "--out", finished, "--resume")
    assert code == 0 and "warning" not in said


# signals and full disks ------------------------------------------------------------------------------
COMMAND = [sys.executable, "-m", "bespokefl"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(bespokefl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def listens(process: "subprocess.Popen[str]") -> bool:
    """Whether the program has set its own handler for SIGTERM, which is the first thing that it does."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)  # type: ignore[index]
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.0, 0.2, 0.8])
def test_a_signal_while_modules_are_imported(experiment: Path, tmp_path: Path, number: int, after: float) -> None:
    command = [*COMMAND, "run", experiment, "--out", tmp_path / "out", "--set", "train.rounds=100000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not listens(process):
        time.sleep(0.002)
    time.sleep(after)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped" in errors and "Traceback" not in errors, errors


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv[1:] = sys.argv[2:]
from bespokefl.__main__ import main
main()
"""


@pytest.mark.parametrize("size", [300, 3000, 20_000])
def test_a_disk_that_is_full_ends_with_one_line(experiment: Path, undisturbed: Path, tmp_path: Path, size: int) -> None:
    """A limit on the size of files fails the write at the same place as a full disk does."""
    out = tmp_path / "out"
    process = start(FULL, size, "run", experiment, "--out", out)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in errors
    assert re.search(r"error: .*(File too large|No space left).*--resume", errors), errors
    assert call("run", experiment, "--out", out, "--resume")[0] == 0
    assert_same_but_for_times(undisturbed, out)
