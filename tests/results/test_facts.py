"""What algorithms show of their state: the numbers and the files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.algorithms import small
from typer.testing import CliRunner

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.lg_mix import LGMix
from bespokefl.algorithms.pgfed import PGFed
from bespokefl.algorithms.plgu_lf import PLGULF
from bespokefl.cli import app
from bespokefl.results import facts
from bespokefl.results.facts import is_kept, read_facts, write_facts

TRAINING = {"lr": 0.2, "local_epochs": 2, "batch_size": 3}


def vector(model: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([v.flatten() for v in model.values()])


def test_lambda_is_the_share_that_was_mixed() -> None:
    """Recovered from the models alone: w' - w = lambda dw + (1 - lambda) du, with dw from FedAvg's local models."""
    ours, fedavg = small.federate(LGMix(**TRAINING)), small.federate(FedAvg(**TRAINING))
    ours.round()
    fedavg.round()
    x0 = torch.as_tensor(small.flat(small.start()))
    du = vector(ours.server.u) - x0
    for i, lam in enumerate(ours.facts()["lambda"]):
        dw, moved = vector(fedavg.client_model(i)) - x0, vector(ours.client_model(i)) - x0
        assert lam == pytest.approx(float((moved - du) @ (dw - du) / ((dw - du) @ (dw - du))), abs=1e-12)
        assert 0 < lam < 1


def test_a_client_without_a_round_has_no_lambda() -> None:
    ours = small.federate(LGMix(**TRAINING), schedule=[[1]])
    ours.round()
    assert np.isnan(ours.facts()["lambda"]).tolist() == [True, False]


def test_A_is_the_servers() -> None:
    ours = small.federate(PGFed(**TRAINING))
    for _ in range(2):
        ours.round()
    assert np.array_equal(ours.facts()["A"], ours.server.A.numpy())
    assert not np.allclose(ours.facts()["A"], 0.5)


def test_layer_scores_by_hand() -> None:
    ours = small.federate(PLGULF(**TRAINING))
    ours.round()
    for i, scores in enumerate(ours.facts()["scores"]):
        theta, w = ours.client_model(i), ours.server["w"]
        drift = [
            np.sqrt(sum(float(((theta[k] - w[k]) ** 2).sum()) for k in names)) / sum(w[k].numel() for k in names)
            for names in (small.BODY, small.HEAD)
        ]
        np.testing.assert_allclose(scores, np.array(drift) / sum(drift), rtol=1e-12)


def test_fedavg_has_nothing_to_show() -> None:
    assert small.federate(FedAvg(**TRAINING)).facts() == {}


def test_which_rounds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(is_kept(nth, 10, 1000) for nth in range(10))
    monkeypatch.setattr(facts, "MOST_BYTES", 3500)
    assert [nth for nth in range(10) if is_kept(nth, 10, 1000)] == [0, 3, 6, 9]
    assert [nth for nth in range(9) if is_kept(nth, 9, 4000)] == [0, 8]


def test_files_hold_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {r: {"A": rng.normal(size=(3, 3)), "step": np.array(0.1 * r)} for r in (2, 10, 100)}
    for r, arrays in written.items():
        write_facts(tmp_path, r, arrays)
    found = read_facts(tmp_path)
    assert found["A"].rounds.tolist() == [2, 10, 100]
    for name in ("A", "step"):
        assert np.array_equal(found[name].values, np.stack([written[r][name] for r in written]))
    assert read_facts(tmp_path / "elsewhere") == {}
    (tmp_path / facts.FOLDER / "000010.safetensors").write_bytes(b"damaged")
    (tmp_path / facts.FOLDER / "notes.safetensors").write_bytes(b"not ours")
    damaged: list[str] = []
    assert read_facts(tmp_path, damaged)["A"].rounds.tolist() == [2, 100]
    assert damaged == ["000010.safetensors"]
    write_facts(tmp_path, 3, {"A": np.zeros((4, 4))})  # left over from another run
    assert read_facts(tmp_path)["A"].rounds.tolist() == [2, 100]


def test_a_run_leaves_them_and_the_report_shows_them(tmp_path: Path) -> None:
    sets = ["data.clients=4", "data.max_samples=200", "model.name=linear", "train.rounds=5", "train.local_epochs=1"]
    arguments = ["run", "--out", str(tmp_path), "--seed", "0", "--set", "algorithm.name=pgfed", "--set", "eval.every=2"]
    result = CliRunner().invoke(app, [*arguments, *(part for s in sets for part in ("--set", s))])
    assert result.exit_code == 0, result.output
    run = tmp_path / "pgfed" / "seed-0"
    fact = read_facts(run)["A"]
    assert fact.rounds.tolist() == [2, 4, 5] and fact.values.shape == (3, 4, 4)
    assert "pgfed: change of A from round 2 to 5" in (tmp_path / "report.html").read_text()
