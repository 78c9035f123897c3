"""FedHKD: FedAvg whose clients also share what they know of each class (Chen et al., ICLR 2023).

Hyper-knowledge of class j is the mean H^j of its features (the head's inputs) and the mean Q^j of its soft predictions
softmax(logits / T), over a client's samples of that class and under its trained model; Gaussian noise is added to H^j.
The server averages models, and H^j and Q^j over the clients by their samples of class j. From the second round on a
client minimises

    f_i(x) + lam mean_j D(softmax(head(H^j) / T), Q^j) + gamma mean_s ||features(s) - H^{y_s}||^2

with j over the classes of which there is knowledge and s over the batch (0 where there is none of a sample's class). A
client's model is its own after training, as in FedAvg; with lam = gamma = 0 it is FedAvg with uniform weights.

* ``distance="l2"`` is the paper's D, a norm that is not squared; "kl" the authors' code, KL(Q^j || softmax(...)).
* The authors' server overwrites an entry client by client, so that the last one stays: ``knowledge="last"``.
* The authors train with Adam (1e-3, batches of 64, E = 5: ``optimizer="adam"``) and clip gradients; ``clip`` is off.
* ``aggregation`` is that of the models; H^j and Q^j are averaged as above.
* A class that nobody had in a round keeps its entry. An absent class is uploaded as zeros with a count of 0.
* The knowledge is collected in one more pass, in evaluation mode; the head runs on H^j in evaluation mode too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.algorithms.fedavg import FedAvg, Kept
from bespokefl.core import (
    MODEL,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    Headed,
    Model,
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
    keyed_normal,
    ordered,
)
from bespokefl.core.trees import clipped


class Collected(NamedTuple):
    """A trained model, and sums over the client's samples of each class."""

    c: Training
    h: Tensor  # of features
    q: Tensor  # of soft predictions
    n: Tensor  # of samples
    key: Tensor  # that of the noise


@dataclass(frozen=True)
class FedHKD(Headed, FedAvg):
    name: ClassVar[str] = "fedhkd"
    paper: ClassVar[str] = (
        "Chen et al., The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with "
        "Data-Free Hyper-Knowledge Distillation, ICLR 2023"
    )
    exchanges: ClassVar = (
        Exchange(
            "train",
            {
                "x": MODEL,
                "n": "how many samples of each class it has",
                "H": "for each class the mean of its samples' representations",
                "Q": "and of their predictions",
            },
        ),
    )

    lam: float = hyper(0.05, "lambda: weight of the distance to the classes' soft predictions", low=0)
    gamma: float = hyper(0.05, "gamma: weight of the distance to the classes' features", low=0)
    T: float = hyper(0.5, "T: temperature of the soft predictions", above=0)
    noise: float = hyper(2.0, "standard deviation of the noise on H^j", low=0)
    distance: Literal["l2", "kl"] = hyper("l2", "D: Euclidean distance, or Kullback-Leibler divergence")
    knowledge: Literal["mean", "last"] = hyper(
        "mean", "H^j and Q^j: mean over clients by samples, or the last client's"
    )
    clip: float | None = hyper(None, "largest norm of a local gradient; nothing: as it is", above=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": x0, "known": {}}

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared=server)
        n = up.n.double()  # clients x classes
        if self.knowledge == "last":
            n = ((n > 0) & (n.flip(0).cumsum(0).flip(0) == n)).double()  # nobody after this client has the class
        total = n.sum(0)
        share = (n / total.clamp(min=1))[..., None]
        known = {k: (share * v).sum(0).to(v.dtype) for k, v in (("H", up.H), ("Q", up.Q))}
        if server["known"]:
            known = {k: torch.where(total[:, None] > 0, v, server["known"][k]) for k, v in known.items()}
        return {"w": self.average(up.x, server["w"], up.weights(self.weights)), "known": known}

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return super().personal_model(server, cohort)._replace(shared=server)

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        return super().newcomer(server, task)._replace(shared=server)

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        collecting = Phase(self.collect, ordered("train", self.batch_size), self.begin_collecting)
        return Program(self.begin, (Phase(self.step, self.epochs), collecting), self.tell)

    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        p = task.grad(x, batch, objective=self.distilled(task, down.known, batch) if down.known else None)
        return p._replace(grad=clipped(p.grad, self.clip))

    def distilled(self, task: Task, known: Model, batch: Batch) -> Callable[[Model, Tensor, Tensor], Tensor]:
        """The objective under the server's knowledge; a class without any has zeros in Q."""
        H, Q = known["H"], known["Q"]
        told = (Q.sum(1) > 0).to(Q.dtype)

        def objective(x: Model, out: Tensor, h: Tensor) -> Tensor:
            log_p = (class_logits(task.head_outputs(x, H)) / self.T).log_softmax(1)
            classes = (told * self.divergence(log_p, Q)).sum() / told.sum().clamp(min=1)
            samples = told[batch.y] * (h.flatten(1) - H[batch.y]).square().sum(1)
            loss = batch.mean(task.per_sample(out, batch.y))
            return loss + self.lam * classes + self.gamma * batch.mean(samples)

        return objective

    def divergence(self, log_p: Tensor, Q: Tensor) -> Tensor:
        """D of each class."""
        if self.distance == "kl":
            return (torch.xlogy(Q, Q) - Q * log_p).sum(1)
        squared = (log_p.exp() - Q).square().sum(1)
        return torch.where(squared > 0, squared, 1.0).sqrt() * (squared > 0)  # no infinite slope at 0

    def begin_collecting(self, task: Task, down: Down, c: Training) -> Collected:
        sizes = task.head_sizes(self.name)
        features, classes = sizes.features, sizes.classes
        zero = torch.zeros((), dtype=torch.int64)
        return Collected(c, torch.zeros(classes, features), torch.zeros(classes, classes), torch.zeros(classes), zero)

    def collect(self, task: Task, down: Down, k: Collected, batch: Batch) -> Collected:
        out, h, _ = task.apply(k.c.x, batch)
        label = batch.one_hot(len(k.n))
        features = k.h + batch.outer(label, h.flatten(1))
        predictions = k.q + batch.outer(label, (class_logits(out) / self.T).softmax(1))
        return Collected(k.c, features, predictions, k.n + batch.sum(label), batch.key)

    def tell(self, task: Task, down: Down, k: Collected) -> tuple[dict[str, Tree], Kept]:
        upload, kept = self.finish(task, down, k.c)
        n = k.n.clamp(min=1)[:, None]
        H = k.h / n + self.noise * keyed_normal(k.key, k.h.shape, k.h.dtype)
        return upload | {"H": H * (k.n > 0)[:, None], "Q": k.q / n, "n": k.n}, kept
