"""S-FedPG: FedPG with a line search for the step (supplement of the ICCV 2023 submission, Algorithm 1).

After the directions of a round are known, the clients tell their losses at omega_t + e d', e from 2^s eta_t down by
halves (from eta_t if a client of the last round is absent) to 2^-s eta_t / sigma. The first e is taken at which every
loss, and the unfairness F, has fallen by the share beta of what its slope promised. If there is none, it is the largest
e that lowered the mean loss, or else the one with the smallest. d' is sent once, each trial costs a number both ways.

The supplement leaves beta open; 1e-4 is that of its sibling FedMDFG. With scaled columns the common direction may raise
F to first order; then F must only not rise. Clients whose gradient vanishes do not vote.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespokefl.algorithms._fedpg.backtracking import finite
from bespokefl.algorithms.fedpg import FedPG, Kept, Server, scalar
from bespokefl.core import Batch, Down, Exchange, Model, Phase, Program, Task, Tree, Uploads, hyper, ordered, unfairness
from bespokefl.core.common_direction import NO_LOSS, Columns, Direction, fairness_weights
from bespokefl.core.solvers import Floats
from bespokefl.core.trees import shift

MOST_TRIALS = 128  # of a round, for a step that is halved from one to the next
TRIAL_LOSS = "its mean training loss at another model on the way"


class Trial(NamedTuple):
    kept: Kept
    x: Model  # omega_t + e d'
    loss: Tensor
    n: Tensor


@dataclass(frozen=True)
class SFedPG(FedPG):
    name: ClassVar[str] = "s-fedpg"
    exchanges: ClassVar = (
        FedPG.exchanges[0],
        Exchange("first_trial", {"loss": TRIAL_LOSS}, ("upload",)),
        Exchange("trial", {"loss": TRIAL_LOSS}, ("first_trial", "trial"), MOST_TRIALS),
        *(e._replace(after=(*e.after, "first_trial", "trial")) for e in FedPG.exchanges[1:]),
    )

    s: int = hyper(1, "s: the search runs from 2^s eta_t down to 2^-s eta_t / sigma", low=0, high=30)
    beta: float = hyper(1e-4, "beta: share of the first-order decrease that a step must reach", above=0, below=1)

    def init_client(self, task: Task, x0: Model) -> Kept:
        return super().init_client(task, x0)._replace(d=task.params(x0))

    @property
    def remembers_w(self) -> bool:
        return True

    def find_step(self, server: Server, up: Uploads, c: Columns, common: Direction) -> float:
        """Algorithm 1: halve the step until every loss and F decrease enough."""
        eta, w = self.lr, server.w
        if not common.moves:
            return eta
        absent = not set(server.online) <= {int(i) for i in up.ids}
        e, low = eta if absent else 2**self.s * eta, 2.0**-self.s * eta / common.sigma
        cohort, here = up.cohort, torch.arange(len(up.ids))
        tried: list[tuple[float, float, float]] = []  # step, mean loss there, mean loss at omega_t
        while e >= low:
            first = {} if tried else {"d": common.d}
            told = cohort.run(self.trial if tried else self.first_trial, shared={"e": scalar(e, w), **first})
            cohort, here = told.cohort, told.align(here)  # who falls silent in between is out of the search
            votes = c.kept[here.numpy()]
            voters, new = here.numpy()[votes], told.loss.double().cpu().numpy()[votes]
            if not len(voters):
                break
            old, slopes = c.losses[voters], common.slopes[voters]
            tried.append((e, float(new.mean()), float(old.mean())))
            if (new <= old + self.beta * e * slopes).all() and (
                not common.fair or unfairness(new) <= unfairness(old) + self.beta * e * fair_slope(old, slopes)
            ):
                return e
            e = e / 2
        lower = [e for e, new_mean, old_mean in tried if new_mean < old_mean]
        return max(lower) if lower else min(tried, key=lambda trial: trial[1], default=(eta,))[0]

    # one client: the loss at omega_t + e d' --------------------------------------------------------------
    @property
    def first_trial(self) -> Program:
        return Program(self.begin_search, (Phase(self.add_trial, ordered("train", self.batch_size)),), self.tell)

    @property
    def trial(self) -> Program:
        return Program(self.begin_trial, (Phase(self.add_trial, ordered("train", self.batch_size)),), self.tell)

    def begin_search(self, task: Task, down: Down, kept: Kept) -> Trial:
        return self.begin_trial(task, down, kept._replace(d=down.d))

    def begin_trial(self, task: Task, down: Down, kept: Kept) -> Trial:
        return Trial(kept, shift(kept.w, down.e, kept.d), torch.zeros(()), torch.zeros(()))

    def add_trial(self, task: Task, down: Down, c: Trial, batch: Batch) -> Trial:
        return c._replace(loss=c.loss + batch.sum(task.losses(c.x, batch)), n=c.n + batch.n)

    def tell(self, task: Task, down: Down, c: Trial) -> tuple[dict[str, Tree], Kept]:
        return {"loss": finite(c.loss / c.n)}, c.kept


def fair_slope(losses: Floats, slopes: Floats) -> float:
    """grad F . d' of those who vote, at most 0: scaled columns may let it come out positive."""
    if len(losses) < 2 or np.linalg.norm(losses) < NO_LOSS:
        return 0.0
    return min(0.0, float(fairness_weights(losses) @ slopes))
