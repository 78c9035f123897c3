"""What each node does, for whoever watches a federation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bespokefl.flower.transport.envelope import Envelope, Reply, Transport
from bespokefl.flower.transport.processes import Child, check_alive
from bespokefl.progress import Line, Reporter


@dataclass
class Seen:
    """Of one node, so far."""

    answers: int = 0
    failures: int = 0
    seconds: float = 0.0
    down: int = 0
    up: int = 0
    last: str = "waiting"


class WatchedTransport:
    """A transport that remembers how every node did, and makes sure first that its processes are still there."""

    def __init__(self, transport: Transport, names: Mapping[int, str], children: Sequence[Child] = ()) -> None:
        self._transport, self._names, self._children = transport, names, children
        self.seen: dict[int, Seen] = {}

    def name(self, node: int) -> str:
        return self._names.get(node, f"node {node}")

    def nodes(self) -> list[int]:
        self._check()
        return self._transport.nodes()

    def exchange(self, requests: Mapping[int, Envelope], seconds: float) -> Iterator[Reply]:
        self._check()
        began = time.monotonic()
        for reply in self._transport.exchange(requests, seconds):
            seen = self.seen.setdefault(reply.node, Seen())
            took = time.monotonic() - began
            seen.down, seen.up = seen.down + reply.bytes_down, seen.up + reply.bytes_up
            if reply.answer is None:
                seen.failures += 1
                seen.last = reply.error
            else:
                seen.answers += 1
                seen.seconds += took
                seen.last = f"{took:.1f} s"
            yield reply

    def _check(self) -> None:
        check_alive(self._children)

    def latest(self) -> str:
        """One line: how long each node took to answer last, or why it did not."""
        return " | ".join(f"{name}: {seen.last}" for name, seen in self._by_name())

    def summary(self) -> Iterator[str]:
        for name, seen in self._by_name():
            mean = seen.seconds / max(1, seen.answers)
            failed = f", {seen.failures} times no answer" if seen.failures else ""
            megabytes = f"{seen.down / 1e6:.2f} MB down, {seen.up / 1e6:.2f} MB up"
            yield f"{name}: {seen.answers} answers in {mean:.2f} s each{failed}; {megabytes}"

    def _by_name(self) -> list[tuple[str, Seen]]:
        return sorted(((self.name(node), seen) for node, seen in self.seen.items()), key=lambda pair: pair[0])


class NodeReporter:
    """A reporter that also says how the nodes did, about every so many seconds."""

    def __init__(self, reporter: Reporter, transport: WatchedTransport, every: float = 2.0) -> None:
        self._reporter, self._transport, self._every, self._said = reporter, transport, every, 0.0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._reporter.start(label, seed, rounds, done)

    def round(self, line: Line) -> None:
        self._reporter.round(line)
        if time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            self.note(f"  round {line['round']}  {self._transport.latest()}")

    def finish(self, outcome: str) -> None:
        self._reporter.finish(outcome)

    def note(self, text: str) -> None:
        self._reporter.note(text)
