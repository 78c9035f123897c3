"""A network in memory: every envelope becomes bytes and back, and a node may be cut off, slow or wrong."""

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.flower.server.membership import Membership
from bespokefl.flower.server.remote_federation import RemoteFederation
from bespokefl.flower.server.serve import make_federation
from bespokefl.flower.silo.silo import open_silo
from bespokefl.flower.transport.envelope import LATE, Envelope, Handler, Reply

SMALL = ("fewest_samples=8",)  # limits of a silo that has few samples


def to_bytes(message: Envelope) -> bytes:
    file = io.BytesIO()
    names = list(message.arrays)
    head = json.dumps({"header": message.header, "names": names}).encode()
    np.savez(file, np.frombuffer(head, np.uint8), *(message.arrays[name] for name in names))
    return file.getvalue()


def from_bytes(content: bytes) -> Envelope:
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        arrays = [stored[name] for name in stored.files]
    head = json.loads(arrays[0].tobytes())
    return Envelope(head["header"], dict(zip(head["names"], arrays[1:], strict=True)))


@dataclass
class Memory:
    """A `Transport`. What comes back from a node may be changed; a node in ``gone`` is not there."""

    handlers: dict[int, Handler]
    gone: set[int] = field(default_factory=set)
    tamper: Callable[[int, Envelope, Envelope], Envelope | str] | None = None  # (node, request, answer)
    before: Callable[[int, Envelope], str | None] | None = None  # a text: the node does not even get the request
    silent: set[int] = field(default_factory=set)  # nodes that are there and never answer
    waited: float = 0.0  # seconds for these
    shuffle: np.random.Generator | None = None
    sent: list[tuple[int, Mapping[str, Any], int, int]] = field(default_factory=list)

    def nodes(self) -> list[int]:
        return [node for node in self.handlers if node not in self.gone]

    def exchange(self, requests: Mapping[int, Envelope], seconds: float) -> Iterator[Reply]:
        order = list(requests)
        if self.shuffle is not None:
            self.shuffle.shuffle(order)
        if self.silent & set(order):
            self.waited += seconds
            time.sleep(min(seconds, 0.3))
        for node in order:
            if node in self.silent:
                yield Reply(node, None, f"{LATE} {seconds:g} s")
                continue
            yield self._one(node, requests[node])

    def _one(self, node: int, request: Envelope) -> Reply:
        down = to_bytes(request)
        if node in self.gone:
            return Reply(node, None, "the node is gone")
        if self.before is not None and (why := self.before(node, request)) is not None:
            return Reply(node, None, why)
        answer: Envelope | str = self.handlers[node].handle(from_bytes(down))
        if self.tamper is not None:
            answer = self.tamper(node, request, answer)
        if isinstance(answer, str):
            return Reply(node, None, answer)
        up = to_bytes(answer)
        self.sent.append((node, request.header, len(down), len(up)))
        return Reply(node, from_bytes(up), "", len(down), len(up))


class Notes:
    """A `Reporter` that remembers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.endings: list[str] = []

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self.texts.append(f"start {label} {seed} {done}/{rounds}")

    def round(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def finish(self, outcome: str) -> None:
        self.endings.append(outcome)

    def note(self, text: str) -> None:
        self.texts.append(text)


def experiment(
    algorithms: list[Any] | str = "fedavg",
    *,
    clients: int = 5,
    rounds: int = 2,
    precision: str = "float64",
    **more: Any,
) -> Experiment:
    """A small one: digits of a few clients, a network of one narrow layer."""
    document: dict[str, Any] = {
        "seeds": [0],
        "algorithms": [algorithms] if isinstance(algorithms, str) else algorithms,
        "data": {"source": "digits", "clients": clients, "max_samples": 40 * clients, "val": 0.1, "partition": "iid"},
        "model": {"name": "mlp", "hidden": [7]},
        "train": {"rounds": rounds, "local_epochs": 2, "batch_size": 8, "lr": 0.05},
        "engine": {"precision": precision, "device": "cpu"},
        "eval": {"cross": False},
        "federation": {"wait": 1.0, "deadline": 5.0, "retries": 1},
    }
    for section, keys in more.items():
        document[section] = {**document.get(section, {}), **keys} if isinstance(keys, Mapping) else keys
    return parse_experiment(document)


def shards(folder: Path, it: Experiment, hosted: list[list[int]]) -> dict[int, Handler]:
    """Silos of simulated clients, by node."""
    return {
        100 + k: open_silo(folder / f"silo-{k}", experiment=it, clients=clients, device="cpu")
        for k, clients in enumerate(hosted)
    }


def remote(
    it: Experiment, transport: Memory, folder: Path, notes: Notes | None = None, rounds: int = 100
) -> RemoteFederation:
    """The first algorithm and seed of an experiment, ready for its first round; a test does as many as it wants."""
    roster = Membership(transport, it, folder, (notes or Notes()).note)
    census = roster.gather(len(transport.nodes()), it.seeds[0])
    federation = make_federation(it, it.algorithms[0], it.seeds[0], census, roster)
    header = federation.clients.opening.header
    agreement = {**header["agreement"], "rounds": rounds}
    federation.clients.opening = Envelope({**header, "agreement": agreement}, federation.clients.opening.arrays)
    federation.begin()
    return federation


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
