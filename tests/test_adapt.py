"""`bespoke adapt`: the model of a client that never took part, its files, and data that do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from bespokefl import models
from bespokefl.cli import app
from bespokefl.data.new_client import load_new_client
from bespokefl.errors import InputError
from bespokefl.experiments.load_run import load_run
from bespokefl.federation.new_clients import Joining
from bespokefl.products.adapt import adapt

CLASSES = ("cat", "dog", "eel")
EXPERIMENT = """
algorithms = [{algorithm}]
[data]
source = "npz"
root = "{root}"
partition = "domain"
normalize = "channel"
[model]
name = "mlp"
hidden = [6]
[train]
rounds = 3
local_epochs = 2
batch_size = "full"
lr = 0.2
[new_clients]
count = 1
epochs = 4
"""


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def samples() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    domain = np.repeat(np.arange(4), 40)
    y = rng.integers(0, 3, len(domain))
    return (3 * rng.normal(size=(len(domain), 5)) + 5 * y[:, None]).astype(np.float32), y, domain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapt")
    x, y, domain = samples()
    np.savez(path / "data.npz", x=x, y=y, domain=domain, classes=np.array(CLASSES))
    algorithms = '"fedavg", {name = "fedrod", label = "rod"}, "fedrep"'
    (path / "exp.toml").write_text(EXPERIMENT.format(algorithm=algorithms, root=path / "data.npz"))
    result = bespoke("run", path / "exp.toml", "--out", path / "out")
    assert result.exit_code == 0, result.output
    return path


def held_out_file(folder: Path, path: Path, **more: Any) -> Path:
    """The last client's samples as they were before normalisation, its test rows marked."""
    x, y, _ = samples()
    new = load_run(folder / "out" / "fedavg").federation.data.held_out
    assert new is not None
    rows = {split: new.splits[split][0] for split in ("train", "test")}
    np.savez(path, **{f"{k}_{s}": v[r] for s, r in rows.items() for k, v in (("x", x), ("y", y))}, **more)
    return path


@pytest.mark.parametrize("label", ["fedavg", "rod", "fedrep"])
def test_it_is_what_the_run_s_own_held_out_client_did(folder: Path, label: str, tmp_path: Path) -> None:
    """Whole-split batches leave nothing to chance: the same accuracies, from the file of raw samples."""
    data = held_out_file(folder, tmp_path / "new.npz")
    out = tmp_path / "deep" / "new.safetensors"
    result = bespoke("adapt", folder / "out" / label, "--data", data, "--epochs", 4, "--out", out)
    assert result.exit_code == 0, result.output
    account = json.loads(out.with_suffix(".json").read_text())
    table = (folder / "out" / label / "seed-0" / "new_clients.csv").read_text().splitlines()[1:]
    assert account["accuracy"] == pytest.approx([float(line.split(",")[2]) for line in table])
    assert account["loss"] == pytest.approx([float(line.split(",")[3]) for line in table], rel=1e-5)
    n = len(np.load(data)["y_train"]), len(np.load(data)["y_test"])
    assert (account["n_train"], account["n_test"], account["epochs"], account["round"]) == (*n, 4, 3)
    assert account["train_loss"][-1] < account["train_loss"][0] and account["classes"] == list(CLASSES)
    shown = [line.split() for line in result.stdout.splitlines()]
    assert [
        "4",
        f"{account['train_loss'][4]:.4f}",
        *(f"{100 * account[k][4]:.1f}" for k in ("train_accuracy", "accuracy")),
    ] in shown
    assert account["how"] in result.stdout and str(out) in result.stdout
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"client": "new", "algorithm": label, "round": "3"}


def test_the_written_model_has_the_accuracy_that_is_told(folder: Path, tmp_path: Path) -> None:
    data = held_out_file(folder, tmp_path / "new.npz")
    adapted = adapt(folder / "out" / "fedavg", data, Joining(epochs=2, lr=0.05), out=tmp_path, onnx=True)
    assert [path.name for path in adapted.files] == [
        f"fedavg-seed-0-new-client.{s}" for s in ("safetensors", "onnx", "json")
    ]
    module = models.build("mlp", (5,), 3, hidden=[6])
    module.load_state_dict(load_file(adapted.files[0]))
    x, _, _ = samples()
    run = load_run(folder / "out" / "fedavg").federation
    train = np.concatenate(run.data.splits["train"])  # of the clients that trained
    arrays = np.load(data)
    scaled = (arrays["x_test"] - x[train].mean(0, dtype=np.float64)) / x[train].std(0, dtype=np.float64)
    inputs = torch.tensor(scaled, dtype=torch.float32)
    accuracy = float((module(inputs).argmax(1).numpy() == arrays["y_test"]).mean())
    assert adapted.accuracy[-1] == pytest.approx(accuracy)
    session = onnxruntime.InferenceSession(adapted.files[1], providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": inputs.numpy()})
    np.testing.assert_allclose(logits, module(inputs).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert json.loads(adapted.files[2].read_text())["lr"] == 0.05


def test_classes_are_matched_by_name(folder: Path, tmp_path: Path) -> None:
    like = load_run(folder / "out" / "fedavg").federation.data
    x = samples()[0][:6]
    np.savez(tmp_path / "named.npz", x=x, y=np.array([0, 1, 0, 1, 0, 1]), classes=np.array(["eel", "cat"]))
    assert load_new_client(tmp_path / "named.npz", like).y.tolist() == [2, 0, 2, 0, 2, 0]
    np.savez(tmp_path / "plain.npz", x=x, y=np.array([0, 1, 0, 1, 0, 2]))
    assert load_new_client(tmp_path / "plain.npz", like).y.tolist() == [0, 1, 0, 1, 0, 2]


def test_splits(folder: Path, tmp_path: Path) -> None:
    like = load_run(folder / "out" / "fedavg").federation.data
    x, y, _ = samples()
    np.savez(tmp_path / "all.npz", x=x[:40], y=y[:40])
    plain = load_new_client(tmp_path / "all.npz", like)
    assert (plain.sizes("train"), plain.sizes("test")) == (40, 0)
    some = load_new_client(tmp_path / "all.npz", like, test=0.25)
    assert (some.sizes("train"), some.sizes("test")) == (30, 10)
    assert not set(some.splits["train"][0]) & set(some.splits["test"][0])
    np.savez(tmp_path / "marked.npz", x=x[:40], y=y[:40], is_test=np.arange(40) % 4 == 0)
    assert load_new_client(tmp_path / "marked.npz", like).splits["test"][0].tolist() == list(range(0, 40, 4))
    with pytest.raises(InputError, match="marks test rows of its own"):
        load_new_client(tmp_path / "marked.npz", like, test=0.5)


def test_without_test_rows_only_the_training_is_told(folder: Path, tmp_path: Path) -> None:
    x, y, _ = samples()
    np.savez(tmp_path / "all.npz", x=x[:40], y=y[:40])
    result = bespoke("adapt", folder / "out/fedavg", "--data", tmp_path / "all.npz", "--epochs", 2, "--out", tmp_path)
    assert result.exit_code == 0 and "There were no test rows" in result.stdout and "test %" not in result.stdout
    account = json.loads((tmp_path / "fedavg-seed-0-new-client.json").read_text())
    assert account["accuracy"] == [None] * 3 and account["n_test"] == 0


def test_values_in_other_units_are_pointed_out(folder: Path, tmp_path: Path) -> None:
    x, y, _ = samples()
    np.savez(tmp_path / "far.npz", x=x[:40] * 100, y=y[:40])
    result = bespoke("adapt", folder / "out/fedavg", "--data", tmp_path / "far.npz", "--epochs", 1, "--out", tmp_path)
    assert result.exit_code == 0 and "are they in the same units?" in result.stderr


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (
            {"x": np.zeros((4, 6), np.float32), "y": np.zeros(4, int)},
            [],
            "samples of the shape (6,); those of this run have (5,)",
        ),
        (
            {"x": np.zeros((4, 5), np.float32), "y": np.full(4, 3)},
            [],
            "has the classes 3, which this run never had: 0 to 2",
        ),
        (
            {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int), "classes": np.array(["bat"])},
            [],
            "has the classes bat, which this run never had: cat, dog, eel",
        ),
        ({"x": np.zeros((4, 5), np.float32)}, [], "holds the keys x; allowed"),
        (
            {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int)},
            ["--test", 1.5],
            "--test 1.5: the fraction must lie",
        ),
        (
            {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int)},
            ["--start", "x"],
            "--start x: it is one of method, global",
        ),
        ({"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int)}, ["--lr", -1], "--lr -1.0: it is a number from 0"),
        (
            {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int)},
            ["--out", "model.bin"],
            "--out model.bin: should be",
        ),
        ({"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, int)}, ["--epochs", 0], "--epochs"),
    ],
)
def test_wrong_input(folder: Path, tmp_path: Path, monkeypatch: Any, arrays: Any, options: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", **arrays)
    result = bespoke("adapt", folder / "out/fedavg", "--data", "new.npz", *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]


def test_what_is_no_data_and_no_run(folder: Path, tmp_path: Path) -> None:
    missing = bespoke("adapt", folder / "out/fedavg", "--data", tmp_path / "no.npz")
    assert missing.exit_code == 2 and "should be a .npz file with x and y, or a folder of images" in missing.output
    several = bespoke("adapt", folder / "out", "--data", folder / "data.npz")
    assert several.exit_code == 2 and "rod/seed-0" in several.output


def test_a_model_that_is_not_finite_is_not_written(folder: Path, tmp_path: Path) -> None:
    data = held_out_file(folder, tmp_path / "new.npz")
    result = bespoke("adapt", folder / "out/fedavg", "--data", data, "--lr", 1e30, "--out", tmp_path / "m.safetensors")
    assert result.exit_code == 1 and "is not finite after 20 epochs" in result.output and "1e+30" in result.output
    assert not list(tmp_path.glob("m.*"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    for place in ("one", "two", "new"):
        for shade, name in enumerate(("dark", "light")):
            (path / place / name).mkdir(parents=True)
            for k in range(8):
                pixels = np.random.default_rng(k).integers(0, 100, (10, 12)) + 150 * shade
                Image.fromarray(pixels.astype(np.uint8)).save(path / place / name / f"{k}.png")
    (path / "data").mkdir()
    for place in ("one", "two"):
        (path / place).rename(path / "data" / place)
    (path / "exp.toml").write_text(
        f"algorithms = ['fedavg']\n[data]\nsource = 'domains'\nroot = '{path / 'data'}'\npartition = 'domain'\n"
        "size = 6\nmode = 'L'\nnormalize = 'half'\n[model]\nname = 'linear'\n[train]\nrounds = 2\n"
    )
    result = bespoke("run", path / "exp.toml", "--out", path / "out")
    assert result.exit_code == 0, result.output
    return path


def test_a_folder_of_images_is_read_as_the_run_s_own(pictures: Path, tmp_path: Path) -> None:
    """Grey, resized to 6 x 6, scaled to -1 to 1, whatever is missing of the classes."""
    like = load_run(pictures / "out").federation.data
    new = load_new_client(pictures / "new", like)
    assert new.input_shape == (1, 6, 6) and new.y.tolist() == [0] * 8 + [1] * 8
    first = Image.open(pictures / "new" / "dark" / "0.png").resize((6, 6), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(new.x[0, 0], np.asarray(first) / 255 * 2 - 1, atol=1e-6)
    result = bespoke("adapt", pictures / "out", "--data", pictures / "new", "--test", 0.25, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "fedavg-seed-0-new-client.json").read_text())["accuracy"][-1] == 1.0
