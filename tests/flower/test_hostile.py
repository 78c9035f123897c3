"""One node that lies: whatever it answers costs it alone, with a reason; no run and no start ends of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.flower.test_contract import HOSTED
from tests.flower.test_faults import BAD, changed, first, is_run

from bespokefl.evaluation.sample_metrics import Judged
from bespokefl.flower.server.census import fitting
from bespokefl.flower.server.membership import Membership
from bespokefl.flower.server.scores import Scores
from bespokefl.flower.server.serve import serve
from bespokefl.flower.server.suitability import Suitability
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.results.files import read_rounds
from bespokefl.results.store import frame

Lie = Callable[[Envelope], Envelope]


def head(**more: Any) -> Lie:
    return lambda a: Envelope({**a.header, **more}, a.arrays)


def reshaped(shape: tuple[int, ...]) -> Lie:
    return lambda a: changed(a, **{first(a): np.zeros(shape)})


def as_list(answer: Envelope) -> Envelope:
    """The same tensors under the same names in another structure."""
    (name, tree) = answer.header["trees"]["uploads"]["dict"][0]
    as_it_is = {"dict": [[name, {"dict": list(reversed(tree["dict"]))}]]}
    return Envelope({**answer.header, "trees": {"uploads": as_it_is}}, answer.arrays)


RUN_LIES: dict[str, Lie] = {
    "clients in a list": head(clients=[[1]]),
    "clients as fractions": head(clients=[4.0]),
    "clients that are true": head(clients=[True]),
    "clients as a table": head(clients={"4": 1}),
    "reasons as a list": head(clients=[], failed=["x"]),
    "a version of text": head(version="1"),
    "an endless version": head(version=2**70),
    "work beyond measure": head(computed=2**52),
    "bfloat16 in a list": head(bfloat16=[[1]]),
    "bfloat16 of doubles": lambda a: Envelope({**a.header, "bfloat16": [first(a)]}, a.arrays),
    "bfloat16 of odd bytes": lambda a: Envelope(
        {**a.header, "bfloat16": [first(a)]}, {**a.arrays, first(a): np.zeros(3, np.uint8)}
    ),
    "bfloat16 without dimensions": lambda a: Envelope(
        {**a.header, "bfloat16": [first(a)]}, {**a.arrays, first(a): np.zeros((), np.uint8)}
    ),
    "a tensor without dimensions": reshaped(()),
    "a tensor of nothing": reshaped((0, 7)),
    "trees as a list": head(trees=["uploads"]),
    "a tree of text": head(trees={"uploads": "x"}),
    "a tree of an unknown class": head(trees={"uploads": {"named": [1], "items": []}}),
    "an error that is no text": head(error=7, clients="x"),
}


@pytest.mark.parametrize("what", RUN_LIES)
def test_no_answer_of_one_node_ends_a_round(what: str, tmp_path: Path) -> None:
    it = experiment("fedamp", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.tamper = lambda node, q, a: RUN_LIES[what](a) if node == BAD and is_run(q) else a
    record = remote(it, transport, tmp_path).round()
    assert list(record.failed) == [4] and record.failed[4], record.failed


def test_the_structure_is_that_of_the_program_whatever_a_node_says(tmp_path: Path) -> None:
    """Two nodes whose uploads have one set of names in two structures: they are joined all the same."""
    it = experiment("fedamp", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.tamper = lambda node, q, a: as_list(a) if node == BAD and is_run(q) else a
    there = remote(it, transport, tmp_path)
    assert there.round().failed == {}
    honest = remote(it, Memory(shards(tmp_path / "h", it, HOSTED)), tmp_path / "h")
    honest.round()
    for mine, theirs in zip(there.evaluate().loss, honest.evaluate().loss, strict=True):
        assert mine == theirs


# the start -----------------------------------------------------------------------------------------------------------
def entry(a: Envelope, **more: Any) -> Envelope:
    clients = [{**client, **more} for client in a.header["clients"]]
    return Envelope({**a.header, "clients": clients})


START_LIES: dict[str, tuple[Lie, str]] = {
    "a lone surrogate as a name": (lambda a: entry(a, name="a\ud800b"), "printable"),
    "a control character in a name": (lambda a: entry(a, name="a\x1b[2Jb"), "printable"),
    "a name of a megabyte": (lambda a: entry(a, name="x" * 10**6), "1 to 200 characters"),
    "no name": (lambda a: entry(a, name=""), "1 to 200 characters"),
    "more samples than there can be": (lambda a: entry(a, train=2**40 - 1), "whole numbers of samples"),
    "an id beyond all": (lambda a: entry(a, id=10**7), "is no id"),
    "an id beyond the federation": (lambda a: entry(a, id=4711), "clients that are not there"),
    "the clients of another": (lambda a: entry(a, id=0), "claims the clients"),
    "a class of 5000 digits": (head(classes=["9" * 5000]), "1 to 200 characters"),
    "100,000 classes": (head(classes=[str(k) for k in range(100_000)]), "at most 30,000"),
    "a class twice": (head(classes=["0", "0"]), "twice"),
    "a class that is no text": (head(classes=[{"a": 1}]), "no text"),
    "200,000 clients": (
        head(clients=[{"id": None, "name": "x", "train": 1, "val": 0, "test": 0}] * 200_000),
        "at most 100,000",
    ),
    "more than one client of its own": (
        lambda a: Envelope({**a.header, "kind": "own", "clients": a.header["clients"] * 2}),
        "is one client",
    ),
    "samples of another shape": (head(input_shape=[3, 9, 9]), "another kind"),
    "samples without end": (head(input_shape=[2**19] * 3), "too many numbers"),
    "a silo that is a list": (head(silo=["x"]), "no text"),
    "another simulation": (head(of=77), "the others of 5"),
}


@pytest.mark.parametrize("what", START_LIES)
def test_no_answer_of_one_node_ends_a_start(what: str, tmp_path: Path) -> None:
    """Three honest silos and a liar that nobody needs: the three work together, and the reason is said."""
    lie, words = START_LIES[what]
    it = experiment("fedavg", rounds=1)
    transport = Memory({**shards(tmp_path, it, HOSTED), 900: shards(tmp_path / "liar", it, [[4]])[100]})
    transport.tamper = lambda node, q, a: lie(a) if node == 900 else a
    notes = Notes()
    roster = Membership(transport, it, tmp_path, notes.note)
    census = roster.gather(3, 0)
    assert census.clients == 5
    assert any("node 900 is left out" in text and words in text for text in notes.texts), notes.texts
    assert all(text.isprintable() and len(text) < 600 for text in notes.texts)


def test_a_start_says_once_why_a_node_is_left_out(tmp_path: Path) -> None:
    it = experiment("fedavg", federation={"wait": 0.7, "min_nodes": 3})
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.tamper = lambda node, q, a: entry(a, name="\x07") if node == BAD else a
    notes = Notes()
    with pytest.raises(Exception, match="2 of 3 silos were there"):
        Membership(transport, it, tmp_path, notes.note).gather(3, 0)
    assert sum("node 101" in text for text in notes.texts) == 1


def test_the_largest_group_works_together_and_of_two_the_first() -> None:
    def about(side: int, silo: str) -> dict[str, Any]:
        clients = [{"id": None, "name": "a", "train": 1}]
        samples = {"input_shape": [side], "target": "labels", "classes": ["0"]}
        return {"clients": clients, "silo": silo, "kind": "own", **samples}

    fit, misfits = fitting({5: about(8, "a"), 2: about(9, "b")})
    assert list(fit) == [5] and "(shape (9,), targets labels" in misfits[2] and "(shape (8,)" in misfits[2]
    fit, misfits = fitting({1: about(8, "a"), 2: about(9, "b"), 3: about(9, "c"), 4: about(9, "c")})
    assert list(fit) == [2, 3] and "another kind" in misfits[1] and "same silo as node 3" in misfits[4]


def own_silo(name: str, classes: list[str]) -> dict[str, Any]:
    clients = [{"id": None, "name": name, "train": 30, "val": 0, "test": 10}]
    samples = {"input_shape": [6], "target": "labels", "classes": classes, "inputs": "numbers"}
    return {"clients": clients, "silo": name, "kind": "own", **samples}


MADE_UP = [f"made up {k}" for k in range(29_995)]


@pytest.mark.parametrize("liar", [1, 3, 9], ids=["the first", "between", "the last"])
def test_a_silo_that_names_too_many_classes_costs_itself(liar: int) -> None:
    """Not those that are heard after it: the silo that names the most classes of its own is left out."""
    told = {
        2: own_silo("a", ["0", "1", "2", "3"]),
        4: own_silo("b", ["3", "4", "5", "6"]),
        liar: own_silo("c", MADE_UP),
    }
    fit, misfits = fitting(dict(sorted(told.items())))
    assert list(fit) == [2, 4]
    assert misfits == {liar: "with it there are 30,002 classes; at most 30,000 are taken"}


@pytest.mark.parametrize("liar", [1, 3, 9], ids=["the first", "between", "the last"])
def test_a_silo_whose_classes_make_the_model_too_large_costs_itself(liar: int) -> None:
    """For itself, and in the union with those of the others."""
    told = {2: own_silo("a", ["0", "1"]), 4: own_silo("b", ["1", "2"]), liar: own_silo("c", MADE_UP)}
    unsuitable = Suitability(experiment("fedavg", model={"hidden": [40_000]}), 0)
    fit, misfits = fitting(dict(sorted(told.items())), unsuitable)
    assert list(fit) == [2, 4] and list(misfits) == [liar]
    assert "the configuration cannot run on its samples" in misfits[liar] and "parameters" in misfits[liar]


def test_of_many_classes_those_that_others_name_are_kept() -> None:
    """Two silos share 20,000 real classes, a third one makes up 15,000 more."""
    real = [str(k) for k in range(20_000)]
    told = {1: own_silo("c", MADE_UP[:15_000]), 2: own_silo("a", real), 4: own_silo("b", real)}
    fit, misfits = fitting(told)
    assert list(fit) == [2, 4] and list(misfits) == [1]


HELD_LIES: dict[str, Any] = {
    "a list": [1],
    "versions as text": {"4": "x"},
    "endless versions": {"4": [2**90]},
    "very many versions": {"4": list(range(10**4))},
}


@pytest.mark.parametrize("what", HELD_LIES)
def test_no_answer_to_the_opening_of_a_run_ends_it(what: str, tmp_path: Path) -> None:
    it = experiment("ditto", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))
    opening = head(held=HELD_LIES[what])
    transport.tamper = lambda node, q, a: opening(a) if node == BAD and q.header["kind"] == "open" else a
    notes = Notes()
    assert list(remote(it, transport, tmp_path, notes).round().failed) == [4]
    assert any("node 101 cannot take part: refused" in text for text in notes.texts)


# scores --------------------------------------------------------------------------------------------------------------
def figures(**more: Any) -> Envelope:
    arrays = {"n": np.array([5]), "accuracy": np.array([0.5]), "loss": np.array([1.0]), **more}
    return Envelope({"clients": [1]}, {k: np.asarray(v) for k, v in arrays.items()})


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"further.accuracy": [1e9]}, "other names"),
        ({"further.loss": [1e9]}, "other names"),
        ({"further.profit": [0.5]}, "other names"),
        ({"profit": [0.5]}, "not those that were asked for"),
        ({"further.auc": [1.5]}, "no fractions as auc"),
        ({"further.f1": [-0.1]}, "no fractions as f1"),
        ({"accuracy": [np.inf]}, "no fractions as accuracy"),
        ({"loss": [1e200]}, "loss of more"),
        ({"n": [4]}, "other samples"),
        ({"n": [np.nan]}, "other samples"),
        ({"accuracy": [[0.5]]}, "another shape"),
        ({"accuracy": [0.5 + 0j]}, "another shape"),
    ],
)
def test_scores_are_fractions_of_the_right_names(lie: dict[str, Any], words: str) -> None:
    scores = Scores(np.arange(3), np.array([5, 5, 5]), Judged("binary", 2), closer=False)
    with pytest.raises(Exception, match=words):
        scores.add([1], figures(**lie))
    assert np.isnan(scores.evaluation().accuracy).all()
    scores.add([1], figures(**{"further.auc": [0.75], "further.f1": [np.nan]}))
    assert scores.evaluation().accuracy[1] == 0.5 and scores.evaluation().further["auc"][1] == 0.75


def test_the_mean_accuracy_cannot_be_overwritten(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))

    def lie(node: int, request: Envelope, answer: Envelope) -> Envelope:
        if node != BAD or request.header["kind"] != "score":
            return answer
        return changed(answer, **{"further.accuracy": np.array([1e9])})

    transport.tamper = lie
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())
    (line,) = read_rounds(outcome.finished[0] / "rounds.jsonl")
    assert 0 <= line["mean"] <= 1


# texts ---------------------------------------------------------------------------------------------------------------
def test_reasons_of_nodes_are_plain_text_everywhere(tmp_path: Path) -> None:
    """In notes, rounds.jsonl and error.txt; and `bespoke results` reads the folder."""
    rude = "\x1b]0;owned\x07\x1b[2J\ud800" + "x" * 10_000
    it = experiment("fedavg", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))

    def lie(node: int, request: Envelope, answer: Envelope) -> Envelope | str:
        if node == BAD and request.header["kind"] == "open":
            return Envelope({**answer.header, "error": rude})
        if node == 100 and is_run(request):
            return Envelope({**answer.header, "clients": [0], "failed": {"3": rude}}, answer.arrays)
        return rude if node == 102 and is_run(request) else answer

    transport.tamper = lie
    notes = Notes()
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=notes)
    (folder,) = [*outcome.finished, *outcome.failed]
    texts = [*notes.texts, *(path.read_text() for path in folder.rglob("*.*") if path.suffix in (".txt", ".jsonl"))]
    assert all("\x1b" not in text and "\x07" not in text and "x" * 500 not in text for text in texts)
    assert any(r"\x1b]0;owned" in text for text in texts)
    reasons = [why for line in read_rounds(folder / "rounds.jsonl") for why in line["failed"].values()]
    assert all(json.dumps(why, ensure_ascii=False).encode() and len(why) < 500 for why in reasons)
    assert len(frame(tmp_path / "out", "SELECT * FROM runs")) > 0
