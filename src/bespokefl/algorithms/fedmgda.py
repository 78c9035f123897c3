"""FedMGDA+: the shortest of the averages near p of normalised updates (Hu et al., IEEE TNSE 2022).

Clients train as in FedAvg. The server takes their updates g_i = (w - w_i) / |w - w_i|, all of length 1, so that nobody
wins by a long one, finds

    lambda* = argmin |sum_i lambda_i g_i|^2  over  lambda >= 0, sum_i lambda_i = 1, |lambda_i - p_i| <= epsilon,

and moves w <- w - eta_g sum_i lambda*_i g_i. Its length no longer follows the local step size: eta_g sets it
alone. With epsilon = 0 it is FedAvg on normalised updates, with epsilon = 1 MGDA, whose direction lowers every loss to
first order; with epsilon in between it need not. What is scored for a client is as in FedAvg.

Steps of one length never settle: the paper's theory wants eta_g to vanish, and its experiments let it fall
exponentially, to a share D of the first by the last of T rounds that is tuned for each data set. That is
``eta_g_decay`` = D^(1/T); every so many rounds at once with ``eta_g_every``. As there is no one D, the default does not
decay. The code of FedLF and FedPG's group takes the local rate instead, with its decay: ``eta_g`` = lr and
``eta_g_decay`` = lr_decay, as this project's experiments of FedPG have it.

Beyond the paper: a client whose update is 0 has no direction and is left out of the sum (p is shared by the others; if
all are, w stays). Buffers (running statistics) are averaged by p as in FedAvg. lambda* is exact, from an active-set
method on the Gram matrix in float64.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bespokefl.algorithms.fedavg import LocalSGD
from bespokefl.core import Cohort, Model, Tree, gram, hyper, min_norm_near, unless, weighted_sum
from bespokefl.core.solvers import Floats
from bespokefl.core.trees import drop, mean, shift, sub


@dataclass(frozen=True)
class FedMGDAPlus(LocalSGD):
    name: ClassVar[str] = "fedmgda+"
    paper: ClassVar[str] = "Hu et al., Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022"

    epsilon: float = hyper(0.1, "epsilon: how far lambda_i may be from p_i", low=0, high=1)
    eta_g: float = hyper(1.0, "eta_g: step size of the server", above=0)
    eta_g_decay: float = hyper(1.0, "factor of eta_g from round to round", above=0, high=1)
    eta_g_every: int = hyper(
        1, "rounds after which eta_g falls, by all their factors", low=1, when=unless(eta_g_decay=1)
    )

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w, task = server["w"], cohort.task
        up = cohort.run(self.train, shared={"w": w})
        p = up.weights(self.weights)
        d = self.direction(sub(task.params(w), task.params(up.x)), p.numpy())
        return {"w": shift(w, -self.step_size(cohort.round), d) | mean(drop(up.x, task.names), p)}

    def step_size(self, t: int) -> float:
        """eta_g of a round, counted from 0."""
        return self.eta_g * float(self.eta_g_decay ** (t - t % self.eta_g_every))

    def direction(self, updates: Model, p: Floats) -> Model:
        """sum_i lambda*_i g_i of the stacked updates w - w_i."""
        products = gram(updates)
        lengths = np.sqrt(products.diagonal())
        some, weights = np.flatnonzero(lengths), np.zeros_like(p)
        if len(some):
            cosines = products[np.ix_(some, some)] / np.outer(lengths[some], lengths[some])
            weights[some] = min_norm_near(cosines, p[some] / p[some].sum(), self.epsilon) / lengths[some]
        return weighted_sum(weights, updates)
