"""The server's way to its nodes over Flower's Grid.

Flower's own `send_and_receive` looks for answers every three seconds and returns them together. Here each node's
answer is waited for by a thread of its own, which looks often at first and then less: one node that uploads slowly,
or dies in the middle of its upload, holds up nobody else, and the deadline holds whatever a node does.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid.http_grid import HttpGrid

from bespokefl.errors import RunError
from bespokefl.flower.refusal import Refused, reading
from bespokefl.flower.transport.envelope import LATE, Envelope, Reply
from bespokefl.flower.transport.records import MESSAGE_TYPE, from_record, payload_bytes, to_record

SHORTEST, LONGEST, SHARE = 0.1, 1.0, 0.1  # seconds between two looks: a share of the time waited, between these
TTL_SLACK = 10.0  # seconds that a message outlives its deadline, for clocks that differ
LOOK = 1.0  # seconds between two looks at who is connected
AWAY = 10.0  # seconds for which a node that went away may come back; the SuperLink notices after 20 that it is gone
PUSHES, PAUSE = 4, 0.3  # attempts to hand over a message, and seconds between them
WENT_AWAY = "the node went away"
LOST = 5  # Flower's code for a node that went away


@dataclass
class Waiting:
    """For one node's answer."""

    request: Envelope
    size: int  # bytes that were sent
    since: str | None  # when the node's session began, as the SuperLink says it; None: that session is over
    away: float | None = None  # since when the node is not connected


class Gone(NamedTuple):
    """The SuperLink says that a node's session is over; the node may come back in another one."""

    node: int


class GridTransport:
    """Requests as Flower messages, answers as they come.

    A node that comes back in a new session is asked again at once, as nobody answers what its earlier session took.
    One that does not come back within `AWAY` seconds is given up.
    """

    def __init__(self, grid: Grid, check: Callable[[], None] = lambda: None) -> None:
        self._grid, self._check = grid, check  # the latter raises where waiting has no sense any more

    def nodes(self) -> list[int]:
        with _about_the_superlink():
            return sorted(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, Envelope], seconds: float) -> Iterator[Reply]:
        talk = _Exchange(self._grid, seconds, self._check)
        try:
            with _about_the_superlink():
                sessions = _sessions(self._grid)
            for node, request in requests.items():
                talk.ask(node, request, sessions.get(node, ""))
            yield from talk.replies()
        finally:
            talk.over.set()  # what still comes is dropped


class _Exchange:
    """One request to each of some nodes, until all have answered or the time is over."""

    def __init__(self, grid: Grid, seconds: float, check: Callable[[], None]) -> None:
        self._grid, self._seconds, self._check = grid, seconds, check
        self._deadline = time.monotonic() + seconds
        self._came: queue.SimpleQueue[Reply | Gone | BaseException] = queue.SimpleQueue()
        self._waiting: dict[int, Waiting] = {}
        self.over = threading.Event()

    def ask(self, node: int, request: Envelope, since: str) -> None:
        content = to_record(request)
        earlier = self._waiting.get(node)
        size = payload_bytes(content) + (earlier.size if earlier else 0)
        self._waiting[node] = Waiting(request, size, since)
        group = str(request.header.get("round", ""))  # shown in Flower's logs
        left = max(0.0, self._deadline - time.monotonic())
        message = Message(content, node, MESSAGE_TYPE, ttl=left + TTL_SLACK, group_id=group)
        threading.Thread(target=self._converse, args=(message, node, size), daemon=True).start()

    def replies(self) -> Iterator[Reply]:
        looked = time.monotonic()
        while self._waiting:
            now = time.monotonic()
            if now >= self._deadline:
                for node, silent in self._waiting.items():
                    yield Reply(node, None, f"{LATE} {self._seconds:g} s", bytes_down=silent.size)
                return
            try:
                came = self._came.get(timeout=max(0.0, min(looked + LOOK, self._deadline) - now))
            except queue.Empty:
                looked = time.monotonic()
                yield from self._look()
                continue
            if isinstance(came, BaseException):
                raise RunError(f"the SuperLink does not answer: {came}") from came
            asked = self._waiting.get(came.node)
            if asked is None:  # it was given up, or has answered in two sessions
                continue
            if isinstance(came, Gone):
                asked.since, asked.away = None, asked.away or time.monotonic()
                continue
            del self._waiting[came.node]
            yield came

    def _look(self) -> Iterator[Reply]:
        """Asks those again that have come back, and gives up those that stay away."""
        self._check()
        if time.monotonic() >= self._deadline:
            return
        with _about_the_superlink():
            sessions = _sessions(self._grid)
        for node, asked in list(self._waiting.items()):
            if node not in sessions:
                asked.away = asked.away or time.monotonic()
                if time.monotonic() - asked.away >= AWAY:
                    del self._waiting[node]
                    yield Reply(node, None, WENT_AWAY, bytes_down=asked.size)
            elif sessions[node] != asked.since:
                self.ask(node, asked.request, sessions[node])
            else:
                asked.away = None  # its line broke for a moment

    def _converse(self, message: Message, node: int, size: int) -> None:
        """One node's request and answer; ends without a word once the exchange is over."""
        try:
            number = self._push(message)
            if not number:  # the SuperLink does not take messages for a node that it has lost
                self._came.put(Reply(node, None, WENT_AWAY, bytes_down=size))
                return
            began = time.monotonic()
            while not self.over.is_set() and (now := time.monotonic()) < self._deadline:
                if reply := self._pulled(number, node, size):
                    self._came.put(Gone(node) if reply.error == WENT_AWAY else reply)
                    return
                self.over.wait(min(max(SHARE * (now - began), SHORTEST), LONGEST))
        except BaseException as error:  # handed to whoever waits: this thread has nobody to tell
            self._came.put(error)

    def _push(self, message: Message) -> str:
        """Its number. The same message once more where Flower lost parts of it: a node may wait for them already."""
        for _ in range(PUSHES - 1):
            try:
                return next(iter(self._grid.push_messages([message])), "")
            except ObjectPushError:  # its push session was replaced, or has expired
                self.over.wait(PAUSE)
        return next(iter(self._grid.push_messages([message])), "")

    def _pulled(self, number: str, node: int, size: int) -> Reply | None:
        try:
            answers = list(self._grid.pull_messages([number]))
        except (httpx.HTTPError, OSError):
            raise
        except Exception as error:  # what came cannot be put together: the node's doing
            return Reply(node, None, f"the answer cannot be read ({type(error).__name__}: {error})", bytes_down=size)
        return _read(answers[0], node, size) if answers else None


def _sessions(grid: Grid) -> dict[int, str]:
    """The nodes that are connected, and since when; the latter only where the Grid tells it."""
    if isinstance(grid, HttpGrid):
        return {info.node_id: info.last_activated_at for info in grid.get_nodes()}
    return dict.fromkeys(grid.get_node_ids(), "")


@contextlib.contextmanager
def _about_the_superlink() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, OSError, RunNotRunningException) as error:
        raise RunError(f"the SuperLink does not answer: {error or type(error).__name__}") from error


def _read(answer: Message, node: int, size: int) -> Reply:
    received = 0
    try:
        with reading("the answer"):
            if answer.has_error():
                reason = answer.error.reason or "no reason given"
                why = WENT_AWAY if answer.error.code == LOST else f"the node failed: {reason}"
                return Reply(node, None, why, bytes_down=size)
            received = payload_bytes(answer.content)
            return Reply(node, from_record(answer.content), bytes_down=size, bytes_up=received)
    except Refused as error:
        return Reply(node, None, f"not a message of ours: {error}", bytes_down=size, bytes_up=received)
