"""What goes over the network, and who carries it: the seam between the federation and Flower.

A message is a small JSON header and arrays by name: numbers only, so that reading one never runs code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Envelope:
    """One message, in either direction."""

    header: Mapping[str, Any]  # JSON
    arrays: Mapping[str, Array] = field(default_factory=dict)


class Reply(NamedTuple):
    """What came back from one node: an answer, or why there is none."""

    node: int
    answer: Envelope | None
    error: str = ""  # for people; empty where there is an answer
    bytes_down: int = 0  # of the request as it was sent,
    bytes_up: int = 0  # and of the answer


LATE = "no answer within"  # how the error of a reply begins where a node kept silent


class Transport(Protocol):
    """The server's way to its nodes."""

    def nodes(self) -> list[int]:
        """Those that are connected now."""
        ...

    def exchange(self, requests: Mapping[int, Envelope], seconds: float) -> Iterator[Reply]:
        """Sends a request to each node; yields every node's reply as it comes.

        A node that has not answered after that many seconds, or was lost, gets a reply without an answer.
        Answers to earlier exchanges that come late are dropped.
        """
        ...


class Handler(Protocol):
    """A node's side: it answers requests, one at a time."""

    def handle(self, request: Envelope) -> Envelope: ...
