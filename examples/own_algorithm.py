"""A method of your own: SCAFFOLD (Karimireddy et al., ICML 2020), written outside the package.

Client i corrects its gradient by c - c_i, what the federation's gradient is thought to be minus its own (Algorithm 1,
line 10). SCAFFOLD has no personal model, so a client is scored with the newest w after E corrected epochs of its own.

    python examples/own_algorithm.py
    cd examples && bespoke run --set algorithm.name=own_algorithm:Scaffold --set train.momentum=0
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from bespokefl.core import (
    Algorithm,
    Batch,
    Call,
    Cohort,
    Down,
    InputError,
    Model,
    Phase,
    Program,
    Setup,
    Task,
    Tree,
    hyper,
)
from bespokefl.core.trees import axpy, mean, sub, zeros


class Local(NamedTuple):
    x: Model
    c_i: Model  # the client's control variate
    steps: Tensor  # K: local steps so far


@dataclass(frozen=True)
class Scaffold(Algorithm):
    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, ICML 2020"
    sends: ClassVar = {"dx": None, "dc": None}  # updates, not models

    eta_g: float = hyper(1.0, "eta_g: step size of the server, line 16", above=0)

    @property
    def only_sgd(self) -> str:
        return "c_i assumes plain SGD (line 12, II)"

    def check(self, task: Task, setup: Setup) -> None:
        if self.momentum:
            raise InputError(f"algorithm.momentum = {self.momentum}: c_i assumes plain SGD (line 12, II); set it to 0")

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": x0, "c": zeros(task.params(x0))}

    def init_client(self, task: Task, x0: Model) -> Model:
        return zeros(task.params(x0))  # c_i

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared=server)
        p, share = up.weights("uniform"), len(up.ids) / len(cohort.everyone())  # |S| / N
        return {"w": axpy(self.eta_g, mean(up.dx, p), server["w"]), "c": axpy(share, mean(up.dc, p), server["c"])}

    def global_model(self, server: Tree) -> Model:
        return server["w"]

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        return Call(Program(self.begin, self.train.phases, self.trained), server)

    # one client --------------------------------------------------------------------------------------
    @property
    def train(self) -> Program:
        return Program(self.begin, (Phase(self.step, self.epochs),), self.finish)

    def begin(self, task: Task, down: Down, c_i: Model) -> Local:
        return Local(down.w, c_i, 0)  # numbers become tensors

    def step(self, task: Task, down: Down, l: Local, batch: Batch) -> Local:
        p = task.grad(l.x, batch)
        x, _ = self.opt.step(l.x, {k: g - l.c_i[k] + down.c[k] for k, g in p.grad.items()}, {})
        return Local(x | p.buffers, l.c_i, l.steps + 1)

    def finish(self, task: Task, down: Down, l: Local) -> tuple[dict[str, Tree], Model]:
        new = {k: c - down.c[k] + (down.w[k] - l.x[k]) / (l.steps * self.lr) for k, c in l.c_i.items()}  # II
        return {"dx": sub(l.x, down.w), "dc": sub(new, l.c_i)}, new

    def trained(self, task: Task, down: Down, l: Local) -> tuple[dict[str, Tree], Tree]:
        return {"model": l.x}, {}


def main() -> None:
    import torch

    from bespokefl.algorithms.fedavg import FedAvg
    from bespokefl.data import load
    from bespokefl.federation import Federation
    from bespokefl.models import build

    data = load("digits", clients=10, partition="labels", labels_per_client=3)
    torch.manual_seed(0)
    model = build("linear", data.input_shape, len(data.classes))
    for method in (FedAvg, Scaffold):
        federation = Federation(model, data, method(lr=0.5, local_epochs=5, batch_size=20))
        federation.run(rounds=20, evaluate_every=0)
        scores = {kind: federation.evaluate(model=kind).accuracy.mean() for kind in ("global", "personal")}
        print(f"{method.name:9}" + "".join(f"  {kind} model {100 * mean:.1f} %" for kind, mean in scores.items()))


if __name__ == "__main__":
    main()
