"""The server's way to its nodes over Flower's Grid.

Flower's own `send_and_receive` looks for answers every three seconds and returns them together. Here each node's
answer is waited for by a thread of its own, which looks often at first and then less: one node that uploads slowly,
or dies in the middle of its upload, holds up nobody else, and the deadline holds whatever a node does.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from bespokefl.errors import RunError
from bespokefl.flower.envelope import Envelope, Reply
from bespokefl.flower.records import MESSAGE_TYPE, from_record, payload_bytes, to_record
from bespokefl.flower.refusal import Refused, reading

SHORTEST, LONGEST, SHARE = 0.1, 1.0, 0.1  # seconds between two looks: a share of the time waited, between these
TTL_SLACK = 10.0  # seconds that a message outlives its deadline, for clocks that differ
WENT_AWAY = "the node went away"
LOST = 5  # Flower's code for a node that went away


class GridTransport:
    """Requests as Flower messages, answers as they come."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, Envelope], seconds: float) -> Iterator[Reply]:
        deadline = time.monotonic() + seconds
        replies: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        over = threading.Event()
        sizes: dict[int, int] = {}
        try:
            for node, request in requests.items():
                content = to_record(request)
                sizes[node] = payload_bytes(content)
                group = str(request.header.get("round", ""))  # shown in Flower's logs
                message = Message(content, node, MESSAGE_TYPE, ttl=seconds + TTL_SLACK, group_id=group)
                arguments = (message, node, sizes[node], deadline, replies, over)
                threading.Thread(target=self._converse, args=arguments, daemon=True).start()
            yield from self._until(deadline, seconds, sizes, replies)
        finally:
            over.set()  # what still comes is dropped

    @staticmethod
    def _until(
        deadline: float, seconds: float, sizes: dict[int, int], replies: "queue.SimpleQueue[Reply | BaseException]"
    ) -> Iterator[Reply]:
        waiting = dict(sizes)
        while waiting:
            try:
                reply = replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for node, size in waiting.items():
                    yield Reply(node, None, f"no answer within {seconds:g} s", bytes_down=size)
                return
            if isinstance(reply, BaseException):
                raise RunError(f"the SuperLink does not answer: {reply}") from reply
            del waiting[reply.node]
            yield reply

    def _converse(
        self, message: Message, node: int, size: int, deadline: float, replies: Any, over: threading.Event
    ) -> None:
        """One node's request and answer; ends without a word once the exchange is over."""
        try:
            (number,) = self._grid.push_messages([message])
            if not number:  # the SuperLink does not take messages for a node that it has lost
                replies.put(Reply(node, None, WENT_AWAY, bytes_down=size))
                return
            began = time.monotonic()
            while not over.is_set() and (now := time.monotonic()) < deadline:
                try:
                    answers = list(self._grid.pull_messages([number]))
                except (httpx.HTTPError, OSError):
                    raise
                except Exception as error:  # what came cannot be put together: the node's doing
                    why = f"the answer cannot be read ({type(error).__name__}: {error})"
                    replies.put(Reply(node, None, why, bytes_down=size))
                    return
                if answers:
                    replies.put(_read(answers[0], node, size))
                    return
                over.wait(min(max(SHARE * (now - began), SHORTEST), LONGEST))
        except BaseException as error:  # handed to whoever waits: this thread has nobody to tell
            replies.put(error)


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
