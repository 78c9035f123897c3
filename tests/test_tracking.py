"""What TensorBoard and MLflow hold after a run, read back by their own libraries, is what rounds.jsonl holds."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import bespokefl
from bespokefl.cli import app
from bespokefl.tracking.base import NAMES
from bespokefl.tracking.mlflow_tracker import MLflow

EXPERIMENT = """
algorithms = ["local", {name = "ditto", label = "ditto-strong", lam = 2.0}]
[data]
clients = 5
max_samples = 300
val = 0.2
[model]
name = "linear"
[train]
rounds = 5
local_epochs = 1
lr = 0.5
[eval]
every = 2
[checkpoint]
every = 2
"""
LABELS = ["local", "ditto-strong"]
BOTH = ("--track", "tensorboard", "--track", "mlflow")

Points = dict[str, list[tuple[int, float]]]  # by name: (round, value)


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here may speak to anybody."""
    tried: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: tried.append(arguments))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    assert not tried


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("track") / "exp.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def template(tracked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes seconds to set up a database: an empty one, to be copied."""
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    store(f"sqlite:///{path}")
    return path


@pytest.fixture
def out(template: Path, tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    shutil.copy(template, tmp_path / "out" / "mlflow.db")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def tracked(experiment: Path) -> Path:
    """Both trackers from nothing."""
    out = experiment.parent / "out"
    result = bespoke("run", experiment, "--out", out, *BOTH)
    assert result.exit_code == 0 and "warning" not in result.output, result.output
    return out


def expected(run: Path) -> Points:
    """Of rounds.jsonl; a round without an evaluation has no accuracies."""
    points: Points = {}
    for line in map(json.loads, (run / "rounds.jsonl").read_text().splitlines()):
        for key, name in NAMES.items():
            if line[key] is not None:
                points.setdefault(name, []).append((line["round"], line[key]))
    return points


def on_tensorboard(run: Path) -> tuple[Points, dict[str, str]]:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return points, texts


def store(uri: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's database warns of itself
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        client.search_experiments()
    return client


def in_mlflow(uri: str) -> dict[str, Any]:
    """The runs of all experiments by name."""
    client = store(uri)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = [e.experiment_id for e in client.search_experiments()]
        runs = client.search_runs(ids)
    names = [run.info.run_name for run in runs]
    assert len(names) == len(set(names)), names
    return {run.info.run_name: run for run in runs}


def points_of(uri: str, run: Any) -> Points:
    client = store(uri)
    return {
        name: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }


def assert_points(found: Points, run: Path, tolerance: float) -> None:
    wanted = expected(run)
    assert {name for name in found if not name.startswith("final/")} == set(wanted)
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name  # each once, in order
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=tolerance), name
    summary = json.loads((run / "summary.json").read_text())
    for key in ("mean", "worst5", "top5", "bytes_total", "seed"):
        ((step, value),) = found[f"final/{key}"]
        assert step == summary["rounds"] and value == pytest.approx(summary[key], rel=tolerance)


def database(out: Path) -> str:
    return f"sqlite:///{out.absolute() / 'mlflow.db'}"


@pytest.mark.parametrize("label", LABELS)
def test_tensorboard_has_every_round_once(tracked: Path, label: str) -> None:
    run = tracked / label / "seed-0"
    points, texts = on_tensorboard(run)
    assert_points(points, run, 1e-6)  # its values are float32
    assert "name = " in texts["config/text_summary"] and texts["state/text_summary"] == "finished"


@pytest.mark.parametrize("label", LABELS)
def test_mlflow_has_every_round_once(tracked: Path, label: str) -> None:
    folder = tracked / label / "seed-0"
    run = in_mlflow(database(tracked))[f"{label}, seed 0"]
    assert_points(points_of(database(tracked), run), folder, 1e-12)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.rounds"] == "5" and run.data.params["algorithm.label"] == label
    assert run.data.tags["label"] == label and run.data.tags["seed"] == "0"
    artifacts = {path.name: path for path in (tracked / "mlartifacts" / run.info.run_id / "artifacts").iterdir()}
    assert artifacts.keys() == {"config.toml", "summary.json", "clients.csv"}
    for name, path in artifacts.items():
        assert path.read_bytes() == (folder / name).read_bytes()


def test_mlflow_has_the_report(tracked: Path) -> None:
    run = in_mlflow(database(tracked))["report"]
    kept = tracked / "mlartifacts" / run.info.run_id / "artifacts" / "report.html"
    assert kept.read_bytes() == (tracked / "report.html").read_bytes()


KILLED = """
import os, signal, sys
from bespokefl import progress
said = progress.LineReporter.round
def round(self, line):
    said(self, line)
    if line["round"] == 4:  # written and told; the checkpoint behind it is that of round 2
        os.kill(os.getpid(), signal.SIGKILL)
progress.LineReporter.round = round
from bespokefl.cli import main
main()
"""


@pytest.mark.parametrize("tracked_before", [True, False])
def test_a_killed_run_goes_on_without_double_points(experiment: Path, out: Path, tracked_before: bool) -> None:
    """Also where tracking begins only with the resumption."""
    arguments = [
        "run",
        str(experiment),
        "--out",
        str(out),
        "--set",
        "algorithms=[local]",
        "--set",
        "checkpoint.every=3",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(bespokefl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, *arguments, *(BOTH if tracked_before else ())]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == -9
    run = out / "local" / "seed-0"
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 4 and not (run / "summary.json").exists()
    before = None
    if tracked_before:
        before = in_mlflow(database(out))["local, seed 0"]
        assert before.info.status == "RUNNING" and before.data.metrics["accuracy/mean"] > 0
    result = bespoke(*arguments, *BOTH, "--resume")
    assert result.exit_code == 0 and "resumed after round 3" in result.output, result.output
    assert_points(on_tensorboard(run)[0], run, 1e-6)
    after = in_mlflow(database(out))["local, seed 0"]
    assert before is None or after.info.run_id == before.info.run_id
    found = points_of(database(out), after)
    found["time/seconds"] = sorted(expected(run)["time/seconds"])  # round 4 was measured twice, and told once
    assert_points(found, run, 1e-12)
    assert after.info.status == "FINISHED"


def test_runs_that_are_finished_are_told_when_tracking_is_asked_for_later(experiment: Path, out: Path) -> None:
    arguments = ["run", experiment, "--out", out, "--set", "algorithms=[local]"]
    assert bespoke(*arguments).exit_code == 0
    run = out / "local" / "seed-0"
    assert not (run / "tensorboard").exists() and not in_mlflow(database(out))
    for _ in range(2):  # the second time there is nothing left to tell
        assert bespoke(*arguments, *BOTH, "--resume").exit_code == 0
        assert_points(on_tensorboard(run)[0], run, 1e-6)
        uri = database(out)
        assert_points(points_of(uri, in_mlflow(uri)["local, seed 0"]), run, 1e-12)


def test_tracking_changes_nothing_in_a_run(tracked: Path, experiment: Path, tmp_path: Path) -> None:
    assert bespoke("run", experiment, "--out", tmp_path / "out", "--set", "algorithms=[local]").exit_code == 0
    ours, alone = tracked / "local" / "seed-0", tmp_path / "out" / "local" / "seed-0"
    assert {p.name for p in ours.iterdir()} - {p.name for p in alone.iterdir()} == {"tensorboard", "mlflow.json"}
    for name in ("config.toml", "clients.csv", "evaluations.jsonl", "results.parquet"):
        assert (ours / name).read_bytes() == (alone / name).read_bytes(), name


def test_another_place_and_name(
    experiment: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{shutil.copy(template, tmp_path / 'other.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "algorithms=[local]", "--set", "train.rounds=1", "--set", "track.experiment=mine"]
    assert bespoke("run", experiment, "--out", "out", "--track", "mlflow", *settings).exit_code == 0
    assert not Path("out/mlflow.db").exists()
    assert store(uri).get_experiment_by_name("mine") is not None and "local, seed 0" in in_mlflow(uri)


def test_a_run_that_fails_is_marked(experiment: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bespokefl.algorithms.local import Local

    real = Local.round

    def breaks(self: Local, server: Any, cohort: Any) -> Any:
        if cohort.round == 2:
            raise ZeroDivisionError("out of numbers")
        return real(self, server, cohort)

    monkeypatch.setattr(Local, "round", breaks)
    assert bespoke("run", experiment, "--out", out, *BOTH, "--set", "algorithms=[local]").exit_code == 1
    run = in_mlflow(database(out))["local, seed 0"]
    assert run.info.status == "FAILED"
    assert [step for step, _ in points_of(database(out), run)["time/seconds"]] == [1, 2]
    assert on_tensorboard(out / "local" / "seed-0")[1]["state/text_summary"] == "failed"


def test_a_tracker_that_fails_does_not_stop_the_run(
    experiment: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: MLflow, round_: int, figures: dict[str, float]) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(MLflow, "log", gone)
    result = bespoke("run", experiment, "--out", out, *BOTH)
    assert result.exit_code == 0
    said = "warning: mlflow is no longer told (ConnectionError: the server is gone); the runs go on"
    assert result.output.count("the server is gone") == 1 and said in result.output
    for label in LABELS:
        run = out / label / "seed-0"
        assert_points(on_tensorboard(run)[0], run, 1e-6)


def test_wrong_input(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bespoke("run", experiment, "--out", tmp_path / "out", "--track", "wandb")
    assert result.exit_code == 2 and "track.to = ['wandb']" in result.output and "tensorboard" in result.output
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "mlflow" else real(name, *a))
    result = bespoke("run", experiment, "--out", tmp_path / "out", *BOTH)
    assert result.exit_code == 2 and "mlflow missing; pip install 'bespokefl[track]'" in result.output
    assert not (tmp_path / "out").exists()


def test_nothing_is_imported_unless_asked_for(experiment: Path, tmp_path: Path) -> None:
    heavy = "{'mlflow', 'tensorboard', 'sqlalchemy'}"
    code = f"import sys, bespokefl.experiments.running; assert not {heavy} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(bespokefl.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
