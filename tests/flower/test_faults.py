"""What goes wrong between machines: silos that are gone, late or wrong, and a server that dies."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.flower.test_contract import HOSTED, assert_alike, simulated

from bespokefl.errors import RunError
from bespokefl.flower.server.serve import serve
from bespokefl.flower.silo.silo_run import Limits
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.interrupts import Interrupted
from bespokefl.results.files import read_csv, read_rounds

BAD = 101  # the node that hosts client 4 alone
Tamper = Callable[[int, Envelope, Envelope], Envelope | str]


def is_run(request: Envelope, round: int | None = None) -> bool:
    return request.header["kind"] == "run" and round in (None, request.header["round"])


def changed(answer: Envelope, **arrays: Any) -> Envelope:
    return Envelope(answer.header, {**answer.arrays, **arrays})


def first(answer: Envelope) -> str:
    return next(iter(answer.arrays))


WRONG: dict[str, tuple[Callable[[Envelope, Envelope], Envelope | str], str]] = {
    "no answer": (lambda q, a: "no answer in 5 s", "did not answer: no answer in 5 s"),
    "an error": (lambda q, a: Envelope({**a.header, "error": "out of memory"}), "out of memory"),
    "NaN": (lambda q, a: changed(a, **{first(a): a.arrays[first(a)] * np.nan}), "not finite"),
    "a wrong shape": (lambda q, a: changed(a, **{first(a): a.arrays[first(a)][:, :1]}), "refused: .*has the shape"),
    "a wrong type": (lambda q, a: changed(a, **{first(a): a.arrays[first(a)].astype("f4")}), "refused: .*float32"),
    "an extra key": (lambda q, a: changed(a, more=np.ones(1)), "refused: .*extra more"),
    "a missing key": (lambda q, a: Envelope(a.header, {}), "refused: .*missing"),
    "a huge norm": (lambda q, a: changed(a, **{first(a): a.arrays[first(a)] * 1e9}), r"refused: .*\.max_norm"),
    "an old answer": (lambda q, a: Envelope({**a.header, "round": 0}, a.arrays), "refused: an old answer, of round 0"),
    "other clients": (lambda q, a: Envelope({**a.header, "clients": [0]}, a.arrays), "were not asked"),
    "a damaged header": (lambda q, a: Envelope({**a.header, "version": "1"}, a.arrays), "damaged"),
    "code in its structure": (lambda q, a: Envelope({**a.header, "trees": {"uploads": {"py": "x"}}}, a.arrays), "kind"),
}


# Ditto's uploads travel as means of a node, FedAMP's one by one.
@pytest.mark.parametrize(
    ("name", "what"), [*(("fedamp", what) for what in WRONG), ("ditto", "no answer"), ("ditto", "a huge norm")]
)
def test_a_wrong_answer_is_left_out_and_the_round_goes_on(name: str, what: str, tmp_path: Path) -> None:
    """As if the client had been silent: what it trained does not count, and in the next round it is there again."""
    spoil, words = WRONG[what]
    it = experiment(name, rounds=3)

    def tamper(node: int, request: Envelope, answer: Envelope) -> Envelope | str:
        return spoil(request, answer) if node == BAD and is_run(request, 1) else answer

    transport = Memory(shards(tmp_path, it, HOSTED), tamper=tamper)
    here, there = simulated(it), remote(it, transport, tmp_path)
    here.round()
    there.round()
    here.round(silent=[4])
    record = there.round()
    assert list(record.failed) == [4]
    assert re.search(words, record.failed[4]), record.failed
    transport.tamper = None
    here.round()
    assert there.round().failed == {}
    assert_alike(here, there, 1e-9)


def test_one_client_of_many_on_a_node_is_refused_alone(tmp_path: Path) -> None:
    it = experiment("pgfed")

    def tamper(node: int, request: Envelope, answer: Envelope) -> Envelope:
        if not is_run(request) or node != 100:
            return answer
        arrays = {k: v.copy() for k, v in answer.arrays.items()}
        arrays["uploads.theta.head.bias"][1] = 1e12  # client 3
        return Envelope(answer.header, arrays)

    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, HOSTED), tamper=tamper), tmp_path)
    here.round(silent=[3])
    assert list(there.round().failed) == [3]
    there.clients.roster.transport.tamper = None  # type: ignore[attr-defined]
    here.round()
    there.round()
    assert_alike(here, there, 1e-9)


def test_a_node_that_dies_in_a_round_comes_back_with_its_state(tmp_path: Path) -> None:
    it = experiment("lg-mix", rounds=4)
    transport = Memory(shards(tmp_path, it, HOSTED))
    here, notes = simulated(it), Notes()
    there = remote(it, transport, tmp_path, notes)
    here.round()
    there.round()

    def dies(node: int, request: Envelope) -> str | None:
        if node == BAD and is_run(request):
            transport.gone.add(BAD)
            return "the connection was lost"
        return None

    transport.before = dies
    here.round(silent=[4])
    assert there.round().failed == {4: "did not answer: the connection was lost"}
    transport.before = None
    again = there.round(clients=[0, 1, 2, 3])
    here.round(clients=[0, 1, 2, 3])
    assert again.failed == {}
    transport.gone.clear()
    transport.handlers[7] = shards(tmp_path, it, HOSTED)[BAD]  # another process, another node id, the same folder
    del transport.handlers[BAD]
    here.round()
    assert there.round().failed == {}
    assert_alike(here, there, 1e-9)


def test_a_silo_that_is_not_there_is_said(tmp_path: Path) -> None:
    it = experiment("fedavg")
    transport = Memory(shards(tmp_path, it, HOSTED))
    there = remote(it, transport, tmp_path)
    transport.gone.add(BAD)
    assert there.round().failed == {4: "its silo is not connected"}
    scores = there.evaluate()
    assert np.isnan(scores.accuracy[4]) and not np.isnan(scores.accuracy[:4]).any() and scores.n[4] == 0


def test_too_few_answers_repeat_the_round_from_where_it_began(tmp_path: Path) -> None:
    it = experiment("s-fedpg", rounds=2, federation={"min_answers": 5, "retries": 2, "wait": 0.5})
    transport = Memory(shards(tmp_path, it, HOSTED))
    here, there = simulated(it), remote(it, transport, tmp_path, notes := Notes())
    here.round()
    there.round()
    failures = iter([True, True])

    def flaky(node: int, request: Envelope, answer: Envelope) -> Envelope | str:
        late = node == BAD and is_run(request, 1) and request.header["exchange"] == 1
        return "too late" if late and next(failures, False) else answer

    transport.tamper = flaky
    here.round()
    assert there.round().failed == {}
    assert sum("try" in text for text in notes.texts) == 2
    assert_alike(here, there, 1e-9)


def test_without_enough_answers_the_run_ends_with_what_it_has(tmp_path: Path) -> None:
    it = experiment("ditto", rounds=5, federation={"min_answers": 4, "retries": 1, "wait": 0.3})
    transport = Memory(shards(tmp_path, it, HOSTED))

    def gone(node: int, request: Envelope) -> str | None:
        return "gone" if is_run(request) and request.header["round"] >= 2 and node != BAD else None

    transport.before = gone
    notes = Notes()
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=notes)
    (folder,) = outcome.failed
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 2 and "round 3 could not be done in 2 tries" in summary["ended_early"]
    assert (
        "federation.min_answers" in notes.endings[0] and "2 rounds that were done" in (folder / "error.txt").read_text()
    )
    assert len(read_rounds(folder / "rounds.jsonl")) == 2 and (folder / "clients.csv").is_file()
    transport.before = None  # they are back: the run goes on where it ended
    again = serve(it, tmp_path / "out", transport, nodes=3, resume=True, reporter=Notes())
    assert again.finished == [folder] and len(read_rounds(folder / "rounds.jsonl")) == 5
    assert not (folder / "error.txt").exists()
    assert "ended_early" not in json.loads((folder / "summary.json").read_text())
    undisturbed = serve(
        it, tmp_path / "other", Memory(shards(tmp_path / "others", it, HOSTED)), nodes=3, resume=False, reporter=Notes()
    )
    (other,) = undisturbed.finished
    assert (other / "clients.csv").read_text() == (folder / "clients.csv").read_text()


def test_no_scores_at_all_end_the_run(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=3, federation={"retries": 0, "wait": 0.1})
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.before = lambda node, request: "cut" if request.header["kind"] == "score" else None
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())
    assert "no silo scores its model" in (outcome.failed[0] / "error.txt").read_text()
    transport.before = None
    assert serve(it, tmp_path / "out", transport, nodes=3, resume=True, reporter=Notes()).finished == outcome.failed


# a server that dies --------------------------------------------------------------------------------------------------
class KilledError(BaseException):
    """Not an exception that anything catches."""


@pytest.mark.parametrize(("name", "kind"), [("pgfedmo", "run"), ("fedamp", "score"), ("s-fedpg", "run")])
def test_a_server_killed_in_a_round_goes_on_without_repeating_a_finished_one(
    name: str, kind: str, tmp_path: Path
) -> None:
    it = experiment(name, rounds=4)
    undisturbed = serve(
        it, tmp_path / "a", Memory(shards(tmp_path / "s", it, HOSTED)), nodes=3, resume=False, reporter=Notes()
    )
    transport = Memory(shards(tmp_path, it, HOSTED))
    answered = 0

    def kill(node: int, request: Envelope, answer: Envelope) -> Envelope:
        nonlocal answered
        if request.header["kind"] == kind and request.header["round"] == (2 if kind == "run" else 3):
            answered += 1
            if answered == 2:  # after some silos have trained
                raise KilledError
        return answer

    transport.tamper = kill
    with pytest.raises(KilledError):
        serve(it, tmp_path / "b", transport, nodes=3, resume=False, reporter=Notes())
    transport.tamper = None
    transport.sent.clear()
    notes = Notes()
    outcome = serve(it, tmp_path / "b", transport, nodes=3, resume=True, reporter=notes)
    assert any("2/4" in text for text in notes.texts)
    assert min(h["round"] for _, h, _, _ in transport.sent if h["kind"] == "run") == 2
    for file in ("clients.csv", "evaluations.jsonl"):
        assert (outcome.finished[0] / file).read_text() == (undisturbed.finished[0] / file).read_text()


def test_a_silo_that_lost_its_folder_starts_anew(tmp_path: Path) -> None:
    """Its state is gone, and that is said; the federation goes on, with this client as it was at first."""
    it = experiment("ditto", rounds=2)
    transport = Memory(shards(tmp_path, it, HOSTED))
    notes = Notes()
    there = remote(it, transport, tmp_path, notes)
    there.round()
    for path in (tmp_path / "silo-1" / "runs").rglob("*"):
        if path.is_file():
            path.unlink()
    transport.handlers[BAD] = shards(tmp_path, it, HOSTED)[BAD]
    assert list(there.round().failed) == [4]
    assert there.round().failed == {}
    assert any("client 4 has lost its state" in text for text in notes.texts)


def test_a_stranger_has_no_place(tmp_path: Path) -> None:
    it = experiment("fedavg")
    transport = Memory(shards(tmp_path, it, HOSTED))
    notes = Notes()
    there = remote(it, transport, tmp_path, notes)
    transport.handlers[55] = shards(tmp_path / "elsewhere", it, [[4]])[100]
    there.round()
    assert any("node 55 is a silo that does not belong" in text for text in notes.texts)
    assert all(node != 55 or header["kind"] == "hello" for node, header, _, _ in transport.sent)


def test_silos_that_never_come(tmp_path: Path) -> None:
    it = experiment("fedavg", federation={"wait": 0.2})
    transport = Memory(shards(tmp_path, it, HOSTED[:2]))
    with pytest.raises(RunError, match=r"2 of 3 silos were there after 0\.2 s"):
        serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())


def test_waiting_for_silos_can_be_stopped(tmp_path: Path) -> None:
    it = experiment("fedavg", federation={"wait": 60.0})
    transport = Memory(shards(tmp_path, it, HOSTED[:2]))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Interrupted, match="while 2 of 3 silos were there"):
        serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())


def test_scores_that_are_missing_or_made_up_are_left_out(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=2)

    def tamper(node: int, request: Envelope, answer: Envelope) -> Envelope | str:
        if request.header["kind"] != "score" or request.header["round"] != 2:
            return answer
        if node == BAD:
            return "gone"
        false = {"accuracy": answer.arrays["accuracy"] + 2} if node == 100 else {}
        return changed(answer, **false)

    transport = Memory(shards(tmp_path, it, HOSTED), tamper=tamper)
    notes = Notes()
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=notes)
    (folder,) = outcome.finished
    scores = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    last = scores[-1]["test"]["accuracy"]
    assert [value is None for value in last] == [True, False, False, True, True]  # nodes host 0 and 3, 4, 1 and 2
    assert read_rounds(folder / "rounds.jsonl")[1]["mean"] == pytest.approx(np.mean([last[1], last[2]]))
    assert any("scores of clients [0, 3] are refused" in text for text in notes.texts)


def test_a_silo_that_refuses_a_run_is_named_with_its_reason(tmp_path: Path) -> None:
    it = experiment("fedavg")
    transport = Memory(shards(tmp_path, it, HOSTED))
    refusing = transport.handlers[BAD]
    refusing._limits = Limits(parameters=10)  # type: ignore[attr-defined]
    notes = Notes()
    there = remote(it, transport, tmp_path, notes)
    for _ in range(2):
        assert "at most 10 are accepted" in there.round().failed[4]
    assert sum("node 101 cannot take part" in text for text in notes.texts) == 1


def test_operational_settings_may_change_on_resume(tmp_path: Path) -> None:
    transport = Memory(shards(tmp_path, experiment("fedavg"), HOSTED))
    transport.before = lambda node, request: "gone" if is_run(request, 1) else None
    first = experiment("fedavg", federation={"retries": 0, "wait": 0.1})
    outcome = serve(first, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())
    transport.before = None
    later = experiment("fedavg", federation={"deadline": 77.0})
    assert serve(later, tmp_path / "out", transport, nodes=3, resume=True, reporter=Notes()).finished == outcome.failed


def test_a_run_that_ends_between_evaluations_has_the_figures_of_one_round(tmp_path: Path) -> None:
    """Those of the last evaluated one; what only a later model could tell is missing."""
    it = experiment(
        "fedavg",
        rounds=5,
        eval={"every": 2, "select": "last"},
        federation={"min_answers": 5, "retries": 0, "wait": 0.3},
    )
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.before = lambda node, q: "gone" if is_run(q) and q.header["round"] == 3 else None
    (folder,) = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes()).failed
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 3 and summary["selected_round"] == 2
    table = read_csv(folder / "clients.csv", texts=("name",))
    assert np.isfinite(table["accuracy"]).all() and np.isnan(table["global_accuracy"]).all()
