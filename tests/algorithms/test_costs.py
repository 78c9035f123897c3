"""What the papers claim of their methods' costs, counted: passes through the network, pulls through a hypernetwork,
floating point operations of the server. Nothing is timed."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bespokefl.algorithms import Algorithm, build_algorithm, plgu_ghn
from bespokefl.core.trees import leaves, numel
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential
from bespokefl.engines.base import Job, Result
from bespokefl.federation import Federation

SIZES = (23, 8)
EPOCHS, BATCH = 2, 10
CLIENTS = len(SIZES)
BATCHES = 3 + 1  # of one pass over the data, both clients
STEPS = EPOCHS * BATCHES  # local steps of a round

passes: Counter[str] = Counter()  # through the probes


class Counted(torch.autograd.Function):
    """The identity; counts each time that autograd really runs through it."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        passes[f"forward {name}"] += 1
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        passes[f"backward {ctx.name}"] += 1
        return d, None


class Probed(nn.Module):
    """A pass that needs only the head's gradient stops before the body's probe."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Counted.apply(torch.tanh(self.body(x)), "body")
        out: Tensor = Counted.apply(self.head(h), "model")
        return out


def federated(sizes: tuple[int, ...]) -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    return FederatedData.from_arrays([{"train": arrays(n), "test": arrays(2)} for n in sizes], classes=("a", "b", "c"))


def training(name: str, **hyper: Any) -> Algorithm:
    return build_algorithm(name, {"lr": 0.05, "local_epochs": EPOCHS, "batch_size": BATCH}, hyper)


def passes_of_a_round(name: str, **hyper: Any) -> Counter[str]:
    """Of the second round: PGFed's first is another."""
    torch.manual_seed(0)
    federation = Federation(Probed().double(), federated(SIZES), training(name, **hyper), engine="sequential")
    federation.round()
    passes.clear()
    federation.round()
    return Counter(passes)


# a client's passes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "hyper", "backward", "forward"),
    [
        ("fedavg", {}, STEPS, STEPS),
        ("local", {}, STEPS, STEPS),
        ("fedprox", {}, STEPS, STEPS),
        ("ditto", {}, 2 * STEPS, 2 * STEPS),
        ("plgu-lf", {}, 2 * STEPS, 2 * STEPS),
        ("plgu-lf", {"rho": 0.0}, 2 * STEPS, 2 * STEPS),
        ("plgu-ghn", {}, STEPS, STEPS),
        ("plgu-ghn", {"ghn_delta": "recompute"}, 2 * STEPS, 2 * STEPS),
        ("pgfed", {}, STEPS + BATCHES, STEPS + BATCHES),  # the closing pass over the data
        ("pgfed", {"grad_pass": "code"}, STEPS + 2 + 1, STEPS + 2 + 1),  # without incomplete batches
        ("pgfedmo", {}, STEPS + BATCHES, STEPS + BATCHES),
        ("fedpg", {}, STEPS, STEPS + BATCHES),  # the losses at the G-model
        ("fedpg", {"grad_mode": "exact"}, BATCHES, BATCHES),
        ("lg-mix", {}, STEPS, 2 * STEPS),  # features of the global model
        ("lg-mix", {"features_mode": "both_eval"}, STEPS, 3 * STEPS),
    ],
)
def test_passes_through_the_network(name: str, hyper: dict[str, Any], backward: int, forward: int) -> None:
    counted = passes_of_a_round(name, **hyper)
    assert counted["backward model"] == backward
    assert counted["forward model"] == forward


@pytest.mark.parametrize(
    ("hyper", "body"),
    [
        ({}, 3 * CLIENTS),
        ({"perturb_grad": "reuse"}, 2 * CLIENTS),
        ({"body_steps": "epoch"}, 3 * BATCHES),
        ({"body_steps": "epoch", "perturb_grad": "reuse"}, 2 * BATCHES),
    ],
)
@pytest.mark.parametrize("head_epochs", [None, 1])
def test_grep_has_one_pass_per_batch_of_the_head_and_three_for_the_body(
    hyper: dict[str, Any], body: int, head_epochs: int | None
) -> None:
    counted = passes_of_a_round("plgu-grep", head_epochs=head_epochs, **hyper)
    assert counted["backward body"] == body
    assert counted["backward model"] == (head_epochs or EPOCHS) * BATCHES + body


@pytest.mark.parametrize("grad_mode", ["pseudo", "exact"])
def test_a_line_search_only_evaluates(grad_mode: str) -> None:
    """A trial is a forward pass over the data; S-FedPG's backward passes are FedPG's."""
    plain, searching = (passes_of_a_round(name, grad_mode=grad_mode) for name in ("fedpg", "s-fedpg"))
    assert searching["backward model"] == plain["backward model"]
    trials, rest = divmod(searching["forward model"] - plain["forward model"], BATCHES)
    assert trials >= 1 and rest == 0


# the server ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hyper", [{}, {"ghn_delta": "recompute"}, {"embed_at": "clean"}])
def test_ghn_pulls_twice_per_client_through_the_hypernetwork(
    hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: Counter[str] = Counter()

    def counting(name: str) -> None:
        real = getattr(plgu_ghn, name)

        def pull(net: nn.Module, phi: Any, v: Tensor, d: Any) -> Any:
            pulled[name] += len(v)
            return real(net, phi, v, d)

        monkeypatch.setattr(plgu_ghn, name, pull)

    counting("pull_phi")
    counting("pull_v")
    federation = Federation(Probed().double(), federated(SIZES), training("plgu-ghn", **hyper), engine="sequential")
    federation.round()
    assert pulled == {"pull_phi": 2 * CLIENTS, "pull_v": CLIENTS}


class Written(TorchDispatchMode):
    """Counts the numbers that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += sum(v.numel() for v in leaves(out) if isinstance(v, Tensor))
        return out


class Apart(Sequential):
    """Keeps what clients do out of the server's bill."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.written = FlopCounterMode(display=False), Written()
        self.by_clients = np.zeros(2, dtype=np.int64)

    def bill(self) -> Any:
        return np.array([self.flops.get_total_flops(), self.written.total])

    def run(self, job: Job) -> Result:
        before = self.bill()
        result = super().run(job)
        self.by_clients += self.bill() - before
        return result


WIDTH = 400
N = 4 * WIDTH + WIDTH + WIDTH * 3 + 3  # parameters of the network below


@cache
def server_bill(cohort: int, receivers: int) -> tuple[int, int, int]:
    """Flops, numbers written and numbers stored by PGFed's server in its second round.

    ``cohort`` clients took part in the first round, ``receivers`` of them take part in the second.
    """
    engine = Apart()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    data, algorithm = federated((2,) * cohort), training("pgfed", local_epochs=1)
    federation = Federation(model, data, algorithm, engine=engine, clients_per_round=cohort)
    federation.round()
    stored = numel(federation.server.grads)
    with engine.flops, engine.written:
        federation.round(clients=range(receivers))
    flops, written = engine.bill() - engine.by_clients
    return int(flops), int(written), stored


COHORTS = [5, 10, 20, 40]


@pytest.mark.parametrize(("cohort", "receivers"), [*((c, c) for c in COHORTS), (20, 1), (40, 1)])
def test_pgfed_costs_the_server_C_n_per_receiving_client(cohort: int, receivers: int) -> None:
    """An auxiliary gradient is a sum of C stored gradients: C n multiplications and as many additions."""
    flops, _, stored = server_bill(cohort, receivers)
    assert flops == receivers * 2 * cohort * N
    assert stored == cohort * N


def test_pgfed_writes_as_many_models_per_client_in_any_cohort() -> None:
    """Nothing of the size C^2 n is ever written, though a whole round has that many products."""
    models_written = [server_bill(cohort, cohort)[1] / (cohort * N) for cohort in COHORTS]
    assert max(models_written) < 1.05 * min(models_written)
