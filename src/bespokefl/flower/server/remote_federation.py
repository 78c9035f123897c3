"""A federation whose clients are elsewhere: the same rounds, with requests in the place of an engine.

The server knows of a client's state only its version, a number. It names the version that a program is to start from,
and takes the one that comes back with an answer that it uses; so a round that is repeated begins where it began before.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.algorithm import Algorithm
from bespokefl.core.cohort import Cohort
from bespokefl.core.program import Order
from bespokefl.core.task import Task
from bespokefl.core.tree_io import pack, unpack
from bespokefl.core.trees import Model
from bespokefl.engines.base import Resident
from bespokefl.errors import Diverged, EndedEarly, InputError, RunError
from bespokefl.evaluation.fit import check_fit
from bespokefl.evaluation.scorer import judged_by, of_all
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.federation.attacks import Attack
from bespokefl.federation.loop import RoundLoop, RoundRecord
from bespokefl.federation.privacy import PrivacySettings
from bespokefl.federation.secret import new_key
from bespokefl.flower.server.census import RemoteCensus
from bespokefl.flower.server.membership import POLL, Membership
from bespokefl.flower.server.remote_clients import RemoteClients, norm_of
from bespokefl.flower.server.scores import Scores
from bespokefl.flower.server.upload_schema import Expectation, made_up
from bespokefl.flower.silo.silo import NO_TRAIN_SCORES
from bespokefl.flower.transport.codec import packed
from bespokefl.flower.transport.envelope import Envelope

ENGINE = "federation"


class RemoteFederation(RoundLoop):
    """An algorithm on clients that are asked over a network."""

    data: RemoteCensus
    clients: RemoteClients

    def __init__(
        self,
        task: Task,
        data: RemoteCensus,
        algorithm: Algorithm,
        *,
        roster: Membership,
        run_id: str,
        agreement: Mapping[str, Any],
        initial: Model,
        seed: int,
        participation: float,
        attack: Attack,
        privacy: PrivacySettings | None = None,
    ) -> None:
        if why := algorithm.remote_unsupported:
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
            secret=None if roster.options.cohort == "seed" else new_key(),
        )
        sample = made_up(data.input_shape, data.classes, data.target, data.inputs)
        answer = check_fit(task, sample, Resident(sample.x, sample.y, torch.device("cpu"), task.dtype))
        self._judged = judged_by(task, sample, answer.shape)
        x0, state = self._start(initial, answer)
        told, arrays = packed({"x0": x0})
        header = {"kind": "open", "federation": roster.federation, "agreement": {"run": run_id, **agreement}, **told}
        self.clients = RemoteClients(
            task,
            data.sizes("train"),
            seed,
            algorithm,
            roster,
            run_id,
            Envelope(header, arrays),
            Expectation(task, state, sample),
            data.silos,
            max(1.0, norm_of(x0)),
            self._postprocessors(),
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
        self.clients.roster.unfit.clear()
        hosted, _ = self.clients.roster.by_node(list(range(self.data.clients)))
        self.clients.open_run(list(hosted))

    # rounds ------------------------------------------------------------------------------------------
    def round(self, clients: Iterable[int] | None = None, silent: Collection[int] = ()) -> RoundRecord:
        """One round, tried again while too few clients answer; EndedEarly if that does not help."""
        options = self.clients.roster.options
        server, versions, done = self.server, self.clients.versions.clone(), self.rounds_done
        seen = self.clients.seen.copy()
        asked = None if clients is None else list(clients)
        for attempt in range(options.retries + 1):
            self.clients.exchange = 0
            try:
                record = super().round(asked, silent)
                answered = [int(c) for c in record.clients if int(c) not in record.failed]
                if len(answered) >= min(options.min_answers, len(record.clients)):
                    return record
                reasons = "; ".join(f"client {c}: {why}" for c, why in list(record.failed.items())[:3])
                why = f"{len(answered)} clients answered, at least {options.min_answers} must (federation.min_answers)"
                why = f"{why}; {reasons}"
            except Diverged:
                raise
            except RunError as error:
                why = str(error)
            self.server, self.clients.versions, self.rounds_done = server, versions.clone(), done
            self.clients.seen = seen.copy()
            self.clients.roster.note(f"warning: round {done + 1}, try {attempt + 1} of {options.retries + 1}: {why}")
            if attempt < options.retries:
                self._wait_for_all()
        raise EndedEarly(f"round {done + 1} could not be done in {options.retries + 1} tries: {why}")

    def _wait_for_all(self) -> None:
        """Until every silo is back, or for federation.wait seconds."""
        until = time.monotonic() + self.clients.roster.options.wait
        everyone = list(range(self.data.clients))
        while time.monotonic() < until:
            self.clients.welcome_back()
            if not self.clients.roster.by_node(everyone)[1]:
                return
            time.sleep(POLL)

    # models and scores -------------------------------------------------------------------------------
    def evaluate(self, split: str = "test", model: str = "personal", *, closer: bool = False) -> Evaluation:
        """As in one process, by the silos themselves: they tell figures. NaN for clients that did not answer."""
        cohort, options = Cohort(self.clients, self.honest, self.rounds_done), self.clients.roster.options
        call = self._call(model, cohort)
        order = Order(call.program, cohort.ids, call.shared, call.per_client, cohort.round)
        wanted = {"split": split, "model": model, "closer": closer}
        program = self.clients.name_of(order)
        scores = Scores(self.honest, self.data.sizes(split), self._judged, closer)
        for _ in range(options.retries + 1):
            taken, failed, _ = self.clients.ask("score", program, order, wanted, scores.add)
            for why in dict.fromkeys(why for why in failed.values() if why.startswith("refused")):
                clients = [client for client, reason in failed.items() if reason == why]
                self.clients.roster.note(f"warning: the scores of clients {clients[:5]} are {why}")
            if taken:
                break
            if all(why == NO_TRAIN_SCORES for why in failed.values()):
                self.clients.roster.note(f"warning: round {self.rounds_done}: no silo tells scores of its train split")
                break
            self._wait_for_all()
        else:
            raise EndedEarly(f"no silo scores its model after round {self.rounds_done}: {next(iter(failed.values()))}")
        return of_all(scores.evaluation(), self.data.clients)

    def end(self) -> None:
        """Every silo writes its clients' personal models into its own folder."""
        cohort = Cohort(self.clients, np.arange(self.data.clients), self.rounds_done)
        call = self._call("personal", cohort)
        order = Order(call.program, cohort.ids, call.shared, call.per_client, cohort.round)
        _, failed, _ = self.clients.ask("keep", self.clients.name_of(order), order, {}, lambda clients, _: clients)
        for client, why in list(failed.items())[:3]:
            self.clients.roster.note(f"warning: client {client} could not keep its personal model: {why}")

    # keeping -----------------------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        server, tensors = pack(self.server, "server")
        meta = {"rounds_done": self.rounds_done, "server": server, "versions": self.clients.versions.tolist()}
        if self.participation.secret is not None:
            meta["cohort"] = self.participation.secret
        meta["changes"] = dict(self.clients.seen.rounds)
        return {k: v.detach().cpu() for k, v in tensors.items()}, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        if "versions" not in meta:
            raise InputError("the checkpoint is that of a simulation; a real federation cannot go on from it.")
        self.server = unpack(meta["server"], tensors, self.algorithm.named_tuples())
        self.clients.versions = torch.tensor(meta["versions"], dtype=torch.int64)
        self.clients.seen.rounds = dict(meta.get("changes", {}))  # none in a checkpoint of an earlier version
        self.rounds_done = int(meta["rounds_done"])
        if self.participation.secret is not None:
            self.participation.secret = meta.get("cohort", self.participation.secret)
