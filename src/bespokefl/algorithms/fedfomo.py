"""FedFomo: each client mixes the models that help it most, its own among them (Zhang et al., ICLR 2021).

Client i holds theta_i, its model after its last local training, and theta_i', the model that this training started
from; at first both are the initial one. It is sent M models theta_n of others. With l_i its loss on validation data,
and n over these M and i itself,

    w_n = (l_i(theta_i') - l_i(theta_n)) / |theta_n - theta_i'|,
    theta_i <- theta_i' + sum_n w+_n (theta_n - theta_i'),

w+_n = max(0, w_n) divided by their sum. That is the next theta_i', from which it trains locally. It sends theta_i and
w. The server adds w to row i of its affinity matrix P. Next, client i is sent the M models of the highest P_in, or,
with the probability ``explore`` * ``explore_decay``^t, M at random. There is no global model.

* Where no w_n is positive, theta_i stays as it was trained, as in the public ports of the method (``fallback``:
  "trained"); "previous" is the formula above to the letter, theta_i': the training is taken back.
* A client's own model is at hand: it is no download, and is always a candidate (the ports give it one of the M places,
  which a 1 on P's diagonal secures, and PGFed's code only if the client took part in the round before). So P's
  diagonal is what training by itself was worth; it decides nothing.
* The norm is l2; the authors' code defaults to l1 (``distance="l1"``). At distance 0 w_n = 0 (the ports add 1e-5).
* Validation data are the validation split, and a client without any keeps its own model. If no client has any, the
  train split serves (the paper holds back 20 % of it). Losses are in evaluation mode.
* Models to be had are the newest of every client that ever sent one (``pool="last_round"``: only those of the last
  round, as in PGFed's code). In the first round there is none, and nothing is sent down. While there are fewer than M
  others, fewer are sent; a client that has one less than the rest of its cohort gets its own model in that place, and
  does not judge it twice.
* P grows by w_n before clipping: a model that harmed ranks behind one never tried (PGFed's code adds w+_n). Ties are
  broken at random. The paper says "epsilon-greedy"; here all of a client's M models in a round are the best ones, or
  all are random.
* A model whose loss is not finite gets w_n = 0. Buffers (running statistics) are mixed like weights, but do not count
  in the distance.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.core import (
    MODEL,
    Algorithm,
    Batch,
    Cohort,
    Down,
    Exchange,
    Model,
    Newcomer,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    hyper,
    never,
    ordered,
    stream,
    unless,
)
from bespokefl.core.trees import leaves, mean, repeat, rows, sub, tree_map, where


class Server(NamedTuple):
    models: Model  # a row per client: what it sent last
    sent: Tensor  # N: in which round; -1: never
    P: Tensor  # N x N, row i is client i's affinity to the others
    split: str  # what models are judged on


class Kept(NamedTuple):
    x: Model  # theta_i
    start: Model  # theta_i', where its training started
    m: Model  # momentum (opt_state="keep" only)


class Judging(NamedTuple):
    kept: Kept
    before: Tensor  # summed loss of theta_i'
    after: Tensor  # 1 + M: of theta_i and of the others' models
    n: Tensor


class Mixed(NamedTuple):
    local: Training
    start: Model  # what was mixed
    w: Tensor  # 1 + M


@dataclass(frozen=True)
class FedFomo(Algorithm):
    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., Personalized FL with First Order Model Optimization, ICLR 2021"
    sends: ClassVar = {"theta": "own"}
    exchanges: ClassVar = tuple(
        Exchange(program, {"theta": MODEL, "w": "its weights of the other clients' models"})
        for program in ("train", "train_without_val")
    )
    acts: ClassVar = {"weights": never("clients weigh the others' models themselves")}

    M: int = hyper(5, "M: models that a client is sent", low=1)
    explore: float = hyper(0.3, "epsilon: probability that these are random, in the first round", low=0, high=1)
    explore_decay: float = hyper(0.95, "factor of epsilon from round to round", low=0, high=1, when=unless(explore=0))
    distance: Literal["l2", "l1"] = hyper("l2", "norm of theta_n - theta_i'")
    fallback: Literal["trained", "previous"] = hyper(
        "trained", "where no model helps: the own one as trained, or as it was before that training"
    )
    pool: Literal["all", "last_round"] = hyper(
        "all", "models to choose from: all clients' last ones, or the last round's"
    )

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        n = setup.clients
        models = tree_map(torch.clone, repeat(x0, n))
        never, P = torch.full((n,), -1), torch.zeros(n, n, dtype=torch.float64)
        return Server(models, never, P, "val" if setup.validates else "train")

    def init_client(self, task: Task, x0: Model) -> Kept:
        return Kept(x0, x0, self.momentum_to_keep(self.opt.init(task.params(x0))))

    def round(self, server: Server, cohort: Cohort) -> Server:
        chosen, ids = self.choose(server, cohort), torch.as_tensor(cohort.ids)
        others = tree_map(lambda v: v[chosen.to(v.device)], server.models)
        sent = {"others": others, "foreign": chosen != ids[:, None]}
        up = cohort.run(self.train_by(server.split), per_client=sent, held={"own": server.models})
        i = torch.as_tensor(up.ids, device=server.P.device)
        j = torch.cat([i[:, None], up.align(chosen).to(i.device)], 1)
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
            draw = stream(cohort.seed, "explore", t, i)
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

    def begin(self, task: Task, down: Down, kept: Kept) -> Judging:
        return Judging(kept, torch.zeros(()), torch.zeros(1 + _count(down.others)), torch.zeros(()))

    def judge(self, task: Task, down: Down, c: Judging, batch: Batch) -> Judging:
        models = [c.kept.x, *(rows(down.others, k) for k in range(_count(down.others)))]
        before = batch.sum(task.losses(c.kept.start, batch))
        after = torch.stack([batch.sum(task.losses(x, batch)) for x in models])
        return Judging(c.kept, c.before + before, c.after + after, c.n + batch.n)

    def mix(self, task: Task, down: Down, c: Judging) -> Mixed:
        trained, start, m = c.kept
        theta = {k: torch.cat([v[None], down.others[k]]) for k, v in trained.items()}
        size = self.lengths(task.params(sub(theta, start)))
        gain = (c.before - c.after) / c.n.clamp(min=1)
        known = torch.cat([down.foreign.new_ones(1), down.foreign]) & (size > 0) & torch.isfinite(gain)
        w = torch.where(known, gain, 0) / torch.where(known, size, 1)
        positive = w.clamp(min=0)
        helped = positive.sum() > 0
        share = positive / torch.where(helped, positive.sum(), 1)
        mixed = {k: torch.einsum("m,m...->...", share, v) for k, v in theta.items()}  # shares sum to 1
        stays = where(c.n > 0, start, trained) if self.fallback == "previous" else trained
        x = where(helped, mixed, stays)
        return Mixed(Training(x, self.momentum_at_start(m, task.params(x))), x, w)

    def lengths(self, stacked: Model) -> Tensor:
        flat = torch.cat([v.flatten(1) for v in leaves(stacked)], 1)
        return flat.abs().sum(1) if self.distance == "l1" else (flat**2).sum(1).sqrt()

    def step(self, task: Task, down: Down, c: Mixed, batch: Batch) -> Mixed:
        return c._replace(local=self.descend(c.local, task.grad(c.local.x, batch)))

    def finish(self, task: Task, down: Down, c: Mixed) -> tuple[dict[str, Tree], Kept]:
        x, m = c.local
        return {"theta": x, "w": c.w}, Kept(x, c.start, self.momentum_to_keep(m))

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        return kept.x


def _count(stacked: Model) -> int:
    return leaves(stacked)[0].shape[0]
