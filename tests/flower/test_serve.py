"""The server's loop: the files of `bespoke run`, the same numbers, and what cannot be done between machines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.memory import Memory, Notes, experiment, shards

from bespokefl.errors import InputError
from bespokefl.experiments.running import run_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.flower.server.serve import serve
from bespokefl.report.publish import publish
from bespokefl.results.files import read_csv, read_rounds, read_runs
from bespokefl.results.table import rich_table

HOSTED = [[0, 3], [4], [1, 2]]


def served(it: Experiment, folder: Path, transport: Memory | None = None, **options: Any) -> tuple[Any, Notes]:
    notes = Notes()
    transport = transport or Memory(shards(folder, it, HOSTED))
    settings = {"nodes": len(transport.handlers), "resume": False, **options}
    return serve(it, folder / "served", transport, reporter=notes, **settings), notes


def test_the_files_are_those_of_a_simulation(tmp_path: Path) -> None:
    it = experiment(["ditto", "s-fedpg"], rounds=3)
    outcome, notes = served(it, tmp_path)
    assert [f.parent.name for f in outcome.finished] == ["ditto", "s-fedpg"] and notes.endings == ["", ""]
    run_experiment(it, tmp_path / "simulated", resume=False, reporter=Notes())
    for folder in outcome.finished:
        twin = tmp_path / "simulated" / folder.relative_to(tmp_path / "served")
        missing = {p.name for p in twin.iterdir()} - {p.name for p in folder.iterdir()}
        assert missing == set()
        ours, theirs = read_rounds(folder / "rounds.jsonl"), read_rounds(twin / "rounds.jsonl")
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys() and a["clients"] == b["clients"] and a["failed"] == {}
            np.testing.assert_allclose(
                [a[k] for k in ("mean", "worst5", "loss")], [b[k] for k in ("mean", "worst5", "loss")]
            )
        a, b = read_csv(folder / "clients.csv"), read_csv(twin / "clients.csv")
        np.testing.assert_allclose(a["accuracy"], b["accuracy"])
        np.testing.assert_allclose(a["f1"], b["f1"])
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["engine"] == "federation" and summary["rounds"] == 3
    assert rich_table(read_runs(tmp_path / "served")).row_count
    assert "s-fedpg" in publish(tmp_path / "served").read_text()


def test_a_second_call_skips_what_is_finished_and_refuses_without_resume(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))
    served(it, tmp_path, transport)
    before = len(transport.sent)
    outcome, notes = served(it, tmp_path, transport, resume=True)
    assert len(outcome.finished) == 1 and any("finished before" in text for text in notes.texts)
    assert all(header["kind"] == "hello" for _, header, _, _ in transport.sent[before:])
    with pytest.raises(InputError, match="not empty; add --resume"):
        served(it, tmp_path, transport)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"name": "pgfed", "taylor": False}, "takes every client's samples to all others"),
        ({"name": "l2sgd", "form": "coin", "flips": 65}, "algorithm.flips = 65"),
        ("examples.q_fedavg:QFedAvg", "registered methods only"),
    ],
)
def test_methods_that_need_one_process_are_refused(algorithm: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        served(experiment([algorithm]), tmp_path)


def test_two_seeds_have_their_own_clients(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1, seeds=[0, 1])
    outcome, _ = served(it, tmp_path)
    assert len(outcome.finished) == 2
    sizes = [(tmp_path / "served" / f"partition-seed-{seed}.csv").read_text() for seed in (0, 1)]
    assert sizes[0].startswith("client,name,n_train,n_val,n_test\n")
