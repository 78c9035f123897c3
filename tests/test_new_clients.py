"""Runs that hold clients out: training never sees them, and what they reach afterwards is worked out again by torch."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from bespokefl import models
from bespokefl.core import InputError, stream
from bespokefl.data import FederatedData, load
from bespokefl.data.held_out import HoldOut
from bespokefl.experiments.load_run import load_run
from bespokefl.experiments.one_run import CONFIG_NOTE, DATA_NOTE
from bespokefl.experiments.reading import parse_experiment, read_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import LineReporter
from bespokefl.results import files
from bespokefl.results.files import TIMED_KEYS, read_runs
from bespokefl.results.table import caption, columns, method_rows
from bespokefl.tuning.validation import without_test_samples

CLIENTS, NEW, EPOCHS = 6, (4, 5), 3
MAY_DIFFER = {"new_clients.csv", "summary.json"}


def write_data(path: Path, change: Any = None) -> Path:
    """One domain per client; ``change`` is done to the rows of those that are held out."""
    rng = np.random.default_rng(0)
    domain = np.repeat(np.arange(CLIENTS), 40)
    y = rng.integers(0, 3, len(domain))
    x = (rng.normal(size=(len(domain), 5)) + y[:, None] * [1, 0, -1, 0.5, 0] + 0.2 * domain[:, None]).astype(np.float32)
    if change is not None:
        rows = np.isin(domain, NEW)
        x, y, domain = change(x, y, domain, rows)
    np.savez(path, x=x, y=y, domain=domain, classes=np.array(["a", "b", "c"]))
    return path


def scrambled(x: Any, y: Any, domain: Any, rows: Any) -> Any:
    x[rows] = 1000 * np.random.default_rng(1).normal(size=(rows.sum(), 5))
    y[rows] = (y[rows] + 1) % 3
    return x, y, domain


def removed(x: Any, y: Any, domain: Any, rows: Any) -> Any:
    return x[~rows], y[~rows], domain[~rows]


def document(data: Path, algorithms: list[Any], **new: Any) -> dict[str, Any]:
    return {
        "algorithms": algorithms,
        "data": {"source": "npz", "root": str(data), "partition": "domain", "normalize": "channel"},
        "model": {"name": "mlp", "hidden": [6]},
        "train": {"rounds": 3, "local_epochs": 2, "batch_size": 8, "lr": 0.1, "momentum": 0.9, "participation": 0.5},
        **({"new_clients": {"epochs": EPOCHS, **new}} if new else {}),
    }


def run(out: Path, given: dict[str, Any], *, resume: bool = False) -> None:
    outcome = run_experiment(parse_experiment(given), out, resume=resume, reporter=LineReporter(Console(quiet=True)))
    assert outcome.finished and not outcome.failed, [(f / "error.txt").read_text() for f in outcome.failed]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run, without times, and without what a checkpoint says of the configuration and the data."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_bytes()
            if path.name == "rounds.jsonl":
                lines = [json.loads(line) for line in text.splitlines()]
                text = json.dumps([{k: v for k, v in line.items() if k not in TIMED_KEYS} for line in lines]).encode()
            if path.parent.name == files.CHECKPOINT and path.suffix == ".json":
                content = json.loads(text)
                kept = {key: value for key, value in content["meta"].items() if key not in (CONFIG_NOTE, DATA_NOTE)}
                text = json.dumps({**content, "meta": kept, "sha256": ""}).encode()
            found[str(path.relative_to(folder))] = text
    return found


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "new_clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    algorithms = ["local", "fedavg", "fedrep", "pgfed"]
    run(folder / "out", document(write_data(folder / "data.npz"), algorithms, count=2))
    return folder


@pytest.mark.parametrize("label", ["local", "fedavg", "fedrep", "pgfed"])
def test_held_out_clients_have_no_influence_on_training(finished: Path, label: str, tmp_path: Path) -> None:
    """With other samples and labels of theirs, every file of the run is the same but those about them."""
    data = tmp_path / "data.npz"
    write_data(data, scrambled)
    run(tmp_path / "out", document(data, [label], count=2))
    ours, theirs = contents(finished / "out" / label / "seed-0"), contents(tmp_path / "out" / label / "seed-0")
    assert ours.keys() == theirs.keys() and "new_clients.csv" in ours
    for name in ours.keys() - MAY_DIFFER - {"config.toml"}:
        assert ours[name] == theirs[name], name
    assert ours["new_clients.csv"] != theirs["new_clients.csv"]
    paths = (str(finished / "data.npz").encode(), str(data).encode())
    assert ours["config.toml"].replace(*paths) == theirs["config.toml"]
    a, b = summary(finished / "out" / label / "seed-0"), summary(tmp_path / "out" / label / "seed-0")
    differing = {key for key in a if a[key] != b[key]}
    assert differing <= TIMED_KEYS | {"new_clients"}


def test_training_is_as_if_they_were_not_in_the_data(finished: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", document(write_data(tmp_path / "data.npz", removed), ["pgfed"]))
    ours, alone = contents(finished / "out/pgfed/seed-0"), contents(tmp_path / "out/pgfed/seed-0")
    assert alone.keys() == ours.keys() - {"new_clients.csv"}
    for name in alone.keys() - {"config.toml", "summary.json"}:
        assert ours[name] == alone[name], name


def test_every_epoch_is_that_of_plain_sgd(finished: Path) -> None:
    """FedAvg's new clients, by torch's own SGD from the checkpoint's global model."""
    folder = finished / "out" / "fedavg" / "seed-0"
    federation = load_run(folder).federation
    new = federation.data.held_out
    assert new is not None and new.client_names == ("4", "5") and federation.data.clients == 4
    found = {(int(row["epoch"]), int(row["client"])): float(row["accuracy"]) for row in table(folder)}
    assert sorted(found) == [(epoch, client) for epoch in range(EPOCHS + 1) for client in NEW]
    for place, client in enumerate(NEW):
        module = models.build("mlp", (5,), 3, hidden=[6])
        module.load_state_dict(federation.global_model() or {})
        train, test = (torch.as_tensor(new.splits[split][place]) for split in ("train", "test"))
        for epoch in range(EPOCHS + 1):
            if epoch:
                sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)  # rebuilt in every epoch
                order = train[stream(0, "newcomer", epoch, client, 0).permutation(len(train))]
                for rows in order.split(8):
                    sgd.zero_grad()
                    F.cross_entropy(module(new.x[rows]), new.y[rows]).backward()
                    sgd.step()
            with torch.no_grad():
                accuracy = (module(new.x[test]).argmax(1) == new.y[test]).double().mean()
            assert found[epoch, client] == pytest.approx(float(accuracy)), (epoch, client)


@pytest.mark.parametrize("label", ["local", "fedavg", "fedrep", "pgfed"])
def test_figures_are_those_of_the_table(finished: Path, label: str) -> None:
    folder = finished / "out" / label / "seed-0"
    accuracy = np.array([float(row["accuracy"]) for row in table(folder)]).reshape(EPOCHS + 1, len(NEW))
    figures = summary(folder)["new_clients"]
    means = accuracy.mean(1)
    assert figures["before"] == pytest.approx(means[0]) and figures["mean"] == pytest.approx(means[1:].tolist())
    assert figures["last"] == pytest.approx(means[-1]) and figures["best"] == pytest.approx(means[1:].max())
    assert figures["epoch"] == 1 + int(means[1:].argmax()) and (figures["clients"], figures["diverged"]) == (2, 0)
    assert (figures["lr"], figures["momentum"], figures["batch_size"], figures["start"]) == (0.1, 0.9, 8, "method")


def test_the_table_for_people_has_them(finished: Path) -> None:
    runs = read_runs(finished / "out")
    rows = method_rows(runs)
    shown = columns(rows)
    for row in rows:
        figures = summary(finished / "out" / row.label / "seed-0")["new_clients"]
        assert shown["new clients %"](row) == f"{100 * figures['last']:.2f}"
        assert shown["new at best %"](row) == f"{100 * figures['best']:.2f}"
    assert "New clients: 2 that training never saw, after 3 epochs of their own (each method's own way)" in caption(
        runs
    )
    partition = (finished / "out" / "partition-seed-0.csv").read_text().splitlines()
    assert [row.split(",")[5] for row in partition] == ["held_out", *"0000", *"11"]


def test_a_run_that_died_before_its_end_gives_the_same_files(finished: Path, tmp_path: Path) -> None:
    given = document(finished / "data.npz", ["fedrep"], count=2)
    run(tmp_path / "out", given)
    folder = tmp_path / "out" / "fedrep" / "seed-0"
    for name in MAY_DIFFER:
        (folder / name).unlink()
    run(tmp_path / "out", given, resume=True)
    assert table(folder) == table(finished / "out/fedrep/seed-0")
    assert summary(folder)["new_clients"] == summary(finished / "out/fedrep/seed-0")["new_clients"]


def test_the_configuration_repeats_the_run(finished: Path) -> None:
    experiment = read_experiment(finished / "out/fedavg/seed-0/config.toml")
    assert (experiment.new_clients.count, experiment.new_clients.epochs, experiment.data.clients) == (2, EPOCHS, 6)


def test_start_and_settings_of_their_own(finished: Path, tmp_path: Path) -> None:
    new = {"share": 0.34, "start": "global", "lr": 0.02, "momentum": 0.5, "batch_size": "full", "opt_state": "keep"}
    run(tmp_path / "out", document(finished / "data.npz", ["fedrep"], **new))
    figures = summary(tmp_path / "out/fedrep/seed-0")["new_clients"]
    assert figures["how"] == "the mean of the clients' models by samples, fine-tuned"
    assert (figures["clients"], figures["start"], figures["opt_state"]) == (2, "global", "keep")
    assert (figures["lr"], figures["momentum"], figures["batch_size"]) == (0.02, 0.5, None)


def test_random_ones(finished: Path) -> None:
    keys = {"source": "npz", "root": str(finished / "data.npz"), "partition": "domain"}
    whole = load(**keys)
    data = load(**keys, seed=3, held_out=HoldOut(count=2, choose="random"))
    assert data.held_out is not None
    chosen = data.record["held_out"]
    assert chosen == sorted(chosen) and len(chosen) == 2 and chosen != [4, 5]
    assert data.client_names + data.held_out.client_names == tuple(
        str(i) for i in [*(i for i in range(6) if i not in chosen), *chosen]
    )
    assert {*data.client_names, *data.held_out.client_names} == set(whole.client_names)
    again = load(**keys, seed=3, held_out=HoldOut(count=2, choose="random"))
    assert again.record["held_out"] == chosen


def test_tuning_never_meets_them(finished: Path) -> None:
    keys = {"source": "npz", "root": str(finished / "data.npz"), "partition": "domain"}
    data: FederatedData = load(**keys, held_out=HoldOut(count=2))
    tuned = without_test_samples(data, 0.2, 0)
    assert tuned.held_out is None and tuned.clients == 4


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"count": 6}, r"new_clients\.count = 6: that is 6 of the 6 clients"),
        ({"share": 0.1}, r"new_clients\.share = 0\.1: that is 0 of the 6 clients"),
        ({"count": 2, "share": 0.5}, r"new_clients\.share = 0\.5 stands beside new_clients\.count"),
        ({"count": 0}, r"new_clients\.count = 0"),
        ({"count": 2, "start": "middle"}, r"new_clients\.start = 'middle'"),
        ({"count": 2, "epoch": 2}, r"new_clients\.epoch = 2 .*Did you mean epochs"),
    ],
)
def test_bad_input(finished: Path, tmp_path: Path, new: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "out", document(finished / "data.npz", ["local"], **new))
    assert not (tmp_path / "out").exists()
