"""The commands, their exit codes, and that a user never meets a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import bespokefl
from bespokefl.algorithms import ALGORITHMS
from bespokefl.cli import app
from bespokefl.core import OPTIMIZERS
from bespokefl.data import PARTITIONS, SOURCES
from bespokefl.engines import ENGINES
from bespokefl.models import MODELS

SMALL = """
algorithms = [{name = "local", note = "the clients' <own> data only."}, {name = "fedavg", personal = "global"}]
[data]
clients = 6
max_samples = 400
[model]
name = "linear"
[train]
rounds = 2
local_epochs = 1
lr = 0.5
[paper]
title = "a table"
accuracy = {local = 50.0, fedavg = 60.0, missing = 70.0}
"""


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def in_a_process(
    *arguments: object, cwd: Path, code: str = "from bespokefl.cli import main; main()"
) -> "subprocess.CompletedProcess[str]":
    paths = [str(Path(bespokefl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def finished(small: Path) -> tuple[Path, str]:
    out = small.parent / "out"
    result = bespoke("run", small, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_run_prints_the_table_and_where_the_report_is(finished: tuple[Path, str]) -> None:
    out, said = finished
    rows = [line.split() for line in said.splitlines() if line.strip().startswith(("local ", "fedavg "))]
    assert {row[0] for row in rows} == {"local", "fedavg"}
    for row in rows:
        numbers = json.loads((out / row[0] / "seed-0" / "summary.json").read_text())
        assert row[1] == f"{100 * numbers['mean']:.2f}" and row[2] == f"{100 * numbers['worst5']:.1f}"
    means = [float(row[1]) for row in rows]
    assert means == sorted(means, reverse=True)
    assert str(out / "report.html") in said
    caption = " ".join(said.split())
    assert "Scored: personal models of all 6 clients, round 2, test split (the last round): " in caption
    assert "the global model for fedavg" in caption and "the method's own personal model for local" in caption
    assert caption.index("own personal model for local") < caption.index("local: the clients' <own> data only.")
    assert '<p class="note">local: the clients&#x27; &lt;own&gt; data only.</p>' in (out / "report.html").read_text()
    for name in ("report.html", "result.png", "result.svg"):
        assert (out / name).stat().st_size > 5000


def test_wrong_input_in_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("algorithms = ['local']\n[train]\nrounds = -1\n")
    result = in_a_process("run", "bad.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: train.rounds = -1: should be greater than or equal to 1. (bad.toml, line 3)\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.toml"]


OWN_MODEL = """
from torch import nn

def factory(input_shape, classes, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, classes))
"""
OWN_ALGORITHM = """
from dataclasses import dataclass
from typing import ClassVar
from bespokefl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Breaks(FedAvg):
    name: ClassVar[str] = "breaks"

    def round(self, server, cohort):
        raise ZeroDivisionError("out of numbers")
"""


def test_own_code_of_the_current_directory_and_exit_code_1(small: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_MODEL + OWN_ALGORITHM)
    settings = ["model.name=mine:factory", "model.width=7", "algorithms=[mine:Breaks, local]"]
    result = in_a_process("run", small, *(part for s in settings for part in ("--set", s)), cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "Breaks, seed 0: failed: ZeroDivisionError: out of numbers" in result.stderr
    assert "Traceback" not in result.stderr and "local" in result.stdout
    config = (tmp_path / "runs" / "small" / "local" / "seed-0" / "config.toml").read_text()
    assert 'name = "mine:factory"' in config and "width = 7" in config
    report = (tmp_path / "runs" / "small" / "report.html").read_text()
    assert "Breaks, seed 0: failed after 0 rounds" in report and "out of numbers" in report


def test_one_algorithm_with_all_its_hyper_parameters() -> None:
    result = bespoke("list", "algorithms", "pgfedmo")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "PGFedMo: PGFed whose auxiliary gradients" in words and "Personalize Each Client's Global Objective" in words
    for part in ("beta 0.5 beta: momentum of the auxiliary gradient", "momentum 0.9", "batch_size 50"):
        assert part in words


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "missing.toml"], ["missing.toml cannot be read (No such file or directory); give the path"]),
        (["run", "--set", 'algorithms=["fedavgg"]'], ["algorithm.name = 'fedavgg'", "(from the command line)"]),
        (["run", "--set", 'algorithms=[{name="pgfed",mu=-1}]'], ["algorithm.mu = -1", "(from the command line)"]),
        (["run", "--set", "train.rounds"], ["key=value"]),
        (["run", "--set", "train.rounds=ten"], ["train.rounds = 'ten'", "command line"]),
        (["run", "--engine", "steam"], ["engine.name = 'steam'", "vectorized"]),
        (["run", "--device", "abacus"], ["engine.device = 'abacus'"]),
        (["run", "--seed", "-1"], ["seeds = [-1]"]),
        (["run", "--set", "algorithm.name=fedavgg"], ["fedavgg", "fedavg"]),
        (["run", "--set", "algorithm.name=plgu-lf", "--set", "algorithm.rho=-1"], ["algorithm.rho = -1", "at least 0"]),
        (["run", "--set", "algorithm.name=plgu-lf", "--set", "algorithm.p=1"], ["algorithm.p = 1", "above 1"]),
        (["run", "--set", "algorithm.name=plgu-lf", "--set", "algorithm.D=9"], ["algorithm.D = 9", "from 0 to 2"]),
        (["run", "--set", "algorithm.name=fedpg", "--set", "algorithm.gamma=1.5"], ["algorithm.gamma = 1.5", "1"]),
        (["run", "--set", "algorithm.name=pgfedmo", "--set", "algorithm.beta=1"], ["algorithm.beta = 1", "below 1"]),
        (["tune", "--trials", "0"], ["tune.trials = 0", "command line"]),
        (
            ["tune", "--set", "tune.grid.train.lrr=[1]"],
            ["tune.grid.train.lrr = [1]", "Did you mean lr?", "command line"],
        ),
        (["tune", "--set", "tune.colour=red"], ["tune.colour = 'red'", "grid", "command line"]),
        (["list", "algorithms", "fedavgg"], ["fedavgg", "fedavg"]),
        (["list", "animals"], ["animals", "algorithms"]),
        (["report", "nowhere"], ["nowhere holds no runs"]),
        (["results", "nowhere"], ["nowhere holds no runs"]),
        (["reproduce", "nothing"], ["experiment = 'nothing'", "pgfed-table1"]),
        (["export", "nowhere", "--client", "0"], ["nowhere must be a run's folder"]),
        (["run", "--colour", "red"], ["--colour"]),
    ],
)
def test_exit_code_2(arguments: list[str], parts: list[str]) -> None:
    result = bespoke(*arguments)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("run", "without one, a demonstration"),
        ("reproduce", "`bespoke list experiments`"),
        ("list", "algorithms, optimizers, datasets, models, partitions, engines or experiments"),
    ],
)
def test_help_says_what_to_name(command: str, part: str) -> None:
    assert part in " ".join(bespoke(command, "--help").output.split())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("algorithms", ALGORITHMS),
        ("datasets", SOURCES),
        ("models", MODELS),
        ("partitions", PARTITIONS),
        ("engines", ENGINES),
        ("optimizers", OPTIMIZERS),
    ],
)
def test_list(kind: str, names: dict[str, object]) -> None:
    entries = json.loads(bespoke("list", kind, "--json").output)
    assert [entry["name"] for entry in entries] == list(names)
    assert all(entry["description"] for entry in entries)
    shown = bespoke("list", kind).output
    assert all(name in shown for name in names)


def test_list_says_defaults() -> None:
    ditto = next(
        entry for entry in json.loads(bespoke("list", "algorithms", "--json").output) if entry["name"] == "ditto"
    )
    averages = {"aggregation", "trim", "krum_f", "krum_keep", "clip_norm"}
    assert ditto["options"].keys() == {"lam", *averages} and "lr" in ditto["training"]
    assert "alpha=0.3" in bespoke("list", "partitions").output


def test_list_experiments() -> None:
    entries = json.loads(bespoke("list", "experiments", "--json").output)
    assert "pgfed-table1" in [entry["name"] for entry in entries]


WITHOUT_TORCH = """
import sys
from bespokefl.cli import app
app(["--version"], standalone_mode=False)
assert "torch" not in sys.modules
"""


def test_help_and_version_do_not_load_torch(tmp_path: Path) -> None:
    result = in_a_process(cwd=tmp_path, code=WITHOUT_TORCH)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"bespokefl {bespokefl.__version__}\n"


def test_reproduce_prints_the_paper_s_numbers(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    result = bespoke("reproduce", "mine", "--out", finished[0], "--resume")
    assert result.exit_code == 0, result.output
    assert "finished before, skipped" in result.output and "a table" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    ours = 100 * json.loads((finished[0] / "fedavg" / "seed-0" / "summary.json").read_text())["mean"]
    assert ["fedavg", f"{ours:.2f}", "60.00", f"{ours - 60:+.2f}"] in lines
    assert ["missing", "-", "70.00", "-"] in lines


def test_export_gives_the_model_that_was_scored(finished: tuple[Path, str], small: Path, tmp_path: Path) -> None:
    out, _ = finished
    target = tmp_path / "deep" / "model.safetensors"
    result = bespoke("export", out / "local" / "seed-0", "--client", 3, "--out", target)
    assert result.exit_code == 0 and result.stdout == f"{target}\n"
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"client": "3", "algorithm": "local", "round": "2"}
        weight, bias = file.get_tensor("head.weight"), file.get_tensor("head.bias")
    data = bespokefl.data.load(clients=6, max_samples=400)
    rows = data.splits["test"][3]
    predicted = (data.x[rows].flatten(1) @ weight.T + bias).argmax(1)
    accuracy = float((predicted == data.y[rows]).to(torch.float64).mean())
    table = (out / "local" / "seed-0" / "clients.csv").read_text().splitlines()
    assert float(table[4].split(",")[3]) == pytest.approx(accuracy)


def test_export_refuses_what_is_not_there(finished: tuple[Path, str]) -> None:
    several = bespoke("export", finished[0], "--client", 0)
    assert several.exit_code == 2 and "local/seed-0" in several.output
    beyond = bespoke("export", finished[0] / "local", "--client", 6)
    assert beyond.exit_code == 2 and "clients 0 to 5" in beyond.output


def test_report_of_unfinished_runs(finished: tuple[Path, str], small: Path, tmp_path: Path) -> None:
    out = tmp_path / "part"
    folder = out / "local" / "seed-0"
    folder.mkdir(parents=True)
    done = finished[0] / "local" / "seed-0"
    (folder / "config.toml").write_text((done / "config.toml").read_text())
    (folder / "rounds.jsonl").write_text((done / "rounds.jsonl").read_text().splitlines(keepends=True)[0])
    result = bespoke("report", out)
    assert result.exit_code == 0
    page = (out / "report.html").read_text()
    assert "local, seed 0: not finished after 1 rounds" in page and "<figure" not in page


def test_results_agree_with_the_other_files(finished: tuple[Path, str]) -> None:
    out, _ = finished
    sql = """
        SELECT label, round, avg(value) AS mean FROM results
        WHERE metric = 'accuracy' AND split = 'test' GROUP BY ALL ORDER BY ALL"""
    result = bespoke("results", out, "--sql", sql, "--json")
    assert result.exit_code == 0, result.output
    found = {(row["label"], row["round"]): row["mean"] for row in json.loads(result.output)}
    lines = {
        (label, line["round"]): line["mean"]
        for label in ("local", "fedavg")
        for line in map(json.loads, (out / label / "seed-0" / "rounds.jsonl").read_text().splitlines())
    }
    assert len(lines) == 4 and found == pytest.approx(lines)
    folder = out / "fedavg" / "seed-0"
    sql = "SELECT value FROM results WHERE round = 2 AND metric = 'global_accuracy' ORDER BY client"
    shared = json.loads(bespoke("results", folder, "--sql", sql, "--json").output)
    table = [line.split(",") for line in (folder / "clients.csv").read_text().splitlines()]
    assert [row["value"] for row in shared] == [float(row[table[0].index("global_accuracy")]) for row in table[1:]]


def test_results_for_people_and_for_files(finished: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = finished
    overview = bespoke("results", out)
    assert overview.exit_code == 0, overview.output
    lines = [line.split() for line in overview.output.splitlines()]
    mean = json.loads((out / "local" / "seed-0" / "summary.json").read_text())["mean"]
    assert ["local", "local", "1", "1", "0", "2", "2", "6", f"{mean:.6g}"] in lines
    assert ["accuracy", "test", "personal", "2", "1", "2", "24"] in lines
    assert {"results", "runs", "rounds", "clients"} <= {line[0] for line in lines if line}
    some = bespoke("results", out, "--sql", "SELECT 'a[b]' AS x, i, NULL FROM range(1000) r(i)")
    assert ["a[b]", "199", "-"] in [line.split() for line in some.output.splitlines()]
    assert "The first 200 rows" in some.output and "--csv" in some.output
    target = tmp_path / "deep" / "all.csv"
    written = bespoke("results", out, "--csv", target)
    assert written.exit_code == 0 and written.output == ""
    header, *rows = target.read_text().splitlines()
    assert header == "run,label,algorithm,seed,round,client,metric,value,split,model"
    assert rows[0].startswith("fedavg/seed-0,fedavg,fedavg,0,1,0,accuracy,") and len(rows) > 2 * 2 * 2 * 6


@pytest.mark.parametrize("sql", ["SELEC 1", "SELECT nothing FROM runs", "DROP VIEW results", "FROM '/etc/passwd'"])
def test_a_bad_query(finished: tuple[Path, str], sql: str) -> None:
    result = bespoke("results", finished[0], "--sql", sql)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "error: the query " in result.output


@pytest.mark.slow
def test_the_demonstration_says_why_a_method_is_below_local(tmp_path: Path) -> None:
    done = in_a_process("run", "--out", "demo", "--set", "seeds=[0]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {}
    for path in (tmp_path / "demo").glob("*/seed-0/summary.json"):
        found[path.parts[-3]] = json.loads(path.read_text())
    said = " ".join(done.stdout.split())
    told = {label for label, summary in found.items() if "note" in summary and f"{label}: {summary['note']}" in said}
    below = {label for label, summary in found.items() if summary["mean"] < found["local"]["mean"]}
    behind = {label for label, s in found.items() if s["gm_acc"] and s["gm_acc"] < found["fedavg"]["gm_acc"] - 0.1}
    assert len(found) == 10 and below | behind <= told


def test_the_demonstration_can_be_read() -> None:
    from bespokefl.experiments.reading import read_experiment

    read_experiment(Path(bespokefl.__file__).with_name("demo.toml"))
