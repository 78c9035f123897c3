"""The start of a federation: who begins where nodes disagree, keep clients to themselves, or say nothing at all."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.flower.test_hostile import Lie, entry, head

from bespokefl.errors import RunError
from bespokefl.experiments.schema import Experiment
from bespokefl.flower.server.membership import Membership
from bespokefl.flower.server.serve import serve
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.results.files import read_csv, read_rounds

SOON = {"wait": 3.0, "hello": 0.2, "deadline": 600.0}


def begun(folder: Path, it: Experiment, transport: Memory, nodes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rounds of a run, and what was said."""
    notes = Notes()
    outcome = serve(it, folder / "out", transport, nodes=nodes, resume=False, reporter=notes)
    (run,) = outcome.finished
    return read_rounds(run / "rounds.jsonl"), notes.texts


def lies(transport: Memory, node: int, lie: Lie) -> None:
    transport.tamper = lambda who, q, a: lie(a) if who == node and q.header["kind"] == "hello" else a


DISAGREE: dict[str, tuple[Lie, str]] = {
    "shapes": (head(input_shape=[3, 9, 9]), "its samples are of another kind"),
    "targets": (head(target="numbers", classes=[]), "its samples are of another kind"),
    "classes": (head(classes=["a", "b"]), "it has other classes (2) than the others (10)"),
    "how many clients there are": (head(of=77), "it knows of 77 clients, the others of 5"),
    "what they host": (lambda a: entry(Envelope({**a.header, "kind": "own"}), id=None), "samples of its own"),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_of_two_that_disagree_the_first_begins(what: str, tmp_path: Path) -> None:
    lie, words = DISAGREE[what]
    it = experiment("fedavg", rounds=1, federation=SOON)
    transport = Memory(shards(tmp_path, it, [[0, 1, 2, 3], [4]]))
    lies(transport, 101, lie)
    (line,), texts = begun(tmp_path, it, transport, 2)
    assert list(line["failed"]) == ["4"] and line["clients"] == [0, 1, 2, 3, 4]
    assert sum(text.startswith("warning: node 101 is left out: ") and words in text for text in texts) == 1
    assert any(text.startswith("warning: 1 of 2 nodes begin, without others: node 101") for text in texts)


def test_of_four_that_disagree_in_pairs_the_pair_of_the_first_begins(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1, federation=SOON)
    transport = Memory(shards(tmp_path, it, [[0], [1], [2], [3, 4]]))
    transport.tamper = lambda node, q, a: head(of=9)(a) if node in (101, 103) and q.header["kind"] == "hello" else a
    (line,), texts = begun(tmp_path, it, transport, 4)
    assert sorted(line["failed"]) == ["1", "3", "4"]
    assert sum("it knows of 9 clients, the others of 5" in text for text in texts if "left out" in text) >= 2


def test_the_configuration_decides_before_the_number_of_nodes(tmp_path: Path) -> None:
    """Two of three say that every pixel has a label; the model answers with one class."""
    it = experiment("fedavg", rounds=1, federation=SOON)
    transport = Memory(shards(tmp_path, it, [[0], [1, 2, 3], [4]]))
    transport.tamper = lambda node, q, a: head(target="masks")(a) if node != 101 and q.header["kind"] == "hello" else a
    (line,), texts = begun(tmp_path, it, transport, 3)
    assert sorted(line["failed"]) == ["0", "4"]
    assert any("node 100 is left out: the configuration cannot run on its samples" in text for text in texts)


def test_a_shape_for_which_no_model_can_be_built_costs_its_node(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1, federation=SOON, model={"hidden": [4000]})
    transport = Memory(shards(tmp_path, it, [[0], [1, 2, 3, 4]]))
    lies(transport, 100, head(input_shape=[2**13, 2**13]))
    (line,), texts = begun(tmp_path, it, transport, 2)
    assert list(line["failed"]) == ["0"] and any("parameters; at most" in text for text in texts)


@pytest.mark.parametrize("method", ["fedavg", "pgfed", "ditto", "fedfomo"])
def test_a_federation_begins_without_clients_that_nobody_hosts(method: str, tmp_path: Path) -> None:
    it = experiment(method, rounds=2, federation=SOON)
    transport = Memory(shards(tmp_path, it, [[0, 3], [1]]))
    notes = Notes()
    outcome = serve(it, tmp_path / "out", transport, nodes=2, resume=False, reporter=notes)
    (run,) = outcome.finished
    assert any("nobody hosts the clients 2, 4 (2 of 5): the federation begins without them" in t for t in notes.texts)
    for line in read_rounds(run / "rounds.jsonl"):
        assert line["failed"] == dict.fromkeys(("2", "4"), "its silo is not connected")
    table = read_csv(run / "clients.csv", texts=("name",))
    assert np.isfinite(table["accuracy"]).tolist() == [True, True, False, True, False]
    assert np.isfinite(json.loads((run / "summary.json").read_text())["mean"])
    again = serve(it, tmp_path / "out", transport, nodes=2, resume=True, reporter=Notes())
    assert again.finished == [run]


def test_fewer_clients_than_must_answer_begin_nothing(tmp_path: Path) -> None:
    it = experiment("fedavg", federation={**SOON, "wait": 0.5, "min_answers": 4})
    with pytest.raises(RunError, match=r"2 of 2 silos were there .* 3 clients, at least 4 must answer"):
        serve(
            it, tmp_path / "out", Memory(shards(tmp_path, it, [[0, 3], [1]])), nodes=2, resume=False, reporter=Notes()
        )


def test_a_node_that_never_answers_a_greeting_holds_up_nobody(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=12, federation=SOON)
    transport = Memory({**shards(tmp_path, it, [[0, 1], [2, 3], [4]]), 900: shards(tmp_path / "x", it, [[4]])[100]})
    transport.silent = {900}
    began = time.monotonic()
    lines, texts = begun(tmp_path, it, transport, 4)
    assert len(lines) == 12 and all(line["failed"] == {} for line in lines)
    assert transport.waited < 3 and time.monotonic() - began < 30  # nothing near the deadline
    told = [text for text in texts if "did not answer the greeting within 0.2 s (federation.hello)" in text]
    assert told and sum(text.startswith("warning: 3 of 4 nodes begin") for text in texts) == 1


def test_nodes_that_never_came_are_waited_for_unless_fewer_are_enough(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1, federation={**SOON, "wait": 0.5})
    transport = Memory(shards(tmp_path, it, [[0, 1], [2, 3, 4]]))
    with pytest.raises(RunError, match=r"2 of 3 silos were there after 0.5 s \(federation.wait\)"):
        serve(it, tmp_path / "none", transport, nodes=3, resume=False, reporter=Notes())
    it = experiment("fedavg", rounds=1, federation={**SOON, "wait": 0.5, "min_nodes": 2})
    (line,), texts = begun(tmp_path, it, transport, 3)
    assert line["failed"] == {} and any(text.startswith("warning: 2 of 3 nodes begin") for text in texts)
    it = experiment("fedavg", rounds=1, federation={**SOON, "wait": 0.5, "min_nodes": 3})
    lies(transport, 101, head(of=9))
    with pytest.raises(RunError, match="1 of 2 silos were there"):
        serve(it, tmp_path / "third", transport, nodes=2, resume=False, reporter=Notes())


def test_a_stranger_does_not_end_the_resuming_of_a_run(tmp_path: Path) -> None:
    """Neither one that claims clients of a silo that was there before, nor a silo that tells of other samples."""
    it = experiment("fedavg", rounds=1, federation=SOON)
    transport = Memory(shards(tmp_path, it, [[0, 1, 2, 3], [4]]))
    begun(tmp_path, it, transport, 2)
    it = experiment(["fedavg", "local"], rounds=1, federation=SOON)
    transport.handlers = {50: shards(tmp_path / "new", it, [[4]])[100], **transport.handlers}
    notes = Notes()
    lies(transport, 101, lambda a: entry(a, train=7))
    outcome = serve(it, tmp_path / "out", transport, nodes=2, resume=True, reporter=notes)
    assert len(outcome.finished) == 2 and not outcome.failed
    assert any("node 50 is left out: the federation began with other silos" in text for text in notes.texts)
    assert any("node 101 is left out: it told other numbers of samples of client 4 before" in t for t in notes.texts)


def test_a_node_that_comes_right_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespokefl.flower.server.greetings.AGAIN", 0.1)
    it = experiment("fedavg", federation={**SOON, "hello": 2.0})
    transport = Memory(shards(tmp_path, it, [[0, 1, 2, 3], [4]]))
    until = time.monotonic() + 0.8
    wrong = head(of=9)
    transport.tamper = lambda node, q, a: wrong(a) if node == 101 and time.monotonic() < until else a
    census = Membership(transport, it, tmp_path, Notes().note).gather(2, 0)
    assert "" not in census.silos and time.monotonic() >= until
    assert remote(it, transport, tmp_path / "x").round().failed == {}
