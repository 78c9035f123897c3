"""SplitGP: a personal client side with an exit of its own before a shared server side (Han et al., INFOCOM 2023).

The model is cut in two: the client side phi_i, and the server side theta behind it. Where it is cut a client also has a
small classifier kappa_i, one linear layer, and it minimises

    gamma CE(kappa_i(phi_i(x))) + (1 - gamma) CE(theta(phi_i(x))).

The server averages theta for all; of the rest every client keeps a share, phi_i <- lam phi_i + (1 - lam) sum_j p_j
phi_j, and the same for kappa_i. A sample leaves at the client's exit where the entropy of its softmax is at most E_th,
and goes on through theta otherwise: that two-exit model is a client's, (mean phi, theta) the global one. lam = 0 is the
paper's multi-exit baseline; lam = 1 leaves the client sides to themselves.

* A client mixes when a round begins for it, which is the same: of an absent client, phi_i is what it trained last. One
  that never took part has the initial phi and kappa as its own.
* ``cut`` names the first layer of the server side, a linear one: the first behind the last convolution by default, or
  the head in a model without convolutions. Layers count in the order in which the model lists them.
* kappa starts at 0. E_th is tuned per data set, usually from 0.05 to 2.3.
* In split training phi runs on the client and theta on the server, which send each other the activations at the cut and
  their gradients. The numbers are the same; that traffic (twice an activation per sample and epoch) is not counted.

lr 0.01, batches of 50 and one local epoch are the paper's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bespokefl.core import (
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    Headed,
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
    class_logits,
    hyper,
)
from bespokefl.core.trees import drop, pick

MODEL_AND_EXIT = "a model after local steps, with its client's exit"
KAPPA = ("kappa.weight", "kappa.bias")


class Kept(NamedTuple):
    side: Model  # phi_i and kappa_i
    m: Model  # momentum (opt_state="keep" only)


@dataclass(frozen=True)
class SplitGP(Headed, ModelAveraging):
    name: ClassVar[str] = "splitgp"
    paper: ClassVar[str] = (
        "Han et al., SplitGP: Achieving Both Generalization and Personalization in Federated Learning, INFOCOM 2023"
    )
    sends: ClassVar = {"x": "w"}
    exchanges: ClassVar = (Exchange("train", {"x": MODEL_AND_EXIT}),)
    averages: ClassVar = ("train",)

    lr: float = hyper(0.01, "eta: step size of local SGD", low=0)
    local_epochs: int = hyper(1, "E: passes over a client's train split in a round", low=1)
    gamma: float = hyper(0.5, "gamma: weight of the client's exit in the loss", low=0, high=1)
    lam: float = hyper(0.2, "lambda: share of its own client side that a client keeps", low=0, high=1)
    E_th: float = hyper(0.4, "E_th: largest entropy with which a sample leaves at the client's exit", low=0)
    cut: str | None = hyper(None, "first layer of the server side; nothing: the first linear one behind convolutions")

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        linear = [layer.name for layer in task.layers if layer.kind == "linear"]
        if self.cut not in (None, task.head_name, *linear):
            raise InputError(
                f"algorithm.cut = {self.cut!r} is no linear layer of the model; it is one of {', '.join(linear)}"
            )
        if not set(self.client_side(task)) & set(task.names):
            raise InputError(
                f"algorithm.cut = {self.first_of_server(task)!r}: no trained layer is left for the client's side; take "
                "a deeper model or cut further behind"
            )

    def first_of_server(self, task: Task) -> str:
        if self.cut is not None:
            return self.cut
        kinds = [layer.kind for layer in task.layers]
        last = max((k for k, kind in enumerate(kinds) if kind == "convolution"), default=len(kinds))
        behind = [layer.name for layer in task.layers[last:] if layer.kind == "linear"]
        return behind[0] if behind else task.head_name

    def client_side(self, task: Task) -> list[str]:
        server_side = set(task.names_from(self.first_of_server(task)))
        return [k for k in task.initial if k not in server_side]

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": self._with_kappa(task, x0)}

    def init_client(self, task: Task, x0: Model) -> Kept:
        x = self._with_kappa(task, x0)
        return self._kept(task, x, self.opt.init(pick(x, self.trained(task))))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        return {"w": self.average(up.x, server["w"], up.weights(self.weights))}

    def global_model(self, server: Tree) -> Model:
        return drop(server["w"], KAPPA)

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.own_model, {"w": server["w"]})

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "a client side that starts at the mean one, before the server's side, which stays as it is"
        return self.joining(how, self.begin_new, self.client_step, {"w": server["w"]})

    def outputs(self, task: Task, model: Model, batch: Batch) -> Tensor:
        """Those of the client's exit where they are sure enough, else those of the whole path."""
        out, h, _ = task.apply(model, batch, at=self.first_of_server(task))
        early = self.client_exit(model, h)
        log_p = class_logits(early).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        return torch.where(entropy <= self.E_th, early, out.view_as(early)).view_as(out)

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        x = self.own(task, down, kept)
        return Training(x, self.momentum_at_start(kept.m, pick(x, self.trained(task))))

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        """lam of the client's own side, 1 - lam of the mean one; the server side as it is."""
        w: Model = down.w
        return w | {k: self.lam * v + (1 - self.lam) * w[k] for k, v in kept.side.items()}

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return self.descend(c, self.gradient(task, c.x, batch, self.trained(task)))

    def begin_new(self, task: Task, down: Down, kept: Kept) -> Training:
        return Training(down.w, self.opt.init(pick(down.w, self.trained(task))))

    def client_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        """The server's side is fixed, with its statistics."""
        side = [*self.client_side(task), *KAPPA]
        p = self.gradient(task, c.x, batch, [k for k in self.trained(task) if k in side])
        return self.descend(c, p._replace(buffers={k: v for k, v in p.buffers.items() if k in side}))

    def gradient(self, task: Task, x: Model, batch: Batch, names: Sequence[str]) -> Pass:
        """Of the loss at both exits."""

        def both_exits(x: Model, out: Tensor, h: Tensor) -> Tensor:
            exits = (self.client_exit(x, h).view_as(out), out)
            early, late = (batch.mean(task.per_sample(o, batch.y)) for o in exits)
            return self.gamma * early + (1 - self.gamma) * late

        return task.grad(x, batch, names, objective=both_exits, at=self.first_of_server(task))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        return {"x": c.x}, self._kept(task, c.x, c.m)

    def client_exit(self, x: Model, h: Tensor) -> Tensor:
        """kappa on the activations at the cut."""
        weight, bias = (x[k] for k in KAPPA)
        return F.linear(h.flatten(1), weight, bias)

    def trained(self, task: Task) -> list[str]:
        return [*task.names, *KAPPA]

    def _with_kappa(self, task: Task, x: Model) -> Model:
        features, outputs = task.head_sizes(self.name)
        cut, like = self.first_of_server(task), x[task.names[0]]
        if cut != task.head_name:
            features = task.initial[f"{cut}.weight"].shape[1]
        return {**x, KAPPA[0]: like.new_zeros(outputs, features), KAPPA[1]: like.new_zeros(outputs)}

    def _kept(self, task: Task, x: Model, m: Model) -> Kept:
        return Kept(pick(x, [*self.client_side(task), *KAPPA]), self.momentum_to_keep(m))
