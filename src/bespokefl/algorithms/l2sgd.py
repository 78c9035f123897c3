"""L2SGD: local models under a penalty on their distance from their mean (Hanzely and Richtarik, arXiv 2020).

min over x_1, ..., x_N of (1/N) sum_i f_i(x_i) + lam/(2N) sum_i |x_i - x_bar|^2, eq. (2), x_bar being the mean of all
x_i. Steps on the first sum are local; a step on the second moves x_i part of the way to the mean,
x_i <- (1 - kappa) x_i + kappa x_bar. A client is scored with x_i, the global model is x_bar.

* ``form="round"`` (default), as in comparisons with other methods: E local epochs, then one step to the mean.
* ``form="coin"``, Algorithm 1: ``flips`` coins a round, common to all clients. Heads, with probability p, are steps to
  the mean; tails local steps on one batch each. Models are exchanged only when tails turn into heads, because a step to
  the mean leaves the mean as it is. Each round begins with tails in this sense, for its clients may be others.

With the paper's step size a: lr = a / (N (1 - p)) and kappa = a lam / (N p), so lam = kappa p / (lr (1 - p)). kappa = 0
is Local, and kappa = 1 with all clients in every round FedAvg with uniform weights, both bit for bit; more than 1 would
overshoot the mean. The theory is for all clients in every round; with some of them x_bar is the mean of the
cohort, and the others keep their x_i. Momentum, which the paper does not have, starts anew with every run of tails
(``opt_state="keep"``: goes on). The variance reduction of L2SGD+ is not included.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple

from bespokefl.core import (
    MODEL,
    ONE_BATCH,
    Batch,
    Batches,
    Cohort,
    Down,
    Exchange,
    Model,
    ModelAveraging,
    Phase,
    Program,
    Setup,
    Task,
    Training,
    Tree,
    hyper,
    part_way,
    shuffled,
    stream,
    when,
)
from bespokefl.core.trees import repeat

MOST_FLIPS = 64  # of a real federation, where each stretch that coins may give has a name


class Stretch(NamedTuple):
    """Local steps, and the steps to the mean behind them."""

    batches: Batches
    heads: int


@dataclass(frozen=True)
class L2SGD(ModelAveraging):
    name: ClassVar[str] = "l2sgd"
    paper: ClassVar[str] = "Hanzely and Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020"
    sends: ClassVar = {"x": "x_bar"}
    exchanges: ClassVar = (
        Exchange("train", {"x": MODEL}, shows=f"{ONE_BATCH} (`form` is `coin`)"),
        Exchange("approach", after=("train",)),
    )
    averages: ClassVar = ("train",)
    acts: ClassVar = {"local_epochs": when(form="round")}

    kappa: float = hyper(0.5, "kappa = a lambda / (N p): the part of the way to the mean that is taken", low=0, high=1)
    form: Literal["round", "coin"] = hyper("round", "local epochs and one step to the mean, or steps by coins")
    p: float = hyper(
        0.1, 'p: probability of a step to the mean (form="coin"), Algorithm 1', low=0, below=1, when=when(form="coin")
    )
    flips: int = hyper(20, 'coins of a round (form="coin")', low=1, when=when(form="coin"))
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"x_bar": x0}

    def init_client(self, task: Task, x0: Model) -> Training:
        return Training(x0, self.momentum_to_keep(self.opt.init(task.params(x0))))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        x_bar = server["x_bar"]
        for stretch in self.stretches(cohort):
            if not stretch.heads:
                cohort.run(self.train_on(stretch))
                break
            up = cohort.run(self.train_on(stretch), held={"x_bar": repeat(x_bar, len(cohort.everyone()))})
            x_bar = self.average(up.x, x_bar, up.weights(self.weights))
            cohort = up.cohort.run(self.approach(stretch.heads), shared={"x_bar": x_bar}).cohort
        return {"x_bar": x_bar}

    def stretches(self, cohort: Cohort) -> list[Stretch]:
        if self.form == "round":
            return [Stretch(self.epochs, heads=1)]
        coins = stream(cohort.seed, "coin", cohort.round).random(self.flips) < self.p
        # Each exchange of a round would begin the stream of batches anew: every stretch has one of its own.
        return [Stretch(self.coin_batches(j, tails), heads) for j, (tails, heads) in enumerate(runs(coins.tolist()))]

    def coin_batches(self, j: int, tails: int) -> Batches:
        return Batches("train", 1, self.batch_size, f"batch {j}", self.drop_last, steps=tails)

    @property
    def remote_unsupported(self) -> str:
        if self.form == "round" or self.flips <= MOST_FLIPS:
            return ""
        return f"algorithm.flips = {self.flips}: there, every program has a name; it is at most {MOST_FLIPS}"

    def programs(self) -> dict[str, Program]:
        named = super().programs()
        if self.form == "round":
            stretch = Stretch(self.epochs, heads=1)
            return named | {"train": self.train_on(stretch), "approach": self.approach(1)}
        some = range(min(self.flips, MOST_FLIPS) + 1)
        named |= {f"approach {heads}": self.approach(heads) for heads in some[1:]}
        for j in range(len(some) // 2 + 1):
            for tails in some:
                batches = self.coin_batches(j, tails)
                named[f"train {j} {tails}"] = self.train_on(Stretch(batches, heads=1))
                named[f"train {j} {tails} alone"] = self.train_on(Stretch(batches, heads=0))
        return named

    def uploads(self) -> dict[str, Exchange]:
        """With coins, every stretch of a round has names of its own."""
        train, approach = super().uploads().values()
        if self.form == "round":
            return {e.program: e for e in (train, approach)}
        names = [name for name in self.programs() if " " in name]
        ends = tuple(name for name in names if name.startswith("approach"))
        begins = tuple(name for name in names if name.startswith("train"))
        found: dict[str, Exchange] = {
            name: train._replace(program=name) for name in begins if name.startswith("train 0 ")
        }
        found |= {name: train._replace(program=name, after=ends) for name in begins if name not in found}
        # The same approach may come again after each of the stretches, of which there are at most so many.
        most = self.flips // 2 + 1
        return found | {name: approach._replace(program=name, after=begins, most=most) for name in ends}

    def global_model(self, server: Tree) -> Model:
        x_bar: Model = server["x_bar"]
        return x_bar

    # one client --------------------------------------------------------------------------------------
    def train_on(self, stretch: Stretch) -> Program:
        """A stretch without steps to the mean behind it sends nothing."""
        finish = self.finish if stretch.heads else self.stay
        return Program(self.begin, (Phase(self.step, stretch.batches),), finish)

    def begin(self, task: Task, down: Down, kept: Training) -> Training:
        return Training(kept.x, self.momentum_at_start(kept.m, task.params(kept.x)))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        return self.descend(c, task.grad(c.x, batch))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {"x": c.x}, Training(c.x, self.momentum_to_keep(c.m))

    def approach(self, heads: int) -> Program:
        """A phase without batches for each step to the mean."""
        return Program(self.take, (Phase(self.step, shuffled(0), self.to_the_mean),) * heads, self.stay)

    def take(self, task: Task, down: Down, kept: Training) -> Training:
        return kept

    def to_the_mean(self, task: Task, down: Down, c: Training) -> Training:
        return c._replace(x=part_way(c.x, self.kappa, down.x_bar))

    def stay(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {}, Training(c.x, self.momentum_to_keep(c.m))

    def own(self, task: Task, down: Down, kept: Training) -> Model:
        return kept.x


def runs(coins: Iterable[bool]) -> list[tuple[int, int]]:
    """The lengths of runs of tails, each with that of the heads behind it."""
    lengths = [(heads, len(list(run))) for heads, run in groupby(coins)]
    if lengths[0][0]:
        lengths.insert(0, (False, 0))
    if not lengths[-1][0]:
        lengths.append((True, 0))
    return [(tails, heads) for (_, tails), (_, heads) in zip(lengths[::2], lengths[1::2], strict=True)]
