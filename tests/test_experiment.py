"""Whole runs: the files they leave, checked against models that are scored again by plain PyTorch."""

import csv
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from bespokefl import models
from bespokefl.data import FederatedData, load
from bespokefl.errors import InputError
from bespokefl.experiments import selection
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import Outcome, run_experiment
from bespokefl.experiments.selection import s_rows
from bespokefl.progress import LineReporter

SMALL: dict[str, Any] = {
    "data": {"clients": 6, "max_samples": 400, "alpha": 0.5},
    "model": {"name": "linear"},
    "train": {"rounds": 3, "local_epochs": 1, "batch_size": 20, "lr": 0.2, "participation": 0.5},
}
SUMMARY_KEYS = [
    *("algorithm", "seed", "rounds", "selection", "mean", "std", "worst5", "top5", "gm_acc", "l_acc", "s_acc", "g_acc"),
    *("bytes_total", "train_seconds", "peak_memory_bytes", "engine", "device", "version"),
]
ROUND_KEYS = ["round", "mean", "std", "worst5", "top5", "loss", "seconds", "bytes_down", "bytes_up"]


def run(out: Path, document: dict[str, Any], *, resume: bool = False) -> Outcome:
    merged = {key: SMALL.get(key, {}) | document.get(key, {}) for key in ("data", "model", "train")}
    experiment = parse_experiment(document | merged)
    return run_experiment(experiment, out, resume=resume, reporter=LineReporter(Console(quiet=True)))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def data_of(config: dict[str, Any]) -> FederatedData:
    return load(**config["data"])


def accuracy(folder: Path, client: int, config: dict[str, Any], data: FederatedData, on: np.ndarray) -> float:
    """Of a written personal model on some rows, by nothing but PyTorch."""
    with safe_open(folder / "personal" / f"client-{client}.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"client": str(client), "algorithm": folder.parent.name, "round": "3"}
    options = {key: value for key, value in config["model"].items() if key not in ("name", "head")}
    module = models.build(config["model"]["name"], data.input_shape, len(data.classes), **options)
    module.load_state_dict(weights)
    with torch.no_grad():
        return float((module(data.x[on]).argmax(1) == data.y[on]).double().mean())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    algorithms = ["local", {"name": "fedavg", "personal": "global"}, "ditto"]
    outcome = run(out, {"algorithms": algorithms, "output": {"personal": True}, "eval": {"s_fraction": 0.4}})
    assert [folder.parent.name for folder in outcome.finished] == ["local", "fedavg", "ditto"]
    assert not outcome.failed
    return out


@pytest.mark.parametrize("label", ["local", "fedavg", "ditto"])
def test_files_hold_what_the_contract_says(finished: Path, label: str) -> None:
    folder = finished / label / "seed-0"
    assert list(summary(folder))[: len(SUMMARY_KEYS)] == SUMMARY_KEYS
    for number, line in enumerate(lines(folder / "rounds.jsonl"), start=1):
        assert list(line)[: len(ROUND_KEYS)] == ROUND_KEYS
        assert line["round"] == number and 0 <= line["mean"] <= 1 and len(line["clients"]) == 3
    assert list(rows(folder / "clients.csv")[0])[:4] == ["client", "n_train", "n_test", "accuracy"]
    assert (folder / "checkpoint" / "round-000003.json").is_file()
    assert not list(folder.rglob("*.unfinished"))


@pytest.mark.parametrize("label", ["local", "fedavg", "ditto"])
def test_accuracies_are_those_of_the_written_models(finished: Path, label: str) -> None:
    folder = finished / label / "seed-0"
    config = tomllib.loads((folder / "config.toml").read_text())
    data = data_of(config)
    test = data.splits["test"]
    cross = s_rows(test, 0.4, seed=0)
    everything = np.concatenate(test)
    table = rows(folder / "clients.csv")
    expected = {
        "accuracy": [accuracy(folder, k, config, data, test[k]) for k in range(6)],
        "s_accuracy": [accuracy(folder, k, config, data, cross[k]) for k in range(6)],
        "g_accuracy": [accuracy(folder, k, config, data, everything) for k in range(6)],
    }
    for column, values in expected.items():
        np.testing.assert_allclose([float(row[column]) for row in table], values, atol=1e-9)
    assert [int(row["n_test"]) for row in table] == [len(own) for own in test]
    numbers = summary(folder)
    means = {key: numbers[key] for key in ("mean", "l_acc", "s_acc", "g_acc")}
    wanted = {"mean": "accuracy", "l_acc": "accuracy", "s_acc": "s_accuracy", "g_acc": "g_accuracy"}
    assert means == pytest.approx({key: np.mean(expected[column]) for key, column in wanted.items()})
    assert numbers["worst5"] == pytest.approx(min(expected["accuracy"]))
    if label == "fedavg":  # its personal models are the global one
        assert numbers["gm_acc"] == pytest.approx(expected["g_accuracy"][0])
    elif label == "local":
        assert numbers["gm_acc"] is None


def test_summary_adds_up_the_rounds(finished: Path) -> None:
    for label in ("local", "fedavg"):
        folder = finished / label / "seed-0"
        numbers, history = summary(folder), lines(folder / "rounds.jsonl")
        assert numbers["bytes_total"] == sum(line["bytes_down"] + line["bytes_up"] for line in history)
        assert numbers["train_seconds"] == pytest.approx(sum(line["seconds"] for line in history))
        assert numbers["mean"] == history[-1]["mean"]
        asked = [int(row["rounds_asked"]) for row in rows(folder / "clients.csv")]
        assert asked == [sum(k in line["clients"] for line in history) for k in range(6)]
        assert numbers["clients_untrained"] == asked.count(0)
    weights = 64 * 10 + 10
    assert summary(finished / "fedavg" / "seed-0")["bytes_total"] == 4 * weights * 2 * 3 * 3
    assert summary(finished / "local" / "seed-0")["bytes_total"] == 0


def test_partition_is_written_once_per_seed(finished: Path) -> None:
    data = data_of(tomllib.loads((finished / "local" / "seed-0" / "config.toml").read_text()))
    counted = sum(data.counts(split) for split in ("train", "val", "test"))
    table = rows(finished / "partition-seed-0.csv")
    assert [[int(row[f"label {name}"]) for name in data.classes] for row in table] == counted.tolist()
    for split in ("train", "test"):
        kept = [[int(row[f"{split} {name}"]) for name in data.classes] for row in table]
        assert kept == data.counts(split).tolist()


def test_all_defaults_are_in_the_resolved_configuration(finished: Path) -> None:
    config = tomllib.loads((finished / "fedavg" / "seed-0" / "config.toml").read_text())
    assert config["algorithm"]["personal"] == "global" and config["algorithm"]["lr_decay"] == 1.0
    assert not {"finetune_epochs", "trim", "betas"} & config["algorithm"].keys()  # which change nothing here
    assert (config["data"]["test"], config["data"]["val"], config["data"]["seed"]) == (0.25, 0.0, 0)
    assert config["data"]["alpha"] == 0.5 and config["data"]["min_samples"] >= 2
    assert config["engine"]["device"] == "auto" and config["eval"]["select"] == "auto"


def test_the_same_data_and_start_for_every_algorithm_of_a_seed(tmp_path: Path) -> None:
    """With one local epoch from the common start, FedProx without its term is FedAvg."""
    algorithms = ["fedavg", {"name": "fedprox", "mu": 0.0}]
    run(tmp_path, {"algorithms": algorithms, "seeds": [0, 1]})
    accuracies = {
        (label, seed): [row["accuracy"] for row in rows(tmp_path / label / f"seed-{seed}" / "clients.csv")]
        for label in ("fedavg", "fedprox")
        for seed in (0, 1)
    }
    assert accuracies["fedavg", 0] == accuracies["fedprox", 0]
    assert accuracies["fedavg", 1] == accuracies["fedprox", 1]
    assert accuracies["fedavg", 0] != accuracies["fedavg", 1]


def test_data_seed_fixes_the_partition(tmp_path: Path) -> None:
    run(tmp_path, {"algorithms": ["local"], "seeds": [0, 1], "data": {"seed": 5}, "train": {"rounds": 1}})
    first, second = (rows(tmp_path / f"partition-seed-{seed}.csv") for seed in (0, 1))
    assert first == second


@pytest.mark.parametrize("select", ["auto", "best_test"])
def test_selection_takes_the_best_round(tmp_path: Path, select: str) -> None:
    document = {
        "algorithms": [{"name": "fedavg", "personal": "global"}],
        "data": {"val": 0.25},
        "train": {"rounds": 8, "lr": 2.0},  # so large that later rounds are not always better
        "eval": {"select": select, "every": 2},
    }
    run(tmp_path, document)
    folder = tmp_path / "fedavg" / "seed-0"
    history, numbers = lines(folder / "rounds.jsonl"), summary(folder)
    assert [line["round"] for line in history if line["mean"] is not None] == [2, 4, 6, 8]
    key = "val_mean" if select == "auto" else "mean"
    best = max((line for line in history if line["mean"] is not None), key=lambda line: line[key])
    assert numbers["selection"] == ("val" if select == "auto" else "best_test")
    assert (numbers["selected_round"], numbers["mean"]) == (best["round"], best["mean"])
    assert np.mean([float(row["accuracy"]) for row in rows(folder / "clients.csv")]) == pytest.approx(best["mean"])
    assert f"round {best['round']}," in numbers["scored"]


@pytest.mark.parametrize(
    "asks",
    [{"paper": {"metrics": ["mean", "s_acc_std"]}}, {"eval": {"also": ["s_acc"]}}, {"paper": {"metrics": ["g_acc"]}}],
)
def test_cross_accuracies_that_are_asked_for_are_measured_at_any_cost(
    asks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(selection.AFFORDABLE, "cpu", 0.0)
    settings = {"algorithms": ["local"], "train": {"rounds": 1}}
    run(tmp_path / "unasked", settings)
    run(tmp_path / "asked", settings | asks)
    found = {name: summary(tmp_path / name / "local" / "seed-0") for name in ("unasked", "asked")}
    assert found["unasked"]["s_acc"] is None and found["unasked"]["g_acc"] is None
    assert found["asked"]["s_acc"] is not None and found["asked"]["g_acc"] is not None


def test_what_is_asked_for_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match=r"eval\.cross = false.*s_acc_std"):
        parse_experiment({"algorithms": ["local"], "eval": {"cross": False}, "paper": {"metrics": ["s_acc_std"]}})


def test_cross_accuracies_can_be_left_out(tmp_path: Path) -> None:
    run(tmp_path, {"algorithms": ["local"], "eval": {"cross": False}, "train": {"rounds": 1}})
    numbers = summary(tmp_path / "local" / "seed-0")
    assert numbers["s_acc"] is None and numbers["g_acc"] is None and not math.isnan(numbers["mean"])
    assert {row["s_accuracy"] for row in rows(tmp_path / "local" / "seed-0" / "clients.csv")} == {""}


def test_finished_runs_are_skipped_and_others_refused(tmp_path: Path) -> None:
    document = {"algorithms": ["local"], "train": {"rounds": 1}}
    run(tmp_path, document)
    before = (tmp_path / "local" / "seed-0" / "summary.json").stat().st_mtime_ns
    with pytest.raises(InputError, match=r"local/seed-0 is not empty.*--resume.*--out"):
        run(tmp_path, document)
    assert len(run(tmp_path, document, resume=True).finished) == 1
    assert (tmp_path / "local" / "seed-0" / "summary.json").stat().st_mtime_ns == before
    changed = document | {"train": {"rounds": 2, "lr": 0.1}}
    with pytest.raises(InputError, match=r"train\.lr was 0\.2 and is now 0\.1; train\.rounds was 1 and is now 2"):
        run(tmp_path, changed, resume=True)


def test_more_algorithms_join_what_is_finished(tmp_path: Path) -> None:
    run(tmp_path, {"algorithms": ["local"], "train": {"rounds": 1}})
    outcome = run(tmp_path, {"algorithms": ["local", "fedavg"], "train": {"rounds": 1}}, resume=True)
    assert [folder.parent.name for folder in outcome.finished] == ["local", "fedavg"]


BROKEN = """
from dataclasses import dataclass
from typing import ClassVar
from bespokefl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Breaks(FedAvg):
    name: ClassVar[str] = "breaks"

    def round(self, server, cohort):
        if cohort.round == 1:
            raise ZeroDivisionError("out of numbers")
        return super().round(server, cohort)
"""


SCARCE = """
import os
from dataclasses import dataclass
from typing import ClassVar
import torch
from bespokefl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Scarce(FedAvg):
    name: ClassVar[str] = "scarce"

    def round(self, server, cohort):
        if cohort.round == 2 and "NO_MEMORY" in os.environ:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 58.00 MiB. GPU 0 has a total capacity")
        return super().round(server, cohort)
"""


@pytest.mark.parametrize("sparing", [{"together": 1}, {"together": 2, "stack": 2}])
def test_runs_that_took_too_much_memory_together_go_on_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sparing: dict[str, int]
) -> None:
    (tmp_path / "scarce_algorithm.py").write_text(SCARCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    method = {"algorithms": ["scarce_algorithm:Scarce"], "seeds": [0, 1], "checkpoint": {"every": 1}}
    at_once = parse_experiment(method | SMALL | {"engine": {"together": 2}})
    monkeypatch.setenv("NO_MEMORY", "1")
    outcome = run_experiment(at_once, tmp_path / "out", resume=False, reporter=LineReporter(Console(width=1000)))
    assert len(outcome.failed) == 2
    said = capsys.readouterr().out
    assert "out of GPU memory; fewer runs at once (engine.together" in said and "Tried to allocate" not in said
    assert "Tried to allocate" in (outcome.failed[0] / "error.txt").read_text()
    monkeypatch.delenv("NO_MEMORY")
    assert len(run(tmp_path / "out", method | {"engine": sparing}, resume=True).finished) == 2
    run(tmp_path / "undisturbed", method)
    for seed in ("seed-0", "seed-1"):
        disturbed, whole = (summary(tmp_path / out / "Scarce" / seed) for out in ("out", "undisturbed"))
        assert [disturbed[key] for key in ("mean", "gm_acc")] == pytest.approx(
            [whole[key] for key in ("mean", "gm_acc")]
        )


def test_a_failing_algorithm_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_algorithm.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    outcome = run(tmp_path / "out", {"algorithms": ["broken_algorithm:Breaks", "local"]})
    assert [folder.parent.name for folder in outcome.failed] == ["Breaks"]
    assert [folder.parent.name for folder in outcome.finished] == ["local"]
    folder = tmp_path / "out" / "Breaks" / "seed-0"
    assert "ZeroDivisionError: out of numbers" in (folder / "error.txt").read_text()
    assert len(lines(folder / "rounds.jsonl")) == 1 and not (folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({"algorithms": ["local", {"name": "ditto", "lam": -1.0}]}, ["algorithm.lam = -1.0", "ditto"]),
        ({"algorithms": ["local", {"name": "ditto", "lamb": 1.0}]}, ["algorithm.lamb", "lam"]),
        ({"algorithms": ["local"], "engine": {"name": "vectorised"}}, ["engine.name = 'vectorised'", "vectorized"]),
        ({"algorithms": ["local"], "engine": {"device": "abacus"}}, ["engine.device = 'abacus'"]),
        ({"algorithms": ["local"], "data": {"clients": 1000}}, ["data.clients = 1000"]),
        ({"algorithms": ["local"], "data": {"alpha": 0.0}}, ["data.alpha"]),
        ({"algorithms": ["local"], "model": {"name": "lenet5"}}, ["model.name is 'lenet5'", "(1, 8, 8)"]),
        ({"algorithms": ["local"], "model": {"head": "nose"}}, ["model.head = 'nose'"]),
        ({"algorithms": ["local"], "eval": {"select": "val"}}, ["eval.select = 'val'", "data.val"]),
    ],
)
def test_wrong_input_is_met_before_any_file_is_written(tmp_path: Path, document: dict, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        run(tmp_path / "out", document)
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .*cannot be made"):
        run(tmp_path / "file" / "out", {"algorithms": ["local"]})
