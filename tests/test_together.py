"""Seeds of an experiment that run at once leave the files of seeds that run one by one."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.seats import Counting
from torch import nn

from bespokefl.engines import Engine, Sequential
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.resolve import load_data
from bespokefl.experiments.running import Ending, Outcome, run_experiment, run_seeds, side_by_side
from bespokefl.interrupts import StopRequest
from bespokefl.progress import Line, SideBySide
from bespokefl.results.files import StoredRun, read_runs

DOCUMENT: dict[str, Any] = {
    "seeds": [0, 1, 2],
    "algorithms": ["fedavg", "ditto"],
    "data": {"clients": 5, "max_samples": 200},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"rounds": 3, "local_epochs": 1, "participation": 0.6},
    "engine": {"precision": "float64"},
}


class Heard:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self.rounds: list[int] = []
        self.notes: list[str] = []
        self.ends = 0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self.starts.append((label, seed))

    def round(self, line: Line) -> None:
        self.rounds.append(line["round"])

    def finish(self, outcome: str) -> None:
        self.ends += 1

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(out: Path, together: int, resume: bool = False, **more: Any) -> tuple[Outcome, Heard]:
    document = DOCUMENT | {"engine": DOCUMENT["engine"] | {"together": together}} | more
    heard = Heard()
    return run_experiment(parse_experiment(document), out, resume=resume, reporter=heard), heard


def assert_same(found: list[StoredRun], expected: list[StoredRun]) -> None:
    assert [(r.label, r.seed) for r in found] == [(r.label, r.seed) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.clients is not None and theirs.clients is not None
        for name, column in theirs.clients.items():
            np.testing.assert_array_equal(ours.clients[name], column) if column.dtype.kind in "US" else (
                np.testing.assert_allclose(ours.clients[name], column, rtol=1e-9)
            )
        for a, b in zip(ours.rounds, theirs.rounds, strict=True):
            assert [a[k] for k in ("round", "clients", "bytes_down", "bytes_up")] == [
                b[k] for k in ("round", "clients", "bytes_down", "bytes_up")
            ]
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)


def test_the_files_are_those_of_runs_one_by_one(tmp_path: Path) -> None:
    one_by_one, heard = run(tmp_path / "a", 1)
    assert len(heard.starts) == 6
    at_once, heard = run(tmp_path / "b", 3)
    assert_same(read_runs(tmp_path / "b"), read_runs(tmp_path / "a"))
    assert len(at_once.finished) == len(one_by_one.finished) == 6
    assert heard.starts == [("fedavg", 0), ("ditto", 0)] and heard.ends == 2  # one progress for the three
    assert heard.rounds == [1, 2, 3] * 2


def test_what_runs_share_is_moved_before_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    movers: set[threading.Thread] = set()
    move = nn.Module.to

    def noted(module: nn.Module, to: Any) -> nn.Module:
        if isinstance(to, torch.device):
            movers.add(threading.current_thread())
        return move(module, to)

    monkeypatch.setattr(nn.Module, "to", noted)
    experiment = parse_experiment(DOCUMENT | {"engine": {"together": 3}})
    data = {seed: load_data(experiment, seed) for seed in experiment.seeds}
    endings = run_seeds(experiment, tmp_path, "fedavg", data, [Heard() for _ in data], StopRequest())
    assert endings == [Ending.FINISHED] * 3
    assert movers == {threading.current_thread()}  # a module that several threads move at once may crash the process


@pytest.mark.parametrize("runs", [1, 2])
def test_an_engine_gives_its_memory_back_when_runs_end_or_fail(runs: int) -> None:
    engine = Counting(Sequential())

    def fails(own: Engine) -> None:
        raise ValueError("out of something")

    assert side_by_side(engine, [lambda own: own.name] * runs) == ["sequential"] * runs
    assert engine.released == 1
    with pytest.raises(ValueError, match="something"):
        side_by_side(engine, [fails] * runs)
    assert engine.released == 2


def test_two_of_three_at_once_and_resuming(tmp_path: Path) -> None:
    run(tmp_path / "a", 1)
    run(tmp_path / "b", 2)
    assert_same(read_runs(tmp_path / "b"), read_runs(tmp_path / "a"))
    again, heard = run(tmp_path / "b", 2, resume=True)
    assert len(again.finished) == 6 and all("finished before" in note for note in heard.notes)


def test_a_seed_that_fails_is_told_and_the_others_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bespokefl.federation import Federation

    evaluate = Federation.evaluate

    def breaking(self: Federation, *args: Any, **options: Any) -> Any:
        if self.seed == 1 and self.rounds_done == 2:
            raise RuntimeError("a broken disk, say")
        return evaluate(self, *args, **options)

    monkeypatch.setattr(Federation, "evaluate", breaking)
    outcome, heard = run(tmp_path, 3, algorithms=["fedavg"])
    assert [folder.name for folder in outcome.failed] == ["seed-1"]
    assert sorted(folder.name for folder in outcome.finished) == ["seed-0", "seed-2"]
    assert any("seed 1: failed: RuntimeError: a broken disk" in note for note in heard.notes)
    assert "a broken disk" in (tmp_path / "fedavg" / "seed-1" / "error.txt").read_text()


def test_when_the_shown_run_ends_another_is_shown() -> None:
    heard = Heard()
    first, second = SideBySide(heard, 2).of_runs
    first.start("fedavg 1/2", 0, 3, 0)
    second.start("fedavg 2/2", 0, 3, 0)
    for run in (first, second):
        run.round({"round": 1})
    first.finish("pruned")
    for round_ in (2, 3):
        second.round({"round": round_})
    second.finish("")
    assert heard.starts == [("fedavg 1/2", 0), ("fedavg 2/2", 0)] and heard.rounds == [1, 2, 3] and heard.ends == 2
    assert heard.notes == ["fedavg 1/2, seed 0: pruned"]
