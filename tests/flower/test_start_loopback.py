"""The start of a federation through a real SuperLink: nodes that say nothing, and nodes that disagree."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from tests.flower.federations import Loopback, connected, loopback
from tests.flower.memory import Notes
from tests.flower.test_federate import written

from bespokefl.experiments.reading import read_experiment
from bespokefl.flower.server.serve import serve
from bespokefl.flower.transport.link import GridTransport
from bespokefl.results.files import read_rounds

pytestmark = pytest.mark.slow
HELLO = 8  # seconds: a silo reads its samples in them
ROUNDS = 3


def begun(
    folder: Path, names: tuple[str, ...], start: Callable[[Loopback, Path], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rounds of a run on four clients, and what was said; all nodes are connected before the first greeting."""
    path, notes = written(folder, ["fedavg"], ROUNDS), Notes()
    settings = [("federation.hello", HELLO), ("federation.deadline", 600), ("train.participation", 1.0)]
    with loopback(folder, names) as link:
        start(link, path)
        with link.control.grid() as grid:
            transport = GridTransport(grid)
            connected(transport, len(names), 60)
            began = time.monotonic()
            experiment = read_experiment(path, settings)
            outcome = serve(experiment, folder / "out", transport, nodes=len(names), resume=False, reporter=notes)
            assert time.monotonic() - began < 300  # nothing near the deadline of 600 s
    (run,) = outcome.finished
    return read_rounds(run / "rounds.jsonl"), notes.texts


def test_a_node_that_never_answers_the_greeting(tmp_path: Path) -> None:
    def start(link: Loopback, experiment: Path) -> None:
        link.host("first", experiment, "0-1")
        link.host("second", experiment, "2-3")
        link.start("mute", mute=True)

    lines, texts = begun(tmp_path, ("first", "second", "mute"), start)
    assert [line["failed"] for line in lines] == [{}] * ROUNDS
    assert any(f"it did not answer the greeting within {HELLO} s (federation.hello)" in text for text in texts), texts
    assert sum(text.startswith("warning: 2 of 3 nodes begin, without others: node ") for text in texts) == 1, texts


def test_of_two_nodes_that_disagree_one_begins(tmp_path: Path) -> None:
    """They know of 4 and of 7 clients; the node with the smaller number begins, as both are heard at once."""

    def start(link: Loopback, experiment: Path) -> None:
        first, second = (link.names[number] for number in sorted(link.names))
        link.host(first, experiment, "0-2")
        link.host(second, experiment, "3", "data.clients=7")

    lines, texts = begun(tmp_path, ("ada", "ben"), start)
    assert [line["failed"] for line in lines] == [{"3": "its silo is not connected"}] * ROUNDS
    assert any("is left out: it knows of 7 clients, the others of 4" in text for text in texts), texts
    assert any("nobody hosts the clients 3 (1 of 4)" in text for text in texts), texts
    assert sum(text.startswith("warning: 1 of 2 nodes begin, without others: node ") for text in texts) == 1, texts
