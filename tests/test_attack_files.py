"""Whole runs under attack: every figure is of the honest clients, worked out again from the written models."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_experiment import accuracy, data_of, lines, rows, run, summary

from bespokefl.core import InputError, stream
from bespokefl.experiments.checkpoint import load_newest
from bespokefl.results.files import read_runs
from bespokefl.results.table import caption, method_rows

ATTACK = {"kind": "noise", "share": 0.34, "sigma": 0.5}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked") / "runs"
    algorithms = ["local", {"name": "fedavg", "personal": "global"}, "ditto"]
    document = {
        "algorithms": algorithms,
        "attack": ATTACK,
        "data": {"val": 0.2},
        "output": {"personal": True},
        "eval": {"s_fraction": 0.4, "select": "last"},
    }
    assert not run(folder, document).failed
    return folder


def honest_of(folder: Path) -> list[int]:
    return [int(row["client"]) for row in rows(folder / "clients.csv") if row["malicious"] == "0"]


def test_the_files_say_who_is_malicious(out: Path) -> None:
    folder = out / "ditto" / "seed-0"
    drawn = sorted(stream(0, "attack").choice(6, 2, replace=False).tolist())
    found = summary(folder)
    assert found["malicious"] == drawn and found["attack"] == "noise"
    assert (
        found["scored"] == "personal models of the 4 honest clients (attack by the other 2: noise), round 3, test split"
    )
    assert found["n_clients"] == 6 and found["clients_without_test"] == 0
    asked = {row["client"] for row in rows(folder / "clients.csv") if row["rounds_asked"] != "0"}
    assert found["clients_untrained"] == len({str(c) for c in range(6) if c not in drawn} - asked)
    assert honest_of(folder) == [c for c in range(6) if c not in drawn]
    for row in rows(folder / "clients.csv"):
        scored = [row[key] != "" for key in ("accuracy", "loss", "s_accuracy", "g_accuracy", "global_accuracy")]
        assert scored == [row["malicious"] == "0"] * 5
        assert int(row["n_test"]) > 0
    assert lines(folder / "evaluations.jsonl")[0]["clients"]["malicious"] == [int(c in drawn) for c in range(6)]
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["attack"] == ATTACK | {"factor": 100.0}


@pytest.mark.parametrize("label", ["local", "fedavg", "ditto"])
def test_all_figures_are_of_the_honest(out: Path, label: str) -> None:
    folder = out / label / "seed-0"
    config, found = tomllib.loads((folder / "config.toml").read_text()), summary(folder)
    data, honest = data_of(config), honest_of(folder)
    test = data.splits["test"]
    own = np.array([accuracy(folder, c, config, data, test[c]) for c in honest])
    assert found["mean"] == found["l_acc"] == pytest.approx(own.mean(), abs=1e-6)
    assert found["std"] == pytest.approx(own.std(), abs=1e-6)
    assert (found["worst5"], found["top5"]) == pytest.approx((own.min(), own.max()), abs=1e-6)
    union = np.concatenate([test[c] for c in honest])
    g = [accuracy(folder, c, config, data, union) for c in honest]
    assert found["g_acc"] == pytest.approx(np.mean(g), abs=1e-6)
    assert found["s_acc"] == pytest.approx(np.mean([s_accuracy(folder, c, honest, config, data) for c in honest]))
    last = lines(folder / "rounds.jsonl")[-1]
    assert [last[k] for k in ("mean", "std", "worst5", "top5")] == [found[k] for k in ("mean", "std", "worst5", "top5")]
    if label == "fedavg":  # its personal model is the global one
        assert found["gm_acc"] == pytest.approx(g[0], abs=1e-6)


def s_accuracy(folder: Path, client: int, honest: list[int], config: Any, data: Any) -> float:
    """By the definition: equally many test samples of the client and of round(0.4 (H - 1)) other honest ones."""
    test = data.splits["test"]
    draw = stream(0, "metric", client)
    others = draw.permutation([c for c in honest if c != client])[: round(0.4 * (len(honest) - 1))]
    involved = [client, *others.tolist()]
    assert len(involved) == 2
    size = min(len(test[c]) for c in involved)
    return float(np.mean([accuracy(folder, client, config, data, draw.permutation(test[c])[:size]) for c in involved]))


def test_the_table_says_so_and_gains_are_of_the_honest(out: Path) -> None:
    runs = read_runs(out)
    assert "of the 4 honest clients (attack by the other 2: noise)" in caption(runs)
    ditto = next(row for row in method_rows(runs) if row.label == "ditto")
    honest = honest_of(out / "ditto" / "seed-0")
    gains = [
        float(rows(out / "ditto/seed-0/clients.csv")[c]["accuracy"])
        - float(rows(out / "local/seed-0/clients.csv")[c]["accuracy"])
        for c in honest
    ]
    assert ditto.gain is not None and ditto.gain.mean == pytest.approx(100 * np.mean(gains))


def test_validation_selects_by_the_honest(tmp_path: Path) -> None:
    document = {"algorithms": ["fedavg"], "attack": ATTACK, "data": {"val": 0.2}, "eval": {"select": "val"}}
    run(tmp_path / "runs", document)
    folder = tmp_path / "runs" / "fedavg" / "seed-0"
    honest, found = honest_of(folder), summary(folder)
    means = [np.mean([line["val"]["accuracy"][c] for c in honest]) for line in lines(folder / "evaluations.jsonl")[1:]]
    assert [line["val_mean"] for line in lines(folder / "rounds.jsonl")] == pytest.approx(means)
    assert found["selected_round"] == 1 + int(np.argmax(means))
    assert all(
        line["val"]["accuracy"][c] is None
        for line in lines(folder / "evaluations.jsonl")[1:]
        for c in found["malicious"]
    )


def test_the_malicious_upload_is_in_the_global_model(tmp_path: Path) -> None:
    """One client of two, uniform weights, noise of 1000: half of it is in w."""
    document = {
        "algorithms": [{"name": "fedavg", "weights": "uniform"}],
        "attack": {"kind": "noise", "clients": [1], "sigma": 1000.0},
        "data": {"clients": 2},
        "train": {"rounds": 1, "participation": 1.0},
    }
    run(tmp_path / "runs", document)
    stored = load_newest(tmp_path / "runs/fedavg/seed-0/checkpoint")
    assert stored is not None
    w = torch.cat([v.flatten() for k, v in stored.tensors.items() if k.startswith("federation/server")])
    assert 350 < float(w.std()) < 650


def test_without_an_attack_files_are_as_they_were(tmp_path: Path) -> None:
    run(tmp_path / "runs", {"algorithms": ["fedavg"]})
    folder = tmp_path / "runs" / "fedavg" / "seed-0"
    assert "malicious" not in rows(folder / "clients.csv")[0]
    assert not {"malicious", "attack"} & set(summary(folder))
    assert summary(folder)["scored"] == "personal models of all 6 clients, round 3, test split"
    assert "attack" not in tomllib.loads((folder / "config.toml").read_text())


def test_an_interrupted_attack_goes_on_as_it_was(tmp_path: Path) -> None:
    document = {"algorithms": ["fedavg"], "attack": {"kind": "labels"}}
    run(tmp_path / "a", document)
    folder = tmp_path / "a" / "fedavg" / "seed-0"
    (folder / "summary.json").unlink()
    before = (folder / "clients.csv").read_bytes()
    run(tmp_path / "a", document, resume=True)
    assert (folder / "clients.csv").read_bytes() == before
    with pytest.raises(InputError, match=r"attack.kind was 'labels' and is now 'signs'"):
        run(tmp_path / "a", document | {"attack": {"kind": "signs"}}, resume=True)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"kind": "poison"}, "attack.kind = 'poison'.*'noise', 'scale', 'labels' or 'signs'"),
        ({"kind": "noise", "share": 0}, "attack.share = 0.*greater than 0"),
        ({"kind": "noise", "sigma": -1.0}, "attack.sigma = -1.0"),
        ({"kid": "noise"}, "attack.kid = 'noise'.*kind"),
        ({"kind": "noise", "clients": [9]}, r"attack.clients = \[9\].*0 to 5"),
    ],
)
def test_bad_input_is_refused_before_the_start(attack: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "runs", {"algorithms": ["fedavg"], "attack": attack})
    assert not (tmp_path / "runs").exists()
