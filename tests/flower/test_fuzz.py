"""Messages made up by the thousand: whoever reads them refuses with a reason, or takes what is fine.

Five tests of 500 messages each; `make test-slow` has 20,000 of each.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.flower import fuzzed
from tests.flower.memory import Memory, experiment, remote, shards

from bespokefl.core.tree_io import full_name
from bespokefl.evaluation.sample_metrics import Judged
from bespokefl.flower.refusal import Refused
from bespokefl.flower.server import answers
from bespokefl.flower.server.scores import Scores
from bespokefl.flower.transport.codec import Form, packed, unpacked
from bespokefl.flower.transport.envelope import Envelope, Handler
from bespokefl.flower.transport.records import MessageError, from_record
from bespokefl.plain import is_plain

FEW, MANY = 500, 20_000
RAW = re.compile(r"[A-Za-z.]*(Error|Exception|Warning)\b")


class Kept(NamedTuple):
    v: torch.Tensor


def fuzz(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Made-up messages, each held against what has to be true of it; the same ones in every run."""

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def one(made_up: Any) -> None:
        check(made_up)

    one()


both = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


UPLOADS = {"x": {"w": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.float64)}, "k": Kept(torch.ones(2, 1))}
HEAD, ARRAYS = packed({"uploads": UPLOADS})
ANSWER = Envelope(
    {"clients": [1, 4], "failed": {"2": "x"}, "version": 7, "computed": 4, "useful": 4, "round": 0, **HEAD}, ARRAYS
)
HELLO = {
    "silo": "ab" * 16,
    "kind": "simulated",
    "clients": [{"id": k, "name": f"c{k}", "train": 4, "val": 0, "test": 2} for k in (1, 4)],
    "of": 5,
    "classes": ["0", "1"],
    "input_shape": [1, 8, 8],
    "target": "labels",
    "inputs": "numbers",
}
SCORES = Envelope({"clients": [1, 4]}, {"n": np.array([2, 2]), "accuracy": np.ones(2), "loss": np.ones(2)})


def check_record(record: Any) -> None:
    try:
        back = from_record(record)
    except MessageError as error:
        assert str(error)
        return
    except Refused as error:
        assert is_plain(str(error)[:50])
        return
    assert isinstance(back.header, dict) and sum(a.nbytes for a in back.arrays.values()) < 10**6


def check_trees(envelope: Envelope) -> None:
    for finite in (True, False):
        try:
            found = unpacked(envelope, ("uploads",), {full_name(Kept): Kept}, most_bytes=10**6, finite=finite)
            taken = Form.of(UPLOADS).taken(found["uploads"], 2, {full_name(Kept): Kept})
        except Refused:
            continue
        assert taken["x"]["w"].shape == (2, 3) and isinstance(taken["k"], Kept)


def check_reading(header: dict[str, Any]) -> None:
    for read in (answers.greeting, answers.held, lambda h: answers.done(h, [1, 2, 4])):
        try:
            read(header)
        except Refused as error:
            assert len(str(error)) < 1000


def check_scores(envelope: Envelope) -> None:
    scores = Scores(np.arange(5), np.full(5, 2), Judged("binary", 2), closer=True)
    try:
        scores.add([1, 4], envelope)
    except Refused:
        assert np.isnan(scores.evaluation().accuracy).all()
        return
    found = scores.evaluation()
    for values in (found.accuracy, *found.further.values()):
        known = values[~np.isnan(values)]
        assert ((known >= 0) & (known <= 1)).all()


def check_silo(silo: Handler, good: Envelope, request: Envelope) -> None:
    """An answer to every request, with a reason where it is refused; and the silo goes on."""
    answer = silo.handle(request)
    error = answer.header.get("error")
    assert error is None or (isinstance(error, str) and not RAW.match(error)), error
    assert "error" not in silo.handle(good).header


@both
def test_records(examples: int) -> None:
    fuzz(examples, fuzzed.records(ANSWER), check_record)


@both
def test_trees(examples: int) -> None:
    fuzz(examples, fuzzed.envelopes(ANSWER), check_trees)


@both
def test_readers(examples: int) -> None:
    good = ({"greeting": HELLO}, {"done": dict(ANSWER.header)}, {"held": {"held": {"1": [0, 5]}}})
    heads = [fuzzed.changed(header) for case in good for header in case.values()]
    fuzz(examples, st.one_of(heads).filter(lambda header: isinstance(header, dict)), check_reading)


@both
def test_scores(examples: int) -> None:
    fuzz(examples, fuzzed.envelopes(SCORES), check_scores)


@both
def test_requests_to_a_silo(examples: int, tmp_path: Path) -> None:
    """Requests of every kind that a real run has, changed; nothing is written outside of the silo's folder."""
    it = experiment("pgfed", rounds=1, clients=2)
    requests: dict[str, Envelope] = {}
    transport = Memory(shards(tmp_path, it, [[0, 1]]))

    def remember(node: int, request: Envelope) -> None:
        requests.setdefault(request.header["kind"], request)

    transport.before = remember
    there = remote(it, transport, tmp_path)
    there.round()
    there.evaluate()
    there.end()
    assert set(requests) == {"hello", "open", "run", "score", "keep"}
    (silo,) = transport.handlers.values()
    before = {path for path in tmp_path.rglob("*") if "silo-0" not in path.parts}
    changed = st.one_of([fuzzed.envelopes(request) for request in requests.values()])
    fuzz(examples, changed, lambda request: check_silo(silo, requests["hello"], request))
    assert {path for path in tmp_path.rglob("*") if "silo-0" not in path.parts} == before
