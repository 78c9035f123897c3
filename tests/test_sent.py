"""Models before aggregation: what a client trained, scored for methods that hand out an average."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedper import FedPer
from bespokefl.algorithms.fedrod import FedRoD
from bespokefl.data import load
from bespokefl.errors import InputError
from bespokefl.federation import Federation
from bespokefl.reproduce.views import View, curves


@pytest.fixture(scope="module")
def data():
    return load("digits", clients=5, partition="dirichlet", alpha=0.3, max_samples=300, seed=1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def federation(algorithm, data, **settings):
    return Federation(network(), data, algorithm, clients_per_round=3, seed=1, **settings)


def test_fedavgs_models_before_aggregation_are_those_that_it_keeps_itself(data):
    settings = {"lr": 0.1, "local_epochs": 1, "momentum": 0.5}
    by_global = federation(FedAvg(**settings, personal="global"), data, keep_sent=True)
    by_own = federation(FedAvg(**settings), data)
    for _ in range(3):
        by_global.round()
        by_own.round()
    np.testing.assert_array_equal(
        by_global.evaluate(model="before_agg").accuracy, by_own.evaluate(model="personal").accuracy
    )
    assert not np.array_equal(by_global.evaluate().accuracy, by_own.evaluate().accuracy)  # the global model's differ


@pytest.mark.parametrize("algorithm", [FedPer, FedRoD])
def test_a_round_of_one_client_changes_nothing_by_its_average(algorithm, data):
    fed = Federation(network(), data, algorithm(lr=0.1, local_epochs=1), seed=1, keep_sent=True)
    fed.round()
    alone = fed.round([2])  # the average of one is what it sent
    assert alone.failed == {}
    before, after = fed.evaluate(model="before_agg"), fed.evaluate()
    assert before.loss[2] == after.loss[2]
    assert (np.delete(before.loss, 2) != np.delete(after.loss, 2)).all()


def test_clients_that_never_took_part_have_the_servers(data):
    fed = federation(FedAvg(lr=0.1, local_epochs=1, personal="global"), data, keep_sent=True)
    fed.round([0, 1])
    before, newest = fed.evaluate(model="before_agg"), fed.evaluate()
    np.testing.assert_array_equal(before.loss[2:], newest.loss[2:])
    assert (before.loss[:2] != newest.loss[:2]).all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_has_scores_of_both_kinds(name, data):
    fed = federation(build_algorithm(name, {"lr": 0.05, "local_epochs": 1}), data, keep_sent=True)
    fed.round()
    before = fed.evaluate(model="before_agg")
    assert np.isfinite(before.accuracy).all()
    if not any(ALGORITHMS[name].cls.sends.values()):
        np.testing.assert_array_equal(before.loss, fed.evaluate().loss)


def test_what_was_sent_is_in_the_checkpoint(data):
    first, second = (federation(FedPer(lr=0.1, local_epochs=1), data, keep_sent=True) for _ in range(2))
    first.round()
    second.restore(*first.state())
    for fed in (first, second):
        fed.round()
    np.testing.assert_array_equal(first.evaluate(model="before_agg").loss, second.evaluate(model="before_agg").loss)


def test_a_federation_that_does_not_keep_them_says_so(data):
    fed = federation(FedAvg(lr=0.1, local_epochs=1), data)
    fed.round()
    with pytest.raises(InputError, match="keep_sent=True"):
        fed.evaluate(model="before_agg")


def test_a_run_scores_what_eval_also_names(tmp_path):
    from typer.testing import CliRunner

    from bespokefl.cli import app

    file = tmp_path / "e.toml"
    file.write_text(
        'algorithms = ["fedrep", {name = "fedavg", personal = "global"}]\n'
        '[data]\nclients = 4\nmax_samples = 200\n[model]\nname = "mlp"\n'
        '[train]\nrounds = 2\nlocal_epochs = 1\n[eval]\nalso = ["global", "before_agg"]\n'
    )
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "o/fedavg/seed-0/evaluations.jsonl").read_text().splitlines()]
    assert [sorted(line) for line in lines[1:]] == [["before_agg", "global", "round", "test"]] * 2
    found = curves(tmp_path / "o/fedavg/seed-0/evaluations.jsonl")
    np.testing.assert_array_equal(found["global"][2], found["personal"][2])  # FedAvg is scored by its global model
    assert View("before_agg", "mean", "last").of(tmp_path / "o/fedavg/seed-0") == found["before_agg"][2].mean()
    assert "global" not in curves(tmp_path / "o/fedrep/seed-0/evaluations.jsonl")  # the server has none
