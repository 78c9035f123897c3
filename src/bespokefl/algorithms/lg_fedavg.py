"""LG-FedAvg: a shared head on local representations (Liang et al., NeurIPS 2019 workshop).

The opposite of FedPer: the lower layers stay with their client, the last ``shared_layers`` are averaged by p_i. A
client runs E epochs of SGD on everything, from its own body and the received head. Its model is its own body, the
initial one if it never took part, with the newest head; the server, who never sees a body, has no model. Running
statistics go with their layers.

* The authors' code averages all clients alike (``weights="uniform"``), and starts from a model that FedAvg has trained:
  hand that one to the federation as its ``initial`` model.
* ``update="body_then_head"`` is PGFed's code: two passes over each batch, the first moves the body, the second the head
  on top of the moved body. The statistics of BatchNorm are those of the first pass. With the PyTorch of its time, whose
  cleared gradients are zeros, the part that rests in a pass also coasts on its momentum there; here it rests.
* A popular re-implementation shares the first layers instead; that is another method.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bespokefl.algorithms.fedper import PartialSharing, check_last_layers, last_layers
from bespokefl.core import Batch, Down, Exchange, Phase, Setup, Task, Tree, hyper


@dataclass(frozen=True)
class LGFedAvg(PartialSharing):
    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, "
        "NeurIPS 2019 workshop"
    )
    exchanges: ClassVar = (Exchange("train", {"phi": "the head of a model after local steps"}),)
    stays: ClassVar = {"v": "its body"}

    shared_layers: int = hyper(1, "how many last layers are shared; 1: the head", low=1)
    update: Literal["joint", "body_then_head"] = hyper("joint", "one pass per batch, or one for each part")

    def private(self, task: Task) -> list[str]:
        shared = last_layers(task, self.shared_layers)
        return [k for k in task.initial if k not in shared]

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        check_last_layers(task, self.name, "shared_layers", self.shared_layers)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.joint_step if self.update == "joint" else self.two_steps, self.epochs),)

    def newcomer_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        return self.private_step_in_training(task, down, c, batch)  # a body has to learn its statistics

    def two_steps(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        c = self.moved(c, task.grad(c.x, batch, self.private_params(task)))
        p = task.grad(c.x, batch, self.shared_params(task))
        return self.moved(c, p._replace(buffers={}))
