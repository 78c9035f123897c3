import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.config_file import parse_experiment
from bespokefl.experiment import run_experiment
from bespokefl.progress import make_reporter
from bespokefl.watch import Watch


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
