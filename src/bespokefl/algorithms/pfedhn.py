"""pFedHN: a hypernetwork on the server writes every client's weights (Shamsian et al., ICML 2021).

min over phi and v of mean_i f_i(H(v_i; phi)), Algorithm 1. A client gets w_i = H(v_i; phi), trains it for K
steps and answers with Delta_i, final minus initial weights. -Delta_i, pulled back through H, is the gradient: the
server steps phi and v_i by SGD with momentum. A client keeps nothing; its model is H(v_i; phi), without local steps.
Sizes, optimisers (a fresh one for every visit) and clipping are those of the authors' code.

* The authors visit one client per round. Here a round visits its cohort one after another in the order of ids, each
  with the weights of the newest phi (``server_step="client"``); "cohort" visits all at once and takes one step by their
  mean, which is faster and needs more rounds.
* In the authors' code v are parameters like any others, so momentum and weight decay move the v of absent clients too
  (``embed_opt="sgd"``); "plain" steps only the v of those who answered, as Algorithm 1 is printed.
* ``private_head=True`` is pFedHN-PC: H writes the body, and the head stays with its client.
* The authors take K = 50 batches (``local_unit="steps"``, ``local_epochs=50``); the default is epochs as elsewhere, so
  that methods are compared at the same local work.
* The authors draw every local batch anew from the whole data; here batches go through shuffled epochs.
* PLGU-GHN shares all settings but ``n_hidden`` and ``embed_opt``: its docstring says why.
* Buffers (running statistics), which the authors' models do not have, are averaged as in FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bespokefl.core import (
    CHANGE,
    SGD,
    STATISTICS,
    Algorithm,
    Batch,
    Call,
    Cohort,
    Down,
    Exchange,
    HyperNetwork,
    InputError,
    Model,
    Newcomer,
    Phase,
    Program,
    RunError,
    Setup,
    Task,
    Training,
    Tree,
    Uploads,
    generate,
    hyper,
    initial_parameters,
    pull_phi,
    pull_v,
    stream,
    unless,
    when,
)
from bespokefl.core.trees import clipped, concat, mean, pick, rows, sub, tree_map, zeros

LARGEST = 2**28  # parameters of a hypernetwork: 1 GiB, and several times that in training


class Server(NamedTuple):
    phi: Model  # weights of the hypernetwork
    m: Model  # their momentum, and that of the embeddings under "v" (embed_opt="sgd" only)
    v: Tensor  # embeddings, a row per client
    rest: Model  # what H does not write: buffers and frozen parameters


class Kept(NamedTuple):
    head: Model  # the client's own (private_head only)
    m: Model  # momentum (opt_state="keep" only)


class Embedded(NamedTuple):
    """A client that comes later."""

    v: Tensor  # its embedding
    head: Model  # its own (private_head only)
    rest: Model  # buffers
    mv: Model  # momenta
    m: Model


@dataclass(frozen=True)
class HyperNetworked(Algorithm):
    """What methods share whose server writes the clients' weights: H, its optimiser, and the clients' training."""

    sends: ClassVar = {"delta": None}
    exchanges: ClassVar = (Exchange("train", {"delta": CHANGE, "rest": STATISTICS}),)
    stays: ClassVar = {"head": "its head, if `private_head`"}
    newcomer_acts: ClassVar = {
        "momentum": when(embed_opt="sgd") | when(private_head=True, optimizer="sgd"),
        "opt_state": when(embed_opt="sgd") & unless(momentum_h=0)
        | when(private_head=True) & (unless(momentum=0) | unless(optimizer="sgd")),
    }

    lr: float = hyper(0.005, "eta: step size of local SGD", low=0)
    momentum: float = hyper(0.9, "momentum of local SGD", low=0, below=1)
    weight_decay: float = hyper(5e-5, "weight decay of local SGD", low=0)
    local_unit: Literal["epochs", "steps"] = hyper("epochs", "K: whether local_epochs counts epochs or batches")
    eta_h: float = hyper(0.01, "eta_h: step size of phi", low=0)
    eta_v: float = hyper(0.01, "eta_v: step size of the embeddings", low=0)
    momentum_h: float = hyper(0.9, "momentum of phi", low=0, below=1)
    weight_decay_h: float = hyper(1e-3, "weight decay of phi", low=0)
    clip: float | None = hyper(50.0, "largest norm of a local gradient, and of phi's and v's together", above=0)
    embed_opt: Literal["sgd", "plain"] = hyper(
        "sgd", "v: phi's SGD on the v of all clients, or plain steps of those who answered"
    )
    private_head: bool = hyper(False, "whether the head stays with its client, so that H writes the body only")
    embed: int | None = hyper(None, "length of an embedding; nothing: 1 + N/4", low=1)
    width: int = hyper(100, "width of H's layers", low=1)
    n_hidden: int = hyper(3, "H has 1 + n_hidden layers before its heads", low=0)
    head_rank: int | None = hyper(None, "rank of H's heads, for large models; nothing: full", low=1)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def check(self, task: Task, setup: Setup) -> None:
        if not self.written_names(task):
            raise InputError(
                f"algorithm.private_head = true: the model has no trained layer before its head '{task.head_name}', "
                "so there is nothing to write; take a deeper model or name another head"
            )
        size = sum(v.numel() for v in self.hypernetwork(task, setup.clients).parameters())
        if size > LARGEST:
            raise InputError(
                f"algorithm.head_rank = {self.head_rank}, algorithm.width = {self.width}: the hypernetwork of a model "
                f"with {task.size:,} parameters would have {size:,}, at most {LARGEST:,} are allowed; set a (smaller) "
                "head_rank or take a smaller model"
            )

    def hypernetwork(self, task: Task, n_clients: int) -> nn.Module:
        """H without values, from the shapes of the model."""
        return self.network_of(task, self._embed(n_clients))

    def network_of(self, task: Task, embed: int) -> nn.Module:
        target = pick(task.initial, self.written_names(task))
        return HyperNetwork(target, embed, self.width, self.n_hidden, self.head_rank)

    def written_names(self, task: Task) -> list[str]:
        return task.body if self.private_head else task.names

    def init(self, task: Task, x0: Model, setup: Setup) -> Server:
        net, like = self.hypernetwork(task, setup.clients), x0[task.names[0]]
        phi = initial_parameters(net, setup.seed, like)
        drawn = stream(setup.seed, "embedding").normal(size=(setup.clients, self._embed(setup.clients)))
        v = torch.as_tensor(drawn).to(like)
        m = self.opt_h.init(phi | ({"v": v} if self.embed_opt == "sgd" else {}))
        return Server(phi, m, v, pick(x0, task.buffer_names))

    def init_client(self, task: Task, x0: Model) -> Kept:
        return self._kept(task, x0, self.opt.init(task.params(x0)))

    def personal_model(self, server: Server, cohort: Cohort) -> Call:
        H = self.hypernetwork(cohort.task, len(server.v))
        w = generate(H, server.phi, server.v[self.embedded(cohort, server)])
        return Call(self.own_model, {"rest": server.rest}, {"w": w})

    def newcomer(self, server: Server, task: Task) -> Newcomer:
        """A row of v of its own, at first the mean of all clients', by gradients of f_i(H(v; phi)); phi stays."""
        how = "a new embedding (and head, if that is private) under the hypernetwork, which stays as it is"
        shared = {"phi": server.phi, "v": server.v.mean(0), "rest": server.rest}
        return self.joining(how, self.begin_new, self.embedding_step, shared)

    @property
    def newcomer_settings(self) -> dict[str, str]:
        return {"lr": "eta_v", "momentum": "momentum_h"}

    # the server's pieces of a round ------------------------------------------------------------------
    def exchange(self, H: nn.Module, phi: Model, server: Server, cohort: Cohort) -> Uploads:
        """H(v_i; phi) to every client; what comes back has Delta_i."""
        w = generate(H, phi, server.v[self.embedded(cohort, server)])
        return cohort.run(self.train, {"rest": server.rest}, {"w": w})

    def descended(self, server: Server, g: Model, g_v: Tensor, index: Tensor) -> Server:
        """One step along the gradients of phi and of the embeddings in the rows ``index``."""
        g, g_v = clipped((g, g_v), self.clip)
        phi, m = self.opt_h.step(server.phi, g, server.m)
        v = server.v.index_copy(0, index, server.v[index] - self.eta_v * g_v)
        if self.embed_opt == "sgd":
            of_all = torch.zeros_like(server.v).index_copy(0, index, g_v)
            stepped, m = self.opt_v.step({"v": server.v}, {"v": of_all}, m)
            v = stepped["v"]
        return server._replace(phi=phi, m=m, v=v)

    def embedded(self, cohort: Cohort, server: Server) -> Tensor:
        """The rows of v that belong to a cohort."""
        return torch.as_tensor(cohort.ids, device=server.v.device)

    def weighted(self, delta: Model, p: Tensor) -> Model:
        """-p_i Delta_i: what is pulled back through H to a gradient."""
        weighted: Model = tree_map(lambda d: -d * p.to(d).reshape(-1, *(1,) * (d.ndim - 1)), delta)
        return weighted

    @property
    def opt_h(self) -> SGD:
        return SGD(self.eta_h, self.momentum_h, self.weight_decay_h)

    @property
    def opt_v(self) -> SGD:
        return SGD(self.eta_v, self.momentum_h, self.weight_decay_h)

    def _embed(self, n_clients: int) -> int:
        return self.embed or 1 + n_clients // 4

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs_or_steps(self.local_unit)),), self.finish)

    def begin(self, task: Task, down: Down, kept: Kept) -> Training:
        x = self.own(task, down, kept)
        return Training(x, self.momentum_at_start(kept.m, task.params(x)))

    def step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        p = task.grad(c.x, batch)
        return self.descend(c, p._replace(grad=clipped(p.grad, self.clip)))

    def finish(self, task: Task, down: Down, c: Training) -> tuple[dict[str, Tree], Kept]:
        delta = sub(pick(c.x, down.w), down.w)
        return {"delta": delta, "rest": pick(c.x, task.buffer_names)}, self._kept(task, c.x, c.m)

    def own(self, task: Task, down: Down, kept: Kept) -> Model:
        """What H wrote, with the shared buffers, and the client's head if that is private."""
        parts = {**down.w, **down.rest, **kept.head}
        return {k: parts[k] for k in task.initial}

    # one that comes later ----------------------------------------------------------------------------
    def begin_new(self, task: Task, down: Down, kept: Kept) -> Embedded:
        return Embedded(down.v, kept.head, down.rest, self.opt_new.init({"v": down.v}), self.opt.init(kept.head))

    def embedding_step(self, task: Task, down: Down, c: Embedded, batch: Batch) -> Embedded:
        p = task.grad(self.joined_model(task, down, c), batch)
        g = clipped(p.grad, self.clip)
        written = {k: g[k][None] for k in self.written_names(task)}
        g_v = pull_v(self.network_of(task, len(c.v)), down.phi, c.v[None], written)[0]
        moved, mv = self.opt_new.step({"v": c.v}, {"v": g_v}, c.mv)
        head, m = self.opt.step(c.head, pick(g, c.head), c.m)
        return Embedded(moved["v"], head, c.rest | p.buffers, mv, m)

    def joined_model(self, task: Task, down: Down, c: Embedded) -> Model:
        w = rows(generate(self.network_of(task, len(c.v)), down.phi, c.v[None]), 0)
        parts = {**w, **c.rest, **c.head}
        return {k: parts[k] for k in task.initial}

    def fresh_optimiser(self, task: Task, down: Down, c: Embedded) -> Embedded:
        return c._replace(mv=zeros(c.mv), m=zeros(c.m))

    @property
    def opt_new(self) -> SGD:
        """Of a new client's embedding."""
        return self.opt_v if self.embed_opt == "sgd" else SGD(self.eta_v)

    def _kept(self, task: Task, x: Model, m: Model) -> Kept:
        return Kept(pick(x, task.head) if self.private_head else {}, self.momentum_to_keep(m))


@dataclass(frozen=True)
class PFedHN(HyperNetworked):
    name: ClassVar[str] = "pfedhn"
    paper: ClassVar[str] = "Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021"

    server_step: Literal["client", "cohort"] = hyper(
        "client", "clients one after another with a step of phi each, or all at once and one step by their mean"
    )

    def round(self, server: Server, cohort: Cohort) -> Server:
        H = self.hypernetwork(cohort.task, len(server.v))
        visits = [cohort] if self.server_step == "cohort" else [cohort.only([i]) for i in cohort.ids]
        answers: list[Uploads] = []
        for visited in visits:
            try:
                up = self.exchange(H, server.phi, server, visited)
            except RunError as nobody:  # a visit in vain; the round fails only if all were
                if visited is visits[-1] and not answers:
                    raise nobody
                continue
            server = self.learn(H, server, up)
            answers.append(up)
        answered = cohort.only(np.concatenate([up.ids for up in answers]))
        return server._replace(rest=mean(concat([up.rest for up in answers]), answered.weights(self.weights)))

    def learn(self, H: nn.Module, server: Server, up: Uploads) -> Server:
        """One step by the given answers: -J_phi^T p_i Delta_i for phi, -J_v^T Delta_i for each v_i."""
        index = self.embedded(up.cohort, server)
        v = server.v[index]
        g = pull_phi(H, server.phi, v, self.weighted(up.delta, up.weights(self.weights)))
        return self.descended(server, g, -pull_v(H, server.phi, v, up.delta), index)
