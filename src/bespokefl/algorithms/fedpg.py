"""FedPG: a fair common descent direction, and personal ones that spare the others (ICCV 2023 submission).

"Preserving Global Performance in Personalized Federated Learning". The G-model moves along d = -Q lam, the shortest
vector in the hull of the clients' gradients and the gradient of F = -cos(L, 1), L the vector of their losses, so that
to first order no loss and no unfairness rises. A P-model is one step from the G-model along d_i, the direction nearest
to the client's own -g_i that does not hurt the others, or (gamma > 0) hurts them by at most the share gamma of what
-g_i would; P-models never touch the G-model.

Only the supplement is public. Taken from its sibling papers FedMDFG (AAAI 2023) and FedLF (AAAI 2024), and different:

* ``scale``: all columns, the fairness and the absent clients' ones too, get the mean length of the online gradients, as
  in FedLF's code (there layer by layer). FedMDFG's rescales the online ones only: its fairness column is their sum with
  weights of length 1, and absent gradients keep the length of their own round.
* ``tau`` = floor(M / |S_t|) counts in M all clients seen so far, this round's too. FedLF's code counts those of earlier
  rounds only, and looks at absent clients only once these are more than the cohort.
* The length of d (sigma) is that of the mean of the scaled online gradients, as in FedMDFG's code; FedLF's takes the
  mean as it was before scaling.
* ``fair_angle`` is FedMDFG's angle, whose code also wants fairness when the loss of some, not all, is above its own
  running mean. ``rose`` (a loss above that of the client's last round) is ours.

Ours as well: the personal direction's problem, ``grad_mode="pseudo"`` as a setting, and what is done where the
supplement's Lemma 1 fails (a direction that lowers all losses need not lower F, then the hull contains 0): the fairness
column is dropped for the round (``fair_dropped`` counts), then absent clients', the oldest first; if d is still 0 the
model is stationary and stays. Clients whose gradient vanishes (below 1e-6) have no say in the round's direction.
``grad_mode="exact"`` differentiates in evaluation mode, as losses are measured, so BatchNorm statistics stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespokefl.algorithms._fedpg.backtracking import HALVINGS, score_all, spare_others
from bespokefl.core import (
    GRADIENT,
    LOSS,
    STATISTICS,
    Algorithm,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    InputError,
    Model,
    Phase,
    Program,
    RunError,
    Setup,
    Task,
    Tree,
    Uploads,
    columns_of,
    common_direction,
    hand_over,
    hyper,
    nearest_directions,
    ordered,
    unless,
    when,
)
from bespokefl.core.common_direction import Columns, Direction
from bespokefl.core.solvers import Floats
from bespokefl.core.trees import (
    axpy,
    combine,
    drop,
    leaves,
    mean,
    repeat,
    rows,
    scale,
    shift,
    stack,
    tree_map,
    where,
    zeros,
)

MANY_LOSSES = "its mean training losses at the personal models of all"


class Kept(NamedTuple):
    """What a client keeps between exchanges and rounds."""

    v: Model  # omega_i, its P-model
    seen: Tensor  # 1 once it has one
    m: Model  # momentum (opt_state="keep" only)
    w: Model  # omega_t, the G-model of its last round (S-FedPG, or pm_base="persistent")
    d: Model  # d', the common direction of its last round (S-FedPG)


class Work(NamedTuple):
    kept: Kept
    x: Model  # the local copy of omega_t (pseudo)
    m: Model
    g: Model  # sum of the samples' gradients (exact)
    loss: Tensor  # sum of the samples' losses at omega_t
    n: Tensor


class Last(NamedTuple):
    g: Model  # the raw gradient that a client last sent
    loss: float
    round: int


class Server(NamedTuple):
    w: Model  # omega_t, the G-model
    last: dict[int, Last]  # by client
    online: list[int]  # S_{t-1}
    seen: list[int]  # clients that ever took part
    step: float  # of the last round
    fair_dropped: int  # rounds in which the fairness column had to go to leave a direction


@dataclass(frozen=True)
class FedPG(Algorithm):
    name: ClassVar[str] = "fedpg"
    paper: ClassVar[str] = "Preserving Global Performance in Personalized Federated Learning, ICCV 2023 submission"
    sends: ClassVar = {"g": None}
    exchanges: ClassVar[tuple[Exchange, ...]] = (
        Exchange("upload", {"g": GRADIENT, "loss": LOSS, "buffers": STATISTICS}, shows=GRADIENT),
        Exchange("all_losses", {"loss": MANY_LOSSES}, ("upload", "all_losses"), HALVINGS, when(pers_backtrack=True)),
        Exchange("receive", after=("upload", "all_losses"), only=when(pm_base="global")),
        Exchange("move", after=("upload", "all_losses"), only=when(pm_base="persistent")),
    )
    acts: ClassVar = dict.fromkeys(
        ("local_epochs", "momentum", "weight_decay", "opt_state", "drop_last", "weights"),
        when(grad_mode="pseudo"),
    )

    lr: float = hyper(0.1, "eta: step size of the server and of local SGD", above=0)
    lr_decay: float = hyper(0.999, "factor of eta from round to round: eta_t = eta lr_decay^t", above=0, high=1)
    gamma: float = hyper(0.0, "gamma: share of its own conflict with others that a P-model may cause", low=0, high=1)
    grad_mode: Literal["pseudo", "exact"] = hyper(
        "pseudo", "g_i: (omega_t - omega_i^E) / eta_t after E local epochs, or the gradient over all local samples"
    )
    scale: Literal["none", "mean", "median", "unit"] = hyper(
        "mean", "r: common length of all columns, of the online gradients' norms (none: as they are)"
    )
    tau: int | None = hyper(None, "tau: rounds an absent client's gradient counts; nothing: floor(M / |S_t|)", low=0)
    fair_angle: float = hyper(
        0.0,
        "the fairness column counts if the angle of L and 1 exceeds so many degrees or a loss rose (0: always)",
        low=0,
        high=90,
    )
    pers: Literal["project", "blend"] = hyper(
        "project",
        "d_i(gamma): projection with bounds, or (1 - gamma) d_i(0) - gamma g_i",
        when=unless(gamma=(0.0, 1.0)),
    )
    pm_base: Literal["global", "persistent"] = hyper(
        "global", "where d_i starts: omega_t, or the client's last P-model"
    )
    pers_backtrack: bool = hyper(
        False, "halve a P-model's step until no other online loss rises (gamma = 0; every client scores every P-model)"
    )
    pm_eval: Literal["last", "rebuild"] = hyper(
        "last", "the scored P-model: the last one sent, or one from fresh gradients of all clients (simulation only)"
    )

    @property
    def only_sgd(self) -> str:
        return "its server takes a client's move over eta for a gradient, which only that of SGD is"

    def check(self, task: Task, setup: Setup) -> None:
        if self.pm_eval == "rebuild" and self.pm_base == "persistent":
            raise InputError('algorithm.pm_eval = "rebuild" builds P-models from the G-model; set pm_base = "global"')
        if self.pers_backtrack and (self.gamma > 0 or self.pm_base == "persistent" or self.pm_eval == "rebuild"):
            raise InputError(
                'algorithm.pers_backtrack = true needs gamma = 0, pm_base = "global" and pm_eval = "last"; '
                f'here they are {self.gamma:g}, "{self.pm_base}" and "{self.pm_eval}"'
            )

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        return Server(x0, {}, [], [], self.lr, 0)

    def init_client(self, task: Task, x0: Model) -> Kept:
        m = self.momentum_to_keep(self.opt.init(task.params(x0)))
        return Kept(x0, torch.zeros(()), m, x0 if self.remembers_w else {}, {})

    @property
    def remembers_w(self) -> bool:
        return self.pm_base == "persistent"

    # the server --------------------------------------------------------------------------------------
    def round(self, server: Server, cohort: Cohort) -> Server:
        t, w = cohort.round, server.w
        up = cohort.run(self.upload, shared={"w": w})
        ids = [int(i) for i in up.ids]
        seen = sorted({*server.seen, *ids})
        tau = len(seen) // len(ids) if self.tau is None else self.tau
        columns = self.columns(up, self.absent(server, ids, t, tau), self.rose(server, up))
        common = common_direction(columns)
        step = self.find_step(server, up, columns, common)
        own = self.personal_directions(columns)
        if self.pers_backtrack:
            own = spare_others(up, own, lambda d: self.p_models(w, up, d, step), self.all_losses)
        self.send_personal(w, up, own, step)

        limit = len(cohort.everyone()) if self.tau is None else self.tau  # no gradient counts for longer
        last = {j: l for j, l in server.last.items() if t + 1 - l.round <= limit}
        for k, i in enumerate(ids):
            last[i] = Last(tree_map(torch.clone, rows(up.g, k)), float(up.loss[k]), t)
        new = shift(w, step, common.d) | mean(up.buffers, up.weights(self.weights))
        return Server(new, last, ids, seen, step, server.fair_dropped + common.fair_dropped)

    def absent(self, server: Server, online: Sequence[int], t: int, tau: int) -> list[Model]:
        """The stored gradients of absent clients that still count, newest first, then by id."""
        gone = [(t - l.round, j) for j, l in server.last.items() if j not in online and t - l.round <= tau]
        return [server.last[j].g for _, j in sorted(gone)]

    def rose(self, server: Server, up: Uploads) -> bool:
        last = {int(i): server.last.get(int(i)) for i in up.ids}
        return any(l is not None and float(up.loss[k]) > l.loss for k, l in enumerate(last.values()))

    def columns(self, up: Uploads, absent: Sequence[Model], rose: bool) -> Columns:
        """Q of the supplement; FedMDFG's rule for when fairness matters, where it is asked for."""
        losses: Floats = up.loss.double().cpu().numpy()
        if losses.min() < -1e-6:
            worst = int(losses.argmin())
            raise RunError(f"{self.name} needs losses of at least 0; client {up.ids[worst]} has {losses[worst]:g}")
        losses = np.maximum(losses, 0)  # a cross-entropy of 0 may come out as -1e-8
        return columns_of(up.g, losses, absent, self.scale, 0.0 if rose else self.fair_angle)

    def personal_directions(self, c: Columns) -> Model:
        """d_i(gamma) = -(g_i + sum_j nu_j g_j) of the online clients, stacked."""
        m = len(c.losses)
        project = self.pers == "project"
        nu = nearest_directions(c.products[:-1, :-1], range(m), self.gamma if project else 0.0)
        weights = np.zeros((m, len(c.products)))  # 0 for the fairness column
        weights[:, :-1] = -nu if project else -(1 - self.gamma) * nu
        weights[np.arange(m), np.arange(m)] = -1.0
        d: Model = combine(torch.as_tensor(weights, device=leaves(c.z)[0].device), c.z)
        return d

    def find_step(self, server: Server, up: Uploads, c: Columns, common: Direction) -> float:
        """The step along d', and that of the P-models; S-FedPG searches for it."""
        return self.lr

    def send_personal(self, w: Model, up: Uploads, own: Model, step: float) -> None:
        if self.pm_base == "global":
            up.cohort.run(self.receive, per_client={"x": self.p_models(w, up, own, step)})
        else:
            up.cohort.run(self.move, shared={"e": scalar(step, w)}, per_client={"d": own, "buffers": up.buffers})

    def p_models(self, w: Model, up: Uploads, own: Model, step: float) -> Model:
        """omega_i = omega_t + eta_p d_i, with the buffers of the client's own training."""
        models: Model = shift(repeat(w, len(up.ids)), step, own) | up.buffers
        return models

    def global_model(self, server: Server) -> Model:
        return server.w

    def server_facts(self, server: Server) -> dict[str, Tensor]:
        return {
            "step": torch.tensor(server.step, dtype=torch.float64),
            "fair_dropped": torch.tensor(server.fair_dropped),
        }

    def personal_model(self, server: Server, cohort: Cohort) -> Call:
        if self.pm_eval == "last":
            return Call(self.last_sent, {"w": server.w})
        up = cohort.everyone().run(self.upload, shared={"w": server.w}, write=False)
        models = self.p_models(server.w, up, self.personal_directions(self.columns(up, (), False)), server.step)
        place = {int(i): k for k, i in enumerate(up.ids)}
        own = [rows(models, place[int(i)]) if int(i) in place else server.w for i in cohort.ids]
        return Call(self.received_model, per_client={"w": stack(own)})

    # one client: gradient and loss ---------------------------------------------------------------------
    @property
    def upload(self) -> Program:
        whole = ordered("train", self.batch_size)
        if self.grad_mode == "exact":
            return Program(self.begin, (Phase(self.add_gradient, whole),), self.exact)
        return Program(self.begin, (Phase(self.add_loss, whole), Phase(self.sgd, self.epochs)), self.pseudo)

    def begin(self, task: Task, down: Down, kept: Kept) -> Work:
        params = task.params(down.w)
        if self.grad_mode == "exact":
            return Work(kept, {}, {}, zeros(params), torch.zeros(()), torch.zeros(()))
        m = self.momentum_at_start(kept.m, params)
        return Work(kept, down.w, m, {}, torch.zeros(()), torch.zeros(()))

    def add_gradient(self, task: Task, down: Down, c: Work, batch: Batch) -> Work:
        p = task.grad(down.w, batch, train=False)
        return c._replace(g=axpy(batch.n, p.grad, c.g), loss=c.loss + batch.n * p.loss, n=c.n + batch.n)

    def add_loss(self, task: Task, down: Down, c: Work, batch: Batch) -> Work:
        return c._replace(loss=c.loss + batch.sum(task.losses(down.w, batch)), n=c.n + batch.n)

    def sgd(self, task: Task, down: Down, c: Work, batch: Batch) -> Work:
        p = task.grad(c.x, batch)
        x, m = self.opt.step(c.x, p.grad, c.m)
        return c._replace(x=x | p.buffers, m=m)

    def exact(self, task: Task, down: Down, c: Work) -> tuple[dict[str, Tree], Kept]:
        return {"g": scale(1 / c.n, c.g), "loss": c.loss / c.n, "buffers": {}}, self._kept(c.kept, down.w, c.kept.m)

    def pseudo(self, task: Task, down: Down, c: Work) -> tuple[dict[str, Tree], Kept]:
        g = {k: (down.w[k] - c.x[k]) / self.lr for k in task.names}
        buffers = drop(c.x, task.names)
        return {"g": g, "loss": c.loss / c.n, "buffers": buffers}, self._kept(c.kept, down.w, c.m)

    def _kept(self, kept: Kept, w: Model, m: Model) -> Kept:
        return kept._replace(m=self.momentum_to_keep(m), w=w if self.remembers_w else {})

    @property
    def all_losses(self) -> Program:
        return score_all(self.batch_size)

    # one client: its P-model ---------------------------------------------------------------------------
    @property
    def receive(self) -> Program:
        return Program(self.take, (), self.keep)

    @property
    def move(self) -> Program:
        return Program(self.along, (), self.keep)

    def take(self, task: Task, down: Down, kept: Kept) -> Kept:
        return kept._replace(v=down.x)

    def along(self, task: Task, down: Down, kept: Kept) -> Kept:
        base = where(kept.seen > 0, kept.v, kept.w)
        return kept._replace(v=shift(base, down.e, down.d) | down.buffers)

    def keep(self, task: Task, down: Down, kept: Kept) -> tuple[dict[str, Tree], Kept]:
        return {}, kept._replace(seen=torch.ones(()))

    @property
    def last_sent(self) -> Program:
        return Program(self.newest_or_own, (), hand_over)

    def newest_or_own(self, task: Task, down: Down, kept: Kept) -> Model:
        model: Model = where(kept.seen > 0, kept.v, down.w)
        return model


def scalar(value: float, like: Model) -> Tensor:
    return leaves(like)[0].new_tensor(value)
