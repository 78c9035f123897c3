"""Requests and answers through a real SuperLink to real node processes, with TLS and node authentication."""

import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from flwr.proto.message_pb2 import PushObjectResponse
from tests.flower.echo_node import Echo
from tests.flower.federations import Loopback, Proxy, connected, loopback

from bespokefl.errors import InputError
from bespokefl.flower.silo.node import Node, make_fleet
from bespokefl.flower.transport.certs import make_certificates, read_private_key
from bespokefl.flower.transport.envelope import Envelope, Reply
from bespokefl.flower.transport.fleet import Fleet, NotAccepted, Refused, Unreachable
from bespokefl.flower.transport.host import LOCAL, Hosting, check_port, free_port, hosted
from bespokefl.flower.transport.link import GridTransport

Started = tuple[Loopback, GridTransport, Proxy]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Three nodes: one of them through a proxy that can be cut, one that the tests kill."""
    with loopback(tmp_path_factory.mktemp("federation"), ("near", "far", "mortal", "spare")) as link:
        proxy = Proxy(link.port)
        link.start("near")
        link.start("far", f"{LOCAL}:{proxy.port}")
        link.start("mortal")
        with link.control.grid() as grid:
            transport = GridTransport(grid)
            connected(transport, 3)
            yield link, transport, proxy
        proxy.close()


def ask(transport: GridTransport, nodes: list[int], seconds: float = 20.0, **header: object) -> dict[int, Reply]:
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}
    replies = list(transport.exchange({node: Envelope({"round": 1, **header}, arrays) for node in nodes}, seconds))
    assert sorted(reply.node for reply in replies) == sorted(nodes)  # each exactly once
    return {reply.node: reply for reply in replies}


def number_of(link: Loopback, name: str) -> int:
    return int(link.log(name).split("connected as node ")[-1].split()[0])


def test_answers_are_the_nodes_own(started: Started) -> None:
    link, transport, _ = started
    replies = ask(transport, transport.nodes(), exchange=7)
    pids = set()
    for reply in replies.values():
        assert reply.answer is not None and reply.error == ""
        np.testing.assert_array_equal(reply.answer.arrays["w"], 2 * np.arange(6, dtype=np.float32).reshape(2, 3))
        assert reply.answer.arrays["n"] == 6
        assert reply.answer.header["exchange"] == 7
        assert 24 + 8 <= reply.bytes_down < 24 + 8 + 2 * 128 + 300  # numbers, two heads of NumPy's, the header
        assert 24 + 8 <= reply.bytes_up < 24 + 8 + 2 * 128 + 300
        pids.add(reply.answer.header["pid"])
    assert pids == {child.pid for child in link.nodes.values()}


def test_a_failure_on_a_node_is_told_a_bug_keeps_its_secrets(started: Started) -> None:
    _, transport, _ = started
    node = transport.nodes()[0]
    assert "the disk is full" in ask(transport, [node], do="fail")[node].error
    bug = ask(transport, [node], do="bug")[node]
    assert bug.answer is None and "ZeroDivisionError" in bug.error and "secret" not in bug.error
    assert ask(transport, [node])[node].answer is not None


def test_a_slow_node_costs_the_deadline_and_its_late_answer_is_dropped(started: Started) -> None:
    _, transport, _ = started
    slow, *others = transport.nodes()
    began = time.monotonic()
    arrays = {"w": np.ones(1, np.float32)}
    requests = {slow: Envelope({"round": 1, "exchange": 1, "do": "sleep", "seconds": 6}, arrays)}
    requests |= {node: Envelope({"round": 1, "exchange": 1}, arrays) for node in others}
    replies = {reply.node: reply for reply in transport.exchange(requests, 3.0)}
    assert time.monotonic() - began > 2.9
    assert replies[slow].answer is None and replies[slow].error == "no answer within 3 s"
    assert all(replies[node].answer is not None for node in others)
    answer = ask(transport, [slow], exchange=2)[slow].answer
    assert answer is not None and answer.header["exchange"] == 2


def test_a_killed_node_costs_the_deadline_and_comes_back_at_once(started: Started) -> None:
    link, transport, _ = started
    mortal = number_of(link, "mortal")
    replies = ask(transport, [mortal], seconds=2.0, do="die")
    assert replies[mortal].answer is None and replies[mortal].error
    assert link.nodes["mortal"].wait(5) is not None
    began = time.monotonic()
    link.start("mortal")
    while ask(transport, [mortal], seconds=3.0)[mortal].answer is None:
        assert time.monotonic() - began < 40  # Flower alone would refuse it for up to a minute


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_comes_back_before_the_deadline_is_asked_again(how: int, started: Started) -> None:
    """It is ended at work and started anew: its answer comes in the same exchange, long before the deadline."""
    link, transport, _ = started
    mortal = number_of(link, "mortal")

    def kill_and_start() -> None:
        os.kill(link.nodes["mortal"].pid, how)
        link.nodes["mortal"].wait(20)
        link.start("mortal")

    threading.Timer(2.0, kill_and_start).start()
    began = time.monotonic()
    request = Envelope({"round": 1, "do": "sleep", "seconds": 4}, {"w": np.ones(1, np.float32)})
    (reply,) = transport.exchange({mortal: request}, 120.0)
    assert reply.answer is not None, reply.error
    assert time.monotonic() - began < 60
    assert reply.answer.header["pid"] == link.nodes["mortal"].pid


def test_a_message_whose_parts_were_lost_is_sent_again(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower answers so where a push session was replaced by another one."""
    _, transport, _ = started
    client = transport._grid._runtime_client  # type: ignore[attr-defined]
    whole, lost = client.PushObject, iter([True])
    monkeypatch.setattr(
        client, "PushObject", lambda q: PushObjectResponse(stored=False) if next(lost, False) else whole(q)
    )
    node = transport.nodes()[0]
    assert ask(transport, [node])[node].answer is not None
    assert next(lost, None) is None


@pytest.mark.slow
def test_a_dead_node_is_noticed(started: Started) -> None:
    """Not the deadline but half a minute: the SuperLink takes 20 s to notice, and it has 10 to come back."""
    link, transport, _ = started
    mortal = number_of(link, "mortal")
    began = time.monotonic()
    reply = ask(transport, [mortal], seconds=120.0, do="die")[mortal]
    assert reply.error == "the node went away" and time.monotonic() - began < 45
    link.start("mortal")
    connected(transport, 3)


def test_a_cut_line_heals(started: Started) -> None:
    link, transport, proxy = started
    far = number_of(link, "far")
    proxy.cut()
    assert ask(transport, [far], seconds=2.0)[far].answer is None
    proxy.mend()
    deadline = time.monotonic() + 20
    while (reply := ask(transport, [far], seconds=3.0)[far]).answer is None:
        assert time.monotonic() < deadline, reply.error
    assert "the line is broken" in link.log("far")


def test_an_unknown_node_is_gone(started: Started) -> None:
    _, transport, _ = started
    assert ask(transport, [12345], seconds=3.0)[12345].error == "the node went away"


# who is let in --------------------------------------------------------------------------------------------------


def knock(address: str, ca: Path | None, key: Path, insecure: bool = False) -> None:
    fleet = Fleet(address, ca, read_private_key(key), insecure)
    try:
        fleet.begin(None)
    finally:
        fleet.close()


def test_an_unregistered_key_is_refused(started: Started, tmp_path: Path) -> None:
    link, _, _ = started
    strange = make_certificates(tmp_path / "strange", [LOCAL], ["node"])
    with pytest.raises(NotAccepted, match="does not accept this key"):
        knock(link.address, link.certificates.ca, strange.node_key("node"))


def test_a_key_that_is_in_use_is_refused(started: Started) -> None:
    link, _, _ = started
    with pytest.raises(NotAccepted):
        knock(link.address, link.certificates.ca, link.certificates.node_key("near"))


def test_another_authority_is_refused(started: Started, tmp_path: Path) -> None:
    link, _, _ = started
    strange = make_certificates(tmp_path / "strange", [LOCAL], [])
    with pytest.raises(Refused, match="not signed by the authority in --ca"):
        knock(link.address, strange.ca, link.certificates.node_key("spare"))


def test_plain_text_is_refused(started: Started) -> None:
    link, _, _ = started
    with pytest.raises(Refused, match="speaks TLS; leave --insecure out"):
        knock(link.address, None, link.certificates.node_key("spare"), insecure=True)


def test_nobody_there(started: Started) -> None:
    link, _, _ = started
    with pytest.raises(Unreachable, match="cannot be reached"):
        knock(f"{LOCAL}:{free_port()}", link.certificates.ca, link.certificates.node_key("spare"))


def test_a_port_in_use_is_said(started: Started) -> None:
    link, _, _ = started
    with pytest.raises(InputError, match=f"--port {link.port} on 127.0.0.1 cannot be used"):
        check_port(LOCAL, link.port)


@pytest.mark.parametrize(
    ("hosts", "days", "words"),
    [([LOCAL], -1.0, "has expired"), (["fl.example.org"], 1.0, "is for another name")],
    ids=["expired", "another name"],
)
def test_a_wrong_certificate_is_refused(hosts: list[str], days: float, words: str, tmp_path: Path) -> None:
    files = make_certificates(tmp_path, hosts, ["node"], days=days)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.server, files.server_key)
    with socket.create_server((LOCAL, 0)) as listener:
        threading.Thread(target=_shake_hands, args=(context, listener), daemon=True).start()
        with pytest.raises(Refused, match=words):
            knock(f"{LOCAL}:{listener.getsockname()[1]}", files.ca, files.node_key("node"))


def _shake_hands(context: ssl.SSLContext, listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True).close()


def test_without_tls_whoever_comes_is_let_in(tmp_path: Path) -> None:
    """Only where both sides say so."""
    with hosted(Hosting(tmp_path, LOCAL, free_port(), None), []) as link, link.control.grid() as grid:
        fleet = make_fleet(link.control.address, None, None)
        node = Node(Echo(), tmp_path, fleet, say=lambda text: None)
        with running(node):
            transport = GridTransport(grid)
            (number,) = connected(transport, 1)
            assert ask(transport, [number])[number].answer is not None


def test_a_node_that_waits_for_its_server_can_be_stopped(tmp_path: Path) -> None:
    said: list[str] = []
    with running(Node(Echo(), tmp_path, make_fleet(f"{LOCAL}:{free_port()}", None, None), say=said.append)):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "waiting for it" in said[0]


@contextlib.contextmanager
def running(node: Node) -> Iterator[None]:
    """In a thread that is over afterwards: one left behind would go on calling in other tests."""
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join(timeout=30)
    assert not thread.is_alive()
