"""pFedMe: personal models tied to the global one by a Moreau envelope (Dinh et al., NeurIPS 2020).

min over w of the mean of F_i(w) = min_theta f_i(theta) + lam/2 |theta - w|^2, eqs. (2) and (3). In each local step of
Algorithm 1 a client approaches the inner minimum by K steps on one batch,
theta <- theta - eta_p (grad f_i(theta) + lam (theta - w_i)), and follows the envelope's gradient with its copy of w,
w_i <- w_i - eta lam (w_i - theta). The server takes w <- (1 - beta) w + beta mean_i w_i, 1/C each. eta is ``lr``. What
is scored is theta_i of the client's last round (the initial model if it never took part), or w_i (``personal="w_i"``).

As in the authors' code theta starts a round at w and then goes on from local step to local step; it is not set back to
w_i. Further:

* Local steps are counted by ``local_epochs``, for comparisons at equal data; ``local_unit="steps"`` takes the paper's
  R batches. Each of them costs K gradients.
* ``train_all``: their code trains all clients in every round and samples only whose w_i are averaged.
* Their inner step also decays theta by 0.001, which is ``weight_decay`` here. Both updates are plain steps: momentum
  and ``opt_state`` have no effect.
* eta = 0.005 and batches of 20 are theirs.
* PGFed's comparison scores w_i: its code means theta_i, but overwrites it with w_i when a client's round ends. It has
  lam = 1, K = 5, eta_p = 0.01, eta = 0.005, beta = 1, the same decay, averages by samples, and batches of 10.
* Running statistics are those of the passes at theta, also in w_i; beta above 1 does not push them beyond the mean.
"""

import contextlib
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from bespokefl.core import (
    SGD,
    Batch,
    Batches,
    Cohort,
    Down,
    Exchange,
    Model,
    ModelAveraging,
    Newcomer,
    OneModel,
    Phase,
    Program,
    RunError,
    Task,
    Training,
    Tree,
    hyper,
    never,
    part_way,
    pulled,
    server_step,
    shuffled,
    when,
)


class Pair(NamedTuple):
    w: Model  # w_i, the client's copy of w
    theta: Model


@dataclass(frozen=True)
class PFedMe(ModelAveraging, OneModel):
    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    sends: ClassVar = {"w": "w"}
    exchanges: ClassVar = (
        Exchange("train", {"w": "a model near its personal one"}),
        Exchange("train_apart", only=when(train_all=True)),
    )
    stays: ClassVar = {"": "the personal model"}
    averages: ClassVar = ("train",)
    acts: ClassVar = {
        "momentum": never("both of its updates are plain steps"),
        "opt_state": never("its plain steps have no state"),
        "local_epochs": when(local_unit="epochs"),
    }
    newcomer_acts: ClassVar = dict.fromkeys(("momentum", "opt_state"), never("its steps are plain ones"))

    lr: float = hyper(0.005, "eta: step size of w_i", low=0)
    batch_size: int | None = hyper(20, "samples of a local step; nothing: the whole split", low=1)
    lam: float = hyper(15.0, "lambda: pull of theta towards w_i, eq. (3)", low=0)
    K: int = hyper(5, "K: inner steps on one batch", low=1)
    eta_p: float = hyper(0.09, "eta_p: step size of theta", low=0)
    beta: float = hyper(1.0, "beta: step size of the server, Algorithm 1", above=0)
    local_unit: Literal["epochs", "steps"] = hyper("epochs", "local rounds: the batches of local_epochs, or R of them")
    R: int = hyper(20, 'R: local rounds, one batch each (local_unit="steps")', low=1, when=when(local_unit="steps"))
    train_all: bool = hyper(False, "train all clients in every round, average only those sampled")
    personal: Literal["theta", "w_i"] = hyper("theta", "which model a client is scored with (w_i: PGFed's code)")
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init_client(self, task: Task, x0: Model) -> Model:
        return x0  # theta, or w_i

    @property
    def only_sgd(self) -> str:
        return "both of its updates are plain steps, by its paper"

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w = server["w"]
        if self.train_all:
            self.train_the_others(w, cohort)
        up = cohort.run(self.train, shared={"w": w})
        average = self.average(up.w, w, up.weights(self.weights))
        return {"w": server_step(cohort.task, w, self.beta, average)}

    def train_the_others(self, w: Model, cohort: Cohort) -> None:
        others = np.setdiff1d(cohort.everyone().ids, cohort.ids)
        if len(others):
            with contextlib.suppress(RunError):  # if none of them can, the round is still that of the cohort
                cohort.only(others).run(self.train_apart, shared={"w": w})

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "theta that starts at the global model and is pulled towards it"
        return self.joining(how, self.begin_tuning, self.newcomer_step, {"w": server["w"]})

    @property
    def newcomer_settings(self) -> dict[str, str]:
        return {"lr": "eta_p"}

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.local_batches),), self.finish)

    @property
    def train_apart(self) -> Program:
        """The same without sending w_i."""
        return self.train._replace(finish=self.finish_apart)

    @property
    def local_batches(self) -> Batches:
        if self.local_unit == "epochs":
            return self.epochs
        return shuffled(1, self.batch_size, steps=self.R, drop_last=self.drop_last)

    def begin(self, task: Task, down: Down, kept: Model) -> Pair:
        return Pair(down.w, down.w)

    def step(self, task: Task, down: Down, c: Pair, batch: Batch) -> Pair:
        theta = self.approached(task, c.theta, c.w, batch)
        return Pair(theta | part_way(task.params(c.w), self.lr * self.lam, task.params(theta)), theta)

    def approached(self, task: Task, theta: Model, w: Model, batch: Batch) -> Model:
        """K steps towards the inner minimum."""
        inner = SGD(self.eta_p, weight_decay=self.weight_decay)
        for _ in range(self.K):
            p = task.grad(theta, batch)
            theta, _ = inner.step(theta, pulled(p.grad, self.lam, theta, w), {})
            theta = theta | p.buffers
        return theta

    def newcomer_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return c._replace(x=self.approached(task, c.x, down.w, batch))

    def finish(self, task: Task, down: Down, c: Pair) -> tuple[dict[str, Tree], Model]:
        return {"w": c.w}, self.kept(c)

    def finish_apart(self, task: Task, down: Down, c: Pair) -> tuple[dict[str, Tree], Model]:
        return {}, self.kept(c)

    def kept(self, c: Pair) -> Model:
        """What is scored; theta starts every round at w."""
        return c.theta if self.personal == "theta" else c.w

    def own(self, task: Task, down: Down, kept: Model) -> Model:
        return kept
