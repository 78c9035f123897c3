"""Segmentation from the command line to the files: Dice for every client, on both engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bespokefl.algorithms.lg_mix import DISTANCES
from bespokefl.cli import app
from bespokefl.data import load
from bespokefl.results.facts import read_facts, read_layers
from bespokefl.results.files import read_csv, read_runs
from bespokefl.results.store import frame
from bespokefl.results.table import caption, columns, method_rows

MODEL = """
import torch
from torch import nn


def small(input_shape, classes):
    return Small(input_shape[0], classes)


class Small(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        first, second = nn.Conv2d(channels, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x):
        return self.head(self.body(x))
"""
EXPERIMENT = """
algorithms = ["local", "fedavg", "lg-mix"]

[data]
source = "blobs"
partition = "domain"
size = 16
samples = 60
domains = 3

[model]
name = "own_segmentation_net:small"

[train]
rounds = 3
local_epochs = 2
batch_size = 4
lr = 0.5

[eval]
target = 0.3

[output]
personal = true
"""


@pytest.fixture(scope="module", params=["vectorized", "sequential"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    (out / "own_segmentation_net.py").write_text(MODEL)
    (out / "seg.toml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(out))
        command = [
            "run",
            str(out / "seg.toml"),
            "--out",
            str(out / "runs"),
            "--engine",
            request.param,
            "--device",
            "cpu",
        ]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return out / "runs"


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def by_hand(run: Path, client: int) -> tuple[float, float]:
    """Dice and pixel accuracy of a written model, in plain PyTorch."""
    data = load("blobs", partition="domain", size=16, samples=60, domains=3, seed=0)
    rows = data.splits["test"][client]
    scope: dict[str, Any] = {"__name__": "model"}
    exec(MODEL, scope)
    net = scope["small"](data.input_shape, 2)
    net.load_state_dict(load_file(run / "personal" / f"client-{client}.safetensors"))
    with torch.no_grad():
        answer = net(data.x[rows]).argmax(1).numpy()
    y = data.y[rows].numpy()
    both, total = (answer & y).sum((1, 2)), answer.sum((1, 2)) + y.sum((1, 2))
    return float(np.where(total > 0, 2 * both / np.maximum(total, 1), 1).mean()), float((answer == y).mean())


@pytest.mark.parametrize("label", ["local", "fedavg", "lg-mix"])
def test_dice_of_every_client(finished: Path, label: str) -> None:
    run = finished / label / "seed-0"
    clients, found = read_csv(run / "clients.csv"), summary(run)
    assert list(clients["name"]) == ["bright", "dim", "stained"]
    assert found["metric"] == "dice" and found["selection"] == "val"
    assert found["mean"] == found["dice"] == pytest.approx(clients["dice"].mean())
    assert found["hausdorff"] == pytest.approx(clients["hausdorff"].mean()) and found["hausdorff_left_out"] == 0
    assert found["l_acc"] == pytest.approx(clients["accuracy"].mean())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert found["selected_round"] == 1 + int(np.argmax([line["val_mean"] for line in lines]))
    means = [line["mean"] for line in lines]
    assert means[found["selected_round"] - 1] == pytest.approx(found["mean"])
    reached = [k + 1 for k, mean in enumerate(means) if mean >= 0.3]
    assert found["rounds_to_target"] == (reached[0] if reached else None)
    assert "Dice" not in found["what"]["gm_acc"] and "mean dice over clients" in found["what"]["mean"]
    if found["selected_round"] == 3:  # the models of the last round are those in the files
        for client in range(3):
            dice, accuracy = by_hand(run, client)
            assert clients["dice"][client] == pytest.approx(dice, abs=1e-6)
            assert clients["accuracy"][client] == pytest.approx(accuracy, abs=1e-6)


def test_some_run_was_checked_by_hand(finished: Path) -> None:
    assert any(summary(finished / label / "seed-0")["selected_round"] == 3 for label in ("local", "fedavg", "lg-mix"))


def test_what_lg_mix_shows_of_itself(finished: Path) -> None:
    facts = read_facts(finished / "lg-mix" / "seed-0")
    assert read_layers(finished / "lg-mix" / "seed-0") == ["body.0", "body.2", "head"]
    assert facts["lambda"].values.shape == (3, 3) and facts[DISTANCES].values.shape == (3, 3, 3)
    assert ((facts["lambda"].values > 0) & (facts["lambda"].values < 1)).all()
    assert (facts[DISTANCES].values > 0).all() and np.isfinite(facts[DISTANCES].values).all()


def test_the_table_speaks_of_dice(finished: Path) -> None:
    runs = read_runs(finished)
    rows = method_rows(runs)
    shown = columns(rows)
    assert {"mean Dice %", "HD, pixels", "rounds to 30 %", "global model acc. %"} <= set(shown)
    assert [row.mean.mean for row in rows] == sorted((row.mean.mean for row in rows), reverse=True)
    assert "Dice and Hausdorff distance (HD) without the background" in caption(runs)
    gains = {row.label: row.gain for row in rows}
    dice = {run.label: run.clients["dice"] for run in runs if run.clients is not None}
    assert gains["fedavg"] is not None
    assert gains["fedavg"].mean == pytest.approx(100 * (dice["fedavg"] - dice["local"]).mean())


def test_the_store_has_dice_of_every_round(finished: Path) -> None:
    sql = "SELECT round, split, count(*) AS n FROM results WHERE metric = 'dice' AND label = 'fedavg' GROUP BY ALL"
    found = frame(finished, sql)
    assert sorted(zip(found["split"], found["round"].tolist(), found["n"].tolist(), strict=True)) == [
        (split, round_, 3) for split in ("test", "val") for round_ in (1, 2, 3)
    ]
    runs = frame(finished, "SELECT label, metric, mean, dice, hausdorff, rounds_to_target FROM runs")
    np.testing.assert_array_equal(runs["mean"], runs["dice"])
