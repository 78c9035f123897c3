"""The round loop: sample clients, run the algorithm's round on them, score every client's model."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bespokefl import trees
from bespokefl.algorithms.base import Algorithm, Setup
from bespokefl.attacks import Attack, Attacker
from bespokefl.cohort import Cohort, Ledger, Site
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Engine, build_engine
from bespokefl.engines.base import Resident
from bespokefl.errors import InputError
from bespokefl.evaluation import batch_size, closer_look, evaluation, joined, judged_by, of_all
from bespokefl.metrics import summarise
from bespokefl.program import Call, Rows
from bespokefl.rng import stream
from bespokefl.sample_metrics import Judged
from bespokefl.scoring import GLOBAL_MODEL, Evaluation, network_outputs, scored
from bespokefl.sent import LastSent
from bespokefl.serial import pack, unpack
from bespokefl.states import ClientStates
from bespokefl.task import Task
from bespokefl.trees import Model, Tree

Schedule = Sequence[Iterable[int]] | Callable[[int], Iterable[int]]

SCORING_BYTES = 2**28  # of client states, or of kept answers, that are gathered at once to be scored


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round."""

    round: int  # 1-based
    clients: Rows  # ids that were asked
    failed: dict[int, str]  # id -> why its answer was left out
    seconds: float
    bytes_down: int
    bytes_up: int
    samples_computed: int
    samples_useful: int

    @property
    def waste(self) -> float:
        """Computed over useful samples: 1 means no padding."""
        return self.samples_computed / max(1, self.samples_useful)


@dataclass
class History:
    """The rounds of a run and the evaluations in between."""

    rounds: list[RoundRecord] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by 1-based round

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """One row per evaluated round, one column per client."""
        return np.stack([e.accuracy for e in self.evaluations.values()])

    def summary(self) -> dict[str, float]:
        """Mean, std, worst and top 5 % of the clients' accuracies (of masks: Dice) in the last evaluated round."""
        last = list(self.evaluations.values())[-1].main
        if np.isnan(last).all():
            raise InputError("no client has an accuracy (a task without classes?); see the losses in rows()")
        return dict(summarise(last))  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        """One row per (round, client): the primary result, of which all else is a view."""
        return [
            {
                "round": r,
                "client": int(client),
                "n_test": int(e.n[place]),
                "accuracy": float(e.accuracy[place]),
                "loss": float(e.loss[place]),
                **{name: float(values[place]) for name, values in e.further.items()},
            }
            for r, e in self.evaluations.items()
            for place, client in enumerate(e.clients)
        ]


class Federation:
    """An algorithm on clients' data.

    Args:
        model: a Task, or a module for the cross-entropy task (trained in the data's precision).
        data: the clients' samples.
        algorithm: what they compute together.
        engine: an engine or the name of one.
        participation: the share of clients asked in a round, or ``clients_per_round`` their number.
        initial: the common initial model; default: the one the module came with.
        schedule: who takes part, round by round (a sequence, or a function of the 0-based round); default: uniform
            samples from a stream that only the seed and the round determine.
        attack: what malicious clients do; they take part like all others and are not scored.
        keep_sent: keep what every client sent last, so that ``evaluate(model="before_agg")`` can score it.
    """

    def __init__(
        self,
        model: Task | nn.Module,
        data: FederatedData,
        algorithm: Algorithm,
        *,
        engine: Engine | str = "vectorized",
        seed: int = 0,
        participation: float = 1.0,
        clients_per_round: int | None = None,
        initial: Model | None = None,
        schedule: Schedule | None = None,
        attack: Attack | None = None,
        keep_sent: bool = False,
    ) -> None:
        self.engine = build_engine(engine) if isinstance(engine, str) else engine
        dtype = data.x.dtype if data.x.is_floating_point() else torch.float32
        self.task = (model if isinstance(model, Task) else Task(model, dtype=dtype)).to(self.engine.device)
        self.attack = attack or Attack()
        self.malicious = self.attack.malicious(data.clients, seed)
        self.honest = np.setdiff1d(np.arange(data.clients), self.malicious)
        data = self.attack.poisoned(data, self.malicious)
        self.data, self.algorithm, self.seed = data, algorithm, seed
        self.cohort_size = _cohort_size(data.clients, participation, clients_per_round)
        self.schedule = schedule
        self.rounds_done = 0
        x0 = self._initial(initial)
        setup = Setup(data.clients, self.cohort_size, seed, bool(data.sizes("val").any()))
        algorithm.check(self.task, setup)
        with torch.device(self.engine.device):
            self.server: Tree = algorithm.init(self.task, x0, setup)
            states = ClientStates(algorithm.init_client(self.task, x0))
        resident = Resident(data, self.engine.device, self.task.dtype)
        sent = LastSent(algorithm.sends) if keep_sent else None
        self.site = Site(
            self.task, resident, data.splits, data.sizes("train"), self.engine, states, seed, self._attacker(), sent
        )
        if data.has_masks:
            _ = self._judged  # refuses a model that does not answer with maps

    # rounds ------------------------------------------------------------------------------------------
    def round(self, clients: Iterable[int] | None = None, silent: Collection[int] = ()) -> RoundRecord:
        """One round. ``clients`` overrides the sample; ``silent`` ones are asked but never answer."""
        ids = self._sample() if clients is None else np.unique(np.fromiter(clients, dtype=np.int64))
        if not len(ids) or ids[0] < 0 or ids[-1] >= self.data.clients:
            raise InputError(f"clients = {ids.tolist()}: ids of a round are some of 0 to {self.data.clients - 1}")
        ledger, start = Ledger(), self._clock()
        cohort = Cohort(self.site, ids, self.rounds_done, silent=frozenset(silent), ledger=ledger)
        self.server = self.algorithm.round(self.server, cohort)
        self.rounds_done += 1
        return RoundRecord(
            self.rounds_done,
            ids,
            ledger.failed,
            self._clock() - start,
            ledger.bytes_down,
            ledger.bytes_up,
            ledger.samples_computed,
            ledger.samples_useful,
        )

    def run(
        self,
        rounds: int,
        *,
        evaluate_every: int = 1,
        after_round: Callable[["Federation", RoundRecord], None] | None = None,
    ) -> History:
        """Several rounds with evaluations of every client's model; the last round is always evaluated."""
        history = History()
        for k in range(1, rounds + 1):
            record = self.round()
            history.rounds.append(record)
            if k == rounds or (evaluate_every and k % evaluate_every == 0):
                history.evaluations[record.round] = self.evaluate()
            if after_round is not None:
                after_round(self, record)
        return history

    def _sample(self) -> Rows:
        if isinstance(self.schedule, Sequence) and self.rounds_done >= len(self.schedule):
            raise InputError(
                f"schedule names the clients of {len(self.schedule)} rounds; this is round {self.rounds_done + 1}"
            )
        if self.schedule is not None:
            chosen = self.schedule(self.rounds_done) if callable(self.schedule) else self.schedule[self.rounds_done]
            return np.unique(np.fromiter(chosen, dtype=np.int64))
        n = self.data.clients
        return np.sort(stream(self.seed, "sample", self.rounds_done).choice(n, self.cohort_size, replace=False))

    # models and scores -------------------------------------------------------------------------------
    @property
    def has_global(self) -> bool:
        return self.algorithm.global_model(self.server) is not None

    def global_model(self) -> Model | None:
        """The server's model, where the algorithm has one."""
        return self.algorithm.global_model(self.server)

    def personal_models(self, clients: Sequence[int] | None = None) -> Model:
        """The personal models of the given clients (all by default), stacked on a leading axis."""
        parts = [self._read(self._personal(cohort), cohort)[1]["model"] for cohort in self._cohorts(clients)]
        models: Model = trees.concat(parts)
        return models

    def client_model(self, client: int) -> Model:
        """One client's personal model."""
        model: Model = trees.rows(self.personal_models([client]), 0)
        return model

    def evaluate(
        self,
        split: str = "test",
        model: str = "personal",
        clients: Sequence[int] | None = None,
        rows: Sequence[Rows] | Rows | None = None,
        *,
        closer: bool = False,
    ) -> Evaluation:
        """Scores the personal (or the global) model of every client on its own split. Reads, never writes.

        ``before_agg`` is the personal model with the client's own last upload instead of the server's average; a
        method whose personal model holds no such part has the same scores for both.
        Unless ``clients`` names them, malicious clients are left out: NaN, of 0 samples.
        ``rows`` are scored on instead: a list has an array of sample rows for each client of the federation; a single
        array is for all, so that a stack of models meets each batch together. ``closer`` measures all that there is
        for the task (`sample_metrics`), also what takes its time; without it, two classes have their AUC and so on, and
        masks their Dice, unless rows are given.
        """
        if model not in ("personal", "global", "before_agg"):
            raise InputError(f"model = {model!r}: it is 'personal', 'global' or 'before_agg'")
        own: Sequence[Rows] = self.data.splits[split] if rows is None else rows  # type: ignore[assignment]
        shared = isinstance(rows, np.ndarray) and rows.ndim == 1
        if shared:
            own = [np.asarray(rows)] * self.data.clients
        name = split if rows is None else "given rows"  # a program that trains on ``split`` still gets its own
        look, judged = None, self._judged
        if judged is not None and (closer or (rows is None and judged.always)):
            look = closer_look(judged, self.data, own, slow=closer)
        parts = []
        asked = self.honest.tolist() if clients is None else clients
        for cohort in self._cohorts(asked, look.answers.nbytes(self.task) if look else 0):
            call = self._call(model, cohort)
            outputs = network_outputs if model == "global" else self.algorithm.outputs
            program = scored(call.program, name, batch_size(self.data), outputs, look.answers if look else None, shared)
            found, tally = self._read(call._replace(program=program), cohort, {name: own})
            parts.append(evaluation(self.task, self.data.y, cohort.ids, own, found, tally, look))
        scores = joined(parts)
        return scores if clients is not None else of_all(scores, self.data.clients)

    @cached_property
    def _judged(self) -> Judged | None:
        return judged_by(self.task, self.data, self.site.data)

    def facts(self) -> dict[str, NDArray[Any]]:
        """What the algorithm shows of its state: arrays of the server, and of the clients stacked by id."""
        found = {k: v.detach().cpu().numpy() for k, v in self.algorithm.server_facts(self.server).items()}
        if self.algorithm.client_facts(self.task, self.server, self.site.states.initial):
            one = partial(self.algorithm.client_facts, self.task, self.server)
            parts = [torch.func.vmap(one)(self.site.states.gather(c.ids)) for c in self._cohorts(None)]
            found |= {k: v.cpu().numpy() for k, v in trees.concat(parts).items()}
        return found

    def _call(self, model: str, cohort: Cohort) -> Call:
        """The program that makes a client's model of this kind."""
        if model == "global":
            return self._global()
        call = self._personal(cohort)
        if model == "personal":
            return call
        if self.site.sent is None:
            raise InputError("model = 'before_agg': the federation does not know it; make it with keep_sent=True")
        return self.site.sent.instead(call, cohort.ids)

    def _personal(self, cohort: Cohort) -> Call:
        with torch.device(self.engine.device):
            return self.algorithm.personal_model(self.server, cohort)

    def _global(self) -> Call:
        w = self.global_model()
        if w is None:
            raise InputError(f"{type(self.algorithm).__name__} has no global model to score")
        return Call(GLOBAL_MODEL, {"w": w})

    def _read(self, call: Call, cohort: Cohort, splits: dict[str, Any] | None = None) -> tuple[Rows, dict[str, Tree]]:
        """Runs a program without any trace: no state, no traffic, no failure is recorded."""
        result = self.engine.run(
            cohort.job(call.program, call.shared, call.per_client, {**self.data.splits, **(splits or {})})
        )
        return result.positions, result.uploads

    def _cohorts(self, clients: Sequence[int] | None, kept_bytes: int = 0) -> Iterable[Cohort]:
        """Groups of clients whose states, and what else is kept of each of them, fit into memory."""
        ids = np.arange(self.data.clients) if clients is None else np.asarray(clients, dtype=np.int64)
        heaviest = max(trees.nbytes(self.site.states.initial), trees.nbytes(self.task.initial), kept_bytes, 1)
        size = max(1 if kept_bytes == heaviest else self.cohort_size, SCORING_BYTES // heaviest)
        for k in range(0, len(ids), size):
            yield Cohort(self.site, ids[k : k + size], self.rounds_done)

    # keeping -----------------------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that later rounds depend on: tensors by name, and JSON."""
        server, tensors = pack(self.server, "server")
        rows, more = pack(self.site.states.rows(), "client")
        sent, last = self.site.sent.state() if self.site.sent else ({}, {})
        meta = {
            "rounds_done": self.rounds_done,
            "sent": sent,
            "server": server,
            "clients": self.site.states.clients,
            "client_rows": rows,
            "engine": self.engine.plan(),
        }
        return {k: v.detach().cpu() for k, v in (tensors | more | last).items()}, meta

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Takes over a state, so that the next rounds are those of the run it came from, bit for bit."""
        on_device = {k: v.to(self.engine.device) for k, v in tensors.items()}
        classes = self.algorithm.named_tuples()
        self.server = unpack(meta["server"], on_device, classes)
        self.site.states.load(meta["clients"], unpack(meta["client_rows"], on_device, classes))
        if self.site.sent is not None:
            self.site.sent.restore(meta["sent"], on_device)
        self.engine.adopt(meta["engine"])
        self.rounds_done = int(meta["rounds_done"])

    # details -----------------------------------------------------------------------------------------
    def _initial(self, given: Model | None) -> Model:
        mine = self.task.initial
        if given is None:
            return mine
        if set(given) != set(mine) or any(given[k].shape != v.shape for k, v in mine.items()):
            wanted = {k: tuple(v.shape) for k, v in mine.items()}
            seen = {k: tuple(v.shape) for k, v in given.items()}
            raise InputError(f"initial has the tensors {seen}; the model's are {wanted}")
        return {k: given[k].detach().to(v) for k, v in mine.items()}

    def _attacker(self) -> Attacker | None:
        if not self.attack.replaces_uploads:
            return None
        return Attacker(self.attack, self.malicious, self.algorithm.sends, self.task.buffer_names, self.seed)

    def _clock(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.perf_counter()


def _cohort_size(clients: int, participation: float, clients_per_round: int | None) -> int:
    if clients_per_round is not None:
        if not 1 <= clients_per_round <= clients:
            raise InputError(f"clients_per_round = {clients_per_round}: it is a number from 1 to {clients}")
        return clients_per_round
    if not 0 < participation <= 1:
        raise InputError(f"train.participation = {participation}: it is a share above 0 and at most 1")
    return max(1, int(participation * clients + 1e-9))  # 0.29 of 100 is 29 in spite of rounding
