"""A federation in one process: all clients' samples are here, and an engine runs their programs."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bespokefl.core import trees
from bespokefl.core.algorithm import Algorithm
from bespokefl.core.cohort import Cohort
from bespokefl.core.model_programs import network_outputs
from bespokefl.core.program import Call, Order, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.tree_io import pack, unpack
from bespokefl.core.trees import Model
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Engine, build_engine
from bespokefl.engines.base import Resident
from bespokefl.errors import InputError
from bespokefl.evaluation.scorer import Scorer, joined, of_all
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.federation.attacks import Attack
from bespokefl.federation.last_uploads import LastSent
from bespokefl.federation.local_clients import LocalClients
from bespokefl.federation.loop import History, RoundLoop, RoundRecord, check_train
from bespokefl.federation.privacy import PrivacySettings
from bespokefl.federation.sampling import Schedule
from bespokefl.federation.states import ClientStates

__all__ = ["Federation", "History", "RoundRecord"]

SCORING_BYTES = 2**28  # of client states, or of kept answers, that are gathered at once to be scored


class Federation(RoundLoop):
    """An algorithm on clients' data, all of it here.

    Args:
        model: a Task, or a module for the cross-entropy task (trained in the data's precision).
        data: the clients' samples.
        algorithm: what they compute together.
        engine: an engine or the name of one.
        participation: the share of clients asked in a round, or ``clients_per_round`` their number.
        initial: the common initial model; default: the one the module came with.
        schedule: who takes part, round by round (a sequence, or a function of the 0-based round); default: uniform
            samples from a stream that only the seed and the round determine. A method that starts from the number of
            clients in a round takes it from the schedule; if its rounds differ, say ``clients_per_round`` too.
        attack: what malicious clients do; they take part like all others and are not scored.
        privacy: clip, noise and delta of client-level differential privacy (`bespokefl.federation.privacy`).
        keep_sent: keep what every client sent last, so that ``evaluate(model="before_agg")`` can score it.

    >>> from bespokefl.algorithms import Ditto
    >>> data = bfl.load("digits", clients=4, max_samples=200)
    >>> model = bfl.build_model("linear", data.input_shape, len(data.classes))
    >>> federation = bfl.Federation(model, data, Ditto(lam=1.0, lr=0.1, local_epochs=1), participation=0.5)
    >>> history = federation.run(rounds=2)
    >>> history.accuracy.shape  # test accuracy of each client's own model in each round
    (2, 4)
    """

    data: FederatedData
    clients: LocalClients

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
        privacy: PrivacySettings | None = None,
        keep_sent: bool = False,
    ) -> None:
        self.engine = build_engine(engine) if isinstance(engine, str) else engine
        dtype = data.x.dtype if data.x.is_floating_point() else torch.float32
        task = (model if isinstance(model, Task) else Task(model, dtype=dtype)).to(self.engine.device)
        attack = attack or Attack()
        check_train(data)
        data = attack.poisoned(data, attack.malicious(data.clients, seed))
        super().__init__(
            task,
            data,
            algorithm,
            device=self.engine.device,
            seed=seed,
            participation=participation,
            clients_per_round=clients_per_round,
            schedule=schedule,
            attack=attack,
            privacy=privacy,
        )
        resident = Resident(data.x, data.y, self.engine.device, task.dtype)
        self._scorer = Scorer(task, data, resident)
        states = ClientStates(self._start(initial, self._scorer.answer)[1])
        self.clients = LocalClients(
            task,
            resident,
            data.splits,
            data.sizes("train"),
            self.engine,
            states,
            seed,
            self._postprocessors(),
            LastSent(algorithm.sends) if keep_sent else None,
        )

    # models and scores -------------------------------------------------------------------------------
    @property
    def engine_name(self) -> str:
        """What runs the clients' programs."""
        return self.engine.name

    def personal_models(self, clients: Sequence[int] | None = None) -> Model:
        """The personal models of the given clients (all by default), stacked on a leading axis."""
        parts = [
            self._read(self._call("personal", cohort), cohort).uploads["model"] for cohort in self._cohorts(clients)
        ]
        models: Model = trees.concat(parts)
        return models

    def client_model(self, client: int) -> Model:
        """One client's personal model."""
        model: Model = trees.rows(self.personal_models([client]), 0)
        return model

    @property
    def local(self) -> "Federation":
        return self

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
        own: Sequence[Rows] = self.data.splits[split] if rows is None else rows  # type: ignore[assignment]
        shared = isinstance(rows, np.ndarray) and rows.ndim == 1
        if shared:
            own = [np.asarray(rows)] * self.data.clients
        name = split if rows is None else "given rows"  # a program that trains on ``split`` still gets its own
        look = self._scorer.look(own, closer=closer, usual=rows is None)
        outputs = network_outputs if model == "global" else self.algorithm.outputs
        parts = []
        asked = self.honest.tolist() if clients is None else clients
        for cohort in self._cohorts(asked, look.answers.nbytes(self.task) if look else 0):
            call = self._call(model, cohort)
            scoring = self._scorer.scoring(call.program, name, outputs, look, shared=shared)
            result = self._read(call._replace(program=scoring), cohort, {name: own})
            parts.append(self._scorer.evaluation(result, cohort.ids, own, look))
        scores = joined(parts)
        return scores if clients is not None else of_all(scores, self.data.clients)

    @property
    def scorable(self) -> tuple[str, ...]:
        """The kinds of models that ``evaluate`` can score."""
        return (*super().scorable, "before_agg") if self.clients.sent else super().scorable

    def _call(self, model: str, cohort: Cohort) -> Call:
        if model != "before_agg":
            return super()._call(model, cohort)
        if self.clients.sent is None:
            raise InputError("model = 'before_agg': the federation does not know it; make it with keep_sent=True")
        return self.clients.sent.instead(super()._call("personal", cohort), cohort.ids)

    def facts(self) -> dict[str, NDArray[Any]]:
        """What the algorithm shows of its state: arrays of the server, and of the clients stacked by id."""
        found = super().facts()
        if self.algorithm.client_facts(self.task, self.server, self.clients.states.initial):
            one = partial(self.algorithm.client_facts, self.task, self.server)
            parts = [torch.func.vmap(one)(self.clients.states.gather(c.ids)) for c in self._cohorts(None)]
            found |= {k: v.cpu().numpy() for k, v in trees.concat(parts).items()}
        return found

    def _read(self, call: Call, cohort: Cohort, splits: dict[str, Any] | None = None) -> Result:
        """Runs a program without any trace: no state, no traffic, no failure is recorded."""
        order = Order(call.program, cohort.ids, call.shared, call.per_client, cohort.round)
        return self.engine.run(self.clients.job(order, splits))

    def _cohorts(self, clients: Sequence[int] | None, kept_bytes: int = 0) -> Iterable[Cohort]:
        """Groups of clients whose states, and what else is kept of each of them, fit into memory."""
        ids = np.arange(self.data.clients) if clients is None else np.asarray(clients, dtype=np.int64)
        heaviest = max(trees.nbytes(self.clients.states.initial), trees.nbytes(self.task.initial), kept_bytes, 1)
        size = max(1 if kept_bytes == heaviest else self.participation.most, SCORING_BYTES // heaviest)
        for k in range(0, len(ids), size):
            yield Cohort(self.clients, ids[k : k + size], self.rounds_done)

    # keeping -----------------------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that later rounds depend on: tensors by name, and JSON."""
        server, tensors = pack(self.server, "server")
        rows, more = pack(self.clients.states.rows(), "client")
        sent, last = self.clients.sent.state() if self.clients.sent else ({}, {})
        meta = {
            "rounds_done": self.rounds_done,
            "sent": sent,
            "server": server,
            "clients": self.clients.states.clients,
            "client_rows": rows,
            "engine": self.engine.plan(),
        }
        return {k: v.detach().cpu() for k, v in (tensors | more | last).items()}, meta

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Takes over a state, so that the next rounds are those of the run it came from, bit for bit."""
        if "client_rows" not in meta:
            raise InputError("the run was a real federation: what its clients kept is in their silos, not here.")
        on_device = {k: v.to(self.engine.device) for k, v in tensors.items()}
        classes = self.algorithm.named_tuples()
        self.server = unpack(meta["server"], on_device, classes)
        self.clients.states.load(meta["clients"], unpack(meta["client_rows"], on_device, classes))
        if self.clients.sent is not None:
            self.clients.sent.restore(meta["sent"], on_device)
        self.engine.load_state(meta["engine"])
        self.rounds_done = int(meta["rounds_done"])
