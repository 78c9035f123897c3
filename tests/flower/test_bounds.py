"""What one node may move: its share of the weights, and how far its uploads go."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.flower.test_contract import HOSTED, assert_alike, simulated
from tests.flower.test_faults import BAD, changed, is_run
from tests.flower.test_hostile import entry

from bespokefl.flower.server.bounds import FEWEST, Seen, capped
from bespokefl.flower.server.serve import serve
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.results.files import read_rounds


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2**31)), min_size=1, max_size=20),
    st.floats(0.05, 1.0),
)
def test_no_node_has_more_than_its_share(clients: list[tuple[int, int]], share: float) -> None:
    hosts, n = [str(host) for host, _ in clients], torch.tensor([float(k) for _, k in clients], dtype=torch.float64)
    p = n / n.sum()
    fair = capped(p, hosts, share)
    nodes = sorted(set(hosts))
    assert float(fair.sum()) == pytest.approx(1.0)
    if len(nodes) < FEWEST:
        assert torch.equal(fair, p)
        return
    of_node = {node: float(fair[[host == node for host in hosts]].sum()) for node in nodes}
    assert max(of_node.values()) <= max(share, 1 / len(nodes)) * (1 + 1e-6)
    if max(float(p[[host == node for host in hosts]].sum()) for node in nodes) <= share:
        assert torch.equal(fair, p)
    for node in nodes:  # within a node, clients weigh as before
        own = torch.tensor([host == node for host in hosts])
        assert torch.allclose(fair[own] / fair[own].sum(), p[own] / p[own].sum())


def test_what_is_cut_goes_to_the_others_in_proportion() -> None:
    p = torch.tensor([0.9, 0.06, 0.04], dtype=torch.float64)
    assert torch.allclose(capped(p, ["a", "b", "c"], 0.5), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))


def test_a_node_that_says_it_has_all_samples_does_not_take_the_model_over(tmp_path: Path) -> None:
    """2^31 samples where the others have 32, and an upload that is 1e5 times its size."""
    it = experiment("fedavg", rounds=3, clients=5)
    honest = remote(it, Memory(shards(tmp_path / "h", it, HOSTED)), tmp_path / "h")

    def lie(node: int, request: Envelope, answer: Envelope) -> Envelope:
        if node != BAD:
            return answer
        if request.header["kind"] == "hello":
            return entry(answer, train=2**31 - 1)
        if is_run(request, 1):
            return changed(answer, **{k: v * 1e5 for k, v in answer.arrays.items()})
        return answer

    notes = Notes()
    there = remote(it, Memory(shards(tmp_path, it, HOSTED), tamper=lie), tmp_path, notes)
    first = there.round()
    honest.round()
    assert first.failed == {} and list(first.cut) == [4] and "to 0.5 (federation.max_share" in first.cut[4]
    second = there.round()
    honest.round()
    assert list(second.failed) == [4] and "federation.max_change" in second.failed[4]
    assert sum("node 101 would weigh more" in text for text in notes.texts) == 1
    mine, theirs = (torch.cat([v.flatten() for v in fed.server["w"].values()]) for fed in (there, honest))
    assert float((mine - theirs).norm()) < float(theirs.norm())


@pytest.mark.parametrize("name", ["fedamp", "pgfed", "lg-mix", "fedpg"])
def test_a_change_far_beyond_the_others_is_refused(name: str, tmp_path: Path) -> None:
    """A model that is sent to each, a model and a gradient, a change, a gradient; the limit is 1e5, below max_norm."""
    it = experiment(name, rounds=2, federation={"max_norm": None})

    def lie(node: int, request: Envelope, answer: Envelope) -> Envelope:
        if node != BAD or not is_run(request, 1):
            return answer
        floats = {k: v for k, v in answer.arrays.items() if v.dtype.kind == "f"}
        return changed(answer, **{k: v * 1e4 for k, v in floats.items()})

    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, HOSTED), tamper=lie), tmp_path)
    here.round()
    there.round()
    here.round(silent=[4])
    record = there.round()
    assert list(record.failed) == [4] and "federation.max_change" in record.failed[4]
    assert_alike(here, there, 1e-9)


def test_honest_changes_are_taken_and_the_median_is_that_of_the_last_rounds() -> None:
    seen = Seen(100.0)
    assert seen.limit("p", [1.0, 1e9]) == np.inf  # of two nobody knows
    seen.note("p", [1.0, 1.0])
    assert seen.limit("p", [1e9]) == 100.0
    for k in range(10):
        seen.note("p", [0.1 * 2**-k] * 3)
    assert seen.limit("p", [1e9]) == pytest.approx(100 * 0.1 * 2**-7)
    assert seen.limit("q", [1.0] * 3) == 100.0
    assert Seen(None).limit("p", [1.0] * 5) == np.inf and seen.limit("r", [0.0] * 3) == np.inf


def test_what_was_seen_is_kept_with_the_run(tmp_path: Path) -> None:
    """A run that is stopped and resumed refuses what an undisturbed one refuses."""
    it = experiment("fedavg", rounds=3)

    def lie(node: int, request: Envelope, answer: Envelope) -> Envelope:
        every = is_run(request, 2)  # two of three nodes lie in this round alone: only the memory knows better
        return changed(answer, **{k: v * 1e3 for k, v in answer.arrays.items()}) if every and node != 100 else answer

    transport = Memory(shards(tmp_path, it, HOSTED), tamper=lie)
    there = remote(it, transport, tmp_path)
    there.round()
    there.round()
    tensors, meta = there.state()
    again = remote(it, transport, tmp_path / "again")
    again.restore(tensors, json.loads(json.dumps(meta)))
    assert set(there.round().failed) == {1, 2, 4}
    assert "changes" in meta and again.clients.seen.rounds == json.loads(json.dumps(meta))["changes"]


def test_what_was_cut_is_in_the_files(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1)
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.tamper = lambda node, q, a: entry(a, train=10**9) if node == BAD and q.header["kind"] == "hello" else a
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=Notes())
    (line,) = read_rounds(outcome.finished[0] / "rounds.jsonl")
    assert list(line["cut"]) == ["4"] and line["failed"] == {}


def test_without_a_limit_weights_are_those_of_the_samples(tmp_path: Path) -> None:
    it = experiment("fedavg", rounds=1, federation={"max_share": 1.0})
    transport = Memory(shards(tmp_path, it, HOSTED))
    transport.tamper = lambda node, q, a: entry(a, train=10**9) if node == BAD and q.header["kind"] == "hello" else a
    there = remote(it, transport, tmp_path)
    assert there.round().cut == {}
