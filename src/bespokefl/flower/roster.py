"""Who takes part: which node hosts which clients, as the silos say it, and as the server remembers it.

A silo is known by a number that it drew itself, so that it may come back as another node; its clients keep their ids.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bespokefl.config import Experiment, FederationSection
from bespokefl.data.dataset import IntArray
from bespokefl.data.digest import digest_of_names
from bespokefl.data.splits import SPLITS
from bespokefl.errors import InputError, RunError
from bespokefl.flower.envelope import Envelope, Transport
from bespokefl.flower.silo import PROTOCOL
from bespokefl.flower.wire import Refused
from bespokefl.interrupts import Interrupted, StopRequest
from bespokefl.results.files import read_json, write_json

FEDERATION = "federation.json"
POLL = 0.2  # seconds between two looks at who is connected
LONGEST_TEXT = 400  # of what a silo says


@dataclass(frozen=True)
class RemoteCensus:
    """The clients as their silos told it."""

    client_names: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    target: str  # labels, masks or numbers
    inputs: str  # numbers or tokens
    counts: Mapping[str, IntArray]  # by split
    silos: tuple[str, ...]  # of each client: the silo that hosts it
    kinds: frozenset[str]  # own, simulated

    @property
    def clients(self) -> int:
        return len(self.client_names)

    @property
    def note(self) -> str:
        return ""  # silos tell sizes, classes and shapes, no more

    @property
    def has_masks(self) -> bool:
        return self.target == "masks"

    @property
    def digest(self) -> dict[str, str]:
        """Of what the silos told: they watch over their samples themselves."""
        sizes = {split: ", ".join(map(str, counts.tolist())) for split, counts in self.counts.items()}
        return {
            "inputs": str(self.input_shape),
            "labels": f"{self.target} {len(self.classes)} {digest_of_names(self.classes)}",
            "partition": digest_of_names(f"{split}: {sizes[split]}" for split in sorted(sizes)),
            "clients": digest_of_names(self.client_names),
        }

    def sizes(self, split: str) -> IntArray:
        return self.counts[split]


class Roster:
    """The nodes of a federation."""

    def __init__(self, transport: Transport, experiment: Experiment, out: Path, note: Callable[[str], None]) -> None:
        self.transport, self.note = transport, note
        self.options: FederationSection = experiment.federation
        self._experiment, self._file = experiment, out / FEDERATION
        stored = read_json(self._file) if self._file.is_file() else {}
        self.federation: str = stored.get("federation", secrets.token_hex(8))
        self._ids: dict[str, list[int]] = stored.get("silos", {})  # by silo: its clients
        self._nodes: dict[int, str] = {}  # by node that was greeted: its silo
        self._strangers: set[int] = set()  # nodes that have no place here
        self.unfit: dict[int, str] = {}  # nodes that refuse the run that is going on, with the reason

    # the beginning -----------------------------------------------------------------------------------
    def gather(self, nodes: int, seed: int, stop: StopRequest | None = None) -> RemoteCensus:
        """Waits until so many silos are there, or somebody asks to stop, and learns what they have."""
        deadline = time.monotonic() + self.options.wait
        told: dict[int, Mapping[str, Any]] = {}
        said: dict[int, str] = {}
        while len(told) < nodes:
            fresh = [node for node in self.transport.nodes() if node not in told]
            answers, errors = self._hello(fresh, seed)
            told |= answers
            said |= errors
            if len(told) < nodes:
                if stop is not None and stop.asked:
                    raise Interrupted(f"while {len(told)} of {nodes} silos were there")
                if time.monotonic() > deadline:
                    why = "; ".join(f"node {node}: {text}" for node, text in said.items())
                    raise RunError(
                        f"{len(told)} of {nodes} silos were there after {self.options.wait:g} s (federation.wait)"
                        + (f": {why}" if why else "")
                    )
                time.sleep(POLL)
        census = self._census(told)
        write_json(self._file, {"federation": self.federation, "silos": self._ids})
        self._nodes = {node: str(about["silo"]) for node, about in told.items()}
        return census

    def settings(self) -> dict[str, Any]:
        """How silos are to read their samples, and how much of them to test on."""
        section = self._experiment.data
        image = {k: v for k, v in section.options.items() if k in ("size", "mode")}
        told = {"normalize": section.normalize, "test": section.test, "val": section.val, "image": image}
        return told | {"inputs": section.options.get("inputs")}

    def _hello(self, nodes: list[int], seed: int) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
        who = {"kind": "hello", "protocol": PROTOCOL, "federation": self.federation}
        header = {**who, "seed": seed, "data": self.settings()}
        found: dict[int, Mapping[str, Any]] = {}
        errors: dict[int, str] = {}
        for node, answer in self.ask({node: Envelope(header) for node in nodes}).answers.items():
            try:
                if isinstance(answer, str):
                    raise Refused(answer)
                found[node] = _checked(answer.header)
            except Refused as refused:
                errors[node] = str(refused)
        return found, errors

    def _census(self, told: Mapping[int, Mapping[str, Any]]) -> RemoteCensus:
        """Ids for all, and one description of all."""
        by_silo = {str(about["silo"]): about for _, about in sorted(told.items())}
        if len(by_silo) < len(told):
            raise RunError("two nodes are the same silo (a copied folder?); every silo needs a folder of its own")
        shapes = {tuple(about["input_shape"]) for about in by_silo.values()}
        targets = {about["target"] for about in by_silo.values()}
        inputs = {about.get("inputs", "numbers") for about in by_silo.values()}
        if max(len(shapes), len(targets), len(inputs)) > 1:
            raise InputError(
                f"silos have samples of different kinds: shapes {sorted(shapes)}, targets {sorted(targets)}, inputs "
                f"{sorted(inputs)}; images can be brought to one size by data.size and data.mode"
            )
        self._assign(by_silo)
        clients = {
            client: (silo, entry)
            for silo, about in by_silo.items()
            for client, entry in zip(self._ids[silo], about["clients"], strict=True)
        }
        if sorted(clients) != list(range(len(clients))):
            missing = sorted(set(range(max(clients) + 1)) - set(clients))
            raise RunError(f"nobody hosts the clients {missing[:10]}, whose ids were given; start their silos too")
        ordered = [clients[c] for c in sorted(clients)]
        return RemoteCensus(
            tuple(str(entry["name"]) for _, entry in ordered),
            _classes([about["classes"] for about in by_silo.values()]),
            next(iter(shapes)),
            next(iter(targets)),
            next(iter(inputs)),
            {split: np.array([entry[split] for _, entry in ordered], dtype=np.int64) for split in SPLITS},
            tuple(silo for silo, _ in ordered),
            frozenset(str(about["kind"]) for about in by_silo.values()),
        )

    def _assign(self, by_silo: Mapping[str, Mapping[str, Any]]) -> None:
        """A silo of simulated clients says which; one of its own gets the next free id, and keeps it."""
        taken: dict[int, str] = {c: silo for silo, ids in self._ids.items() for c in ids}
        for silo, about in by_silo.items():
            wanted = [entry["id"] for entry in about["clients"]]
            given = self._ids.get(silo)
            if given is None and None not in wanted and about["kind"] == "simulated":
                given = wanted
            if given is None:
                free = (c for c in range(len(taken) + len(wanted)) if c not in taken)
                given = [next(free) for _ in wanted]
            if len(given) != len(wanted) or any(taken.get(c, silo) != silo for c in given):
                raise RunError(f"two silos claim the clients {given[:10]}; give each client to one node")
            self._ids[silo] = given
            taken |= {c: silo for c in given}

    # every exchange ----------------------------------------------------------------------------------
    def by_node(self, clients: list[int]) -> tuple[dict[int, list[int]], dict[int, str]]:
        """The clients that each connected node hosts, and why the others cannot be asked."""
        node_of = {silo: node for node, silo in self._nodes.items()}
        connected = set(self.transport.nodes())
        found: dict[int, list[int]] = {}
        missing: dict[int, str] = {}
        hosts = {c: node_of.get(silo) for silo, ids in self._ids.items() for c in ids}
        for client in clients:
            node = hosts.get(client)
            if node is None or node not in connected:
                missing[client] = "its silo is not connected"
            elif node in self.unfit:
                missing[client] = self.unfit[node]
            else:
                found.setdefault(node, []).append(client)
        return found, missing

    def clients_of(self, node: int) -> list[int]:
        return self._ids[self._nodes[node]]

    def newcomers(self, seed: int) -> list[int]:
        """Nodes that are new, and turn out to be known silos: they came back."""
        known = [n for n in self.transport.nodes() if n not in self._nodes and n not in self._strangers]
        if not known:
            return []
        answers, _ = self._hello(known, seed)
        back = []
        for node, about in answers.items():
            silo = str(about["silo"])
            if silo not in self._ids or len(about["clients"]) != len(self._ids[silo]):
                self._strangers.add(node)
                self.note(f"warning: node {node} is a silo that does not belong to this run; it is left out")
                continue
            self._nodes = {n: s for n, s in self._nodes.items() if s != silo} | {node: silo}
            back.append(node)
        return back

    def forget(self, node: int) -> None:
        """The node is greeted anew before the next exchange."""
        self._nodes.pop(node, None)

    def ask(self, requests: Mapping[int, Envelope]) -> "Asked":
        """Sends a request to each node, and waits for the answers."""
        found: dict[int, Envelope | str] = {}
        down = up = 0
        for reply in self.transport.exchange(requests, self.options.deadline) if requests else ():
            down, up = down + reply.bytes_down, up + reply.bytes_up
            if reply.answer is None:
                found[reply.node] = f"did not answer: {reply.error or 'no reason given'}"[:LONGEST_TEXT]
            elif isinstance(error := reply.answer.header.get("error"), str):
                found[reply.node] = error[:LONGEST_TEXT]
            else:
                found[reply.node] = reply.answer
        return Asked({node: found.get(node, "did not answer") for node in requests}, (down, up))


class Asked(NamedTuple):
    answers: dict[int, Envelope | str]  # by node: an answer, or why there is none
    traffic: tuple[int, int]  # bytes down and up


def _checked(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a silo says of itself; nothing of it is believed unseen."""
    clients, shape, classes = header.get("clients"), header.get("input_shape"), header.get("classes")
    whole = isinstance(clients, list) and 0 < len(clients) <= 1_000_000
    if not whole or not all(isinstance(c, Mapping) for c in clients or ()):
        raise Refused("the silo names no clients")
    for entry in clients or ():
        counts = [entry.get(split) for split in SPLITS]
        if not all(type(n) is int and 0 <= n < 2**40 for n in counts) or not isinstance(entry.get("name"), str):
            raise Refused("the silo's clients need a name and whole numbers of samples")
        if entry.get("id") is not None and (type(entry["id"]) is not int or not 0 <= entry["id"] < 1_000_000):
            raise Refused("the silo's clients have ids that are no ids")
        if not entry["train"]:
            raise Refused(f"the client {entry['name'][:40]!r} has no samples to train on")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and 0 < n < 2**20 for n in shape):
        raise Refused("the silo's samples have no shape")
    if not isinstance(classes, list) or len(classes) > 100_000 or not all(isinstance(c, str) for c in classes):
        raise Refused("the silo's classes are no names")
    silo, kind, target = (header.get(key) for key in ("silo", "kind", "target"))
    if not isinstance(silo, str) or kind not in ("own", "simulated") or target not in ("labels", "masks", "numbers"):
        raise Refused("the silo does not say who it is")
    if header.get("inputs", "numbers") not in ("numbers", "tokens"):
        raise Refused("the silo's inputs are neither numbers nor tokens")
    return header


def _classes(of_silos: list[list[str]]) -> tuple[str, ...]:
    """Those that all have, or else all that occur: by number where they are numbers, else by name."""
    if all(classes == of_silos[0] for classes in of_silos):
        return tuple(of_silos[0])
    union = {name for classes in of_silos for name in classes}
    return tuple(sorted(union, key=int) if all(name.isdecimal() for name in union) else sorted(union))
