"""FedFomo: each client mixes in the models of others that help it most (Zhang et al., ICLR 2021).

Client i holds theta_i, its model after its last local training, and gets M models theta_n that others sent. With l_i
its loss on validation data,

    w_n = (l_i(theta_i) - l_i(theta_n)) / |theta_n - theta_i|,   theta_i <- theta_i + sum_n w+_n (theta_n - theta_i),

w+_n = max(0, w_n) divided by their sum; where no w_n is positive theta_i stays. Then it trains locally and sends
theta_i and w. The server adds w to row i of its affinity matrix P. Next, client i is sent the M models of the highest
P_in, or, with the probability ``explore`` * ``explore_decay``^t, M at random. There is no global model.

* The norm is l2; the authors' code defaults to l1 (``distance="l1"``). At distance 0 (a model like one's own) w_n = 0.
* Validation data are the validation split, and a client without any keeps its own model. If no client has any, the
  train split serves (the paper holds back 20 % of it). Losses are in evaluation mode.
* Models to be had are the newest of every client that ever sent one (``pool="last_round"``: only those of the last
  round, as in PGFed's code). In the first round there is none: clients train alone, and nothing is sent down. While
  there are fewer than M others, fewer are sent; a client that has one less than the rest of its cohort gets its own
  model in that place.
* P grows by w_n before clipping: a model that harmed ranks behind one never tried. Ties are broken at random. The paper
  says "epsilon-greedy"; here all of a client's M models in a round are the best ones, or all are random.
* A model whose loss is not finite gets w_n = 0. Buffers (running statistics) are mixed like weights, but do not count
  in the distance.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.algorithms.base import Algorithm, Newcomer, Setup, Training
from bespokefl.algorithms.hyper import hyper
from bespokefl.cohort import Cohort
from bespokefl.program import Down, Phase, Program, ordered
from bespokefl.rng import stream
from bespokefl.task import Batch, Task
from bespokefl.trees import Model, Tree, leaves, mean, repeat, rows, sub, tree_map


class Server(NamedTuple):
    models: Model  # a row per client: what it sent last
    sent: Tensor  # N: in which round; -1: never
    P: Tensor  # N x N, row i is client i's affinity to the others
    split: str  # what models are judged on


class Judging(NamedTuple):
    own: Training  # theta_i, and kept momentum
    mine: Tensor  # summed loss of theta_i
    theirs: Tensor  # M: of the others' models
    n: Tensor


class Mixed(NamedTuple):
    local: Training
    w: Tensor  # M


@dataclass(frozen=True)
class FedFomo(Algorithm):
    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., Personalized FL with First Order Model Optimization, ICLR 2021"
    sends: ClassVar = {"theta": "own"}

    M: int = hyper(5, "M: models that a client is sent", low=1)
    explore: float = hyper(0.3, "epsilon: probability that these are random, in the first round", low=0, high=1)
    explore_decay: float = hyper(0.95, "factor of epsilon from round to round", low=0, high=1)
    distance: Literal["l2", "l1"] = hyper("l2", "norm of theta_n - theta_i")
    pool: Literal["all", "last_round"] = hyper(
        "all", "models to choose from: all clients' last ones, or the last round's"
    )

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        n = setup.clients
        models = tree_map(torch.clone, repeat(x0, n))
        never, P = torch.full((n,), -1), torch.zeros(n, n, dtype=torch.float64)
        return Server(models, never, P, "val" if setup.validates else "train")

    def init_client(self, task: Task, x0: Model) -> Training:
        return Training(x0, self.momentum_to_keep(self.opt.init(task.params(x0))))

    def round(self, server: Server, cohort: Cohort) -> Server:
        chosen = self.choose(server, cohort)
        if chosen.shape[1]:
            others = tree_map(lambda v: v[chosen.to(v.device)], server.models)
            up = cohort.run(self.train_by(server.split), per_client={"others": others}, held={"own": server.models})
        else:
            up = cohort.run(self.alone, held={"own": server.models})
        i = torch.as_tensor(up.ids, device=server.P.device)
        j = up.align(chosen).to(i.device)
        return Server(
            tree_map(lambda old, new: old.index_copy(0, i, new), server.models, up.theta),
            server.sent.index_fill(0, i, cohort.round),
            server.P.index_put((i[:, None], j), up.w.double(), accumulate=True),
            server.split,
        )

    def choose(self, server: Server, cohort: Cohort) -> Tensor:
        """Whose models each client of the cohort is sent: a row of ids each."""
        sent, P, t = server.sent.cpu().numpy(), server.P.cpu().numpy(), cohort.round
        usable = (sent >= 0) & ((sent == t - 1) | (self.pool == "all"))
        epsilon = self.explore * self.explore_decay**t
        picked = []
        for i in cohort.ids:
            draw = stream(cohort.site.seed, "explore", t, i)
            others = draw.permutation(np.flatnonzero(usable & (np.arange(len(sent)) != i)))
            if draw.random() >= epsilon:
                others = others[np.argsort(-P[i, others], kind="stable")]
            picked.append(others[: self.M])
        most = max(len(others) for others in picked)
        filled: list[NDArray[np.int64]] = [
            np.append(others, [i] * (most - len(others))) for i, others in zip(cohort.ids, picked, strict=True)
        ]
        return torch.as_tensor(np.stack(filled), dtype=torch.int64)

    def newcomer(self, server: Server, task: Task) -> Newcomer:
        met = (server.sent >= 0).double()
        met = met if met.any() else torch.ones_like(met)
        return self.tuning(mean(server.models, met / met.sum()), "the mean of the models that clients sent, fine-tuned")

    def server_facts(self, server: Server) -> dict[str, Tensor]:
        return {"P": server.P}

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return self.train_by("val")

    @property
    def train_without_val(self) -> Program:
        return self.train_by("train")

    def train_by(self, split: str) -> Program:
        judge = Phase(self.judge, ordered(split, self.batch_size))
        return Program(self.begin, (judge, Phase(self.step, self.epochs, self.mix)), self.finish)

    @property
    def alone(self) -> Program:
        return Program(self.begin_alone, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, own: Training) -> Judging:
        return Judging(own, torch.zeros(()), torch.zeros(_count(down.others)), torch.zeros(()))

    def begin_alone(self, task: Task, down: Down, own: Training) -> Mixed:
        return Mixed(Training(own.x, self.momentum_at_start(own.m, task.params(own.x))), torch.zeros(0))

    def judge(self, task: Task, down: Down, c: Judging, batch: Batch) -> Judging:
        theirs = [batch.sum(task.losses(rows(down.others, k), batch)) for k in range(_count(down.others))]
        mine = batch.sum(task.losses(c.own.x, batch))
        return Judging(c.own, c.mine + mine, c.theirs + torch.stack(theirs), c.n + batch.n)

    def mix(self, task: Task, down: Down, c: Judging) -> Mixed:
        away = sub(down.others, c.own.x)
        size, gain = self.lengths(task.params(away)), (c.mine - c.theirs) / c.n.clamp(min=1)
        known = (size > 0) & torch.isfinite(gain)
        w = torch.where(known, gain, 0) / torch.where(known, size, 1)
        share = w.clamp(min=0)
        share = share / torch.where(share.sum() > 0, share.sum(), 1)
        x = {k: v + torch.einsum("m,m...->...", share, away[k]) for k, v in c.own.x.items()}
        return Mixed(Training(x, self.momentum_at_start(c.own.m, task.params(x))), w)

    def lengths(self, stacked: Model) -> Tensor:
        flat = torch.cat([v.flatten(1) for v in leaves(stacked)], 1)
        return flat.abs().sum(1) if self.distance == "l1" else (flat**2).sum(1).sqrt()

    def step(self, task: Task, down: Down, c: Mixed, batch: Batch) -> Mixed:
        return c._replace(local=self.descend(c.local, task.grad(c.local.x, batch)))

    def finish(self, task: Task, down: Down, c: Mixed) -> tuple[dict[str, Tree], Training]:
        x, m = c.local
        return {"theta": x, "w": c.w}, Training(x, self.momentum_to_keep(m))

    def own(self, task: Task, down: Down, own: Training) -> Model:
        return own.x


def _count(stacked: Model) -> int:
    return leaves(stacked)[0].shape[0]
