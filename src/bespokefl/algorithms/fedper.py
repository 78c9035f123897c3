"""FedPer: personal last layers on a shared base, trained together (Arivazhagan et al., arXiv 2019).

Clients minimise sum_i p_i f_i(phi, v_i) over a shared base phi and private last layers v_i (the paper's W_B and
W_P,i). A client runs E epochs of SGD on both at once, one backward pass per batch, from the received phi and its own
v_i; the server averages the phi_i. A client's model is the newest phi with its own v_i, the initial one if it never
took part; the server, who never sees a v_i, has no model. ``private_layers`` is the paper's K_P, counted in layers
with parameters (the paper counts blocks of a ResNet); running statistics go with their layer. lr 0.01
and batches of 128 are said to be the paper's.

``PartialSharing`` is what FedPer has in common with all methods that share one part of the model and keep the rest
with its client: FedRep, LG-FedAvg, FedBABU, FedAlt, FedSim, FedBN and PLGU-GRep say which part, and how it is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from bespokefl.core import (
    BODY,
    Batch,
    Batches,
    Call,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    ModelAveraging,
    Newcomer,
    Pass,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    hand_over,
    hyper,
    layers_of,
    shuffled,
)
from bespokefl.core.trees import drop, pick


class Kept(NamedTuple):
    v: Model  # the private part
    m: Model  # momentum (opt_state="keep" only)


@dataclass(frozen=True)
class PartialSharing(ModelAveraging):
    """The server holds the shared part phi, client i its private part v_i; its model is both.

    A method says what is ``private`` and gives the ``phases`` of a client's round. One tree holds the momentum of all
    parameters: a phase or pass that moves some names only is an optimiser of its own for them. A method that remembers
    more has state and carry of its own, with the fields v and m, and x and m.
    """

    sends: ClassVar = {"phi": "phi"}
    exchanges: ClassVar = (Exchange("train", {"phi": BODY}),)
    stays: ClassVar = {"v": "its head"}
    averages: ClassVar = ("train",)

    def private(self, task: Task) -> list[str]:
        """The tensors that stay with their client, running statistics included."""
        return last_layers(task)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.joint_step, self.epochs),)

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        if not task.body:
            raise InputError(
                f"algorithm.name = '{self.name}': the model has no trained layer before its head '{task.head_name}', "
                "so it has no two parts, one to share and one to keep; take a deeper model or name another head"
            )

    # the server --------------------------------------------------------------------------------------
    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"phi": drop(x0, self.private(task))}

    def init_client(self, task: Task, x0: Model) -> Tree:
        return self.kept(task, x0, self.opt.init(task.params(x0)))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"phi": server["phi"]})
        return server | {"phi": self.average(up.phi, server["phi"], up.weights(self.weights))}

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.joined_parts, {"phi": server["phi"]})

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "a private part from the initial one, trained under the server's shared part, which stays as it is"
        return self.joining(how, self.begin, self.newcomer_step, {"phi": server["phi"]})

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, self.phases, self.finish)

    def begin(self, task: Task, down: Down, kept: Tree) -> Tree:
        x = self.joined(task, down, kept)
        return Training(x, self.momentum_at_start(kept.m, task.params(x)))

    def joint_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        return self.moved(c, task.grad(c.x, batch))

    def private_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        """The shared part is fixed, in evaluation mode: no statistics move."""
        return self.moved(c, task.grad(c.x, batch, self.private_params(task), train=False))

    def shared_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        """The private part is fixed."""
        return self.moved(c, task.grad(c.x, batch, self.shared_params(task)))

    def newcomer_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        return self.private_step(task, down, c, batch)

    def private_step_in_training(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        """The shared part is fixed, with its statistics; those of the private part move."""
        private = set(self.private(task))
        p = task.grad(c.x, batch, self.private_params(task))
        return self.moved(c, p._replace(buffers={k: v for k, v in p.buffers.items() if k in private}))

    def moved(self, c: Tree, p: Pass) -> Tree:
        """One step of SGD on the names in the gradient, with the pass's new buffers."""
        x, m = self.opt.step(c.x, p.grad, c.m)
        return c._replace(x=x | p.buffers, m=m)

    def finish(self, task: Task, down: Down, c: Tree) -> tuple[dict[str, Tree], Tree]:
        return {"phi": drop(c.x, self.private(task))}, self.kept(task, c.x, c.m)

    @property
    def joined_parts(self) -> Program:
        return Program(self.joined, (), hand_over)

    def joined(self, task: Task, down: Down, kept: Tree) -> Model:
        """The received phi with the client's own v, in the order of the model."""
        parts = {**down.phi, **kept.v}
        return {k: parts[k] for k in task.initial}

    # pieces of it ------------------------------------------------------------------------------------
    def kept(self, task: Task, x: Model, m: Model) -> Kept:
        return Kept(pick(x, self.private(task)), self.momentum_to_keep(m))

    def private_params(self, task: Task) -> list[str]:
        private = set(self.private(task))
        return [k for k in task.names if k in private]

    def shared_params(self, task: Task) -> list[str]:
        private = set(self.private(task))
        return [k for k in task.names if k not in private]

    def alternately(self, private_epochs: int, shared_epochs: int) -> tuple[Phase, ...]:
        """First v with phi fixed, then phi with the new v fixed."""
        steps = ((self.private_step, private_epochs), (self.shared_step, shared_epochs))
        return tuple(Phase(step, shuffled(e, self.batch_size, drop_last=self.drop_last)) for step, e in steps)

    # more training at evaluation, on a copy ----------------------------------------------------------
    def tuned_by(self, step: Callable[..., Tree], epochs: int) -> Program:
        batches = Batches("train", epochs, self.batch_size, stream="finetune", drop_last=self.drop_last)
        return Program(self.begin_anew, (Phase(step, batches),), self.tuned_model)

    def begin_anew(self, task: Task, down: Down, kept: Tree) -> Training:
        x = self.joined(task, down, kept)
        return Training(x, self.opt.init(task.params(x)))

    def tuned_model(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Tree]:
        return {"model": c.x}, {}


@dataclass(frozen=True)
class FedPer(PartialSharing):
    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 2019"

    lr: float = hyper(0.01, "eta: step size of local SGD", low=0)
    batch_size: int | None = hyper(128, "samples of a local step; nothing: the whole split", low=1)
    private_layers: int = hyper(1, "K_P: how many last layers are private; 1: the head", low=1)

    def private(self, task: Task) -> list[str]:
        return last_layers(task, self.private_layers)

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        check_last_layers(task, self.name, "private_layers", self.private_layers)


def last_layers(task: Task, k: int = 1) -> list[str]:
    """The tensors of the head and of the k - 1 layers with parameters before it, in the order of the model."""
    before = layers_of(task, names=task.body)
    chosen = {name for part in before[len(before) + 1 - k :] for names in part for name in names}
    head = f"{task.head_name}."
    return [name for name in task.initial if name in chosen or name in task.head or name.startswith(head)]


def check_last_layers(task: Task, method: str, key: str, k: int) -> None:
    """Refuses to count the first layer of the model among its last ones."""
    most = len(layers_of(task, names=task.body))
    if k > most:
        raise InputError(
            f"algorithm.{key} = {k} ({method}): the model has {most + 1} layers with parameters (a head of several "
            f"counts as one), so it is a number from 1 to {most}"
        )
