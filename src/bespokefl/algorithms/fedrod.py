"""FedRoD: a balanced generic head for all clients, and a personal head on top for each (Chen and Chao, ICLR 2022).

One body phi carries two heads. The generic one, h^G, is trained together with phi by the balanced softmax, the
cross-entropy of h^G(z) + log n_i, z = phi(x), n_i the client's samples per class, which undoes its label skew; phi and
h^G are averaged and are the global model. The personal head h_i^P is trained by the cross-entropy of
h^G(z) + h_i^P(z), in which only h_i^P may move. A client's model answers with that sum, under the newest phi and h^G.

A step on a batch is one of (phi, h^G) and then one of h_i^P, with z and h^G(z) as they were before the first. So does
the popular re-implementation; the authors published no code.

* ``head="linear"``: h_i^P is a second head that stays with its client and starts as a copy of the initial one.
* ``head="hyper"``: a hypernetwork nu writes h_i^P from n_i / sum n_i, so that new clients have one too; nu is averaged
  and travels with w. Its two hidden layers of ``width`` are our choice.
* log n_i is at least log 1e-12: a class that a client lacks gets no infinite logit.
* h_i^P runs in evaluation mode, which matters only if the head holds dropout or normalisation.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from bespokefl.core import (
    MODEL,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    Headed,
    HyperNetwork,
    Model,
    ModelAveraging,
    Newcomer,
    OneModel,
    Phase,
    Program,
    Setup,
    Task,
    Tree,
    add_to_logits,
    generate,
    hyper,
    initial_parameters,
    ordered,
    when,
)
from bespokefl.core.trees import pick, rows, zeros

PERSONAL = "personal."  # before the names of the personal head in a client's model
FEWEST = 1e-12  # samples of a class that a client lacks


class Kept(NamedTuple):
    h: Model  # the personal head (head="linear" only)
    m: Model  # momenta (opt_state="keep" only)
    mp: Model


class Two(NamedTuple):
    x: Model  # body and generic head
    p: Model  # the personal head, or the hypernetwork that writes it
    m: Model
    mp: Model
    n: Tensor  # samples per class


@dataclass(frozen=True)
class FedRoD(Headed, ModelAveraging, OneModel):
    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = (
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    )
    sends: ClassVar = {"w": "w", "nu": "nu"}
    exchanges: ClassVar = (Exchange("train", {"w": MODEL, "nu": "the network that writes heads, after local steps"}),)
    stays: ClassVar = {"h": "the head that it answers with"}
    averages: ClassVar = ("train",)

    head: Literal["linear", "hyper"] = hyper("linear", "h_i^P: a head of the client's own, or written from its labels")
    width: int = hyper(16, 'width of the hypernetwork\'s layers (head="hyper")', low=1, when=when(head="hyper"))

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        linear = self.head == "linear"
        nu = {} if linear else initial_parameters(self.hypernetwork(task), setup.seed, x0[task.names[0]])
        return {"w": x0, "nu": nu}

    def init_client(self, task: Task, x0: Model) -> Kept:
        like = x0[task.names[0]]
        if self.head == "linear":
            p = pick(x0, task.head)
        else:
            p = {k: like.new_zeros(v.shape) for k, v in self.hypernetwork(task).named_parameters()}
        return self._kept(p, self.opt.init(task.params(x0)), self.opt.init(p))

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared=server)
        return self.average({"w": up.w, "nu": up.nu}, server, up.weights(self.weights))

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(self.both_heads, server)

    @property
    def both_heads(self) -> Program:
        counting = (self.counting,) if self.head == "hyper" else ()
        return Program(self.begin, counting, self.answering)

    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        how = "a personal head on the server's body and generic head, which stay as they are"
        return self.joining(how, self.begin, self.head_step, server, (self.counting,))

    def outputs(self, task: Task, model: Model, batch: Batch) -> Tensor:
        """h^G(z) + h_i^P(z)."""
        out, h, _ = task.apply(model, batch)
        own = {k.removeprefix(PERSONAL): v for k, v in model.items() if k.startswith(PERSONAL)}
        return out + task.head_outputs(model | own, h).view_as(out)

    def hypernetwork(self, task: Task) -> HyperNetwork:
        return HyperNetwork(pick(task.initial, task.head), task.head_sizes(self.name).classes, self.width, n_hidden=1)

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (self.counting, Phase(self.step, self.epochs)), self.finish)

    @property
    def counting(self) -> Phase:
        return Phase(self.count, ordered("train", self.batch_size))

    def begin(self, task: Task, down: Down, kept: Kept) -> Two:
        p = kept.h if self.head == "linear" else down.nu
        m, mp = self.momentum_at_start(kept.m, task.params(down.w)), self.momentum_at_start(kept.mp, p)
        return Two(down.w, p, m, mp, torch.zeros(task.head_sizes(self.name).classes))

    def count(self, task: Task, down: Down, c: Two, batch: Batch) -> Two:
        return c._replace(n=c.n + batch.sum(batch.one_hot(len(c.n))))

    def step(self, task: Task, down: Down, c: Two, batch: Batch) -> Two:
        log_n = c.n.clamp(min=FEWEST).log()

        def balanced(x: Model, out: Tensor, z: Tensor) -> Tensor:
            return batch.mean(task.per_sample(add_to_logits(out, log_n), batch.y))

        q = task.grad(c.x, batch, objective=balanced)
        x, m = self.opt.step(c.x, q.grad, c.m)
        return self.personal_step(task, c, batch, q.out, q.h)._replace(x=x | q.buffers, m=m)

    def personal_step(self, task: Task, c: Two, batch: Batch, generic: Tensor, z: Tensor) -> Two:
        """One step of h_i^P beside what the generic head answers."""

        def personal(p: Model) -> Tensor:
            own = task.head_outputs(c.x | self.personal_head(task, p, c.n), z)
            return batch.mean(task.per_sample(generic + own.view_as(generic), batch.y))

        p, mp = self.opt.step(c.p, grad(personal)(c.p), c.mp)
        return c._replace(p=p, mp=mp)

    def head_step(self, task: Task, down: Down, c: Two, batch: Batch) -> Two:
        """What a client does that comes later: body and generic head are fixed, in evaluation mode."""
        generic, z, _ = task.apply(c.x, batch)
        return self.personal_step(task, c, batch, generic, z)

    def joined_model(self, task: Task, down: Down, c: Two) -> Model:
        model: Model = self.answering(task, down, c)[0]["model"]
        return model

    def fresh_optimiser(self, task: Task, down: Down, c: Two) -> Two:
        return c._replace(mp=zeros(c.mp))

    def finish(self, task: Task, down: Down, c: Two) -> tuple[dict[str, Tree], Kept]:
        return {"w": c.x, "nu": c.p if self.head == "hyper" else {}}, self._kept(c.p, c.m, c.mp)

    def answering(self, task: Task, down: Down, c: Two) -> tuple[dict[str, Tree], Tree]:
        own = {PERSONAL + k: v for k, v in self.personal_head(task, c.p, c.n).items()}
        return {"model": c.x | own}, {}

    def personal_head(self, task: Task, p: Model, n: Tensor) -> Model:
        """h_i^P, by the names of the model's head."""
        if self.head == "linear":
            return p
        written: Model = rows(generate(self.hypernetwork(task), p, (n / n.sum().clamp(min=1))[None]), 0)
        return written

    def _kept(self, p: Model, m: Model, mp: Model) -> Kept:
        return Kept(p if self.head == "linear" else {}, self.momentum_to_keep(m), self.momentum_to_keep(mp))
