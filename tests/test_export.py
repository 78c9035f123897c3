"""Exported files, read by the libraries that other programs use, answer as the personal models that were scored."""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from bespokefl import models
from bespokefl.cli import app
from bespokefl.data import FederatedData, load
from bespokefl.errors import RunError
from bespokefl.products import export as exporting

EXPERIMENT = """
algorithms = [{algorithm}]
[data]
clients = 3
max_samples = 150
[model]
{model}
[train]
rounds = 1
local_epochs = 1
lr = 0.1
batch_size = 20
"""
MLP = "name = 'mlp'\nhidden = [12]"
CLIENT = 1


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def finished_run(folder: Path, algorithm: str, model: str, *settings: str) -> Path:
    path = folder / "exp.toml"
    path.write_text(EXPERIMENT.format(algorithm=algorithm, model=model))
    result = bespoke("run", path, "--out", folder / "out", *(part for s in settings for part in ("--set", s)))
    assert result.exit_code == 0, result.output
    return next((folder / "out").glob("*/seed-0"))


def exported(run: Path, folder: Path) -> tuple[dict[str, torch.Tensor], onnxruntime.InferenceSession, str]:
    target = folder / "model.safetensors"
    result = bespoke("export", run, "--client", CLIENT, "--out", target, "--onnx")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines()] == [str(target), str(target.with_suffix(".onnx"))]
    onnx.checker.check_model(onnx.load(target.with_suffix(".onnx")), full_check=True)
    assert not list(folder.glob(".*"))
    session = onnxruntime.InferenceSession(target.with_suffix(".onnx"), providers=["CPUExecutionProvider"])
    return load_file(target), session, result.stderr


def test_data(run: Path) -> tuple[FederatedData, torch.Tensor, torch.Tensor]:
    data = load(**tomllib.loads((run / "config.toml").read_text())["data"])
    rows = torch.as_tensor(data.splits["test"][CLIENT])
    return data, data.x[rows], data.y[rows]


test_data.__test__ = False  # type: ignore[attr-defined]


def module_of(run: Path, data: FederatedData) -> nn.Module:
    config = tomllib.loads((run / "config.toml").read_text())["model"]
    options = {k: v for k, v in config.items() if k not in ("name", "head")}
    return models.build(config["name"], data.input_shape, len(data.classes), **options).eval()


def assert_scored(run: Path, logits: np.ndarray, y: torch.Tensor) -> None:
    """The accuracy in the run's own table is that of the exported model."""
    row = (run / "clients.csv").read_text().splitlines()[CLIENT + 1].split(",")
    assert float(row[3]) == pytest.approx(float((logits.argmax(1) == y.numpy()).mean()))


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("'fedavg'", MLP),
        ("'apfl'", MLP),
        ("'fedhkd'", MLP),
        ("'ditto'", "name = 'tests.small_networks:convolutional'"),
        ("'fedbn'", "name = 'tests.small_networks:normalised'"),
    ],
)
def test_one_network(algorithm: str, model: str, tmp_path: Path) -> None:
    """torch's own module with the safetensors file, and onnxruntime with the ONNX file, give the same logits."""
    run = finished_run(tmp_path, algorithm, model)
    tensors, session, said = exported(run, tmp_path)
    data, x, y = test_data(run)
    module = module_of(run, data)
    missing = module.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and all("num_batches" in key for key in missing.missing_keys)
    with torch.no_grad():
        expected = module(x).numpy()
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (single,) = session.run(None, {"x": x[:1].numpy()})
    np.testing.assert_allclose(single, expected[:1], rtol=1e-4, atol=1e-5)
    assert_scored(run, found, y)
    assert "read back, the same answers" in said and "read back by onnxruntime" in said


def head(tensors: dict[str, torch.Tensor], name: str, h: torch.Tensor) -> torch.Tensor:
    return h @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def test_two_heads_of_fedrod(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "'fedrod'", MLP)
    w, session, _ = exported(run, tmp_path)
    _, x, y = test_data(run)
    first = next(k for k in w if k.endswith("weight")).removesuffix(".weight")
    h = head(w, first, x.flatten(1)).relu()
    expected = head(w, "head", h) + head(w, "personal.head", h)
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert_scored(run, found, y)


def test_two_exits_of_splitgp(tmp_path: Path) -> None:
    """Samples on both sides of the entropy's threshold, in one batch."""
    threshold = 1.0
    more = ("train.rounds=5", "train.local_epochs=10", "train.lr=0.5")
    run = finished_run(tmp_path, f"{{name = 'splitgp', E_th = {threshold}}}", MLP, *more)
    w, session, _ = exported(run, tmp_path)
    _, x, y = test_data(run)
    first = next(k for k in w if k.endswith("weight")).removesuffix(".weight")
    h = head(w, first, x.flatten(1)).relu()
    early, late = head(w, "kappa", h), head(w, "head", h)
    entropy = torch.distributions.Categorical(logits=early).entropy()[:, None]
    assert 0 < int((entropy <= threshold).sum()) < len(x)
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, torch.where(entropy <= threshold, early, late).numpy(), rtol=1e-4, atol=1e-5)
    assert_scored(run, found, y)


def test_other_precisions(tmp_path: Path) -> None:
    """The ONNX file is float32 also of a run in bf16 or float64."""
    for precision in ("bf16", "float64"):
        folder = tmp_path / precision
        folder.mkdir()
        run = finished_run(folder, "'local'", MLP, f"engine.precision={precision}")
        w, session, _ = exported(run, folder)
        _, x, _ = test_data(run)
        first = next(k for k in w if k.endswith("weight")).removesuffix(".weight")
        expected = head(w, "head", F.relu(head(w, first, x.flatten(1).to(w["head.bias"].dtype))))
        (found,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("local"), "'local'", MLP)


def test_a_wrong_onnx_file_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exporting._save_onnx

    def damaged(module: nn.Module, example: torch.Tensor, path: Path) -> None:
        with torch.no_grad():
            next(module.parameters()).add_(0.01)
        real(module, example, path)

    monkeypatch.setattr(exporting, "_save_onnx", damaged)
    target = tmp_path / "wrong.safetensors"
    result = bespoke("export", run, "--client", 0, "--out", target, "--onnx")
    assert result.exit_code == 1 and "answers differently from the model, by up to" in result.output
    assert not list(tmp_path.glob("*wrong.onnx*")) and not list(tmp_path.glob(".*"))


def test_a_wrong_safetensors_file_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exporting.load_file
    monkeypatch.setattr(exporting, "load_file", lambda path: {k: v + 1e-3 for k, v in real(path).items()})
    target = tmp_path / "wrong.safetensors"
    with pytest.raises(RunError, match="answers differently; it was removed"):
        exporting.export_model(run, 0, target)
    assert not target.exists()


def test_without_the_packages(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden: set[str] = {"onnxruntime"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a))
    result = bespoke("export", run, "--client", 0, "--out", tmp_path / "a.safetensors", "--onnx")
    assert result.exit_code == 0 and "not checked: that needs the package onnxruntime" in result.stderr
    hidden |= {"onnxscript"}
    result = bespoke("export", run, "--client", 0, "--out", tmp_path / "b.safetensors", "--onnx")
    assert result.exit_code == 2 and "needs the package onnxscript: pip install 'bespokefl[onnx]'" in result.output
    assert not (tmp_path / "b.safetensors").exists()


def test_the_note_of_a_file(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "noted.safetensors"
    bespoke("export", run, "--client", 2, "--out", target)
    size = int.from_bytes(target.read_bytes()[:8], "little")
    note = json.loads(target.read_bytes()[8 : 8 + size])["__metadata__"]
    assert note == {"algorithm": "local", "client": "2", "round": "1"}
