"""LG-Mix: mix each client's own update with the global one by their convergence rates (Jiang et al., ICLR 2024).

Client c trains its own model w_c and obtains dw_c; the server averages them, du = sum_c p_c dw_c, and moves its model,
u <- u + eta_g du, which is never trained itself. Then w_c <- w_c + lambda_c dw_c + (1 - lambda_c) eta_g du, from
the w_c of the round's start. Updates are mixed, not models: w_c and u differ after the first round.

lambda_c comes from r_c = tr_c / (tr_c + tr_g), the local features' share of the energy: tr_c = sum_x |h_c(x)|^2 over
all samples met in the round, h_c(x) being the head's input in the local model when it met x, before that step; tr_g is
the same of u at the round's start. The sum is the trace of sum_x h h^T. Where both are 0, r = 1/2.

* Unlike the paper: lambda is the mean of r over the client's rounds with the current one, as in the authors' code; the
  paper's mean leaves the current one out and says nothing of the first (``history="past"``: r itself there);
  ``"none"`` is the ablation, lambda = r. With fewer than all clients in a round, p_c is taken over the cohort, and
  those absent stay as they are while u moves.
* Unlike the authors' code: traces are uncentred, as in the paper; ``trace="code"`` centres the features and leaves out
  the smallest singular value of their covariance, and can fall on the other side of 1/2; ``"centred"`` only centres.
  Several local epochs follow one another (the code restores the weights before each).
* Where the head's input is a map (segmentation), every pixel is a sample of eq. (5): the head's parameters get a
  gradient from each pixel's output, h h^T for a 1x1 convolution, so Sigma is a sum over samples and pixels. Whether the
  sum or the mean over pixels is taken makes no difference: the factor cancels in r. ``map_features="mean"`` takes
  instead the one vector of the pixels' mean, in which opposite features cancel each other.
* As in the code: local features come from the training pass and global ones from one in evaluation mode, so that with
  BatchNorm they differ even for equal weights (``features_mode="both_eval"``: both in evaluation mode); normalisation
  statistics are averaged and mixed like weights. Unlike there, a running variance that this makes 0 or less (it is a
  sum of updates, of which du knows nothing of the client) is replaced: w's by the one just trained, u's by its last.

The server sends du, and clients follow u by themselves; if one of the cohort missed a round, all are sent u anew.
lr 0.01, without momentum, and one local epoch are the paper's, which has all clients in every round.

Made for feature shift: u is never trained, and clients go on from their own models, which drift apart where labels are
skewed. On skewed digits its personal models then score about as Local's, 91.9 % to 91.6 %, and u 70.0 %, where
FedAvg's are at 94.7 % and 92.5 %; ``trace`` and ``history`` change that by at most 0.3 points (docs/results.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.core import (
    CHANGE,
    Batch,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    ModelAveraging,
    Phase,
    Program,
    Setup,
    Task,
    Tree,
    hyper,
)
from bespokefl.core.trees import add, norm, scale, sub, tree_map, zeros

DISTANCES = "layers: |w - u| / |u|"  # name of a fact: a row per client, a column per layer of the model


class Server(NamedTuple):
    u: Model
    follows: Tensor  # N: whether the client's copy of u is the newest


class Kept(NamedTuple):
    """What a client keeps between rounds, and between the two exchanges of a round."""

    w: Model  # its own model
    u: Model  # its copy of the global one
    dw: Model  # its update, waiting to be mixed
    r: Tensor  # the last ratio
    lam: Tensor  # the last lambda
    r_sum: Tensor  # of the ratios of the rounds before,
    rounds: Tensor  # and how many
    m: Model  # momentum (opt_state="keep" only)


class Moments(NamedTuple):
    """Of the features met in a round, where they are centred."""

    n: Tensor
    sum: Tensor  # of h
    second: Tensor  # sum of h h^T (trace="code"), or its trace


class Training(NamedTuple):
    x: Model
    m: Model
    local: Tree  # energy of the local features so far: a sum of squares, or Moments
    common: Tree  # of u's features
    kept: Kept


@dataclass(frozen=True)
class LGMix(ModelAveraging):
    name: ClassVar[str] = "lg-mix"
    paper: ClassVar[str] = (
        "Jiang et al., Heterogeneous Personalized FL by Local-Global Updates Mixing via Convergence Rate, ICLR 2024"
    )
    sends: ClassVar = {"dw": None}
    exchanges: ClassVar = (
        Exchange("train", {"dw": CHANGE}),
        Exchange("train_anew", {"dw": CHANGE}),
        Exchange("mix", after=("train", "train_anew")),
    )
    stays: ClassVar = {"w": "the personal model", "lam": "its weight in the mixture", "r": "what that is made of"}
    averages: ClassVar = ("train", "train_anew")

    lr: float = hyper(0.01, "eta: step size of local SGD", low=0)
    local_epochs: int = hyper(1, "E: passes over a client's train split in a round", low=1)
    eta_g: float = hyper(1.0, "eta_g: step size of the global update", above=0)
    trace: Literal["paper", "centred", "code"] = hyper(
        "paper", "energy of features: sum of squares, the same of centred ones, or as in the authors' code"
    )
    history: Literal["code", "past", "none"] = hyper(
        "code", "lambda: mean of all ratios so far, of those before this round, or this round's alone"
    )
    features_mode: Literal["as_code", "both_eval"] = hyper(
        "as_code", "local features of the training pass, or of one in evaluation mode as the global ones"
    )
    map_features: Literal["pixels", "mean"] = hyper(
        "pixels", "h where the head's input is a map: that of every pixel, or their mean"
    )

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        shape = tuple(task.initial[task.head[0]].shape)
        fits = len(shape) in (2, 4)
        fewest = 2 if self.trace == "code" else 1  # features: the code leaves one of their singular values out
        if self.trace != "paper" and (not fits or shape[1] < fewest):
            raise InputError(
                f"algorithm.trace = {self.trace!r} (lg-mix) centres the features: it needs a linear head (or a "
                f"convolution) of at least {fewest} inputs, and "
                f"{task.head[0]!r} has the shape {shape}; use trace = 'paper'"
            )

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        return Server(x0, torch.ones(setup.clients, dtype=torch.bool))

    def init_client(self, task: Task, x0: Model) -> Kept:
        zero = torch.zeros((), dtype=torch.float64)
        m = self.momentum_to_keep(self.opt.init(task.params(x0)))
        return Kept(x0, x0, zeros(x0), zero, zero, zero, zero, m)

    def round(self, server: Server, cohort: Cohort) -> Server:
        if server.follows[cohort.ids].all():
            up = cohort.run(self.train)
        else:
            up = cohort.run(self.train_anew, shared={"u": server.u})
        du = scale(self.eta_g, self.average(up.dw, None, up.weights(self.weights)))
        mixed = up.cohort.run(self.mix, shared={"du": du})
        follows = torch.zeros_like(server.follows)
        follows[mixed.ids] = True
        return Server(valid(add(server.u, du), server.u), follows)

    def global_model(self, server: Server) -> Model:
        return server.u

    def client_facts(self, task: Task, server: Server, kept: Kept) -> dict[str, Tensor]:
        apart = [distance(kept.w, server.u, layer.params) for layer in task.layers]
        return {"lambda": torch.where(kept.rounds > 0, kept.lam, torch.nan), DISTANCES: torch.stack(apart)}

    # one client trains -------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    @property
    def train_anew(self) -> Program:
        return Program(self.begin_anew, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        m = self.momentum_at_start(kept.m, task.params(kept.w))
        return Training(kept.w, m, self.no_energy(task), self.no_energy(task), kept)

    def begin_anew(self, task: Task, down: Down, kept: Kept) -> Training:
        return self.begin(task, down, kept._replace(u=down.u))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        h = p.h if self.features_mode == "as_code" else task.features(c.x, batch)
        x, m = self.opt.step(c.x, p.grad, c.m)
        local, common = self.plus(c.local, h, batch), self.plus(c.common, task.features(c.kept.u, batch), batch)
        return Training(x | p.buffers, m, local, common, c.kept)

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        dw = sub(c.x, c.kept.w)
        r = share(self.energy(c.local), self.energy(c.common))
        return {"dw": dw}, c.kept._replace(dw=dw, r=r, m=self.momentum_to_keep(c.m))

    # the energy of features, in float64 --------------------------------------------------------------
    def no_energy(self, task: Task) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        if self.trace == "paper":
            return zero
        width = task.initial[task.head[0]].shape[1]
        none = torch.zeros(width, dtype=torch.float64)
        return Moments(zero, none, none[:, None] * none if self.trace == "code" else zero)

    def plus(self, energy: Tree, h: Tensor, batch: Batch) -> Tree:
        h = vectors(h, self.map_features).double()
        if self.trace == "paper":
            return energy + batch.sum((h**2).sum((1, 2)))
        counted = h if batch.weights is None else h * batch.weights.double()[:, None, None]
        second = h.flatten(0, 1).T @ counted.flatten(0, 1) if self.trace == "code" else (h * counted).sum()
        return Moments(
            energy.n + batch.n.double() * h.shape[1], energy.sum + counted.sum((0, 1)), energy.second + second
        )

    def energy(self, energy: Tree) -> Tensor:
        if self.trace == "paper":
            total: Tensor = energy
            return total
        return variance_without_the_smallest(energy) if self.trace == "code" else variance(energy)

    # one client mixes --------------------------------------------------------------------------------
    @property
    def mix(self) -> Program:
        return Program(self.take, (), self.mixed)

    def take(self, task: Task, down: Down, kept: Kept) -> Kept:
        return kept

    def mixed(self, task: Task, down: Down, kept: Kept) -> tuple[dict[str, Tree], Kept]:
        lam = self.lam(kept)

        def one(w: Tensor, dw: Tensor, du: Tensor) -> Tensor:
            own = lam.to(w.dtype)
            return w + own * dw + (1 - own) * du

        w = valid(tree_map(one, kept.w, kept.dw, down.du), add(kept.w, kept.dw))
        u = valid(add(kept.u, down.du), kept.u)
        r_sum, rounds = kept.r_sum + kept.r, kept.rounds + 1
        return {}, kept._replace(w=w, u=u, dw=zeros(kept.dw), lam=lam, r_sum=r_sum, rounds=rounds)

    def lam(self, kept: Kept) -> Tensor:
        """lambda_c, this round's r included in ``kept`` but not yet in its sum."""
        if self.history == "none":
            return kept.r
        if self.history == "past":
            return torch.where(kept.rounds > 0, kept.r_sum / kept.rounds.clamp(min=1), kept.r)
        return (kept.r_sum + kept.r) / (kept.rounds + 1)

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        return kept.w


def vectors(h: Tensor, map_features: str) -> Tensor:
    """The head's inputs as (samples, vectors of each, features): of a map a vector for each pixel, or their mean."""
    if h.ndim != 4:
        return h.flatten(1).unsqueeze(1)
    pixels = h.flatten(2).mT
    return pixels if map_features == "pixels" else pixels.mean(1, keepdim=True)


def valid(x: Model, otherwise: Model) -> Model:
    """x with the running variances of another model where its own are not positive."""
    return {k: torch.where(v > 0, v, otherwise[k]) if k.endswith("running_var") else v for k, v in x.items()}


def distance(w: Model, u: Model, names: Sequence[str]) -> Tensor:
    """|w - u| / |u| over the named tensors; 0 where both are 0, as for a layer that borrows another's tensors."""
    own = [k for k in names if k in u]
    ours, common = ({k: model[k].double() for k in own} for model in (w, u))
    apart, size = norm(sub(ours, common)), norm(common)
    return torch.where(apart > 0, apart / size, torch.zeros_like(apart))


def share(a: Tensor, b: Tensor) -> Tensor:
    """a / (a + b), and 1/2 where both are 0."""
    total = a + b
    return torch.where(total > 0, a / torch.where(total > 0, total, torch.ones_like(total)), 0.5)


def variance(t: Moments) -> Tensor:
    """The mean square of the centred features: the trace of their covariance."""
    centre = t.sum / t.n
    return (t.second / t.n - (centre**2).sum()).clamp(min=0)


def variance_without_the_smallest(t: Moments) -> Tensor:
    """The singular values of the features' covariance (its eigenvalues), without the smallest, summed."""
    centre = t.sum / t.n
    values: Tensor = torch.linalg.eigvalsh(t.second / t.n - centre[:, None] * centre)  # ascending
    return values[1:].clamp(min=0).sum()
