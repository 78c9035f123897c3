"""FedAMP: similar clients attract each other's models (Huang et al., AAAI 2021).

Minimises sum_i f_i(w_i) + lambda sum_{i<j} A(|w_i - w_j|^2) over the personal models, A(x) = 1 - exp(-x / sigma), by a
step on each part in turn. The server keeps every w_i and makes client i's cloud model

    u_i = (1 - sum_{j != i} xi_ij) w_i + sum_{j != i} xi_ij w_j,   xi_ij = alpha A'(|w_i - w_j|^2),

A'(x) = exp(-x / sigma) / sigma: the nearer a model, the larger its weight. The client then minimises
f_i(x) + lambda / (2 alpha) |x - u_i|^2 by SGD and sends the result as its new w_i. There is no global model.

* The weights make sense as long as that of w_i itself is not negative; alpha <= sigma / (N - 1) suffices, which the
  widespread alpha = sigma = 1 does not meet. Where the others' weights sum to more than 1 they are scaled down to 1;
  ``self_weight="strict"`` refuses such alpha instead and leaves the paper's formula alone.
* Squared distances grow with the number of parameters: with sigma = 1 all xi_ij of a large model vanish, u_i = w_i, and
  clients are alone. Set sigma to the models' scale, or measure the mean squared difference of a parameter
  (``distance="mean_squared"``).
* SGD starts at the client's own w_i; the paper starts at u_i (``start="cloud"``). Only then do buffers (running
  statistics) travel, and are mixed like weights; otherwise they stay with the client.
* With fewer than all clients in a round, u_i takes in all N models, as sent last; a client that never took part counts
  with the initial model.
* A widely used implementation builds the proximal term from detached tensors: its gradient is 0, and FedAMP is
  silently Local.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from bespokefl.core import (
    MODEL,
    Algorithm,
    Batch,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    Newcomer,
    Phase,
    Program,
    Rows,
    Setup,
    Task,
    Training,
    Tree,
    hyper,
    never,
)
from bespokefl.core.solvers import squared_distances
from bespokefl.core.trees import combine, mean, repeat, tree_map


@dataclass(frozen=True)
class FedAMP(Algorithm):
    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    sends: ClassVar = {"w": "u"}
    exchanges: ClassVar = (Exchange("train", {"w": MODEL}),)
    acts: ClassVar = {"weights": never("its attention takes the place of an average")}

    alpha: float = hyper(1.0, "alpha_k: step size of the attraction", above=0)
    sigma: float = hyper(1.0, "sigma: scale of A, in squared distance", above=0)
    lam: float = hyper(1.0, "lambda: weight of the attraction", low=0)
    distance: Literal["squared", "mean_squared"] = hyper("squared", "|w_i - w_j|^2, or that divided by n")
    start: Literal["own", "cloud"] = hyper("own", "where local SGD starts: the client's w_i, or u_i (the paper)")
    self_weight: Literal["scale", "strict"] = hyper(
        "scale", "weights of others beyond 1 in sum: scaled to 1, or alpha refused where they could be"
    )

    def check(self, task: Task, setup: Setup) -> None:
        most = self.sigma / max(1, setup.clients - 1)
        if self.self_weight == "strict" and self.alpha > most:
            raise InputError(
                f'algorithm.alpha = {self.alpha:g} (fedamp, self_weight = "strict") could give a client\'s own model a '
                f"negative weight; with sigma = {self.sigma:g} and {setup.clients} clients it is at most {most:g}"
            )

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": tree_map(torch.clone, repeat(self.sent(task, x0), setup.clients))}

    def init_client(self, task: Task, x0: Model) -> Training:
        return Training(x0, self.momentum_to_keep(self.opt.init(task.params(x0))))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w, task = server["w"], cohort.task
        up = cohort.run(self.train, per_client={"u": combine(self.attention(task, w, cohort.ids), w)})
        i = torch.as_tensor(up.ids, device=w[task.names[0]].device)
        return {"w": tree_map(lambda old, new: old.index_copy(0, i, new), w, up.w)}

    def attention(self, task: Task, w: Model, clients: Rows) -> Tensor:
        """The weights of all N models in u_i, a row for each of the clients."""
        d = squared_distances(task.params(w), clients) / (task.size if self.distance == "mean_squared" else 1)
        xi = self.alpha / self.sigma * np.exp(-d / self.sigma)
        itself = np.arange(len(clients)), clients
        xi[itself] = 0.0
        xi /= np.maximum(1.0, xi.sum(1, keepdims=True))
        xi[itself] = np.maximum(0.0, 1.0 - xi.sum(1))
        return torch.as_tensor(xi, device=w[task.names[0]].device)

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        n = len(server["w"][task.names[0]])
        u = mean(server["w"], torch.full((n,), 1 / n, dtype=torch.float64))
        how = "the mean of all clients' models, trained on and pulled towards it"
        return self.joining(how, self.begin_new, self.step, {"u": u})

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, own: Training) -> Training:
        x = own.x if self.start == "own" else down.u
        return Training(x, self.momentum_at_start(own.m, task.params(x)))

    def begin_new(self, task: Task, down: Down, own: Training) -> Training:
        x = own.x | down.u
        return Training(x, self.opt.init(task.params(x)))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p, pull = task.grad(c.x, batch), self.lam / self.alpha
        return self.descend(c, p._replace(grad={k: g + pull * (c.x[k] - down.u[k]) for k, g in p.grad.items()}))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Training]:
        return {"w": self.sent(task, c.x)}, Training(c.x, self.momentum_to_keep(c.m))

    def sent(self, task: Task, x: Model) -> Model:
        """What of a model travels: all of it only where training starts from what was received."""
        return x if self.start == "cloud" else task.params(x)

    def own(self, task: Task, down: Down, own: Training) -> Model:
        return own.x
