import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.cli import app
from bespokefl.evaluation.divergence import what_diverged
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.experiments.callbacks.telling import Watch
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import make_reporter


def line(round_: int, mean: float | None, failed: dict[str, str] | None = None) -> dict[str, Any]:
    return {"round": round_, "mean": mean, "clients": [0, 1, 2], "failed": failed or {}}


def test_a_collapse_is_said_once_with_both_rounds() -> None:
    watch = Watch()
    assert watch.look(line(1, 0.6), {}) == []
    assert watch.look(line(2, 0.8), {}) == []
    assert watch.look(line(3, None), {}) == []
    assert watch.look(line(4, 0.61), {}) == []
    (said,) = watch.look(line(5, 0.3), {})
    assert said.startswith("round 5: ") and "30.0 % from 80.0 % in round 2" in said
    assert watch.look(line(6, 0.1), {}) == []


def test_clients_whose_answers_are_not_finite() -> None:
    watch = Watch()
    lost = {"0": "answered with values that are not finite", "2": "answered with values that are not finite"}
    assert watch.look(line(1, 0.5, {"0": lost["0"]}), {}) == []
    (said,) = watch.look(line(2, 0.5, lost), {})
    assert "2 of 3 clients" in said
    assert watch.look(line(3, 0.5, lost), {}) == []


def test_an_algorithm_is_heard_once_a_matter() -> None:
    watch = Watch()
    assert watch.look(line(1, 0.5), {"alpha": "is 3"}) == ["round 1: is 3"]
    assert watch.look(line(2, 0.5), {"alpha": "is 4", "beta": "is 5"}) == ["round 2: is 5"]


def test_a_run_passes_warnings_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "warnings", lambda self, server: {"w": "w grows"})
    text = io.StringIO()
    document = {"algorithms": ["fedavg"], "data": {"clients": 3, "max_samples": 60}, "train": {"rounds": 2}}
    reporter = make_reporter(Console(file=text, width=200))
    run_experiment(parse_experiment(document), tmp_path, resume=False, reporter=reporter)
    assert text.getvalue().count("warning: fedavg, seed 0, round 1: w grows") == text.getvalue().count("w grows") == 1


# divergence ------------------------------------------------------------------------------------------
def scores(loss: list[float], n: list[int] | None = None) -> Evaluation:
    values = np.array(loss)
    return Evaluation(np.arange(len(loss)), np.array(n or [5] * len(loss)), np.full(len(loss), 0.1), values)


@pytest.mark.parametrize(
    ("loss", "n", "classes", "said"),
    [
        ([2.3, 2.3, 2.3], None, 10, ""),
        ([2.3, math.nan, math.nan], None, 10, "not finite"),
        ([2.3, math.nan, 2.3, math.nan], None, 10, ""),  # half is not more than half
        ([2.3, math.nan, math.nan], [5, 5, 0], 10, ""),  # the third has nothing to be scored on
        ([2000.0, 2000.0, 2000.0], None, 10, ""),
        ([3000.0, 3000.0, 2.3], None, 10, "a loss over 2.3e+03"),
        ([3000.0, 3000.0, 2.3], None, 0, ""),  # regression: there is no guessing
        ([math.nan], [0], 10, ""),
    ],
)
def test_when_models_are_lost(loss: list[float], n: list[int] | None, classes: int, said: str) -> None:
    found = what_diverged(scores(loss, n), classes)
    assert said in found if said else not found


def run_command(folder: Path, method: str, more: str) -> Result:
    """`bespoke run` of three rounds on four clients."""
    text = f'algorithms = ["{method}"]\n[data]\nclients = 4\nmax_samples = 200\n[model]\nname = "linear"\n'
    (folder / "e.toml").write_text(f"{text}[train]\nrounds = 3\nlocal_epochs = 1\n{more}\n")
    return CliRunner().invoke(app, ["run", str(folder / "e.toml"), "--out", str(folder / "out")])


@pytest.mark.parametrize("method", ["fedavg", "pgfed", "ditto", "fedpg", "lg-mix", "local", "feddyn", "apfl"])
def test_every_method_ends_alike_at_an_absurd_rate(tmp_path: Path, method: str) -> None:
    result = run_command(tmp_path, method, "lr = 1e6")
    assert result.exit_code == 3, result.output
    told = " ".join((tmp_path / "out" / method / "seed-0" / "error.txt").read_text().split())
    assert re.search(r"diverged by round \d|round \d: none of the 4 clients", told) and "smaller train.lr" in told


def test_an_attack_may_ruin_models(tmp_path: Path) -> None:
    result = run_command(tmp_path, "fedavg", 'lr = 0.1\n[attack]\nkind = "scale"\nfactor = 1e8')
    assert result.exit_code == 0, result.output
