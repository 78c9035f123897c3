"""`bespoke reproduce` as a whole: runs, comparison, what is left out and why."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import bespokefl
from bespokefl.cli import app
from bespokefl.experiments.reading import parse_experiment
from bespokefl.reproduce.comparison import departures
from bespokefl.results.files import TIMED_KEYS

TABLE = """
seeds = [0, 1]
algorithms = ["local", { name = "fedavg", personal = "global" }, { name = "fedavg", label = "own-models" }]
[data]
source = "digits"
clients = 6
max_samples = 300
[model]
name = "linear"
[train]
rounds = 2
local_epochs = 1
lr = 0.5
[paper]
title = "Somebody, table 1"
metrics = ["mean", "gain"]
added = ["own-models"]
[[paper.contradictions]]
where = "first/fedavg/mean"
says = "it is 60 here and 61 there."
[[paper.data]]
name = "Photographs"
where = "https://example.org/photographs"
licence = "CC0"
layout = "photographs/ with a folder per class"
settings = ["absent"]
[[setting]]
name = "first"
title = "six clients"
paper.numbers.mean = { local = 90.0, fedavg = 60.0 }
[[setting]]
name = "second"
data.clients = 5
train.participation = 0.5
[[setting]]
name = "absent"
data.source = "images"
data.root = "photographs"
"""


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "experiments").mkdir()
    (folder / "experiments" / "table.toml").write_text(TABLE)
    return folder


@pytest.fixture(scope="module")
def serial(here: Path) -> tuple[Path, Any]:
    """All settings, one run after another."""
    before = Path.cwd()
    os.chdir(here)
    try:
        return here / "serial", bespoke("reproduce", "table", "--out", here / "serial", "--jobs", 1)
    finally:
        os.chdir(before)


def compared(out: Path) -> dict[str, Any]:
    return json.loads((out / "comparison.json").read_text())


def column(comparison: dict[str, Any], setting: str, metric: str) -> dict[str, Any]:
    found = next(one for one in comparison["settings"] if one["name"] == setting)
    return next(one for one in found["columns"] if one["metric"] == metric)


def untimed(folder: Path) -> Any:
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    drop = lambda table: {key: value for key, value in table.items() if key not in TIMED_KEYS}  # noqa: E731
    return [drop(line) for line in rounds], drop(summary), (folder / "clients.csv").read_text()


def test_ours_beside_the_paper_s(serial: tuple[Path, Any]) -> None:
    out, result = serial
    means = {}
    for label in ("local", "fedavg", "own-models"):
        summaries = [json.loads((out / f"first/{label}/seed-{n}/summary.json").read_text()) for n in (0, 1)]
        means[label] = [100 * summary["mean"] for summary in summaries]
    found = {row["label"]: row for row in column(compared(out), "first", "mean")["methods"]}
    for label, values in means.items():
        assert found[label]["ours"] == pytest.approx(np.mean(values))
        assert found[label]["ours_std_over_seeds"] == pytest.approx(np.std(values))
    assert found["fedavg"]["difference"] == pytest.approx(np.mean(means["fedavg"]) - 60)
    assert found["own-models"]["paper"] is None and not found["own-models"]["in_paper"]
    gain = {row["label"]: row["ours"] for row in column(compared(out), "first", "gain")["methods"]}
    assert gain["fedavg"] == pytest.approx(np.mean(means["fedavg"]) - np.mean(means["local"]))
    text = result.output
    line = next(line for line in text.splitlines() if line.split()[:1] == ["fedavg"] and "[1]" in line)
    assert "60.00 [1]" in line and f"{np.mean(means['fedavg']) - 60:+.2f}" in line
    assert "not in the paper" in text and "not at hand" in text
    assert "[1] In the paper: it is 60 here and 61 there." in text
    assert "Somebody, table 1: six clients: mean client accuracy %" in text
    assert "the last round" in text and "std" not in text.split("Scored")[0].split("gain")[0]
    page = (out / "comparison.md").read_text()
    assert "60.00 [1] |" in page and "[1] In the paper: it is 60 here and 61 there." in page


def test_it_ends_with_the_compare_block(serial: tuple[Path, Any]) -> None:
    out, result = serial
    cells = {row["label"]: row for row in column(compared(out), "first", "mean")["methods"]}
    gain = np.subtract(*(list(cells[label]["ours_by_seed"].values()) for label in ("local", "fedavg")))
    error = np.std(gain, ddof=1) / np.sqrt(2)
    spreads = sum(cells[label]["ours_std_over_seeds"] for label in ("local", "fedavg"))
    assert spreads < 30  # so the paper separates its 90 from its 60
    beyond = abs(np.mean(gain)) > 13.9677 * error  # of two seeds
    answer = "cannot tell" if not beyond else "holds" if np.mean(gain) > 0 else "does not hold"
    found = compared(out)["compared"]
    assert found["verdict"] == answer
    assert (found["cells"], found["cells_of_the_paper"], found["cells_with_a_spread"]) == (2, 2, 2)
    differences = [abs(cells[label]["difference"]) for label in ("local", "fedavg")]
    assert found["mean_absolute_difference"] == {"points": pytest.approx(np.mean(differences))}
    outside = [abs(cells[m]["difference"]) > cells[m]["ours_std_over_seeds"] for m in ("local", "fedavg")]
    assert found["outside_both_spreads"] == sum(outside)
    assert found["kendall_tau"] == np.sign(cells["local"]["ours"] - cells["fedavg"]["ours"])
    (pair,) = found["pairs_that_the_paper_separates"]
    assert pair["ours"] == pytest.approx(np.mean(gain)) and pair["error"] == pytest.approx(error)
    assert pair["seeds"] == 2 and "(2 seeds, 1 degree of freedom)" in found["why"]
    for text in (result.output, (out / "comparison.md").read_text()):
        assert "Compared with the paper" in text and f"Verdict: {answer}; " in text
        assert "13.97 standard errors (2 seeds, 1 degree of freedom)" in " ".join(text.split())
        assert f"{np.mean(differences):.2f} points" in " ".join(text.split())
    assert column(compared(out), "second", "mean")["compared"]["cells_of_the_paper"] == 0


def test_settings_that_are_left_out_and_small_scales_are_said(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(here)
    (here / "experiments" / "wide.toml").write_text(
        TABLE.replace("data.clients = 5", "data.clients = 5\npaper.numbers.mean = { local = 91.0, fedavg = 61.0 }")
    )
    result = bespoke("reproduce", "wide", "--out", tmp_path / "a", "--jobs", 1, "--only", "first")
    found = compared(tmp_path / "a")["compared"]
    assert (found["cells"], found["cells_of_the_paper"]) == (2, 4)
    assert found["verdict"] != "holds"
    assert "2 of 4" in result.output
    result = bespoke(
        "reproduce", "wide", "--out", tmp_path / "b", "--jobs", 1, "--only", "first", "--scale", "small", "--seed", 0
    )
    assert result.exit_code == 0, result.output
    found = compared(tmp_path / "b")["compared"]
    assert found["mean_absolute_difference"] is None and found["outside_both_spreads"] is None
    assert found["verdict"] == "cannot tell" and "fewer than two seeds" in found["why"]
    assert not any(line.split()[-1:] == ["difference"] for line in result.output.splitlines())
    block = " ".join(result.output.split("Compared with the paper")[1].split())
    assert "difference|" not in block and "outside" not in block and "points" not in block
    assert "the ordering of the methods is compared" in block and "Verdict (on the small set-up)" in block


def test_missing_data_are_named_and_the_others_run(serial: tuple[Path, Any]) -> None:
    out, result = serial
    assert result.exit_code == 2
    message = " ".join(result.output.split())
    for part in ("absent was not run", "https://example.org/photographs", "Licence: CC0", "a folder per class"):
        assert part in message
    assert "Traceback" not in result.output
    assert sorted(path.parent.parent.name for path in out.glob("*/*/seed-0")) == ["first"] * 3 + ["second"] * 3
    assert compared(out)["settings"][2]["missing_data"]


def test_missing_data_are_said_before_the_tables(serial: tuple[Path, Any]) -> None:
    _, result = serial
    assert result.output.index("https://example.org/photographs") < result.output.index("Somebody, table 1")


def test_without_any_data_the_error_is_all_there_is(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    result = bespoke("reproduce", "table", "--out", tmp_path / "out", "--only", "absent")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert said.startswith("error: absent cannot run: ") and "https://example.org/photographs" in said
    assert "Compared with the paper" not in said and "Somebody, table 1" not in said
    assert not (tmp_path / "out" / "comparison.md").exists()


def test_every_setting_is_an_ordinary_output_folder(serial: tuple[Path, Any]) -> None:
    out, _ = serial
    for setting in ("first", "second"):
        assert (out / setting / "report.html").is_file() and (out / setting / "partition-seed-1.csv").is_file()
    assert bespoke("report", out / "second").exit_code == 0


def test_side_by_side_gives_the_same_numbers(
    here: Path, serial: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    out = here / "parallel"
    result = bespoke("reproduce", "table", "--out", out, "--jobs", 2, "--only", "first/fedavg")
    assert result.exit_code == 0, result.output
    assert "2 runs, 2 at a time" in result.output
    for seed in (0, 1):
        assert untimed(out / f"first/fedavg/seed-{seed}") == untimed(serial[0] / f"first/fedavg/seed-{seed}")
    assert (out / "first/partition-seed-1.csv").read_text() == (serial[0] / "first/partition-seed-1.csv").read_text()


def test_seeds_that_share_an_engine_give_the_same_numbers(
    here: Path, serial: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(here)
    options = ["--set", "engine.together=2", "--set", "engine.precision=float64"]
    only = ["--only", "first/local", "--only", "first/fedavg"]
    result = bespoke("reproduce", "table", "--out", tmp_path / "a", "--jobs", 2, *only, *options)
    assert result.exit_code == 0, result.output
    assert "4 runs, 4 at a time" in result.output
    again = bespoke("reproduce", "table", "--out", tmp_path / "a", "--jobs", 2, *only, *options)
    assert again.exit_code == 0 and "4 runs finished before, skipped; 0 to run" in again.output
    alone = bespoke("reproduce", "table", "--out", tmp_path / "b", "--jobs", 1, *only, *options[2:])
    assert alone.exit_code == 0, alone.output
    for label in ("local", "fedavg"):
        for seed in (0, 1):
            ours, theirs = (untimed(tmp_path / out / f"first/{label}/seed-{seed}") for out in "ab")
            for found, expected in zip(ours[0], theirs[0], strict=True):
                assert found["clients"] == expected["clients"]
                assert [found[key] for key in ("mean", "loss")] == pytest.approx(
                    [expected[k] for k in ("mean", "loss")]
                )
    for seed in (0, 1):
        name = f"first/partition-seed-{seed}.csv"
        assert (tmp_path / "a" / name).read_text() == (serial[0] / name).read_text()


def test_finished_runs_are_skipped(here: Path, serial: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    out, _ = serial
    marks = {path: path.stat().st_mtime_ns for path in out.glob("*/*/seed-*/rounds.jsonl")}
    again = bespoke("reproduce", "table", "--out", out, "--only", "first", "--only", "second")
    assert again.exit_code == 0 and "12 runs finished before, skipped; 0 to run" in again.output
    assert marks == {path: path.stat().st_mtime_ns for path in out.glob("*/*/seed-*/rounds.jsonl")}
    other = bespoke("reproduce", "table", "--out", out, "--only", "first", "--set", "train.lr=0.4")
    assert other.exit_code == 2 and "train.lr was 0.5 and is now 0.4" in " ".join(other.output.split())


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["second/fed*"], {"second/fedavg"}),
        (["own-models"], {"first/own-models", "second/own-models"}),
        (["first/local", "second/own*"], {"first/local", "second/own-models"}),
    ],
)
def test_only(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: list[str], expected: set[str]
) -> None:
    monkeypatch.chdir(here)
    only = [word for pattern in patterns for word in ("--only", pattern)]
    result = bespoke("reproduce", "table", "--out", tmp_path, "--jobs", 1, "--seed", 3, *only)
    absent = "own-models" in patterns
    assert result.exit_code == (2 if absent else 0), result.output
    assert {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("*/*/seed-3")} == expected
    assert "seeds = [3] instead of [0, 1]" in " ".join(result.output.split())


def test_a_method_that_only_the_paper_has_is_not_offered_at_another_scale(tmp_path: Path) -> None:
    result = bespoke("reproduce", "plgu-figure5", "--scale", "small", "--out", tmp_path, "--only", "plgu-lf-d23")
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "--only plgu-lf-d23 matches nothing. There are methods: fedavg, fedsam, plgu-lf-d0" in said
    assert said.count("plgu-lf-d3") == 1 and said.count("d23") == 1


def test_what_is_set_need_not_suit_settings_that_were_not_asked_for(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    (here / "experiments" / "models.toml").write_text(
        TABLE[: TABLE.index("[[paper.data]]")]
        + '[[setting]]\nname = "line"\nmodel.name = "linear"\n[[setting]]\nname = "net"\nmodel.name = "mlp"\n'
    )
    asked = ["--seed", 0, "--jobs", 1, "--set", "model.hidden=[4]"]
    for number, pattern in enumerate(("net", "net/fed*", "n*/fedavg")):
        out = tmp_path / str(number)
        result = bespoke("reproduce", "models", "--out", out, "--only", pattern, *asked)
        assert result.exit_code == 0, result.output
        assert [path.name for path in out.iterdir() if path.is_dir()] == ["net"]
        assert (out / "net" / "fedavg" / "seed-0" / "summary.json").is_file()
    for pattern in ("fedavg", "line/fedavg"):
        result = bespoke("reproduce", "models", "--out", tmp_path / "x", "--only", pattern, *asked)
        assert result.exit_code == 2 and "model.hidden" in result.output


def test_a_pattern_that_matches_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    result = bespoke("reproduce", "table", "--only", "first/fedavgg")
    assert result.exit_code == 2
    assert "settings: first, second, absent; methods: local, fedavg, own-models" in " ".join(result.output.split())
    assert bespoke("reproduce", "table", "--scale", "tiny").exit_code == 2


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    (here / "breaking.py").write_text(
        "import multiprocessing\nimport os\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from bespokefl.algorithms.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\nclass Raises(FedAvg):\n    name: ClassVar[str] = 'raises'\n"
        "    def round(self, server, cohort):\n        raise ArithmeticError('on purpose')\n"
        "@dataclass(frozen=True)\nclass Dies(FedAvg):\n    name: ClassVar[str] = 'dies'\n"
        "    def round(self, server, cohort):\n        os._exit(9)\n"
        "@dataclass(frozen=True)\nclass NeverStarts(FedAvg):\n    name: ClassVar[str] = 'never-starts'\n"
        "    def init(self, *setup):\n"
        "        return os._exit(8) if multiprocessing.parent_process() else super().init(*setup)\n"
    )
    monkeypatch.syspath_prepend(str(here))
    algorithms = '[{name="breaking:Dies"}, {name="breaking:Raises"}, {name="breaking:NeverStarts"}, "local"]'
    table = TABLE.replace(TABLE.split("\n")[2], f"algorithms = {algorithms}")
    (here / "experiments" / "broken.toml").write_text(table)
    result = bespoke("reproduce", "broken", "--out", tmp_path, "--jobs", 2, "--only", "first", "--seed", 0)
    assert result.exit_code == 1, result.output
    assert "on purpose" in (tmp_path / "first/Raises/seed-0/error.txt").read_text()
    assert "exit code 9" in (tmp_path / "first/Dies/seed-0/error.txt").read_text()
    assert "exit code 8" in (tmp_path / "first/NeverStarts/seed-0/error.txt").read_text()
    assert "first/NeverStarts, seed 0: failed: the process" in result.output
    assert (tmp_path / "first/local/seed-0/summary.json").is_file()


@pytest.mark.slow
def test_a_seed_that_fails_does_not_stop_those_beside_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    (here / "fragile.py").write_text(
        "import os\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from bespokefl.algorithms.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\nclass Raises(FedAvg):\n    name: ClassVar[str] = 'raises'\n"
        "    def round(self, server, cohort):\n"
        "        if cohort.clients.seed == 1:\n            raise ArithmeticError('on purpose')\n"
        "        return super().round(server, cohort)\n"
        "@dataclass(frozen=True)\nclass Dies(FedAvg):\n    name: ClassVar[str] = 'dies'\n"
        "    def round(self, server, cohort):\n        os._exit(9)\n"
    )
    monkeypatch.syspath_prepend(str(here))
    table = TABLE.replace(
        TABLE.split("\n")[2], 'algorithms = [{name="fragile:Dies"}, {name="fragile:Raises"}, "local"]'
    )
    (here / "experiments" / "fragile.toml").write_text(table)
    options = [
        "--out",
        tmp_path,
        "--jobs",
        2,
        "--only",
        "first",
        "--set",
        "engine.together=3",
        "--set",
        "seeds=[0,1,2]",
    ]
    result = bespoke("reproduce", "fragile", *options)
    assert result.exit_code == 1, result.output
    assert "on purpose" in (tmp_path / "first/Raises/seed-1/error.txt").read_text()
    for label, seed in (("Raises", 0), ("Raises", 2), ("local", 0), ("local", 1), ("local", 2)):
        assert (tmp_path / f"first/{label}/seed-{seed}/summary.json").is_file()
    for seed in (0, 1, 2):
        assert "exit code 9" in (tmp_path / f"first/Dies/seed-{seed}/error.txt").read_text()


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(here: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bespokefl", "reproduce", "table", "--out", str(tmp_path), "--jobs", "2"]
    command += ["--only", "first", "--set", "train.rounds=100000"]
    paths = [str(Path(bespokefl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("first/*/*/checkpoint/*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopping after these rounds" in errors and "continue with: bespoke reproduce table" in errors
    done = list(tmp_path.glob("first/*/*/rounds.jsonl"))
    assert len(done) == 2 and all(path.read_text().endswith("\n") for path in done)
    assert not list(tmp_path.glob("first/*/*/error.txt"))


def test_run_runs_every_setting(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    (here / "two.toml").write_text(TABLE.rsplit("[[setting]]", 1)[0])
    result = bespoke("run", here / "two.toml", "--out", tmp_path, "--seed", 0, "--set", "train.rounds=1")
    assert result.exit_code == 0, result.output
    assert {path.parent.parent.name for path in tmp_path.glob("*/*/seed-0")} == {"first", "second"}
    assert "first: six clients" in result.output


TWINS = """
seeds = [0]
algorithms = ["local", { name = "fedavg", personal = "global" }]
[data]
source = "digits"
clients = 5
max_samples = 300
[model]
name = "linear"
[train]
rounds = 2
local_epochs = 1
lr = 0.5
[paper]
metrics = ["mean", "memory"]
[[setting]]
name = "first"
paper.numbers.mean = { local = 90.0, fedavg = 60.0 }
paper.numbers.memory = { local = 10.0, fedavg = 20.0 }
[[setting]]
name = "same"
data.clients = 5
paper.numbers.mean = { local = 70.0, fedavg = 80.0 }
[[setting]]
name = "half"
algorithms = ["local", { name = "fedavg", personal = "local_before_agg" }]
"""


def test_runs_that_are_the_same_in_two_settings_go_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "twins.toml").write_text(TWINS)
    monkeypatch.chdir(tmp_path)
    result = bespoke("reproduce", "twins", "--out", tmp_path / "out", "--jobs", 1)
    assert result.exit_code == 0, result.output
    runs = {str(path.parent.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("summary.json")}
    assert runs == {"first/local/seed-0", "first/fedavg/seed-0", "half/fedavg/seed-0"}
    found = compared(tmp_path / "out")
    ours = {
        setting["name"]: {row["label"]: (row["ours"], row["paper"]) for row in setting["columns"][0]["methods"]}
        for setting in found["settings"]
    }
    assert ours["first"]["fedavg"][0] == ours["same"]["fedavg"][0] != ours["half"]["fedavg"][0]
    assert ours["first"]["local"][0] == ours["same"]["local"][0] == ours["half"]["local"][0]
    assert ours["same"]["local"][1] == 70.0 and ours["first"]["local"][1] == 90.0
    text = " ".join(result.output.split())
    assert "All methods: the same here as in first, run there once; the paper's numbers are this setting's." in text
    assert "local: the same here as in first" in text
    assert not (tmp_path / "out" / "same").exists()
    assert (
        "Runs that several settings share are measured once, and their pairs counted in each, beside its numbers "
        "of the paper (same: first; half: local of first): they are no further evidence of ours." in text
    )
    again = bespoke("reproduce", "twins", "--out", tmp_path / "out", "--jobs", 1, "--only", "same/*")
    assert again.exit_code == 0 and (tmp_path / "out" / "same" / "local").exists()  # alone it has runs of its own
    assert "several settings share" not in again.output


SMALL = """
seeds = [0]
algorithms = ["local", "ditto", { name = "plgu-lf", D = 2 }]
[data]
source = "cifar10"
partition = "labels"
labels_per_client = 3
[model]
name = "lenet5"
[train]
rounds = 3
lr = 0.05
[eval]
also = ["global"]
[paper]
metrics = ["mean", "worst5"]
[small]
seeds = [0]
data.max_samples = 400
train.rounds = 1
[[setting]]
name = "first"
paper.numbers.mean = { local = 90.0, ditto = 60.0, plgu-lf = 50.0 }
[[setting]]
name = "other"
title = "another network"
model.name = "resnet18"
paper.numbers.mean = { local = 70.0, ditto = 80.0, plgu-lf = 50.0 }
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("small")
    (folder / "experiments").mkdir()
    (folder / "experiments" / "shared.toml").write_text(SMALL)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return bespoke("reproduce", "shared", "--scale", "small", "--out", folder / "out", "--jobs", 1)
    finally:
        os.chdir(before)


def test_what_all_settings_have_in_common_is_said_once(small: Any) -> None:
    assert small.exit_code == 0, small.output
    text = " ".join(small.output.split())
    assert text.count("data.source = digits instead of cifar10") == 1
    assert text.count("train.rounds = 1 instead of 3") == 1
    first, other = text.index("model.name = mlp instead of lenet5"), text.index("model.name = mlp instead of resnet18")
    assert first < other < text.index("SMALL SCALE, in all settings: ")


def test_rates_are_said_in_the_place_of_those_of_train(small: Any) -> None:
    text = " ".join(small.output.split())
    assert "ditto" in re.search(r"SMALL SCALE, in all settings: .*", text).group() and "instead of 0.05" in text
    assert not re.search(r"lr = [\d.]+ instead of the default", text)
    before = parse_experiment({"algorithms": ["local", "ditto", {"name": "plgu-lf", "D": 2}], "train": {"lr": 0.05}})
    now = [{"name": "local", "lr": 0.3}, {"name": "ditto", "lr": 0.3}, {"name": "plgu-lf", "D": 1, "lr": 0.1}]
    assert departures(before, parse_experiment({"algorithms": now, "train": {"lr": 0.3}})) == [
        "train.lr = 0.3 instead of 0.05",
        "lr = 0.3 instead of 0.05 for local, ditto",
        "plgu-lf.D = 1 instead of 2",
        "plgu-lf.lr = 0.1 instead of 0.05",
    ]


def test_what_another_setting_showed_is_not_shown_again(small: Any) -> None:
    assert small.output.count("lowest 5 % of the clients, %") == 1  # the paper has none, ours is that of the first
    assert " ".join(small.output.split()).count("Scored: ") == 1


def test_the_cost_is_explained_where_it_is_shown(small: Any, serial: tuple[Path, Any]) -> None:
    assert "MB sent" not in small.output and "MB sent" not in serial[1].output


def test_a_title_is_as_wide_as_the_page(small: Any) -> None:
    assert "shared: another network: mean client accuracy %\n" in small.output


def test_runs_and_rounds_are_said_before_the_start_and_what_is_left_after_each(small: Any) -> None:
    lines = small.output.splitlines()
    assert lines[0] == "3 runs of 1 round, one after another"
    assert any(line.startswith("1 of 3 runs, about ") and line.endswith(" to go") for line in lines)
