"""FedBABU: only the body is learned together; the head stays random until fine-tuning (Oh et al., ICLR 2022).

A client runs E epochs of SGD on the body phi under the common initial head, which nobody trains, averages or sends; the
server averages the bodies. The global model is the newest body with the initial head, and a client's model is that
after ``finetune_epochs`` of local SGD at evaluation, on a copy: of the whole model, of the body, or of the head alone.

* The authors' code and PGFed's differ in the average: all clients alike (the default), or by samples.
* lr 0.1 and momentum 0.9 are the authors', who divide lr by 10 after 1/2 and 3/4 of the rounds, and fine-tune for 1 to
  5 epochs; PGFed's code for 1 epoch, at a rate of its own: ``finetune_lr``.
* The head alone is fine-tuned with the body in evaluation mode; otherwise running statistics move with the copy.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bespokefl.algorithms.fedper import PartialSharing
from bespokefl.core import (
    Batch,
    Call,
    Cohort,
    Down,
    Model,
    Newcomer,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    hyper,
)


@dataclass(frozen=True)
class FedBABU(PartialSharing):
    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = (
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    )

    lr: float = hyper(0.1, "eta: step size of local SGD", low=0)
    momentum: float = hyper(0.9, "momentum of local SGD", low=0, below=1)
    finetune_epochs: int = hyper(1, "tau_f: epochs of fine-tuning at evaluation", low=1)
    finetune_part: Literal["whole", "body", "head"] = hyper("whole", "what is fine-tuned")
    finetune_lr: float | None = hyper(None, "step size of fine-tuning; nothing: lr", low=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.shared_step, self.epochs),)

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {**super().init(task, x0, setup), "x0": x0}

    def global_model(self, server: Tree) -> Model:
        model: Model = server["x0"] | server["phi"]  # the head is that of x0
        return model

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.tuned, {"phi": server["phi"]})

    @property
    def tuned(self) -> Program:
        return self.tuned_by(self.finetune_step, self.finetune_epochs)

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = f"the shared body with the initial head, fine-tuned ({self.finetune_part})"
        return self.joining(how, self.begin_anew, self.finetune_step, {"phi": server["phi"]})

    @property
    def newcomer_settings(self) -> dict[str, str]:
        return {} if self.finetune_lr is None else {"lr": "finetune_lr"}

    def finetune_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        names = {"whole": task.names, "body": self.shared_params(task), "head": self.private_params(task)}
        p = task.grad(c.x, batch, names[self.finetune_part], train=self.finetune_part != "head")
        lr = self.lr if self.finetune_lr is None else self.finetune_lr
        x, m = self.opt_at(lr).step(c.x, p.grad, c.m)
        return Training(x | p.buffers, m)
