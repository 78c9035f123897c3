"""What a run keeps beside the personal models' scores, round by round: train, S- and G-scores, features."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bespokefl.algorithms.local import Local
from bespokefl.cli import app
from bespokefl.data import load
from bespokefl.errors import InputError
from bespokefl.experiments.features import feature_figures
from bespokefl.experiments.reading import read_experiment
from bespokefl.federation import Federation
from bespokefl.federation.attacks import Attack
from bespokefl.results.evaluations import EVALUATIONS, read_series
from bespokefl.results.facts import read_facts
from bespokefl.results.files import read_csv

EXPERIMENT = """
algorithms = ["fedavg"]
[data]
clients = 6
partition = "labels"
labels_per_client = 2
[model]
hidden = [12]
[train]
rounds = 3
local_epochs = 1
[eval]
cross = true
s_fraction = 0.4
also = ["train", "s_acc", "g_acc"]
features = true
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("also")
    (folder / "exp.toml").write_text(EXPERIMENT)
    result = CliRunner().invoke(app, ["run", str(folder / "exp.toml"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return folder / "out" / "fedavg" / "seed-0"


def test_every_evaluated_round_has_them(run: Path) -> None:
    found = {(s.metric, s.split, s.round): s.values for s in read_series(run / EVALUATIONS) if s.model == "personal"}
    for metric in ("s_accuracy", "g_accuracy"):
        assert [round_ for m, _, round_ in found if m == metric] == [1, 2, 3]
        selected = read_csv(run / "clients.csv")[metric]  # of the last round, where no validation data are
        assert found[metric, "test", 3] == pytest.approx(selected.astype(float), abs=1e-12)
    assert all(len(found["loss", "train", round_]) == 6 for round_ in (1, 2, 3))
    assert np.mean(found["loss", "train", 3]) < np.mean(found["loss", "train", 1])
    assert not np.array_equal(found["accuracy", "train", 3], found["accuracy", "test", 3])


def test_they_go_into_the_facts(run: Path) -> None:
    facts = {name: fact for name, fact in read_facts(run).items() if name.startswith("features: ")}
    assert len(facts) == 4
    for fact in facts.values():
        assert fact.rounds.tolist() == [1, 2, 3] and fact.values.shape == (3, 6)


def federation(engine: str = "sequential", **more: Any) -> Federation:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 10)).double()
    data = load("digits", clients=5, partition="dirichlet", alpha=0.5, seed=1)
    data = replace(data, x=data.x.double())
    made = Federation(model, data, Local(local_epochs=1, batch_size=20, lr=0.3), engine=engine, **more)
    made.round()
    return made


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_features_are_those_before_the_head(engine: str) -> None:
    made = federation(engine)
    found = feature_figures(made)
    for client in range(5):
        w = made.client_model(client)
        x = made.data.x[made.data.splits["test"][client]].flatten(1)
        h = torch.tanh(x @ w["1.weight"].T + w["1.bias"]).numpy().ravel()
        ours = [values[client] for values in found.values()]
        assert ours == pytest.approx([h.mean(), np.median(h), np.percentile(h, 95), (h > 0).mean()], rel=1e-9)


def test_nobody_looks_at_the_features_of_an_attacker() -> None:
    found = feature_figures(federation(attack=Attack("signs", clients=(2,))))
    for values in found.values():
        assert np.isnan(values).tolist() == [False, False, True, False, False]


def test_train_scores_are_of_the_train_samples(run: Path) -> None:
    """A share of so many samples, and of no other number."""
    sizes = load("digits", clients=6, partition="labels", labels_per_client=2, seed=0).sizes("train")
    lines = [json.loads(line) for line in (run / EVALUATIONS).read_text().splitlines()]
    assert lines[0]["clients"]["n_train"] == sizes.tolist()
    hits = np.array([line["train"]["accuracy"] for line in lines[1:]]) * sizes
    assert hits == pytest.approx(hits.round(), abs=1e-6) and (hits.round() > 0).any()


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text(EXPERIMENT.replace('"train", "s_acc"', '"trian", "s_acc"'))
    with pytest.raises(InputError, match=r"eval\.also.*'train'"):
        read_experiment(path)
