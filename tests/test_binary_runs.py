"""A whole run on data of two classes: AUC and its like in every file, against scikit-learn on the written models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from sklearn import metrics as sk

from bespokefl.data import load
from bespokefl.errors import InputError
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import LineReporter
from bespokefl.results.files import read_csv, read_runs
from bespokefl.results.store import frame
from bespokefl.results.table import columns, method_rows

QUIET = LineReporter(Console(quiet=True))
NAMES = ("auc", "sensitivity", "specificity", "f1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("binary")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 240)
    x = rng.normal(size=(240, 5)) + 0.8 * y[:, None]
    np.savez(out / "two.npz", x=x.astype(np.float32), y=y, classes=["healthy", "ill"])
    document: dict[str, Any] = {
        "algorithms": ["local", {"name": "fedavg", "personal": "global"}],
        "data": {"source": "npz", "root": str(out / "two.npz"), "clients": 5, "alpha": 0.2, "min_samples": 8},
        "model": {"name": "linear"},
        "train": {"rounds": 2, "local_epochs": 1, "batch_size": 10, "lr": 0.1},
        "output": {"personal": True},
        "eval": {"target": 0.99},
    }
    outcome = run_experiment(parse_experiment(document), out / "runs", resume=False, reporter=QUIET)
    assert not outcome.failed
    return out / "runs"


@pytest.mark.parametrize("label", ["local", "fedavg"])
def test_files_against_scikit_learn(finished: Path, label: str) -> None:
    run = finished / label / "seed-0"
    clients, summary = read_csv(run / "clients.csv"), json.loads((run / "summary.json").read_text())
    data = load("npz", 5, root=str(finished.parent / "two.npz"), alpha=0.2, min_samples=8)
    skewed = 0
    for client, rows in enumerate(data.splits["test"]):
        weights = load_file(run / "personal" / f"client-{client}.safetensors")
        logits = data.x[rows] @ weights["head.weight"].T + weights["head.bias"]
        y, answer = data.y[rows].numpy(), logits.argmax(1).numpy()
        if len(np.unique(y)) == 1:
            skewed += 1
            assert np.isnan(clients["auc"][client])
        else:
            probability = torch.softmax(logits.double(), 1)[:, 1].numpy()
            assert clients["auc"][client] == pytest.approx(sk.roc_auc_score(y, probability))
        expected = sk.f1_score(y, answer, labels=[0, 1], average="macro", zero_division=0)
        assert clients["f1"][client] == pytest.approx(expected)
        assert clients["sensitivity"][client] == pytest.approx(sk.recall_score(y, answer, zero_division=0))
    assert summary["auc"] == pytest.approx(np.nanmean(clients["auc"])) and summary["auc_left_out"] == skewed
    for name in NAMES[1:]:
        assert summary[name] == pytest.approx(clients[name].mean()) and summary[f"{name}_left_out"] == 0
    assert f"{5 - skewed} clients that have it" in summary["what"]["auc"]
    assert summary["rounds_to_target"] is None and summary["target"] == 0.99


def test_every_round_is_in_the_store(finished: Path) -> None:
    found = frame(finished, "SELECT DISTINCT metric, round FROM results WHERE split = 'test' AND model = 'personal'")
    pairs = set(zip(found["metric"].tolist(), found["round"].tolist(), strict=True))
    assert {(name, round_) for name in ("accuracy", "loss", *NAMES) for round_ in (1, 2)} <= pairs
    runs = frame(finished, "SELECT auc, auc_left_out, target, rounds_to_target FROM runs")
    assert np.isfinite(runs["auc"]).all() and np.isnan(runs["rounds_to_target"].astype(float)).all()


def test_the_table_shows_them(finished: Path) -> None:
    rows = method_rows(read_runs(finished))
    shown = {name: [cell(row) for row in rows] for name, cell in columns(rows).items()}
    assert {"AUC", "sensitivity %", "specificity %"} <= set(shown)
    assert shown["rounds to 99 %"] == ["never", "never"] and "speed-up" not in shown


def test_dice_is_refused_without_masks() -> None:
    document = {"algorithms": ["local"], "train": {"loss": "dice"}}
    with pytest.raises(InputError, match=r"train\.loss = 'dice' is for masks"):
        run_experiment(
            parse_experiment(document), Path("nowhere"), resume=False, reporter=LineReporter(Console(quiet=True))
        )
