"""A run on a silo: the method, the model and the samples that the server's requests are about.

Everything comes from names and numbers in the server's message. The server is not trusted: names are those of this
package's registries, sizes are bounded, and what a request may do is to run a program of the method on the silo's own
clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespokefl import models
from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.core import trees
from bespokefl.core.hyper import refuse_code
from bespokefl.core.losses import LOSSES
from bespokefl.core.program import Order, Program, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Model, Tree, leaves
from bespokefl.data.dataset import IntArray
from bespokefl.engines import Engine
from bespokefl.engines.base import Job, Resident
from bespokefl.evaluation.scorer import Scorer
from bespokefl.flower.refusal import Refused
from bespokefl.flower.silo.asked import Asked
from bespokefl.flower.silo.silo_data import Holdings
from bespokefl.flower.silo.state_store import StateStore
from bespokefl.flower.silo.terms import Limits
from bespokefl.flower.transport.codec import leaves_by_name

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True)
class Agreement:
    """A run as the server described it and the silo checked it; kept on disk as it came (JSON)."""

    run: str
    algorithm: str
    hyper: dict[str, Any]
    seed: int
    model: dict[str, Any]  # name, head, options
    loss: str
    precision: str
    classes: list[str]
    input_shape: list[int]
    data: dict[str, Any]  # how samples are read
    clients: list[int]  # ids of the silo's clients
    of: int  # clients of the federation
    rounds: int  # of the run
    every: int  # rounds between two evaluations; the last round has one, too

    @classmethod
    def checked(cls, content: Any, limits: Limits) -> "Agreement":
        """From JSON; every field is there, of its type, and within bounds."""
        kinds = {name: hint for name, hint in cls.__annotations__.items()}
        if not isinstance(content, Mapping) or set(content) != set(kinds):
            raise Refused(f"a run is described by {', '.join(kinds)}; the message has something else")
        plain = {str: str, int: int, list[int]: list, list[str]: list, dict[str, Any]: dict}
        for name, hint in kinds.items():
            if type(content[name]) is not plain[hint]:
                raise Refused(f"{name} of the run is a {type(content[name]).__name__}")
        agreed = cls(**content)
        whole = [*agreed.clients, *agreed.input_shape, agreed.of, agreed.seed]
        if not all(type(v) is int and v >= 0 for v in whole) or not all(type(v) is str for v in agreed.classes):
            raise Refused("clients, input_shape, of and seed of a run are whole numbers, classes are names")
        if agreed.of > limits.clients or len(agreed.run) > 200:
            raise Refused(f"a federation of {agreed.of} clients is too large; at most {limits.clients}")
        if not 1 <= agreed.rounds <= limits.rounds or agreed.every < 1:
            raise Refused(
                f"a run of {agreed.rounds} rounds, evaluated every {agreed.every}: it has 1 to {limits.rounds} "
                "rounds, and is evaluated every 1 or more"
            )
        if agreed.precision not in PRECISIONS or agreed.loss not in LOSSES:
            raise Refused(f"precision = {agreed.precision!r} or loss = {agreed.loss!r} is not known here")
        return agreed


class Workshop:
    """Runs the programs that requests name."""

    def __init__(
        self, agreed: Agreement, x0: Model | None, holdings: Holdings, engine: Engine, folder: Path, limits: Limits
    ) -> None:
        self.agreed, self.engine, self.limits, self.folder = agreed, engine, limits, folder
        self.algorithm = make_algorithm(agreed, limits)
        self.classes = self.algorithm.named_tuples()
        self.task = make_task(agreed, limits).to(engine.device)
        place = holdings.place(agreed.seed, agreed.data, agreed.clients, agreed.of, agreed.classes)
        if list(place.data.input_shape) != agreed.input_shape:
            raise Refused(f"samples here have the shape {place.data.input_shape}, the run's {agreed.input_shape}")
        self.data, self.reading = place
        check_samples(limits, self.data.sizes("train")[agreed.clients])
        self._resident = Resident(self.data.x, self.data.y, engine.device, self.task.dtype)
        self.scorer = Scorer(self.task, self.data, self._resident)
        self.x0 = self._checked_model(x0)
        with torch.device(engine.device):
            initial = self.algorithm.init_client(self.task, self.x0)
        self.vault, self.asked = self._kept(initial)

    def _kept(self, initial: Tree) -> tuple[StateStore, Asked]:
        vault = StateStore(self.folder, initial, self.classes)
        return vault, Asked(self.folder, self.limits, rounds=self.agreed.rounds, every=self.agreed.every)

    def program(self, name: Any, round: int, *, upload: bool) -> Program:
        """One that a round of the method has, whose upload may leave; or one that makes a model, which stays."""
        programs, method = self.algorithm.at(round).programs(), self.agreed.algorithm
        if not isinstance(name, str) or name not in programs:
            raise Refused(f"{method} has no program {str(name)[:60]!r}")
        if upload and name not in self.algorithm.uploads():
            raise Refused(f"{name!r} of {method} is no part of a round: what it makes does not leave this silo")
        if not upload and name not in self.algorithm.model_programs():
            raise Refused(f"{name!r} of {method} makes no model that could be scored or kept")
        return programs[name]

    def check_upload(self, name: str, sent: Mapping[str, Tree]) -> None:
        """Refuses what the method has not declared; a mistake of the method, never of the server."""
        if more := sorted(k for k, v in sent.items() if k not in self.algorithm.uploads()[name].sends and leaves(v)):
            raise Refused(
                f"{name!r} of {self.agreed.algorithm} would send {', '.join(more)}, which it does not declare"
            )

    def clients(self, ids: Any, versions: Any) -> tuple[Rows, list[int]]:
        """Those that a request is about, and the versions of their states."""
        for what, values in (("clients", ids), ("versions", versions)):
            if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values) or not values:
                raise Refused(f"{what} of the request should be a list of whole numbers")
        strangers = sorted(set(ids) - set(self.agreed.clients))
        if strangers or sorted(set(ids)) != ids or len(versions) != len(ids):
            raise Refused(f"clients = {ids[:10]}: ascending ids of the {len(self.agreed.clients)} clients of this silo")
        return np.array(ids, dtype=np.int64), versions

    def check_downloads(self, shared: Tree, per_client: Tree, clients: int) -> None:
        """Refuses what cannot be meant for these clients and this model."""
        if not isinstance(shared, dict) or not isinstance(per_client, dict) or set(shared) & set(per_client):
            raise Refused("downloads come by name, each once")
        for name, value in leaves_by_name(per_client).items():
            if not value.ndim or value.shape[0] != clients:
                raise Refused(f"{name.lstrip('.')!r} has the shape {tuple(value.shape)} for {clients} clients")
        for name, value in leaves_by_name({"shared": shared, "own": per_client}).items():
            model = next((k for k in self.x0 if name.endswith(f".{k}")), None)
            if model is None:
                continue
            wanted = tuple(self.x0[model].shape)
            if len(wanted) > value.ndim or tuple(value.shape[value.ndim - len(wanted) :]) != wanted:
                raise Refused(f"{model!r} came with the shape {tuple(value.shape)}; the model's is {wanted}")

    def run(self, order: Order, versions: Sequence[int], splits: Mapping[str, Any] | None = None) -> Result:
        """A program on the named versions of its clients' states."""
        self._check_work(order)
        shared, own = trees.tree_map(lambda v: self._on_device(v), (dict(order.shared), dict(order.per_client)))
        states = self.vault.gather([int(c) for c in order.clients], versions)
        job = Job(
            self.task,
            self._resident,
            {**self.data.splits, **(splits or {})},
            order.program,
            order.clients,
            shared,
            own,
            states,
            self.agreed.seed,
            order.round,
        )
        return self.engine.run(job)

    def _on_device(self, value: Any) -> Any:
        return value.to(self.engine.device) if isinstance(value, torch.Tensor) else value

    def _check_work(self, order: Order) -> None:
        fewest = int(self.data.sizes("train")[order.clients].min())
        for phase in order.program.phases:
            passes, trains = max(phase.batches.epochs, phase.batches.steps or 0), phase.batches.stream is not None
            size = min(fewest, phase.batches.size or fewest)
            if trains and phase.batches.split == "train" and size < self.limits.smallest_batch:
                raise Refused(
                    f"a step on a batch of {size}: this silo trains on batches of {self.limits.smallest_batch} or more "
                    "(--smallest-batch)"
                )
            if passes > self.limits.passes:
                raise Refused(f"a request for {passes} passes over the samples; at most {self.limits.passes} are made")

    def _checked_model(self, x0: Model | None) -> Model:
        mine = self.task.initial
        if x0 is None:
            return mine
        if set(x0) != set(mine) or any(x0[k].shape != v.shape or x0[k].dtype != v.dtype for k, v in mine.items()):
            raise Refused("the initial model is not of the described kind")
        return {k: x0[k].to(v.device) for k, v in mine.items()}


def check_samples(limits: Limits, sizes: Sequence[int] | IntArray) -> None:
    if (fewest := int(min(sizes))) < limits.fewest_samples:
        raise Refused(
            f"{fewest} samples would be left to train on; this silo takes part with {limits.fewest_samples} or more "
            "(--fewest-samples; data.test and data.val say how many are held back)"
        )


def make_algorithm(agreed: Agreement, limits: Limits) -> Algorithm:
    """A registered method with checked hyper-parameters."""
    if limits.methods and agreed.algorithm not in limits.methods:
        agreed_to = ", ".join(limits.methods)
        raise Refused(f"algorithm {agreed.algorithm[:60]!r}: this silo agrees to {agreed_to} only (--methods)")
    if agreed.algorithm not in ALGORITHMS:
        raise Refused(f"algorithm {agreed.algorithm[:60]!r} is not registered here; code is never taken from a server")
    for name, value in agreed.hyper.items():
        if type(value) is int and value > limits.whole_number and name != "batch_size":
            raise Refused(f"algorithm.{str(name)[:60]} = {value}: at most {limits.whole_number} is accepted")
    refuse_code(ALGORITHMS[agreed.algorithm].cls, agreed.hyper, "code is never taken from a server")
    return build_algorithm(agreed.algorithm, {}, agreed.hyper)


def make_task(agreed: Agreement, limits: Limits) -> Task:
    """A registered model of a bounded size; its parameters are made only after they were counted."""
    name: Any
    name, head, options = (agreed.model.get(key) for key in ("name", "head", "options"))
    ours = isinstance(name, str) and name in models.MODELS
    if not ours or not isinstance(options, dict) or not (head is None or isinstance(head, str)):
        raise Refused(f"model {str(name)[:60]!r} is not registered here; code is never taken from a server")
    shape, classes = tuple(agreed.input_shape), max(1, len(agreed.classes))
    with torch.device("meta"):
        size = sum(math.prod(p.shape) for p in models.build(name, shape, classes, **options).parameters())
    if size > limits.parameters:
        raise Refused(f"the model would have {size:,} parameters; at most {limits.parameters:,} are accepted")
    with torch.random.fork_rng(devices=[]):
        module = models.build(name, shape, classes, **options)
    precision = agreed.precision
    return Task(module, agreed.loss, head=head, dtype=PRECISIONS[precision], bf16=precision == "bf16")
