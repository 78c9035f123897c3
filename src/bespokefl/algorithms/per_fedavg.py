"""Per-FedAvg: a global model that one local gradient step makes good for each client (Fallah et al., NeurIPS 2020).

min over w of the mean of f_i(w - alpha grad f_i(w)), eq. (3). A meta step of Algorithm 1 draws independent batches:
w~ = w - alpha grad f_i(w) on the first and g = grad f_i(w~) on the second, and then

* ``variant="fo"``, first order: w <- w - beta g. Two batches, two gradients.
* ``variant="hf"``, Hessian-free, the default, because the paper finds it the better one on heterogeneous clients:
  w <- w - beta (g - alpha d), where d = (grad f_i(w + delta g) - grad f_i(w - delta g)) / (2 delta) on the third batch
  is the Hessian at w (not at w~) times g, eq. (10). Three batches, four gradients.

beta is ``lr``, 0.001 as in popular code. The server averages, 1/C each. A client is scored with one step of
size alpha from the newest w on one batch of its train split, taken on a copy (``adapt_by="beta"``: of size beta, as
PGFed's code does).

An epoch is one pass over the train split: a meta step takes 2 or 3 batches of ``batch_size`` of it, so there are 2 or 3
times fewer steps than in FedAvg's. The last samples of an epoch are shared out among the batches of a shorter step;
where fewer samples are left than batches are needed (or a client has no more), samples serve in more than one.
Meta steps are plain: momentum and ``opt_state`` have no effect. Running statistics are those of the pass at w.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bespokefl.core import (
    MODEL,
    SGD,
    Batch,
    Batches,
    Call,
    Cohort,
    Down,
    Exchange,
    Model,
    ModelAveraging,
    Newcomer,
    OneModel,
    Phase,
    Program,
    Task,
    Training,
    Tree,
    hand_over,
    hyper,
    never,
    received,
    shuffled,
    when,
)
from bespokefl.core.trees import axpy, scale, shift, sub


@dataclass(frozen=True)
class PerFedAvg(ModelAveraging, OneModel):
    name: ClassVar[str] = "per-fedavg"
    paper: ClassVar[str] = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
    sends: ClassVar = {"w": "w"}
    exchanges: ClassVar = (Exchange("train", {"w": MODEL}),)
    averages: ClassVar = ("train",)
    acts: ClassVar = {
        "momentum": never("its meta steps are plain ones"),
        "opt_state": never("its plain steps have no state"),
    }
    newcomer_acts: ClassVar = dict.fromkeys(("momentum", "opt_state"), never("its steps are plain ones"))

    lr: float = hyper(0.001, "beta: step size of the meta step", low=0)
    alpha: float = hyper(0.01, "alpha: size of the step that adapts w to a client, eq. (3)", low=0)
    variant: Literal["hf", "fo"] = hyper("hf", "the meta gradient: Hessian-free, or of first order")
    delta: float = hyper(
        1e-3,
        'delta: width of the difference that stands for the Hessian, eq. (10) ("hf")',
        above=0,
        when=when(variant="hf"),
    )
    adapt_by: Literal["alpha", "beta"] = hyper("alpha", "size of the step at evaluation: alpha, or lr (PGFed's code)")
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    @property
    def only_sgd(self) -> str:
        return "its meta steps are plain ones along a gradient, by its paper"

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        return {"w": self.average(up.w, server["w"], up.weights(self.weights))}

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.adapted, {"w": server["w"]})

    @property
    def adapted(self) -> Program:
        one_batch = Batches("train", 1, self.batch_size, stream="finetune", steps=1)
        return Program(received, (Phase(self.adapt, one_batch),), hand_over)

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "the global model, adapted by plain steps of size alpha"
        return self.joining(how, self.begin_tuning, self.newcomer_step, {"w": server["w"]})

    @property
    def newcomer_settings(self) -> dict[str, str]:
        return {"lr": "alpha"} if self.adapt_by == "alpha" else {}

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        size = None if self.batch_size is None else self.batches * self.batch_size
        batches = shuffled(self.local_epochs, size, drop_last=self.drop_last)
        return Program(received, (Phase(self.meta_step, batches),), self.finish)

    @property
    def batches(self) -> int:
        """Of one meta step."""
        return 3 if self.variant == "hf" else 2

    def meta_step(self, task: Task, down: Down, w: Model, batch: Batch) -> Model:
        first, second, *third = shared_out(batch, self.batches)
        p = task.grad(w, first)
        g = task.grad(shift(w, -self.alpha, p.grad), second).grad
        if self.variant == "hf":
            g = axpy(-self.alpha, self.hessian_times(g, task, w, third[0]), g)
        w, _ = SGD(self.lr, weight_decay=self.weight_decay).step(w, g, {})
        return w | p.buffers

    def hessian_times(self, g: Model, task: Task, w: Model, batch: Batch) -> Model:
        ahead, behind = (task.grad(shift(w, s, g), batch).grad for s in (self.delta, -self.delta))
        d: Model = scale(1 / (2 * self.delta), sub(ahead, behind))
        return d

    def finish(self, task: Task, down: Down, w: Model) -> tuple[dict[str, Tree], Tree]:
        return {"w": w}, {}

    def newcomer_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return c._replace(x=self.adapt(task, down, c.x, batch))

    def adapt(self, task: Task, down: Down, w: Model, batch: Batch) -> Model:
        p = task.grad(w, batch)
        return shift(w, -self.alpha if self.adapt_by == "alpha" else -self.lr, p.grad) | p.buffers


def shared_out(batch: Batch, parts: int) -> list[Batch]:
    """The samples dealt to several batches in turn, so that padding leaves none of them empty.

    Fewer samples than batches are dealt over again until each batch has one.
    """
    n = batch.n.long()
    k = torch.arange(max(parts, batch.x.shape[0]), device=batch.x.device)
    rows = k % n.clamp(min=1)
    x, y = batch.x[rows], batch.y[rows]
    weights = None if batch.weights is None else (k < n.clamp(min=parts)).to(batch.weights.dtype)
    return [
        Batch(x[j::parts], y[j::parts], None if weights is None else weights[j::parts], batch.key + j)
        for j in range(parts)
    ]
