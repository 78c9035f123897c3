"""A federation whose clients are elsewhere: the same rounds, with requests in the place of an engine.

The server knows of a client's state only its version, a number. It names the version that a program is to start from,
and takes the one that comes back with an answer that it uses; so a round that is repeated begins where it began before.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespokefl import trees
from bespokefl.algorithms.base import Algorithm
from bespokefl.attacks import Attack, Attacker
from bespokefl.cohort import Cohort
from bespokefl.engines.base import Result
from bespokefl.errors import EndedEarly, InputError, RunError
from bespokefl.evaluation import of_all
from bespokefl.flower.envelope import Envelope
from bespokefl.flower.expectation import Expectation, made_up
from bespokefl.flower.roster import POLL, RemoteCensus, Roster
from bespokefl.flower.silo import UNKNOWN_RUN
from bespokefl.flower.vault import INITIAL
from bespokefl.flower.wire import Refused, check_rows, packed, unpacked
from bespokefl.privacy import Privacy, PrivacySettings
from bespokefl.program import Order, Program, Rows
from bespokefl.rounds import RoundLoop, RoundRecord
from bespokefl.scoring import Evaluation
from bespokefl.serial import pack, unpack
from bespokefl.task import Task
from bespokefl.trees import Model, Tree

ENGINE = "federation"


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
class RemoteSite:
    """Runs programs by asking the nodes that host the clients."""

    task: Task
    train_sizes: Rows
    seed: int
    algorithm: Algorithm
    roster: Roster
    run_id: str
    opening: Envelope  # what makes a silo ready for this run; its clients are filled in
    expectation: Expectation
    smallest_norm: float  # of the initial model: what an answer's is compared with where nothing was sent
    attacker: Attacker | None = None
    privacy: Privacy | None = None
    versions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # by client
    exchange: int = 0  # of the round

    def __post_init__(self) -> None:
        self._names: dict[Program, str] = {p: name for name, p in self.algorithm.programs().items()}
        if not len(self.versions):
            self.versions = torch.full((len(self.train_sizes),), INITIAL, dtype=torch.int64)

    # the site of a cohort ----------------------------------------------------------------------------
    def run(self, order: Order) -> Result:
        expected = self.expectation.upload(order)
        mean = self.mean_by(order)
        more = {"write": order.write, "mean": mean}
        asked, failed, traffic = self.ask("run", order, more)
        parts: list[Part] = []
        for clients, answer in asked:
            try:
                parts.append(self._part(answer, clients, order, expected, mean is not None))
            except Refused as refused:
                failed |= dict.fromkeys(clients, f"refused: {refused}")
        self.exchange += 1
        for part in parts:
            failed |= part.failed
        errors: dict[int, BaseException] = {client: NoAnswerError(why) for client, why in sorted(failed.items())}
        return self._joined(order, parts, errors, mean is not None, traffic)

    def keep(self, clients: Rows, states: Tree) -> None:
        self.versions[torch.as_tensor(clients)] = states

    def mean_by(self, order: Order) -> str | None:
        """How nodes may average their clients' uploads, where the method does nothing else with them."""
        if not order.write or self.attacker is not None or self.privacy is not None:
            return None
        averages = self.name_of(order.program) in self.algorithm.averaged()
        return self.algorithm.weights if averages else None

    def name_of(self, program: Program) -> str:
        if program not in self._names:
            raise InputError(
                f"algorithm.name = {self.algorithm.name!r} runs a program without a name, which cannot be asked for "
                "over a network; make it a property that returns a Program, or add it to `programs`"
            )
        return self._names[program]

    # requests ----------------------------------------------------------------------------------------
    def ask(
        self, kind: str, order: Order, more: Mapping[str, Any]
    ) -> tuple[list[tuple[list[int], Envelope]], dict[int, str], tuple[int, int] | None]:
        """Answers with the clients that they are of, why others have none, and the bytes both ways."""
        self.welcome_back()
        place = {int(c): k for k, c in enumerate(order.clients)}
        hosted, missing = self.roster.by_node(list(place))
        failed = dict.fromkeys(missing, "its silo is not connected")
        program = self.name_of(order.program)
        requests = {}
        for node, clients in hosted.items():
            own = order.select(np.array([place[c] for c in clients]))
            told, arrays = packed({"shared": dict(own.shared), "per_client": dict(own.per_client)})
            head = {"kind": kind, "run": self.run_id, "round": order.round, "exchange": self.exchange}
            about = {"program": program, "clients": clients, "versions": self.versions[clients].tolist()}
            requests[node] = Envelope({**head, **about, **more, **told}, arrays)
        asked = self.roster.ask(requests)
        good: list[tuple[list[int], Envelope]] = []
        for node, answer in asked.answers.items():
            if isinstance(answer, Envelope) and (old := _is_old(requests[node], answer)):
                answer = f"refused: {old}"
            if isinstance(answer, str):
                failed |= dict.fromkeys(hosted[node], answer)
                if answer == UNKNOWN_RUN or "not kept here" in answer:
                    self.roster.forget(node)
            else:
                good.append((hosted[node], answer))
        return good, failed, asked.traffic if any(asked.traffic) else None

    def open_run(self, nodes: Iterable[int]) -> None:
        """Makes silos ready for this run, and goes on from the states that they have."""
        requests = {}
        for node in nodes:
            header = dict(self.opening.header)
            header["agreement"] = {**header["agreement"], "clients": self.roster.clients_of(node)}
            requests[node] = Envelope(header, self.opening.arrays)
        for node, answer in self.roster.ask(requests).answers.items():
            if isinstance(answer, str):
                self.roster.note(f"warning: node {node} cannot take part: {answer}")
                self.roster.forget(node)
                continue
            held = answer.header.get("held")
            for client in self.roster.clients_of(node):
                there = held.get(str(client)) if isinstance(held, Mapping) else None
                self._reconcile(client, there if isinstance(there, list) else [INITIAL])

    def welcome_back(self) -> None:
        if back := self.roster.newcomers(self.seed):
            self.open_run(back)

    def _reconcile(self, client: int, held: list[Any]) -> None:
        """A silo that has lost its newest state goes on from the newest that it has."""
        if int(self.versions[client]) in held:
            return
        whole = [v for v in held if type(v) is int and 0 <= v < 2**63] or [INITIAL]
        self.roster.note(f"warning: client {client} has lost its state, and goes on from an older one")
        self.versions[client] = whole[-1]

    # answers -----------------------------------------------------------------------------------------
    def _part(self, answer: Envelope, asked: list[int], order: Order, expected: Mapping[str, Any], mean: bool) -> Part:
        header = answer.header
        clients, told, version = header.get("clients"), header.get("failed"), header.get("version")
        if not isinstance(clients, list) or not set(clients) <= set(asked) or sorted(set(clients)) != clients:
            raise Refused("the answer is of clients that were not asked")
        if not isinstance(told, Mapping) or type(version) is not int or not 0 < version < 2**63:
            raise Refused("the answer's header is damaged")
        failed = {c: str(told.get(str(c), "gave no answer"))[:400] for c in asked if c not in clients}
        counts = [header.get(key) for key in ("computed", "useful")]
        if not all(type(n) is int and 0 <= n < 2**53 for n in counts):
            raise Refused("the answer's header is damaged")
        limit = self.roster.options.max_bytes
        classes = self.algorithm.named_tuples()
        uploads = unpacked(answer, ("uploads",), classes, most_bytes=limit, finite=False)["uploads"]
        rows = (1 if mean else len(clients)) if clients else 0
        if rows:
            check_rows(uploads, expected, rows)
        large = self._too_large(uploads, rows, order)
        if large and mean:
            raise Refused(large[0])
        if large:
            failed |= {clients[row]: f"refused: {why}" for row, why in large.items()}
            good = [row for row in range(rows) if row not in large]
            index = torch.tensor(good, dtype=torch.int64)
            clients, uploads = [clients[row] for row in good], trees.rows(uploads, index)
        return Part(clients, uploads, version, failed, *counts)  # type: ignore[arg-type]

    def _too_large(self, uploads: Tree, rows: int, order: Order) -> dict[int, str]:
        """The rows whose norm cannot be honest, with the reason; NaN is for the check that all answers go through."""
        most = self.roster.options.max_norm
        if most is None:
            return {}
        sent = max(_norm(order.shared), _norm(order.per_client), self.smallest_norm)
        sizes = {row: _norm(trees.rows(uploads, row)) for row in range(rows)}
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


class RemoteFederation(RoundLoop):
    """An algorithm on clients that are asked over a network."""

    data: RemoteCensus
    site: RemoteSite

    def __init__(
        self,
        task: Task,
        data: RemoteCensus,
        algorithm: Algorithm,
        *,
        roster: Roster,
        run_id: str,
        agreement: Mapping[str, Any],
        initial: Model,
        seed: int,
        participation: float,
        attack: Attack,
        privacy: PrivacySettings | None = None,
    ) -> None:
        if why := algorithm.why_not_apart:
            raise InputError(f"algorithm.name = {algorithm.name!r} cannot run in a real federation: {why}")
        super().__init__(
            task,
            data,
            algorithm,
            device=torch.device("cpu"),
            seed=seed,
            participation=participation,
            clients_per_round=None,
            schedule=None,
            attack=attack,
            privacy=privacy,
        )
        x0, state = self._start(initial)
        told, arrays = packed({"x0": x0})
        header = {"kind": "open", "federation": roster.federation, "agreement": {"run": run_id, **agreement}, **told}
        sample = made_up(data.input_shape, data.classes, data.target)
        self.site = RemoteSite(
            task,
            data.sizes("train"),
            seed,
            algorithm,
            roster,
            run_id,
            Envelope(header, arrays),
            Expectation(task, state, sample),
            max(1.0, _norm(x0)),
            self._attacker(),
            self.privacy,
        )

    @property
    def engine_name(self) -> str:
        return ENGINE

    @property
    def _noise_seed(self) -> int | None:
        """None: silos know the seed, and whoever knows the noise can take it away again."""
        return None

    def begin(self) -> None:
        """Makes the silos ready."""
        hosted, _ = self.site.roster.by_node(list(range(self.data.clients)))
        self.site.open_run(list(hosted))

    # rounds ------------------------------------------------------------------------------------------
    def round(self, clients: Iterable[int] | None = None, silent: Collection[int] = ()) -> RoundRecord:
        """One round, tried again while too few clients answer; EndedEarly if that does not help."""
        options = self.site.roster.options
        server, versions, done = self.server, self.site.versions.clone(), self.rounds_done
        asked = None if clients is None else list(clients)
        for attempt in range(options.retries + 1):
            self.site.exchange = 0
            try:
                record = super().round(asked, silent)
                answered = [int(c) for c in record.clients if int(c) not in record.failed]
                if len(answered) >= min(options.min_answers, len(record.clients)):
                    return record
                reasons = "; ".join(f"client {c}: {why}" for c, why in list(record.failed.items())[:3])
                why = f"{len(answered)} clients answered, at least {options.min_answers} must (federation.min_answers)"
                why = f"{why}; {reasons}"
            except RunError as error:
                why = str(error)
            self.server, self.site.versions, self.rounds_done = server, versions.clone(), done
            self.site.roster.note(f"warning: round {done + 1}, try {attempt + 1} of {options.retries + 1}: {why}")
            if attempt < options.retries:
                self._wait_for_all()
        raise EndedEarly(f"round {done + 1} could not be done in {options.retries + 1} tries: {why}")

    def _wait_for_all(self) -> None:
        """Until every silo is back, or for federation.wait seconds."""
        until = time.monotonic() + self.site.roster.options.wait
        everyone = list(range(self.data.clients))
        while time.monotonic() < until:
            self.site.welcome_back()
            if not self.site.roster.by_node(everyone)[1]:
                return
            time.sleep(POLL)

    # models and scores -------------------------------------------------------------------------------
    def evaluate(self, split: str = "test", model: str = "personal", *, closer: bool = False) -> Evaluation:
        """As in one process, by the silos themselves: they tell figures. NaN for clients that did not answer."""
        cohort, options = Cohort(self.site, self.honest, self.rounds_done), self.site.roster.options
        call = self._call(model, cohort)
        order = Order(call.program, cohort.ids, call.shared, call.per_client, cohort.round)
        wanted = {"split": split, "model": model, "closer": closer}
        for _ in range(options.retries + 1):
            asked, failed, _ = self.site.ask("score", order, wanted)
            if asked:
                break
            self._wait_for_all()
        else:
            raise EndedEarly(f"no silo scores its model after round {self.rounds_done}: {next(iter(failed.values()))}")
        scores = _Scores(self.honest)
        for clients, answer in asked:
            try:
                scores.add(clients, answer)
            except Refused as refused:
                self.site.roster.note(f"warning: the scores of clients {clients[:5]} are refused: {refused}")
        return of_all(scores.evaluation(), self.data.clients)

    def end(self) -> None:
        """Every silo writes its clients' personal models into its own folder."""
        cohort = Cohort(self.site, np.arange(self.data.clients), self.rounds_done)
        call = self._call("personal", cohort)
        order = Order(call.program, cohort.ids, call.shared, call.per_client, cohort.round)
        _, failed, _ = self.site.ask("keep", order, {})
        for client, why in list(failed.items())[:3]:
            self.site.roster.note(f"warning: client {client} could not keep its personal model: {why}")

    # keeping -----------------------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        server, tensors = pack(self.server, "server")
        meta = {"rounds_done": self.rounds_done, "server": server, "versions": self.site.versions.tolist()}
        return {k: v.detach().cpu() for k, v in tensors.items()}, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        if "versions" not in meta:
            raise InputError("the checkpoint is that of a simulation; a real federation cannot go on from it.")
        self.server = unpack(meta["server"], tensors, self.algorithm.named_tuples())
        self.site.versions = torch.tensor(meta["versions"], dtype=torch.int64)
        self.rounds_done = int(meta["rounds_done"])


class _Scores:
    """Figures as they come in, by client."""

    def __init__(self, clients: Rows) -> None:
        self._clients = clients
        self._n = np.zeros(len(clients), dtype=np.int64)
        self._floats: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        for name in ("accuracy", "loss"):
            self._column(name)

    def add(self, clients: list[int], answer: Envelope) -> None:
        arrays = answer.arrays
        if answer.header.get("clients") != clients or not {"n", "accuracy", "loss"} <= set(arrays) or len(arrays) > 20:
            raise Refused("they are not those that were asked for")
        for array in arrays.values():
            if array.shape != (len(clients),) or array.dtype.kind not in "if":
                raise Refused("they have another shape than one value per client")
        places = np.searchsorted(self._clients, clients)
        self._n[places] = arrays["n"].astype(np.int64)
        for name, array in arrays.items():
            if name != "n":
                self._column(name.removeprefix("further."))[places] = array

    def evaluation(self) -> Evaluation:
        further = {name: values for name, values in self._floats.items() if name not in ("accuracy", "loss")}
        return Evaluation(self._clients, self._n, self._floats["accuracy"], self._floats["loss"], further)

    def _column(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return self._floats.setdefault(name, np.full(len(self._clients), np.nan))


def _is_old(request: Envelope, answer: Envelope) -> str:
    """How an answer belongs to another request; empty if it is of this one."""
    for key in ("run", "round", "exchange"):
        if answer.header.get(key) != request.header.get(key):
            seen = str(answer.header.get(key))[:40]
            return f"an old answer, of {key} {seen}; this is {request.header.get(key)}"
    return ""


def _norm(tree: Tree) -> float:
    squares = [float(v.double().square().sum()) for v in trees.leaves(tree) if isinstance(v, Tensor)]
    return float(np.sqrt(sum(squares)))
