"""The clients as the server reaches them: programs become requests, and answers are checked before they are used."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bespokefl.core import trees
from bespokefl.core.algorithm import Algorithm
from bespokefl.core.clients import Postprocessor
from bespokefl.core.program import Order, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree
from bespokefl.engines.variants import fingerprint
from bespokefl.errors import InputError, RunError
from bespokefl.flower.refusal import Refused
from bespokefl.flower.server import answers
from bespokefl.flower.server.bounds import Seen, capped, changes
from bespokefl.flower.server.membership import Membership
from bespokefl.flower.server.upload_schema import Expectation
from bespokefl.flower.silo.silo import UNKNOWN_RUN
from bespokefl.flower.silo.state_store import INITIAL, LOST
from bespokefl.flower.transport.codec import Form, packed, unpacked
from bespokefl.flower.transport.envelope import Envelope

T = TypeVar("T")


class NoAnswerError(RunError):
    """Why a client has no part in an exchange."""


class Part(NamedTuple):
    """A node's share of an exchange, checked."""

    clients: list[int]
    uploads: dict[str, Tree]  # a row per client, or one for all
    version: int
    failed: dict[int, str]
    computed: int
    useful: int


@dataclass
class RemoteClients:
    """Runs programs by asking the nodes that host the clients."""

    task: Task
    train_sizes: Rows
    seed: int
    algorithm: Algorithm
    roster: Membership
    run_id: str
    opening: Envelope  # what makes a silo ready for this run; its clients are filled in
    expectation: Expectation
    silos: Sequence[str]  # of every client: who hosts it
    smallest_norm: float  # of the initial model: what an answer's is compared with where nothing was sent
    postprocessors: Sequence[Postprocessor] = ()
    versions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # by client
    exchange: int = 0  # of the round
    seen: Seen = field(init=False)
    classes: Mapping[str, type] = field(init=False)  # that uploads may hold

    def __post_init__(self) -> None:
        if not len(self.versions):
            self.versions = torch.full((len(self.train_sizes),), INITIAL, dtype=torch.int64)
        self.seen = Seen(self.roster.options.max_change)
        self.classes = self.algorithm.named_tuples()

    # what a cohort asks for ----------------------------------------------------------------------------
    def run(self, order: Order) -> Result:
        expected = self.expectation.upload(order)
        program = self.name_of(order)
        mean = self.mean_by(order, program)
        more = {"write": order.write, "mean": mean}

        def read(clients: list[int], answer: Envelope) -> Part:
            return self._part(answer, clients, order, expected, mean is not None)

        parts, failed, traffic = self.ask("run", program, order, more, read)
        parts = self._within(parts, order, program)
        self.exchange += 1
        for part in parts:
            failed |= part.failed
        errors: dict[int, BaseException] = {client: NoAnswerError(why) for client, why in sorted(failed.items())}
        return self._joined(order, parts, errors, mean is not None, traffic)

    def fair(self, clients: Rows, p: Tensor) -> tuple[Tensor, dict[int, str]]:
        """No node weighs more than federation.max_share, from three nodes on."""
        share, hosts = self.roster.options.max_share, [self.silos[client] for client in clients]
        fair = capped(p, hosts, share)
        cut = {}
        for client, before, after in zip(clients.tolist(), p.tolist(), fair.tolist(), strict=True):
            if after < before * (1 - 1e-6):
                cut[client] = f"its weight was cut from {before:.3g} to {after:.3g} (federation.max_share = {share:g})"
        for silo in sorted({self.silos[client] for client in cut}):
            self.roster.note_once(
                f"warning: {self.roster.name_of(silo)} would weigh more than federation.max_share = {share:g}; its "
                "weight is cut to that"
            )
        return fair, cut

    def samples(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        raise RunError("the clients' samples are on their own machines, and stay there")

    def keep(self, clients: Rows, states: Tree, uploads: Mapping[str, Tree]) -> None:
        self.versions[torch.as_tensor(clients)] = states

    def mean_by(self, order: Order, program: str) -> str | None:
        """How nodes may average their clients' uploads, where the method does nothing else with them."""
        if not order.write or self.postprocessors:
            return None
        return self.algorithm.weights if program in self.algorithm.averaged() else None

    def name_of(self, order: Order) -> str:
        names = {fingerprint(program): name for name, program in self.algorithm.at(order.round).programs().items()}
        if (wanted := fingerprint(order.program)) not in names:
            raise InputError(
                f"algorithm.name = {self.algorithm.name!r} runs a program without a name, which cannot be asked for "
                "over a network; make it a property that returns a Program, or add it to `programs`"
            )
        return names[wanted]

    # requests ----------------------------------------------------------------------------------------
    def ask(
        self, kind: str, program: str, order: Order, more: Mapping[str, Any], read: Callable[[list[int], Envelope], T]
    ) -> tuple[list[T], dict[int, str], tuple[int, int] | None]:
        """The answers as ``read`` makes them of clients and answer, why other clients have none, bytes both ways."""
        self.welcome_back()
        place = {int(c): k for k, c in enumerate(order.clients)}
        hosted, failed = self.roster.by_node(list(place))
        requests = {}
        for node, clients in hosted.items():
            own = order.select(np.array([place[c] for c in clients]))
            told, arrays = packed({"shared": dict(own.shared), "per_client": dict(own.per_client)})
            head = {"kind": kind, "run": self.run_id, "round": order.round, "exchange": self.exchange}
            about = {"program": program, "clients": clients, "versions": self.versions[clients].tolist()}
            requests[node] = Envelope({**head, **about, **more, **told}, arrays)

        def checked(node: int, answer: Envelope) -> T:
            _refuse_old(requests[node], answer)
            return read(hosted[node], answer)

        asked = self.roster.ask(requests, checked)
        for node, why in asked.errors.items():
            failed |= dict.fromkeys(hosted[node], why)
            if why == UNKNOWN_RUN or LOST in why:
                self.roster.forget(node)
        return list(asked.answers.values()), failed, asked.traffic if any(asked.traffic) else None

    def open_run(self, nodes: Iterable[int]) -> None:
        """Makes silos ready for this run, and goes on from the states that they have."""
        requests = {}
        for node in nodes:
            header = dict(self.opening.header)
            header["agreement"] = {**header["agreement"], "clients": self.roster.clients_of(node)}
            requests[node] = Envelope(header, self.opening.arrays)
        asked = self.roster.ask(requests, lambda _, answer: answers.held(answer.header))
        for node, why in asked.errors.items():
            self.roster.note(f"warning: node {node} cannot take part: {why}")
            self.roster.unfit[node] = why
        for node, held in asked.answers.items():
            self.roster.unfit.pop(node, None)
            for client in self.roster.clients_of(node):
                self._reconcile(client, held.get(client) or [INITIAL])

    def welcome_back(self) -> None:
        if back := self.roster.rejoined(self.seed):
            self.open_run(back)

    def _reconcile(self, client: int, held: list[int]) -> None:
        """A silo that has lost its newest state goes on from the newest that it has."""
        if int(self.versions[client]) in held:
            return
        self.roster.note(f"warning: client {client} has lost its state, and goes on from an older one")
        self.versions[client] = held[-1]

    # answers -----------------------------------------------------------------------------------------
    def _part(self, answer: Envelope, asked: list[int], order: Order, expected: Form, mean: bool) -> Part:
        clients, failed, version, computed, useful = answers.done(answer.header, asked)
        limit = self.roster.options.max_bytes
        classes = self.classes
        uploads = unpacked(answer, ("uploads",), classes, most_bytes=limit, finite=False)["uploads"]
        rows = (1 if mean else len(clients)) if clients else 0
        if rows:
            uploads = expected.taken(uploads, rows, classes)
        large = self._too_large(uploads, rows, order)
        if large and mean:
            raise Refused(large[0])
        if large:
            failed |= {clients[row]: f"refused: {why}" for row, why in large.items()}
            good = [row for row in range(rows) if row not in large]
            index = torch.tensor(good, dtype=torch.int64)
            clients, uploads = [clients[row] for row in good], trees.rows(uploads, index)
        return Part(clients, uploads, version, failed, computed, useful)

    def _within(self, parts: list[Part], order: Order, program: str) -> list[Part]:
        """The parts without the rows whose change is many times the median node's (federation.max_change)."""
        place = {int(c): k for k, c in enumerate(order.clients)}
        sends = self.algorithm.sends
        moved: list[Tensor] = []
        for part in parts:
            rows = len(trees.leaves(part.uploads)[0]) if trees.leaves(part.uploads) else 0
            alike = rows == len(part.clients)
            known = {k: start for k, start in sends.items() if alike or start is None or start in order.shared}
            moved.append(changes(part.uploads, known, order, [place[c] for c in part.clients][:rows]))
        of_nodes = [float(rows.nanmedian()) for rows in moved if len(rows) and bool(rows.isfinite().any())]
        limit = self.seen.limit(program, of_nodes)
        self.seen.note(program, [value for value in of_nodes if value <= limit])
        return [self._without(part, rows, limit) for part, rows in zip(parts, moved, strict=True)]

    def _without(self, part: Part, moved: Tensor, limit: float) -> Part:
        """Where a node sent one mean, that is refused for all of its clients."""
        too_far = moved > limit
        if not bool(too_far.any()):
            return part
        why = "refused: the upload changed by {:.3g}; at most {:.3g} is taken (federation.max_change)"
        if len(moved) != len(part.clients):
            gone = dict.fromkeys(part.clients, why.format(float(moved[0]), limit))
            return part._replace(clients=[], uploads={}, failed=part.failed | gone)
        refused = {c: why.format(float(moved[k]), limit) for k, c in enumerate(part.clients) if too_far[k]}
        kept = [c for c in part.clients if c not in refused]
        uploads = trees.rows(part.uploads, torch.nonzero(~too_far).reshape(-1))
        return part._replace(clients=kept, uploads=uploads, failed=part.failed | refused)

    def _too_large(self, uploads: Tree, rows: int, order: Order) -> dict[int, str]:
        """The rows whose norm cannot be honest, with the reason; NaN is for the check that all answers go through."""
        most = self.roster.options.max_norm
        if most is None:
            return {}
        sent = max(norm_of(order.shared), norm_of(order.per_client), self.smallest_norm)
        sizes = {row: norm_of(trees.rows(uploads, row)) for row in range(rows)}
        return {
            row: f"the answer's norm is {size:.3g}, that of the download {sent:.3g} (federation.max_norm)"
            for row, size in sizes.items()
            if size > most * sent
        }

    def _joined(
        self,
        order: Order,
        parts: list[Part],
        failed: dict[int, BaseException],
        mean: bool,
        traffic: tuple[int, int] | None,
    ) -> Result:
        """The nodes' answers as one, in the order of the clients."""
        place = {int(c): k for k, c in enumerate(order.clients)}
        answered = sorted((p for p in parts if p.clients), key=lambda part: part.clients[0])
        positions = np.array([place[c] for part in answered for c in part.clients], dtype=np.int64)
        ascending = np.argsort(positions)
        versions = torch.tensor([part.version for part in answered for _ in part.clients], dtype=torch.int64)
        groups = np.repeat(np.arange(len(answered)), [len(part.clients) for part in answered])
        uploads: dict[str, Tree] = trees.concat([part.uploads for part in answered]) if answered else {}
        if not mean and answered:
            uploads = trees.rows(uploads, torch.as_tensor(ascending))
        return Result(
            positions[ascending],
            uploads,
            versions[torch.as_tensor(ascending)],
            failed,
            sum(part.computed for part in parts),
            sum(part.useful for part in parts),
            groups[ascending] if mean else None,
            traffic,
        )


def _refuse_old(request: Envelope, answer: Envelope) -> None:
    """Refuses an answer that belongs to another request."""
    for key in ("run", "round", "exchange"):
        if answer.header.get(key) != request.header.get(key):
            seen = str(answer.header.get(key))[:40]
            raise Refused(f"an old answer, of {key} {seen}; this is {request.header.get(key)}")


def norm_of(tree: Tree) -> float:
    """Over all tensors of a tree together."""
    tensors = [v for v in trees.leaves(tree) if isinstance(v, Tensor)]
    norms = [torch.linalg.vector_norm(v if v.is_floating_point() else v.double()) for v in tensors]
    return math.hypot(*map(float, norms))
