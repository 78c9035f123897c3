"""Who takes part: which node hosts which clients, as the silos say it, and as the server remembers it.

A silo is known by a number that it drew itself, so that it may come back as another node; its clients keep their ids.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from bespokefl.data.splits import SPLITS
from bespokefl.errors import RunError
from bespokefl.experiments.schema import Experiment, FederationSection
from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused, reading
from bespokefl.flower.server.answers import greeting
from bespokefl.flower.server.census import NOBODY, RemoteCensus, all_classes, fitting, kind_of
from bespokefl.flower.server.greetings import Greetings
from bespokefl.flower.silo.silo import PROTOCOL
from bespokefl.flower.transport.envelope import LATE, Envelope, Transport
from bespokefl.interrupts import Interrupted, StopRequest
from bespokefl.plain import one_line
from bespokefl.results.files import read_json, write_json

FEDERATION = "federation.json"
POLL = 0.2  # seconds between two looks at who is connected

T = TypeVar("T")


class Membership:
    """The nodes of a federation."""

    def __init__(self, transport: Transport, experiment: Experiment, out: Path, note: Callable[[str], None]) -> None:
        self.transport, self.note = transport, note
        self.options: FederationSection = experiment.federation
        self._experiment, self._file = experiment, out / FEDERATION
        stored = read_json(self._file) if self._file.is_file() else {}
        self.federation: str = stored.get("federation", secrets.token_hex(8))
        self._ids: dict[str, list[int]] = stored.get("silos", {})  # by silo: its clients
        self._told: dict[str, dict[str, Any]] = stored.get("told", {})  # by seed and client: name, samples by split
        self._greetings = Greetings(self.options.hello)
        self._nodes: dict[int, str] = {}  # by node that was greeted: its silo
        self._strangers: set[int] = set()  # nodes that have no place here
        self._noted: set[str] = set()  # what need not be said again
        self.unfit: dict[int, str] = {}  # nodes that refuse the run that is going on, with the reason

    # the beginning -----------------------------------------------------------------------------------
    def gather(
        self,
        nodes: int,
        seed: int,
        stop: StopRequest | None = None,
        unsuitable: Callable[[Mapping[str, Any]], str] = lambda about: "",
    ) -> RemoteCensus:
        """Waits until so many silos are there, or somebody asks to stop, and learns what they have.

        Who is left out (``unsuitable`` says whom the configuration cannot run on) is not waited for: the others go on
        without, when `federation.hello` seconds have passed in which nothing changed.
        """
        deadline = time.monotonic() + self.options.wait
        heard: dict[int, Mapping[str, Any]] = {}
        fit: dict[int, Mapping[str, Any]] = {}
        reasons: dict[int, str] = {}  # of nodes that are left out
        standing, since = None, time.monotonic()
        while True:
            connected = self.transport.nodes()
            heard = {node: about for node, about in heard.items() if node in connected or node in fit}
            answers, errors = self._hello([node for node in connected if node not in fit], seed)
            heard |= answers
            place = partial(self._misplaced, seed=seed, nodes=nodes)
            fit, misfits = fitting(heard, unsuitable, place)
            reasons = {node: why for node, why in reasons.items() if node in connected and node not in fit}
            reasons |= errors | misfits
            for node in answers.keys() & misfits.keys():
                self._greetings.later(node)
            for node, why in reasons.items():
                self.note_once(f"warning: node {node} is left out: {why}")
            now = time.monotonic()
            if (here := (set(fit), set(reasons))) != standing:
                standing, since = here, now
            if len(fit) >= nodes and not _unhosted(fit):
                break
            if now - since >= self.options.hello or now > deadline:
                enough = self._is_enough(fit, nodes, len(reasons), over=now > deadline)
                why = "; ".join(f"node {node}: {text}" for node, text in reasons.items())
                if enough:
                    if len(fit) < nodes:
                        self.note(f"warning: {len(fit)} of {nodes} nodes begin, without others: {why or 'none came'}")
                    break
                if not fit and len(reasons) >= nodes:
                    raise RunError(f"none of the {len(reasons)} nodes that are there can take part: {why}")
                if now > deadline:
                    clients = sum(len(about["clients"]) for about in fit.values())
                    few = f" with {clients} clients, at least {self.options.min_answers} must answer"
                    raise RunError(
                        f"{len(fit)} of {nodes} silos were there after {self.options.wait:g} s (federation.wait)"
                        + (few if fit and clients < self.options.min_answers else "")
                        + (f": {why}" if why else "")
                    )
            if stop is not None and stop.asked:
                raise Interrupted(f"while {len(fit)} of {nodes} silos were there")
            time.sleep(POLL)
        census = self._census(fit, seed)
        write_json(self._file, {"federation": self.federation, "silos": self._ids, "told": self._told})
        self._nodes = {node: str(about["silo"]) for node, about in fit.items()}
        return census

    def _is_enough(self, fit: Mapping[int, Mapping[str, Any]], nodes: int, left_out: int, *, over: bool) -> bool:
        """Whether the nodes that are there begin, though some are missing; ``over``: nobody else is waited for."""
        least = self.options.min_nodes
        needed = max(nodes - left_out, least or 1)
        if over and least is not None:
            needed = min(needed, least)
        clients = sum(len(about["clients"]) for about in fit.values())
        return len(fit) >= needed and clients >= self.options.min_answers

    def _misplaced(self, about: Mapping[str, Any], *, seed: int, nodes: int) -> str:
        """Why a silo cannot take the place that it would have beside those of an earlier start; nothing if it can."""
        silo = str(about["silo"])
        if (known := self._ids.get(silo)) is not None:
            if len(known) != len(about["clients"]):
                return "it had another number of clients before"
            before = self._told.get(str(seed), {})
            for client, entry in zip(known, about["clients"], strict=True):
                sizes = [entry[split] for split in SPLITS]
                if str(client) in before and before[str(client)]["sizes"] != sizes:
                    return f"it told other numbers of samples of client {client} before"
            return ""
        if len(self._ids) >= nodes:
            return "the federation began with other silos, and this is none of them (has it lost its folder?)"
        taken = {c for ids in self._ids.values() for c in ids}
        if claimed := [entry["id"] for entry in about["clients"] if entry["id"] in taken]:
            return f"it claims the clients {claimed[:10]}, which another silo had before"
        return ""

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
        """What those say who are to be greeted now, and why others say nothing."""
        who = {"kind": "hello", "protocol": PROTOCOL, "federation": self.federation}
        header = {**who, "seed": seed, "data": self.settings()}
        requests = {node: Envelope(header) for node in self._greetings.due(nodes)}
        seconds = min(self.options.hello, self.options.deadline)
        asked = self.ask(requests, lambda _, answer: greeting(answer.header), seconds)
        errors = dict(asked.errors)
        for node in errors:
            if node in asked.silent:
                errors[node] = self._greetings.keeps_silent(node)
            else:
                self._greetings.later(node)
        return asked.answers, errors

    def _census(self, told: Mapping[int, Mapping[str, Any]], seed: int) -> RemoteCensus:
        """Ids for all, and one description of all; a client that nobody hosts has the samples that it once had."""
        by_silo = {str(about["silo"]): about for _, about in sorted(told.items())}
        kind = kind_of(next(iter(by_silo.values())))
        self._assign(by_silo)
        known = self._told.setdefault(str(seed), {})
        hosts: dict[int, str] = {}
        for silo, about in by_silo.items():
            for client, entry in zip(self._ids[silo], about["clients"], strict=True):
                hosts[client] = silo
                known[str(client)] = {"name": str(entry["name"]), "sizes": [entry[split] for split in SPLITS]}
        count = kind.of or 1 + max(c for ids in self._ids.values() for c in ids)
        if missing := [c for c in range(count) if c not in hosts]:
            self.note(
                f"warning: nobody hosts the clients {', '.join(map(str, missing[:10]))}"
                f"{' and others' if len(missing) > 10 else ''} ({len(missing)} of {count}): the federation begins "
                "without them"
            )
        entries = [known.get(str(c), {"name": str(c), "sizes": [0] * len(SPLITS)}) for c in range(count)]
        return RemoteCensus(
            tuple(entry["name"] for entry in entries),
            all_classes([about["classes"] for about in by_silo.values()]),
            kind.input_shape,
            kind.target,
            kind.inputs,
            {split: np.array([entry["sizes"][k] for entry in entries], np.int64) for k, split in enumerate(SPLITS)},
            tuple(hosts.get(client, NOBODY) for client in range(count)),
        )

    def _assign(self, by_silo: Mapping[str, Mapping[str, Any]]) -> None:
        """A silo of simulated clients says which; one of its own gets the next free id, and keeps it."""
        taken = {c for ids in self._ids.values() for c in ids}
        for silo, about in by_silo.items():
            if silo not in self._ids:
                free = (c for c in range(len(taken) + len(about["clients"])) if c not in taken)
                simulated = about["kind"] == "simulated"
                self._ids[silo] = [entry["id"] if simulated else next(free) for entry in about["clients"]]
                taken |= set(self._ids[silo])

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

    def rejoined(self, seed: int) -> list[int]:
        """Nodes that are new, and turn out to be known silos: they came back."""
        known = [n for n in self.transport.nodes() if n not in self._nodes and n not in self._strangers]
        if not known:
            return []
        answers, errors = self._hello(known, seed)
        for node, why in errors.items():
            self.note_once(f"warning: node {node} is left out: {why}")
        back = []
        for node, about in answers.items():
            silo = str(about["silo"])
            if silo not in self._ids or self._misplaced(about, seed=seed, nodes=0):
                self._strangers.add(node)
                self.note(f"warning: node {node} is a silo that does not belong to this run; it is left out")
                continue
            self._nodes = {n: s for n, s in self._nodes.items() if s != silo} | {node: silo}
            back.append(node)
        return back

    def forget(self, node: int) -> None:
        """The node is greeted anew before the next exchange."""
        self._nodes.pop(node, None)

    def ask(
        self, requests: Mapping[int, Envelope], read: Callable[[int, Envelope], T], seconds: float | None = None
    ) -> "Asked[T]":
        """Sends a request to each node, waits for the answers, and reads them.

        ``read`` takes a node and its answer, and raises `Refused` where it is not as it should be. Whatever goes wrong
        with a node's answer is an error of that node, and nobody else's.
        """
        found: dict[int, T] = {}
        errors = dict.fromkeys(requests, "did not answer")
        silent: set[int] = set()
        down = up = 0
        for reply in self.transport.exchange(requests, seconds or self.options.deadline) if requests else ():
            node, answer = reply.node, reply.answer
            down, up = down + reply.bytes_down, up + reply.bytes_up
            if answer is None:
                if reply.error.startswith(LATE):
                    silent.add(node)
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
        return Asked({node: found[node] for node in requests if node in found}, errors, (down, up), silent)


@dataclass(frozen=True)
class Asked(Generic[T]):
    answers: dict[int, T]  # by node, of those whose answer was read; in the order of the requests
    errors: dict[int, str]  # by node, why there is none
    traffic: tuple[int, int]  # bytes down and up
    silent: set[int]  # nodes that did not answer in time


def _unhosted(told: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether clients of a simulation are missing: a node may still come that has them."""
    clients = sum(len(about["clients"]) for about in told.values())
    return any(clients < kind.of for kind in map(kind_of, told.values()) if kind.of is not None)
