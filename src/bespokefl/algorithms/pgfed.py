"""PGFed: each client has a global objective of its own, by learned weights (Luo et al., ICCV 2023).

Client i minimises F_i(theta_i) = f_i(theta_i) + mu sum_j alpha_ij f_j(theta_i), eq. (5), over its model and its own
weights alpha_ij >= 0. f_j is a mean over samples (a sum would make mu depend on n_j). It is not at hand on client i and
is replaced by its tangent f_j(theta_j) + grad_j . (theta_i - theta_j) at the model that client j last sent, eq. (8).
So all that client i needs of the others is one vector, the auxiliary gradient g~_i =
mu sum_j alpha_ij grad_j, eq. (13).
The gradient of F_i by alpha_ij is a_j + mu grad_j . theta_i, with the intercept
a_j = mu (f_j(theta_j) - grad_j . theta_j); its second part would need every grad_j on client i and is replaced by its
mean over j. PGFedMo smooths the auxiliary gradient over the client's rounds, eq. (15).

Index j ranges over the clients S_{t-1} that answered in the last round (client i itself, if it did). In the first round
there is none, and training is FedAvg's. What is scored is theta_i, the client's model after its last local training.

* ``taylor=False`` takes the f_j of eq. (5) themselves in every step, for studies of what the tangents cost (the paper's
  motivation, eq. (4)). For that the others' samples go to client i, so it is no federation, and O(N^2) work. Alpha
  moves after theta there: nobody published the other order (``alpha_order="code"`` is refused), which leaves open
  whether theta's gradient is taken with the moved alpha.
* ``aggregation`` is that of the models theta_i; gradients enter eq. (13) as they come.
* Beyond the paper: alpha is projected on alpha >= 0 after every step, as in the authors' code; the recursion of
  eq. (15) starts with the first auxiliary gradient that a client gets, unchanged, as in their code.
* Nothing in the paper keeps alpha from growing, and a row that has grown drowns the client's own risk: a warning says
  so, and ``alpha_cap`` (of every alpha_ij) or ``alpha_rows="bounded"`` (their sum over j is at most its initial 1)
  prevent it.
* Unlike the authors' code: alpha moves after theta, as in Algorithm 1 (``alpha_order="code"`` for theirs); the closing
  gradient is exact and in evaluation mode (``grad_pass="code"``: shuffled, train mode, without the last incomplete
  batch); their beta was never in effect, because the name that turns it on is refused by their own command line.
  Momentum 0.9 is the paper's and lr 0.005 the code's, which keeps its buffers over rounds (``opt_state="keep"``), and
  takes batches of 10 without an epoch's incomplete one (``drop_last``).
* Normalisation statistics (BatchNorm) are averaged like weights, and those that the closing pass would leave are not
  kept. The authors' code exchanges parameters only (``buffers="local"``): every client keeps statistics of its own,
  with those of the closing pass, and is scored with them; the global model's stay as they were at the start.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.core import (
    GRADIENT,
    MODEL,
    Batch,
    Batches,
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
    ordered,
    when,
)
from bespokefl.core.trees import add, axpy, combine, dot, scale, tree_map, where, zeros

HEAVY = 1.0  # mu sum_j alpha_ij from which the others count more than the client itself; it starts at mu


class Server(NamedTuple):
    w: Model  # the global model
    A: Tensor  # N x N, row i is alpha_i
    ids: Tensor  # S_{t-1}, those who answered in the last round; none before the first
    grads: Model  # their grad_j, stacked
    a: Tensor  # their intercepts a_j


class Kept(NamedTuple):
    """What a client keeps between rounds."""

    theta: Model  # its model after its last local training
    m: Model  # momentum of SGD (opt_state="keep" only)
    s: Model  # the last smoothed auxiliary gradient (PGFedMo only)
    has_s: Tensor  # 1 once there is one


class Training(NamedTuple):
    x: Model  # theta
    m: Model
    s: Model  # the auxiliary gradient, constant during a round
    has_s: Tensor
    alpha: Tensor  # alpha_ij for j in S_{t-1}


class FullPass(NamedTuple):
    c: Training  # done
    g: Model  # sums over samples: of gradients,
    f: Tensor  # of losses,
    n: Tensor  # and of ones


UPLOAD = {
    "theta": MODEL,
    "grad": "its gradient at that model, over all its training samples",
    "a": "a number made of its training loss and that gradient",
    "alpha": "its weights of the other clients' risks",
}


@dataclass(frozen=True)
class PGFed(ModelAveraging):
    name: ClassVar[str] = "pgfed"
    paper: ClassVar[str] = "Luo et al., PGFed: Personalize Each Client's Global Objective, ICCV 2023"
    sends: ClassVar = {"theta": "w", "grad": None}
    exchanges: ClassVar = (
        Exchange("first", UPLOAD, shows=GRADIENT),
        Exchange("train", UPLOAD, shows=GRADIENT),
        Exchange("train_exactly", UPLOAD, only=when(taylor=False), shows=GRADIENT),
    )

    lr: float = hyper(0.005, "eta: step size of local SGD", low=0)
    momentum: float = hyper(0.9, "momentum of local SGD", low=0, below=1)
    mu: float = hyper(0.1, "mu: weight of the other clients' risks, eq. (5)", low=0)
    eta2: float = hyper(0.01, "eta_2: step size of alpha, Algorithm 1", low=0)
    alpha_order: Literal["paper", "code"] = hyper("paper", "alpha moves after theta, or before it (authors' code)")
    grad_pass: Literal["exact", "code"] = hyper(
        "exact", "the closing gradient: of all samples in evaluation mode, or as in the authors' code"
    )
    alpha_cap: float | None = hyper(None, "the largest alpha_ij; nothing: no bound, as in the paper", above=0)
    alpha_rows: Literal["free", "bounded"] = hyper("free", "the sum over j of alpha_ij: as it comes, or at most 1")
    buffers: Literal["average", "local"] = hyper(
        "average", "normalisation statistics: averaged like weights, or each client's own (authors' code)"
    )
    taylor: bool = hyper(True, "f_j of eq. (5) by its tangent, eq. (8); false: itself, on client j's data")

    @property
    def remote_unsupported(self) -> str:
        return "" if self.taylor else "algorithm.taylor = false takes every client's samples to all others"

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        if not self.taylor and self.alpha_order == "code":
            raise InputError(
                f'algorithm.alpha_order = "code" ({self.name}) is the order of the authors\' code, which has no '
                'taylor = false; there take alpha_order = "paper"'
            )

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        A = torch.full((setup.clients, setup.clients), 1 / setup.cohort_size, dtype=task.dtype)
        nobody = tree_map(lambda v: v.new_zeros(0, *v.shape), task.params(x0))
        return Server(x0, A, torch.zeros(0, dtype=torch.int64), nobody, torch.zeros(0, dtype=task.dtype))

    def init_client(self, task: Task, x0: Model) -> Kept:
        return self.kept(x0, self.opt.init(task.params(x0)), zeros(task.params(x0)), torch.zeros((), dtype=task.dtype))

    def round(self, server: Server, cohort: Cohort) -> Server:
        i, j = torch.as_tensor(cohort.ids, device=server.A.device), server.ids
        alpha, w = server.A[i][:, j], self.exchanged(cohort.task, server.w)
        if not len(j):
            up = cohort.run(self.first, shared={"w": w})
        elif not self.taylor:
            up = cohort.run(self.train_exactly, {"w": w, **data_of(j, cohort)}, {"alpha": alpha})
        else:
            g_bar = tree_map(lambda v: self.mu * v.mean(0), server.grads)
            up = cohort.run(
                self.train,
                shared={"w": w, "g_bar": g_bar, "a": server.a},
                per_client={"g_aux": combine(self.mu * alpha, server.grads), "alpha": alpha},  # eq. (13)
            )
        i, A = torch.as_tensor(up.ids, device=server.A.device), server.A.clone()
        A[i[:, None], j] = up.alpha
        w = self.average(up.theta, w, up.weights(self.weights))
        return Server(server.w | w, A, i, up.grad, up.a)

    def exchanged(self, task: Task, model: Model) -> Model:
        """What of a model goes between client and server."""
        return model if self.buffers == "average" else task.params(model)

    def global_model(self, server: Server) -> Model:
        return server.w

    def server_facts(self, server: Server) -> dict[str, Tensor]:
        return {"A": server.A}

    def warnings(self, server: Server) -> dict[str, str]:
        weight = self.mu * float(server.A[:, server.ids].sum(1).max())
        if weight <= HEAVY:
            return {}
        return {
            "alpha": f"a client's other risks weigh {weight:.1f} times its own (mu sum_j alpha_ij) and may drown it; "
            'algorithm.alpha_cap or algorithm.alpha_rows = "bounded" prevents that, as does a smaller mu or eta2'
        }

    # one client --------------------------------------------------------------------------------------
    @property
    def first(self) -> Program:
        """The first round: nothing is known of the others."""
        return Program(self.begin_first, (Phase(self.plain_step, self.epochs), self.closing), self.finish)

    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs), self.closing), self.finish)

    @property
    def closing(self) -> Phase:
        """One pass for grad_i and f_i at the last theta; it takes nothing from the stream of the training batches."""
        batches = ordered("train", self.batch_size)
        if self.grad_pass == "code":
            batches = Batches("train", 1, self.batch_size, stream="gradient", drop_last=True)
        return Phase(self.add_gradient, batches, self.enter_closing)

    def begin_first(self, task: Task, down: Down, kept: Kept) -> Training:
        return self.start(task, down, kept, kept.s, kept.has_s, torch.zeros(0))

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        return self.start(task, down, kept, self.auxiliary(down, kept), torch.ones(()), down.alpha)

    def start(self, task: Task, down: Down, kept: Kept, s: Model, has_s: Tensor, alpha: Tensor) -> Training:
        x = kept.theta | down.w  # what does not come down is the client's own
        return Training(x, self.momentum_at_start(kept.m, task.params(x)), s, has_s, alpha)

    def auxiliary(self, down: Down, kept: Kept) -> Model:
        g_aux: Model = down.g_aux
        return g_aux

    def plain_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        x, m = self.opt.step(c.x, p.grad, c.m)
        return c._replace(x=x | p.buffers, m=m)

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        x, m = self.opt.step(c.x, add(p.grad, c.s), c.m)
        theta = task.params(x if self.alpha_order == "paper" else c.x)
        alpha = c.alpha - self.eta2 * (down.a + dot(down.g_bar, theta))
        return c._replace(x=x | p.buffers, m=m, alpha=self.allowed(alpha))

    def allowed(self, alpha: Tensor) -> Tensor:
        """Weights that are not negative and within the bounds that were set."""
        alpha = alpha.clamp(min=0, max=self.alpha_cap)
        return alpha if self.alpha_rows == "free" else alpha / alpha.sum().clamp(min=1)

    # the study of what the tangents cost -------------------------------------------------------------
    @property
    def train_exactly(self) -> Program:
        return Program(self.begin_exactly, (Phase(self.exact_step, self.epochs), self.closing), self.finish)

    def begin_exactly(self, task: Task, down: Down, kept: Kept) -> Training:
        return self.start(task, down, kept, {}, kept.has_s, down.alpha)

    def exact_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        """Descends eq. (5) itself, in theta and in alpha."""
        p, theirs = task.grad(c.x, batch), Batch(down.x, down.y, None, batch.key)
        share = c.alpha @ down.mean_of
        q = task.grad(c.x, theirs, train=False, objective=lambda _, out, h: share @ task.per_sample(out, theirs.y))
        x, m = self.opt.step(c.x, axpy(self.mu, q.grad, p.grad), c.m)
        f = down.mean_of @ task.losses(x, theirs)
        return c._replace(x=x | p.buffers, m=m, alpha=self.allowed(c.alpha - self.eta2 * self.mu * f))

    def enter_closing(self, task: Task, down: Down, c: Training) -> FullPass:
        return FullPass(c, zeros(task.params(c.x)), torch.zeros(()), torch.zeros(()))

    def add_gradient(self, task: Task, down: Down, c: FullPass, batch: Batch) -> FullPass:
        p = task.grad(c.c.x, batch, train=self.grad_pass == "code")
        seen = c.c if self.buffers == "average" else c.c._replace(x=c.c.x | p.buffers)
        return FullPass(seen, axpy(batch.n, p.grad, c.g), c.f + batch.n * p.loss, c.n + batch.n)

    def finish(self, task: Task, down: Down, c: FullPass) -> tuple[dict[str, Tree], Kept]:
        x, m, s, has_s, alpha = c.c
        grad = scale(1 / c.n, c.g)
        a = self.mu * (c.f / c.n - dot(grad, task.params(x)))
        up = {"theta": self.exchanged(task, x), "grad": grad, "a": a, "alpha": alpha}
        return up, self.kept(x, m, s, has_s)

    def kept(self, theta: Model, m: Model, s: Model, has_s: Tensor) -> Kept:
        return Kept(theta, self.momentum_to_keep(m), {}, has_s)

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        return kept.theta


def data_of(clients: Tensor, cohort: Cohort) -> dict[str, Tensor]:
    """All train samples of some clients, and the matrix that makes each client's mean of values per sample."""
    x, y, counts = cohort.samples([int(k) for k in clients])  # here; see `remote_unsupported`
    means = (torch.full((1, n), 1 / n, dtype=cohort.task.dtype, device=clients.device) for n in counts)
    return {"x": x, "y": y, "mean_of": torch.block_diag(*means)}  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class PGFedMo(PGFed):
    """PGFedMo: PGFed whose auxiliary gradients are smoothed over a client's rounds (Luo et al., ICCV 2023)."""

    name: ClassVar[str] = "pgfedmo"

    beta: float = hyper(0.5, "beta: momentum of the auxiliary gradient, eq. (15)", low=0, below=1)

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        if not self.taylor:
            raise InputError("algorithm.taylor = false: pgfedmo smooths the gradient of the tangents; take pgfed")

    def auxiliary(self, down: Down, kept: Kept) -> Model:
        smoothed = axpy(1 - self.beta, down.g_aux, scale(self.beta, kept.s))
        s: Model = where(kept.has_s > 0, smoothed, down.g_aux)
        return s

    def kept(self, theta: Model, m: Model, s: Model, has_s: Tensor) -> Kept:
        return super().kept(theta, m, s, has_s)._replace(s=s)
