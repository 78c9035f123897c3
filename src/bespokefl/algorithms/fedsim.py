"""FedSim: the shared and the personal part of a model move together (Pillutla et al., ICML 2022).

min over u and all v_i of sum_i p_i f_i(u, v_i), u shared and v_i personal: the last ``private_layers`` here. Algorithm
FedSim: a client runs E epochs of SGD on (u, v_i) at once; the server moves u by its own rate along the mean update,
u <- u + eta_g sum_i p_i (u_i - u). A client's model is the newest u with its own v_i, the initial one if it never took
part; the server has no model. With eta_g = 1 and mu = 0 it is FedPer, bit for bit.

* ``mu`` adds mu/2 |v_i - v_0|^2, v_0 being the common initial value; the authors' code writes c |v_i - v_0|^2, so
  its c is half of mu.
* The authors' code weighs a client by its number of batches: ``count="batches"``.
* Running statistics go with their layer; those of u are averaged, whatever eta_g is.
* The paper also has personal input layers and adapters: a subclass names them in ``private``.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.algorithms.fedper import PartialSharing, check_last_layers, last_layers
from bespokefl.core import Cohort, Down, Model, ModelAveraging, Pass, Setup, Task, Tree, hyper, when
from bespokefl.core.trees import pick


class Kept(NamedTuple):
    v: Model  # the personal part
    m: Model  # momentum (opt_state="keep" only)
    v0: Model  # the parameters of v that all began with (mu > 0 only)


class Training(NamedTuple):
    x: Model
    m: Model
    v0: Model


@dataclass(frozen=True)
class FedSim(PartialSharing):
    name: ClassVar[str] = "fedsim"
    paper: ClassVar[str] = "Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022"
    stays: ClassVar = {"v": "its head", "v0": "its head as it was before"}

    private_layers: int = hyper(1, "v_i: how many last layers are personal; 1: the head", low=1)
    mu: float = hyper(0.0, "mu: pull of v_i towards its initial value", low=0)
    eta_g: float = hyper(1.0, "eta_g: step size of the server", above=0)
    count: Literal["samples", "batches"] = hyper(
        "samples",
        'p_i: what is counted with weights="sample"',
        when=when(weights="sample") & ModelAveraging.acts["weights"],
    )

    def private(self, task: Task) -> list[str]:
        return last_layers(task, self.private_layers)

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        check_last_layers(task, self.name, "private_layers", self.private_layers)

    def init_client(self, task: Task, x0: Model) -> Kept:
        kept = super().init_client(task, x0)
        return Kept(kept.v, kept.m, pick(x0, self.private_params(task)) if self.mu else {})

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        u = server["phi"]
        up = cohort.run(self.train, shared={"phi": u})
        average: Model = self.average(up.phi, u, self.shares(up.cohort))
        params = self.shared_params(cohort.task)
        return {"phi": average | {k: (1 - self.eta_g) * u[k] + self.eta_g * average[k] for k in params}}

    def shares(self, cohort: Cohort) -> Tensor:
        """p_i of those that answered."""
        if self.weights == "uniform" or self.count == "samples":
            return cohort.weights(self.weights)
        size = cohort.n if self.batch_size is None else cohort.n.clamp(max=self.batch_size)
        batches = torch.floor(cohort.n / size) if self.drop_last else torch.ceil(cohort.n / size)
        return batches / batches.sum()

    # one client --------------------------------------------------------------------------------------
    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        c = super().begin(task, down, kept)
        return Training(c.x, c.m, kept.v0)

    def moved(self, c: Training, p: Pass) -> Training:
        pulled = {k: p.grad[k] + self.mu * (c.x[k] - v) for k, v in c.v0.items() if k in p.grad}
        moved: Training = super().moved(c, p._replace(grad=p.grad | pulled))
        return moved

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        upload, kept = super().finish(task, down, c)
        return upload, Kept(kept.v, kept.m, c.v0)
