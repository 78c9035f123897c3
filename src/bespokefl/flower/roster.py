"""Who takes part: which node hosts which clients, as the silos say it, and as the server remembers it.

A silo is known by a number that it drew itself, so that it may come back as another node; its clients keep their ids.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from bespokefl.config import Experiment, FederationSection
from bespokefl.data.splits import SPLITS
from bespokefl.errors import InputError, RunError
from bespokefl.flower import limits
from bespokefl.flower.answers import greeting
from bespokefl.flower.census import RemoteCensus, all_classes, fitting, kind_of
from bespokefl.flower.envelope import Envelope, Transport
from bespokefl.flower.refusal import Refused, reading
from bespokefl.flower.silo import PROTOCOL
from bespokefl.interrupts import Interrupted, StopRequest
from bespokefl.plain import one_line
from bespokefl.results.files import read_json, write_json

FEDERATION = "federation.json"
POLL = 0.2  # seconds between two looks at who is connected

T = TypeVar("T")


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
        self._noted: set[str] = set()  # what need not be said again
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
            known = {node: about for node, about in answers.items() if self._is_as_it_was(about)}
            told, misfits = fitting(told | known)
            misfits |= dict.fromkeys(answers.keys() - known.keys(), "it had another number of clients before")
            said |= errors | misfits
            for node, why in (errors | misfits).items():
                self.note_once(f"warning: node {node} is left out: {why}")
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

    def _is_as_it_was(self, about: Mapping[str, Any]) -> bool:
        known = self._ids.get(str(about["silo"]))
        return known is None or len(known) == len(about["clients"])

    def note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def settings(self) -> dict[str, Any]:
        """How silos are to read their samples, and how much of them to test on."""
        section = self._experiment.data
        image = {k: v for k, v in section.options.items() if k in ("size", "mode")}
        told = {"normalize": section.normalize, "test": section.test, "val": section.val, "image": image}
        return told | {"inputs": section.options.get("inputs")}

    def _hello(self, nodes: list[int], seed: int) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
        who = {"kind": "hello", "protocol": PROTOCOL, "federation": self.federation}
        header = {**who, "seed": seed, "data": self.settings()}
        asked = self.ask({node: Envelope(header) for node in nodes}, lambda _, answer: greeting(answer.header))
        return asked.answers, asked.errors

    def _census(self, told: Mapping[int, Mapping[str, Any]]) -> RemoteCensus:
        """Ids for all, and one description of all."""
        by_silo = {str(about["silo"]): about for _, about in sorted(told.items())}
        kinds = {kind_of(about) for about in by_silo.values()}
        if len(kinds) > 1:
            raise InputError(
                f"silos have samples of different kinds: {'; '.join(map(str, sorted(kinds)))}; images can be brought "
                "to one size by data.size and data.mode"
            )
        kind = kinds.pop()
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
            all_classes([about["classes"] for about in by_silo.values()]),
            kind.input_shape,
            kind.target,
            kind.inputs,
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

    def name_of(self, silo: str) -> str:
        """For people: the node that it is."""
        return next((f"node {node}" for node, known in self._nodes.items() if known == silo), f"silo {silo}")

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
            if silo not in self._ids or not self._is_as_it_was(about):
                self._strangers.add(node)
                self.note(f"warning: node {node} is a silo that does not belong to this run; it is left out")
                continue
            self._nodes = {n: s for n, s in self._nodes.items() if s != silo} | {node: silo}
            back.append(node)
        return back

    def forget(self, node: int) -> None:
        """The node is greeted anew before the next exchange."""
        self._nodes.pop(node, None)

    def ask(self, requests: Mapping[int, Envelope], read: Callable[[int, Envelope], T]) -> "Asked[T]":
        """Sends a request to each node, waits for the answers, and reads them.

        ``read`` takes a node and its answer, and raises `Refused` where it is not as it should be. Whatever goes wrong
        with a node's answer is an error of that node, and nobody else's.
        """
        found: dict[int, T] = {}
        errors = dict.fromkeys(requests, "did not answer")
        down = up = 0
        for reply in self.transport.exchange(requests, self.options.deadline) if requests else ():
            node, answer = reply.node, reply.answer
            down, up = down + reply.bytes_down, up + reply.bytes_up
            if answer is None:
                errors[node] = f"did not answer: {one_line(reply.error, limits.TEXT) or 'no reason given'}"
            elif isinstance(error := answer.header.get("error"), str):
                errors[node] = one_line(error, limits.TEXT)
            else:
                try:
                    with reading("the answer"):
                        found[node] = read(node, answer)
                    del errors[node]
                except Refused as refused:
                    errors[node] = one_line(f"refused: {refused}", limits.TEXT)
        return Asked({node: found[node] for node in requests if node in found}, errors, (down, up))


@dataclass(frozen=True)
class Asked(Generic[T]):
    answers: dict[int, T]  # by node, of those whose answer was read; in the order of the requests
    errors: dict[int, str]  # by node, why there is none
    traffic: tuple[int, int]  # bytes down and up
