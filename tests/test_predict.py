"""`bespoke predict`: the personal model answers as it did when it was scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.flower.memory import SMALL, Memory, Notes, experiment
from tests.flower.test_silo import own_silo
from typer.testing import CliRunner

from bespokefl.cli import app
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.running import run_experiment
from bespokefl.flower.server.serve import serve
from bespokefl.flower.silo.kept_model import load_kept_model
from bespokefl.flower.silo.silo import open_silo
from bespokefl.products.predict import load_personal_model
from bespokefl.results.files import read_csv


def ask(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


@pytest.mark.parametrize("name", ["ditto", "fedrod", "splitgp"])  # the last two answer by more than one network
def test_a_runs_model_has_the_accuracy_that_it_was_scored_with(name: str, tmp_path: Path) -> None:
    it = experiment(name, rounds=1, precision="float32", output={"personal": True}, data={"normalize": "channel"})
    run_experiment(it, tmp_path, resume=False, reporter=Notes())
    folder, (x, y) = tmp_path / name / "seed-0", stored_test_rows(2)
    np.savez(tmp_path / "new.npz", x=x)
    found = load_personal_model(folder, client=2).predict([tmp_path / "new.npz"])
    hits = [one.label == str(label) for one, label in zip(found, y, strict=True)]
    assert np.mean(hits) == pytest.approx(read_csv(folder / "clients.csv")["accuracy"][2])


def stored_test_rows(client: int) -> Any:
    """Stored values of a client's test samples, as a file would hold them."""

    raw = resolve.load_data(experiment("ditto", data={"normalize": "unit"}), 0)
    rows = torch.as_tensor(raw.splits["test"][client])
    return raw.x[rows].numpy(), raw.y[rows].numpy()


def test_outputs_that_no_class_belongs_to(tmp_path: Path) -> None:
    model = {"name": "tests.small_networks:spare_output"}
    it = experiment("local", rounds=1, precision="float32", output={"personal": True}, model=model)
    run_experiment(it, tmp_path, resume=False, reporter=Notes())
    np.save(tmp_path / "new.npy", stored_test_rows(2)[0])
    first = load_personal_model(tmp_path / "local" / "seed-0", client=2).predict([tmp_path / "new.npy"])[0]
    assert list(first.probabilities) == [*"0123456789", "output 10"]
    assert sum(first.probabilities.values()) == pytest.approx(1)


def silo_with_a_model(tmp_path: Path) -> Path:
    made = [own_silo(tmp_path, k, [0, 1, 2]) for k in range(2)]
    transport = Memory(
        {k: open_silo(home, data=data, device="cpu", limits=SMALL) for k, (home, data) in enumerate(made)}
    )
    it = experiment("ditto", rounds=3, train={"lr": 0.2}, precision="float32")
    serve(it, tmp_path / "out", transport, nodes=2, resume=False, reporter=Notes())
    return made[1][0]


def test_a_silos_model_by_hand_and_on_the_command_line(tmp_path: Path) -> None:
    silo = silo_with_a_model(tmp_path)
    x = np.array([[0.0] * 6, [2.0] * 6], dtype=np.float32)
    np.save(tmp_path / "new.npy", x)
    (path,) = silo.glob("runs/*/personal/client-1.safetensors")
    w = {k: v.double().numpy() for k, v in load_file(path).items()}
    bias, weight = sorted(name for name in w if not name.startswith("head."))
    hidden = np.maximum(x @ w[weight].T + w[bias], 0)
    logits = hidden @ w["head.weight"].T + w["head.bias"]
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shown = ask(silo, tmp_path / "new.npy", "--json")
    assert shown.exit_code == 0
    told = json.loads(shown.stdout)
    assert told["model"] == str(path)
    for one, p in zip(told["predictions"], wanted, strict=True):
        np.testing.assert_allclose(list(one["probabilities"].values()), p, rtol=1e-5)
        assert one["class"] == str(p.argmax()) and one["probability"] == pytest.approx(p.max(), rel=1e-5)
    table = ask(silo, tmp_path / "new.npy")
    assert "\nnew.npy[1] " in table.stdout and "probability" in table.stdout  # the folder is known to whoever asks


def test_one_sample_needs_no_axis_of_samples(tmp_path: Path) -> None:
    silo = silo_with_a_model(tmp_path)
    np.save(tmp_path / "one.npy", np.ones(6))
    (one,) = load_kept_model(silo).predict([tmp_path / "one.npy"])
    assert one.source.endswith("one.npy") and sum(one.probabilities.values()) == pytest.approx(1)


def test_an_image_is_read_as_those_it_was_trained_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 210)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            grey = rng.integers(level - 30, level + 30, (9, 11), dtype=np.uint8)
            Image.fromarray(grey).save(tmp_path / "images" / name / f"{i}.png")
    silo = tmp_path / "silo"
    it = experiment("local", rounds=8, data={"source": "images", "size": 6, "mode": "L"}, train={"lr": 0.2})
    transport = Memory({1: open_silo(silo, data=tmp_path / "images", device="cpu", limits=SMALL)})
    serve(it, tmp_path / "out", transport, nodes=1, resume=False, reporter=Notes())
    Image.fromarray(np.full((20, 30, 3), 215, dtype=np.uint8)).save(tmp_path / "new.jpg")
    Image.fromarray(np.full((5, 5), 35, dtype=np.uint8)).save(tmp_path / "other.png")
    found = load_kept_model(silo).predict([tmp_path / "new.jpg", tmp_path / "other.png"])
    assert [one.label for one in found] == ["light", "dark"]


def test_mistakes_have_a_message(tmp_path: Path) -> None:
    silo = silo_with_a_model(tmp_path)
    np.save(tmp_path / "wide.npy", np.ones((2, 7)))
    (tmp_path / "text.txt").write_text("x")
    Image.fromarray(np.zeros((6, 6), dtype=np.uint8)).save(tmp_path / "grey.png")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    model = load_kept_model(silo)
    for file, words in [
        ("wide.npy", r"shape \(7,\); the model takes \(6,\)"),
        ("text.txt", "should be an image"),
        ("grey.png", "is an image; the model takes arrays"),
        ("nothing.npy", "does not exist"),
        ("objects.npy", "cannot be read"),
    ]:
        with pytest.raises(InputError, match=words):
            model.predict([tmp_path / file])
    with pytest.raises(InputError, match="--client 5 is not among them: there are models of the clients 1"):
        load_kept_model(silo, client=5)
    with pytest.raises(InputError, match="holds no personal model"):
        load_kept_model(tmp_path)
    with pytest.raises(InputError, match="of the run 'other'"):
        load_kept_model(silo, run="other")
    assert ask(tmp_path, tmp_path / "wide.npy").exit_code == 2
