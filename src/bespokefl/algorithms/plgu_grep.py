"""PLGU-GRep: a shared body made flat layer by layer, under heads that stay with their clients.

Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, CVPR 2023, Algorithm 3. A
client first trains its head h_i on the received body phi for K epochs; then one batch moves the body twice, by the
gradient (eq. 11) and by the gradient at an LWSAM perturbation of where that led (eqs. 12, 13), each layer by the score
of its first move (eq. 10). The server averages the bodies, 1/C each. A client's model is the newest body with its own
head, the initial one if it never took part; the server, who never sees a head, has no model.

Where the paper is not literal (the authors published no code):

* Eq. (13) prints the unperturbed gradient, with which the perturbation would not matter: the perturbed one is meant.
  Line 14 averages phi_i; the bodies after eq. (13) are meant, as in the authors' slides.
* Eq. (10) uses phi_i before (11) defines it: ``score_from="step"`` takes that of (11); "previous" the body that the
  client sent last (equal scores if it never did).
* (12) takes a new gradient at phi_i; ``perturb_grad="reuse"`` takes that of (11), one backward pass less.
* The scores are of the body's layers only, and renormalised to sum to 1. A layer is a convolution or a linear one with
  its norm, as in PLGU-LF.
* Line 11 draws one batch for the body, however large K is. In few rounds the body then hardly moves:
  ``body_steps="epoch"`` takes (11) to (13) over an epoch of batches.
* With momentum (11) and (13) are two steps of an optimiser that is new in each round; ``opt_state`` is the head's.
* The head is trained with the body in evaluation mode; running statistics are those of the pass of (11).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.algorithms._plgu.sharpness import equal_scores, lwsam, scores
from bespokefl.algorithms.fedper import PartialSharing
from bespokefl.core import (
    BODY,
    ONE_BATCH,
    Batch,
    Down,
    Exchange,
    Model,
    Part,
    Phase,
    Task,
    Tree,
    hyper,
    layers_of,
    shuffled,
    when,
)
from bespokefl.core.trees import drop, pick, shift


class Kept(NamedTuple):
    v: Model  # the head
    m: Model  # its momentum (opt_state="keep" only)
    sent: Model  # the body sent last (score_from="previous" only)
    seen: Tensor  # 1 once the client took part


class Training(NamedTuple):
    x: Model  # body and head
    m: Model  # momentum of both
    xi: Tensor  # scores against the body sent last (score_from="previous" only)


@dataclass(frozen=True)
class PLGUGRep(PartialSharing):
    name: ClassVar[str] = "plgu-grep"
    paper: ClassVar[str] = "Qu et al., How to Prevent the Poor Performance Clients for Personalized FL?, CVPR 2023"
    exchanges: ClassVar = (Exchange("train", {"phi": BODY}, shows=f"{ONE_BATCH} (`body_steps` is `batch`)"),)

    acts: ClassVar = {"local_epochs": when(head_epochs=None)}

    rho: float = hyper(0.05, "rho: radius of the perturbation, eq. (12)", low=0)
    p: float = hyper(2.0, "p: norm of the perturbation, eq. (12)", above=1)
    head_epochs: int | None = hyper(None, "K: epochs of the head; nothing: local_epochs", low=1)
    body_steps: Literal["batch", "epoch"] = hyper("batch", "whether (11) to (13) see one batch or an epoch of them")
    score_from: Literal["step", "previous"] = hyper("step", "phi_i in eq. (10): that of eq. (11), or the one sent last")
    perturb_grad: Literal["fresh", "reuse"] = hyper("fresh", "gradient in eq. (12): at phi_i, or that of eq. (11)")
    score_scale: Literal["sum1", "mean1"] = hyper("sum1", "xi: scores sum to 1, or have the mean 1")
    norm_scope: Literal["global", "layer"] = hyper("global", "||g||: of the whole body, eq. (12), or of each layer")
    grouping: Literal["module", "conv_norm"] = hyper(
        "conv_norm", "a layer: a convolution or a linear layer with its norm, or any module"
    )
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    @property
    def only_sgd(self) -> str:
        return (
            "its scores (score_from = 'step') take a first step for a gradient, and Adam's, say, has one length in "
            "every coordinate"
            if self.score_from == "step"
            else ""
        )

    def init_client(self, task: Task, x0: Model) -> Kept:
        return self._remembered(task, x0, self.opt.init(task.params(x0)), torch.zeros(()))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Lines 5 to 9 with the body fixed, then lines 10 to 13 with the head fixed."""
        head = shuffled(self.head_epochs or self.local_epochs, self.batch_size, drop_last=self.drop_last)
        steps = 1 if self.body_steps == "batch" else None
        body = shuffled(1, self.batch_size, steps=steps, drop_last=self.drop_last)
        return Phase(self.private_step, head), Phase(self.body_step, body)

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        x = self.joined(task, down, kept)
        m = self.opt.init(task.params(x)) | kept.m
        layers = self.layers(task)
        xi = equal_scores(x[task.body[0]], layers, self.score_scale)
        if self.score_from == "previous":
            xi = torch.where(kept.seen > 0, scores(kept.sent, x, layers, self.score_scale), xi)
        return Training(x, m, xi)

    def body_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        layers = self.layers(task)
        p = task.grad(c.x, batch, task.body)
        x, m = self.opt.step(c.x, p.grad, c.m)  # eq. (11)
        xi = scores(x, c.x, layers, self.score_scale) if self.score_from == "step" else c.xi  # eq. (10)
        g = task.grad(x, batch, task.body).grad if self.perturb_grad == "fresh" else p.grad
        epsilon = lwsam(g, xi, layers, self.rho, self.p, self.norm_scope)  # eq. (12)
        q = task.grad(shift(x, 1.0, epsilon), batch, task.body)
        x, m = self.opt.step(x, q.grad, m)  # eq. (13)
        return Training(x | p.buffers, m, c.xi)

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        upload, _ = super().finish(task, down, c)
        return upload, self._remembered(task, c.x, c.m, torch.ones(()))

    def layers(self, task: Task) -> tuple[Part, ...]:
        return layers_of(task, self.grouping, task.body)

    def _remembered(self, task: Task, x: Model, m: Model, seen: Tensor) -> Kept:
        sent = pick(x, task.body) if self.score_from == "previous" else {}
        kept = self.kept(task, x, drop(m, task.body))
        return Kept(kept.v, kept.m, sent, seen)
