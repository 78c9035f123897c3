"""Clients that come after the training: each gets a model from what the server has, and is scored after every epoch.

What a client does is the method's own (`Algorithm.newcomer`), or plain SGD from one common model for all methods. All
new clients run in the engine at once. The federation is read, never written.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.algorithms import Algorithm
from bespokefl.core import trees
from bespokefl.core.acting import in_words
from bespokefl.core.algorithm import Newcomer
from bespokefl.core.model_programs import Outputs, network_outputs
from bespokefl.core.program import Batches, Down, Phase, Program, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Model, Tree
from bespokefl.data import FederatedData
from bespokefl.engines.base import Job, Resident
from bespokefl.errors import InputError, RunError
from bespokefl.evaluation.fit import check_fit
from bespokefl.evaluation.scorer import batch_size, evaluation
from bespokefl.evaluation.scoring import Evaluation, scored
from bespokefl.federation.federation import Federation

Start = Literal["method", "global"]
OnEpoch = Callable[[int, Evaluation, Evaluation], None]  # (epoch, on train rows, on test rows); epoch 0 is the start


SETTINGS = ("lr", "momentum", "batch_size")
MODELS_AT_ONCE = 64  # all personal models may not fit into memory


@dataclass(frozen=True)
class Joining:
    """What new clients do. Without a value of its own, lr, momentum and batch_size are those of the training."""

    epochs: int = 20
    start: Start = "method"  # the method's own procedure; "global": plain SGD from the global model
    opt_state: Literal["reset", "keep"] = "reset"  # a fresh optimiser in every epoch, or one for all
    lr: float | None = None
    momentum: float | None = None
    batch_size: int | Literal["full"] | None = None

    @classmethod
    def checked(cls, **values: Any) -> "Joining":
        """InputError, as of the command line, for values that are not allowed."""
        for name in ("start", "opt_state"):
            allowed = get_args(get_type_hints(cls)[name])
            if values.get(name, allowed[0]) not in allowed:
                raise InputError(f"--{name.replace('_', '-')} {values[name]}: it is one of {', '.join(allowed)}.")
        for name, low, high in (("lr", 0, math.inf), ("momentum", 0, 1)):
            value = values.get(name)
            if value is not None and not low <= value < high:
                raise InputError(
                    f"--{name} {value}: it is a number from {low}{f' to below {high}' if high == 1 else ''}."
                )
        return cls(**values)

    def settings(self) -> dict[str, Any]:
        """Those that differ from the training's."""
        given = {key: getattr(self, key) for key in SETTINGS}
        return {key: None if value == "full" else value for key, value in given.items() if value is not None}

    def unused(self, algorithm: Algorithm) -> dict[str, str]:
        """What is said here and changes nothing in the method, each with the reason."""
        given = self.settings()
        idle = algorithm.for_newcomers(**given).unused_by_newcomers(tuning=self.start == "global")
        said = given.keys() | ({"opt_state"} if self.opt_state != Joining.opt_state else set())
        return {name: why for name, why in idle.items() if name in said}

    def without_unused(self, algorithm: Algorithm) -> "Joining":
        """The same without what changes nothing."""
        return replace(self, **{name: getattr(Joining, name) for name in self.unused(algorithm)})


class Joined(NamedTuple):
    """New clients after their epochs; rows of the arrays are epochs, the first one being the start, columns clients."""

    how: str  # what they did, for people
    settings: dict[str, Any]  # lr, momentum and batch_size that were used, by the method's names for them
    accuracy: NDArray[np.float64]  # on test rows; NaN without any
    loss: NDArray[np.float64]
    train_accuracy: NDArray[np.float64]
    train_loss: NDArray[np.float64]
    models: Model  # stacked
    outputs: Outputs  # what they answer
    finite: NDArray[np.bool_]  # whose model is


def join(
    federation: Federation,
    data: FederatedData,
    joining: Joining,
    clients: Rows | None = None,
    on_epoch: OnEpoch | None = None,
) -> Joined:
    """Let all clients of ``data`` join a trained federation.

    InputError for a setting that changes nothing in its method.
    ``clients`` are their numbers, which fix their batches; by default those that follow the federation's own.
    """
    _check(federation, data)
    for name, why in joining.unused(federation.algorithm).items():
        raise InputError(
            f"new_clients.{name} = {in_words(getattr(joining, name))} ({federation.algorithm.name}) changes nothing: "
            f"{why}. Leave it out (--{name.replace('_', '-')} of bespoke adapt)."
        )
    algorithm, joiner, outputs = _procedure(federation, joining)
    ids = federation.data.clients + np.arange(data.clients) if clients is None else np.asarray(clients, dtype=np.int64)
    group = _Group(federation, data, ids, joiner, outputs)
    scores = []
    for epoch in range(joining.epochs + 1):
        if epoch:
            group.train(_epoch(algorithm, joiner, joining.opt_state), epoch)
        scores.append((group.score("train"), group.score("test")))
        if on_epoch is not None:
            on_epoch(epoch, *scores[-1])
    models = group.models()
    names = algorithm.newcomer_settings if joining.start == "method" else {}
    used = {name: getattr(algorithm, name) for name in (names.get(key, key) for key in SETTINGS)}
    return Joined(
        joiner.how,
        used,
        np.stack([test.accuracy for _, test in scores]),
        np.stack([test.loss for _, test in scores]),
        np.stack([train.accuracy for train, _ in scores]),
        np.stack([train.loss for train, _ in scores]),
        models,
        outputs,
        trees.finite_rows(models, data.clients).numpy(),
    )


def common_model(federation: Federation) -> tuple[Model, str]:
    """The model that PGFed's figure 4 lets all new clients start from.

    Where the method has no global model, it is the mean of the clients' personal ones by their train samples: for a
    shared body under private heads, that body under the mean head.
    """
    w = federation.global_model()
    if w is not None:
        return w, "the global model"
    n = federation.clients.train_sizes
    parts = []
    for some in np.array_split(np.arange(len(n)), -(-len(n) // MODELS_AT_ONCE)):
        share = torch.as_tensor(n[some] / n.sum())
        parts.append(trees.mean(federation.personal_models(some.tolist()), share))
    total: Model = trees.tree_map(lambda *v: torch.stack(v).double().sum(0).to(v[0].dtype), *parts)
    return trees.pick(total, federation.task.initial), "the mean of the clients' models by samples"


def _procedure(federation: Federation, joining: Joining) -> tuple[Algorithm, Newcomer, Outputs]:
    """The algorithm with the new clients' settings, what they do, and what their model answers."""
    algorithm = federation.algorithm.for_newcomers(**joining.settings())
    shares = bool(trees.leaves(federation.server))  # Local's server has nothing: its new clients are alone, too
    with torch.device(federation.engine.device):
        if joining.start == "global" and shares:
            w, what = common_model(federation)
            return algorithm, algorithm.tuning(w, f"{what}, fine-tuned"), network_outputs
        return algorithm, algorithm.newcomer(federation.server, federation.task), algorithm.outputs


def _check(federation: Federation, data: FederatedData) -> None:
    ours = federation.data
    if data.input_shape != ours.input_shape:
        raise InputError(
            f"the new client's samples have the shape {data.input_shape}; those of this run have {ours.input_shape}."
        )
    if data.x.is_floating_point() != ours.x.is_floating_point():
        kinds = ["numbers" if x.is_floating_point() else "tokens" for x in (data.x, ours.x)]
        raise InputError(f"the new client's inputs are {kinds[0]}; those of this run are {kinds[1]}.")
    if data.y.is_floating_point() != ours.y.is_floating_point():
        kinds = ["numbers" if y.is_floating_point() else "class labels" for y in (data.y, ours.y)]
        raise InputError(f"the new client's targets are {kinds[0]}; those of this run are {kinds[1]}.")
    if ours.classes and int(data.y.max()) >= len(ours.classes):
        raise InputError(f"the new client has the label {int(data.y.max())}; this run has {len(ours.classes)} classes.")
    if not data.sizes("train").all():
        raise InputError("a new client has no samples to train on; give it some.")


class _Group:
    """Some new clients, and what they have in hand between epochs."""

    def __init__(
        self,
        federation: Federation,
        data: FederatedData,
        ids: Rows,
        joiner: Newcomer,
        outputs: Outputs,
    ) -> None:
        self._federation, self._ids, self._joiner, self._outputs = federation, ids, joiner, outputs
        self._y, self._batch = data.y, batch_size(data)
        self._data = Resident(data.x, data.y, federation.engine.device, federation.task.dtype)
        check_fit(federation.task, data, self._data)
        self._splits: Any = {split: dict(zip(ids.tolist(), rows, strict=True)) for split, rows in data.splits.items()}
        self._own = _model_program(joiner.model)
        initial = federation.clients.states.initial
        self._carry = trees.tree_map(lambda v: v.expand(len(ids), *v.shape).clone(), initial)
        self._carry, _ = self._run(Program(joiner.begin, joiner.before, _keep), 0)

    def train(self, epoch: Phase, number: int) -> None:
        self._carry, _ = self._run(Program(_take, (epoch,), _keep), number)

    def score(self, split: str) -> Evaluation:
        _, tally = self._run(scored(self._own, split, self._batch, self._outputs), 0)
        found = evaluation(self._federation.task, self._y, self._ids, (), np.arange(len(self._ids)), tally, None)
        broken = np.isnan(found.loss) & (found.n > 0)  # the answers of a model that is not finite are all wrong
        return found._replace(accuracy=np.where(broken & ~np.isnan(found.accuracy), 0.0, found.accuracy))

    def models(self) -> Model:
        models: Model = self._run(self._own, 0)[1]["model"]
        return models

    def _run(self, program: Program, epoch: int) -> tuple[Tree, dict[str, Tree]]:
        fed, shared = self._federation, self._joiner.shared
        job = Job(fed.task, self._data, self._splits, program, self._ids, shared, {}, self._carry, fed.seed, epoch)
        result = fed.engine.run(job)
        if result.failed:
            client, error = next(iter(result.failed.items()))
            raise RunError(f"new client {client} could not join: {type(error).__name__}: {error}") from error
        return result.states, result.uploads


def _epoch(algorithm: Algorithm, joiner: Newcomer, opt_state: str) -> Phase:
    batches = Batches("train", 1, algorithm.batch_size, stream="newcomer", drop_last=algorithm.drop_last)
    return Phase(joiner.step, batches, joiner.fresh if opt_state == "reset" else None)


def _take(task: Task, down: Down, carry: Tree) -> Tree:
    return carry


def _keep(task: Task, down: Down, carry: Tree) -> tuple[dict[str, Tree], Tree]:
    return {}, carry


@cache
def _model_program(model: Callable[..., Model]) -> Program:
    """The same one for the same function, so that engines know it again."""
    return Program(_take, (), _HandOver(model).finish)


class _HandOver:
    def __init__(self, model: Callable[..., Model]) -> None:
        self._model = model

    def finish(self, task: Task, down: Down, carry: Tree) -> tuple[dict[str, Tree], Tree]:
        return {"model": self._model(task, down, carry)}, {}
