"""q-FedAvg: clients with a higher loss count more (Li et al., Fair Resource Allocation in FL, ICLR 2020).

Algorithm 2, with F_k the loss of client k at w, d_k = w - w_k after its local training, and L = 1 / eta:
w <- w - sum_k L F_k^q d_k / sum_k (q F_k^(q-1) |L d_k|^2 + L F_k^q). q = 0 is FedAvg with uniform weights.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bespokefl.algorithms.fedavg import Kept, LocalSGD
from bespokefl.core import Batch, Cohort, Down, Phase, Program, Task, Training, Tree, hyper, ordered
from bespokefl.core.trees import drop, flat, mean, shift, sub


class Local(NamedTuple):
    c: Training  # starts at w
    loss: Tensor  # sum over the samples at w
    n: Tensor


@dataclass(frozen=True)
class QFedAvg(LocalSGD):
    name: ClassVar[str] = "q-fedavg"
    paper: ClassVar[str] = "Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020"
    sends: ClassVar = {"d": None}  # an update, not a model

    q: float = hyper(1.0, "q: how much a high loss counts, eq. (2)", low=0)

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        F, L = up.loss.double().clamp(min=1e-10), 1 / self.lr
        h = self.q * F ** (self.q - 1) * L**2 * (flat(up.d).double() ** 2).sum(1) + L * F**self.q
        w = shift(server["w"], -1.0, mean(up.d, L * F**self.q / h.sum()))
        return {"w": w | mean(up.buffers, up.weights("uniform"))}

    @property
    def train(self) -> Program:
        phases = Phase(self.add_loss, ordered("train", self.batch_size)), Phase(self.local_step, self.epochs)
        return Program(self.begin_local, phases, self.finish_local)

    def begin_local(self, task: Task, down: Down, kept: Kept) -> Local:
        return Local(self.begin(task, down, kept), torch.zeros(()), torch.zeros(()))

    def add_loss(self, task: Task, down: Down, l: Local, batch: Batch) -> Local:
        return l._replace(loss=l.loss + batch.sum(task.losses(down.w, batch)), n=l.n + batch.n)

    def local_step(self, task: Task, down: Down, l: Local, batch: Batch) -> Local:
        return l._replace(c=self.step(task, down, l.c, batch))

    def finish_local(self, task: Task, down: Down, l: Local) -> tuple[dict[str, Tree], Kept]:
        d = sub(task.params(down.w), task.params(l.c.x))
        return {"d": d, "buffers": drop(l.c.x, task.names), "loss": l.loss / l.n}, self.finish(task, down, l.c)[1]
