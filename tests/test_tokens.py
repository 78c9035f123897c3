"""Texts: token ids stay whole numbers from the data to the scores and the exported files, on every engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tests.flower.memory import SMALL, Memory, Notes, experiment, remote, shards
from tests.flower.test_contract import assert_alike, simulated
from tests.small_networks import Words, words
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from bespokefl import models
from bespokefl.algorithms import build_algorithm
from bespokefl.cli import app
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData, load
from bespokefl.engines import build_engine
from bespokefl.federation import Federation
from bespokefl.federation.new_clients import Joining
from bespokefl.flower.silo.silo import open_silo
from bespokefl.products.adapt import adapt
from bespokefl.products.predict import load_personal_model
from bespokefl.results.files import read_csv

SIZES = (11, 6, 9)


def texts(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Five ids each; class 1 has more of the high ones."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return np.clip(rng.integers(0, 14, (n, 5)) + 6 * y[:, None], 0, 19), y


def clients() -> FederatedData:
    return FederatedData.from_arrays([texts(n, n) for n in SIZES], seed=3)


def by_hand(data: FederatedData, start: dict[str, torch.Tensor], rounds: int, epochs: int, lr: float) -> Words:
    """FedAvg with whole-split batches, in plain PyTorch."""
    w = start
    sizes = [len(rows) for rows in data.splits["train"]]
    for _ in range(rounds):
        sent = []
        for rows in data.splits["train"]:
            net = Words(20, 2).double()
            net.load_state_dict(w)
            optimizer = torch.optim.SGD(net.parameters(), lr)
            for _ in range(epochs):
                optimizer.zero_grad()
                cross_entropy(net(data.x[rows]), data.y[rows]).backward()
                optimizer.step()
            sent.append(net.state_dict())
        w = {k: sum(n * s[k] for n, s in zip(sizes, sent, strict=True)) / sum(sizes) for k in w}
    net = Words(20, 2).double()
    net.load_state_dict(w)
    return net


@pytest.mark.parametrize(
    "engine",
    [{"name": "sequential"}, {"name": "vectorized"}, {"name": "vectorized", "stack": 1, "lanes": 2}],
    ids=["sequential", "stacked", "lanes"],
)
def test_engines_train_on_tokens(engine: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, data = Words(20, 2).double(), clients()
    assert data.x.dtype == torch.int64
    algorithm = build_algorithm("fedavg", {"lr": 0.5, "local_epochs": 3, "batch_size": None}, {"personal": "global"})
    federation = Federation(
        Task(module, dtype=torch.float64), data, algorithm, engine=build_engine(device="cpu", **engine)
    )
    federation.run(2, evaluate_every=0)
    net = by_hand(data, module.state_dict(), rounds=2, epochs=3, lr=0.5)
    for name, value in (federation.global_model() or {}).items():
        torch.testing.assert_close(value, net.state_dict()[name], rtol=1e-11, atol=1e-12)
    for rows, accuracy in zip(data.splits["test"], federation.evaluate().accuracy, strict=True):
        assert accuracy == (net(data.x[rows]).argmax(1) == data.y[rows]).double().mean()


@pytest.mark.parametrize("name", ["ditto", "pgfed", "fedrod", "plgu-lf", "lg-mix"])
def test_both_engines_agree_in_ragged_batches(name: str) -> None:
    found = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(1)
        algorithm = build_algorithm(name, {"lr": 0.3, "local_epochs": 2, "batch_size": 4}, {})
        federation = Federation(Task(Words(20, 2), dtype=torch.float64), clients(), algorithm, engine=engine, seed=2)
        federation.run(2)
        found.append((federation.personal_models(), federation.evaluate()))
    (ours, here), (theirs, there) = found
    for k, v in ours.items():
        torch.testing.assert_close(v, theirs[k], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(here.loss, there.loss)
    np.testing.assert_allclose(here.further["auc"], there.further["auc"])


def test_a_run_its_files_and_who_comes_later(tmp_path: Path) -> None:
    x, y = texts(90)
    np.savez(tmp_path / "texts.npz", x=x, y=y, classes=["dull", "fine"])
    np.savez(tmp_path / "later.npz", x=x[:30].astype(np.int16), y=y[:30], classes=["dull", "fine"])
    (tmp_path / "exp.toml").write_text(
        'seeds = [0]\nalgorithm = { name = "ditto" }\n[model]\nname = "tests.small_networks:words"\n'
        f'[data]\nsource = "npz"\nroot = "{tmp_path / "texts.npz"}"\ninputs = "tokens"\nclients = 3\n'
        'partition = "iid"\n[train]\nrounds = 3\nlocal_epochs = 3\nbatch_size = 10\nlr = 0.5\n'
        "[output]\npersonal = true\nsurface = true\n"
    )
    result = CliRunner().invoke(app, ["run", str(tmp_path / "exp.toml"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    run = tmp_path / "out" / "ditto" / "seed-0"
    assert 'inputs = "tokens"' in (run / "config.toml").read_text()

    data = load("npz", 3, "iid", root=str(tmp_path / "texts.npz"), inputs="tokens")
    rows = data.splits["test"][1]
    np.save(tmp_path / "new.npy", x[rows])
    found = load_personal_model(run, client=1).predict([tmp_path / "new.npy"])
    hits = [one.label == ("dull", "fine")[label] for one, label in zip(found, y[rows], strict=True)]
    assert np.mean(hits) == pytest.approx(read_csv(run / "clients.csv")["accuracy"][1])
    np.save(tmp_path / "new.npy", x[rows] * 1.0)
    with pytest.raises(InputError, match="dtype float64, but inputs = 'tokens'"):
        load_personal_model(run, client=1).predict([tmp_path / "new.npy"])

    arguments = ["export", str(run), "--client", "1", "--out", str(tmp_path / "m.safetensors"), "--onnx"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"x": x[rows]})[0])
    wanted = [one.probabilities["fine"] for one in found]
    torch.testing.assert_close(logits.softmax(1)[:, 1].tolist(), wanted, rtol=1e-5, atol=1e-6)

    joined = adapt(run, tmp_path / "later.npz", Joining(epochs=1), test=0.3, out=tmp_path)
    assert joined.note is None and joined.accuracy[-1] is not None
    assert json.loads((tmp_path / "ditto-seed-0-new-client.json").read_text())["n_train"] == 21


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(input_shape: tuple[int, ...], classes: int, hidden: Any = ()) -> nn.Module:
        return words(input_shape, classes)

    monkeypatch.setitem(
        models.MODELS._ours, "words", models.registry.ModelSpec("words", "the mean of embeddings", factory)
    )


@pytest.mark.usefixtures("registered")
def test_silos_of_texts(tmp_path: Path) -> None:
    x, y = texts(60)
    np.savez(tmp_path / "texts.npz", x=x, y=y)
    source = {"source": "npz", "root": str(tmp_path / "texts.npz"), "inputs": "tokens", "max_samples": None}
    it = experiment("ditto", clients=3, data=source, model={"name": "words"})
    here = simulated(it)
    there = remote(it, Memory(shards(tmp_path, it, [[0], [1, 2]])), tmp_path)
    for _ in range(2):
        here.round()
        assert there.round().failed == {}
    assert_alike(here, there, 1e-9)


@pytest.mark.usefixtures("registered")
def test_silos_with_texts_of_their_own(tmp_path: Path) -> None:
    handlers = {}
    for k, size in enumerate((30, 24)):
        x, y = texts(size, k)
        np.savez(tmp_path / f"{k}.npz", x=x.astype(np.uint8), y=y)
        handlers[k] = open_silo(tmp_path / f"silo-{k}", data=tmp_path / f"{k}.npz", device="cpu", limits=SMALL)
    it = experiment("fedavg", model={"name": "words"}, data={"inputs": "tokens", "source": "npz"})
    there = remote(it, Memory(handlers), tmp_path, Notes())
    assert there.data.inputs == "tokens" and there.round().failed == {}
    assert np.isfinite(there.evaluate().accuracy).all()
