"""Trials that run at once are those that run one by one."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bespokefl.engines import Vectorized
from bespokefl.engines.base import Job, Result
from bespokefl.experiments.reading import parse_experiment
from bespokefl.federation import Federation
from bespokefl.interrupts import Interrupted
from bespokefl.progress import LineReporter
from bespokefl.tuning import Tuning, tune

DOCUMENT: dict[str, Any] = {
    "algorithms": ["fedprox"],
    "data": {"clients": 5, "max_samples": 150},
    "model": {"name": "linear"},
    "train": {"rounds": 3, "local_epochs": 1, "batch_size": 5},
}
PRUNING = {"grid": {"train.lr": [0.3, 0.2, 0.1, 1e-9]}, "prune": True, "rounds": 8, "seeds": [0, 1]}


def tuned(out: Path, together: int, keys: dict[str, Any], engine: str = "sequential", **options: Any) -> Tuning:
    section = {"name": engine, "precision": "float64", "together": together}
    return tune(parse_experiment(DOCUMENT | {"engine": section, "tune": keys}), out, **options)


def trials(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "tuning" / "fedprox.json").read_text())["trials"]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("parameters", "state", "rounds", "reason"):
            assert ours[key] == theirs[key]
        for key in ("value", "mean", "worst5"):
            assert ours[key] == (theirs[key] and pytest.approx(theirs[key], rel=1e-9))
        assert [rounds for rounds, _ in ours["curve"]] == [rounds for rounds, _ in theirs["curve"]]
        assert [v for _, v in ours["curve"]] == pytest.approx([v for _, v in theirs["curve"]], rel=1e-9)


@pytest.mark.parametrize("together", [2, 6])
def test_the_table_is_that_of_trials_one_by_one(tmp_path: Path, together: int) -> None:
    """Two of three seeds at once, or two trials with all of them; also where one of the trials diverges."""
    keys = {"grid": {"train.lr": [0.05, 1e308, 0.2]}, "seeds": [0, 1, 2], "metric": "worst5", "rounds": 2}
    one_by_one, at_once = tuned(tmp_path / "a", 1, keys), tuned(tmp_path / "b", together, keys)
    assert_same(trials(tmp_path / "b"), trials(tmp_path / "a"))
    assert [trial["state"] for trial in trials(tmp_path / "b")] == ["complete", "failed", "complete"]
    assert at_once.methods[0].best is not None and one_by_one.methods[0].best is not None
    assert at_once.methods[0].best.parameters == one_by_one.methods[0].best.parameters
    assert {path.name for path in (tmp_path / "b" / "tuning").iterdir()} == {"fedprox.json"}


def test_trials_are_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []
    run = Vectorized.run

    def counting(self: Vectorized, job: Job) -> Result:
        jobs.append(len(job.clients))
        return run(self, job)

    monkeypatch.setattr(Vectorized, "run", counting)
    keys = {"grid": {"train.lr": [0.05, 0.1, 0.2], "algorithm.mu": [0.1, 0.5]}, "rounds": 2}
    tuned(tmp_path / "b", 6, keys, "vectorized")
    assert set(jobs) == {30}  # the 5 clients of 6 trials
    tuned(tmp_path / "a", 1, keys, "vectorized")
    assert_same(trials(tmp_path / "b"), trials(tmp_path / "a"))


@pytest.mark.parametrize("together", [2, 6])
def test_hopeless_trials_end_as_early(tmp_path: Path, together: int) -> None:
    """Two seeds of one trial, or three trials; the fourth is then compared with those three."""
    tuned(tmp_path / "a", 1, PRUNING)
    tuned(tmp_path / "b", together, PRUNING)
    assert [(trial["state"], trial["rounds"]) for trial in trials(tmp_path / "a")] == [("complete", 16)] * 3 + [
        ("pruned", 2)
    ]
    assert_same(trials(tmp_path / "b"), trials(tmp_path / "a"))


def test_trials_of_one_group_are_not_compared_with_each_other(tmp_path: Path) -> None:
    tuned(tmp_path, 8, PRUNING)
    assert [trial["state"] for trial in trials(tmp_path)] == ["complete"] * 4


def test_a_pruned_trial_leaves_the_others_alone(tmp_path: Path) -> None:
    keys = PRUNING | {"grid": {"train.lr": [0.3, 0.2, 0.1, 1e-9, 0.4]}}
    tuned(tmp_path / "a", 1, keys | {"prune": False})
    tuned(tmp_path / "b", 6, keys)
    pruned, whole = trials(tmp_path / "b"), trials(tmp_path / "a")
    assert pruned[3]["state"] == "pruned" and pruned[3]["curve"] == whole[3]["curve"][:2]
    assert_same(pruned[:3] + pruned[4:], whole[:3] + whole[4:])


def test_a_sampler_s_trials_take_their_seeds_together(tmp_path: Path) -> None:
    keys = {"grid": {"train.lr": {"low": 0.01, "high": 1.0, "log": True}}, "trials": 4, "seeds": [0, 1], "rounds": 2}
    tuned(tmp_path / "a", 1, keys)
    tuned(tmp_path / "b", 8, keys)
    assert_same(trials(tmp_path / "b"), trials(tmp_path / "a"))


class Interrupting(LineReporter):
    """Sends Ctrl-C in a round. It is the main thread that hears it, while runs are in others."""

    def __init__(self, after: int) -> None:
        super().__init__(Console(quiet=True))
        self.rounds, self.after = 0, after

    def round(self, line: dict[str, Any]) -> None:
        self.rounds += 1
        if self.rounds == self.after:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


def test_resuming_changes_nothing(tmp_path: Path) -> None:
    tuned(tmp_path / "a", 6, PRUNING)
    for after in (3, 4):
        with pytest.raises(Interrupted, match=r"of fedprox \d/4|before trial fedprox"):
            tuned(tmp_path / "b", 6, PRUNING, resume=True, reporter=Interrupting(after))
    tuned(tmp_path / "b", 6, PRUNING, resume=True)
    assert_same(trials(tmp_path / "b"), trials(tmp_path / "a"))


def test_a_full_disk_stops_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Federation.evaluate

    def full(self: Federation, *args: Any, **options: Any) -> Any:
        if self.seed == 1 and self.rounds_done == 2:
            raise OSError("no space left on device")
        return evaluate(self, *args, **options)

    monkeypatch.setattr(Federation, "evaluate", full)
    with pytest.raises(OSError, match="no space left"):
        tuned(tmp_path, 6, PRUNING)
    assert not (tmp_path / "tuning" / "fedprox.json").exists()
    monkeypatch.undo()
    tuned(tmp_path, 6, PRUNING, resume=True)
    assert len(trials(tmp_path)) == 4
