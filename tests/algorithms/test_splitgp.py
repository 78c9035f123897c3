"""SplitGP: two rounds worked out in numpy, its limits, where a model is cut, and the two exits."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from tests.algorithms.small import Array, Weights
from torch import Tensor, nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.splitgp import SplitGP
from bespokefl.core import InputError, Setup, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

N, N_KAPPA = 21, 12
KAPPA = ("kappa.weight", "kappa.bias")
LOCAL: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
SETUP = Setup(clients=2, cohort_sizes=(2,), seed=0, validates=False)


def exits(w: Weights, x: Array) -> tuple[Array, Array]:
    """Logits of the client's exit and of the whole path."""
    logits, h = small.forward(w, x)
    return h @ w["kappa.weight"].T + w["kappa.bias"], logits


def gradient(w: Weights, x: Array, y: Any, gamma: float) -> Weights:
    h = small.forward(w, x)[1]
    early, late = exits(w, x)
    hot = np.eye(small.CLASSES)[y]
    d_early = gamma * (small.softmax(early) - hot) / len(y)
    d_late = (1 - gamma) * (small.softmax(late) - hot) / len(y)
    g = small.backward(w, x, h, d_late)
    d_h = (d_early @ w["kappa.weight"]) * (1 - h**2)
    g["body.weight"] = g["body.weight"] + d_h.T @ x
    g["body.bias"] = g["body.bias"] + d_h.sum(0)
    return g | {"kappa.weight": d_early.T @ h, "kappa.bias": d_early.sum(0)}


def answers(w: Weights, x: Array, threshold: float) -> tuple[Array, Array]:
    """The two-exit model's logits, and which samples left early."""
    early, late = exits(w, x)
    p = small.softmax(early)
    left = -(p * np.log(p)).sum(1) <= threshold
    return np.where(left[:, None], early, late), left


def by_hand(federation: Federation, algorithm: SplitGP, rounds: list[list[int]]) -> tuple[Weights, list[Weights]]:
    """The mean model and the clients' own ones after the rounds."""
    w = small.start() | {"kappa.weight": np.zeros((3, 3)), "kappa.bias": np.zeros(3)}
    last, lam = [w, w], algorithm.lam

    def mixed(i: int) -> Weights:
        return w | {k: lam * last[i][k] + (1 - lam) * w[k] for k in small.BODY + KAPPA}

    for t, clients in enumerate(rounds):
        trained = []
        for i in clients:
            (x, y), v, m = small.samples()[i], mixed(i), Weights()
            (rows,) = small.batches(federation, algorithm.train, i, t)
            for r in rows:
                v, m = small.sgd(v, gradient(v, x[r], y[r], algorithm.gamma), m, 0.1, 0.9)
            trained.append(v)
        for i, v in zip(clients, trained, strict=True):
            last[i] = v
        n = np.array([small.SIZES[i] for i in clients])
        w = small.average(trained, n / n.sum())
    return w, [mixed(0), mixed(1)]


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("clients", [[[0, 1], [0, 1]], [[0], [0, 1]], [[0, 1], [1]]], ids=["all", "late", "absent"])
@pytest.mark.parametrize(("gamma", "lam"), [(0.5, 0.2), (0.3, 0.7)])
def test_two_rounds_by_hand(engine: type, clients: list[list[int]], gamma: float, lam: float) -> None:
    algorithm = SplitGP(**LOCAL, gamma=gamma, lam=lam, E_th=1.08)
    federation = small.federate(algorithm, engine(), schedule=clients)
    w, own = by_hand(federation, algorithm, clients)
    for _ in clients:
        federation.round()
    small.assert_models(federation.server["w"], w, 1e-11)
    small.assert_models(federation.global_model(), {k: w[k] for k in small.BODY + small.HEAD}, 1e-11)  # type: ignore[arg-type]
    found = federation.evaluate()
    for i, (x, y) in enumerate(small.samples()):
        small.assert_models(federation.client_model(i), own[i], 1e-11)
        logits, _ = answers(own[i], x, 1.08)
        np.testing.assert_allclose(found.loss[i], -np.log(small.softmax(logits)[np.arange(len(y)), y]).mean(), 1e-10)
        assert found.accuracy[i] == (logits.argmax(1) == y).mean()


def test_the_entropy_decides_sample_by_sample() -> None:
    x, y = small.samples()[0]
    run = small.federate(SplitGP(**LOCAL))
    _, own = by_hand(run, SplitGP(**LOCAL), [[0, 1]])
    p = small.softmax(exits(own[0], x)[0])
    entropies = np.sort(-(p * np.log(p)).sum(1))
    losses = []
    for threshold, leaving in ((0.0, 0), (float(entropies[2:4].mean()), 3), (2.0, 7)):
        run = small.federate(SplitGP(**LOCAL, E_th=threshold))
        run.round()
        logits, left = answers(own[0], x, threshold)
        assert left.sum() == leaving
        losses.append(-np.log(small.softmax(logits)[np.arange(len(y)), y]).mean())
        np.testing.assert_allclose(run.evaluate().loss[0], losses[-1], rtol=1e-10)
    assert len(set(losses)) == 3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_lambda_and_gamma_it_is_fedavg(engine: str, momentum: float) -> None:
    local = LOCAL | {"momentum": momentum, "weight_decay": 0.01}
    ours = small.federate(SplitGP(**local, lam=0.0, gamma=0.0), engine, schedule=[[0, 1], [1], [0, 1]])
    theirs = small.federate(FedAvg(**local, personal="global"), engine, schedule=[[0, 1], [1], [0, 1]])
    for _ in range(3):
        ours.round()
        theirs.round()
    assert all(torch.equal(v, ours.server["w"][k]) for k, v in theirs.server["w"].items())
    assert all(torch.equal(v, ours.client_model(0)[k]) for k, v in theirs.server["w"].items())
    np.testing.assert_array_equal(ours.evaluate().loss, theirs.evaluate().loss)  # kappa is still 0: nobody leaves early


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_with_lambda_1_the_client_sides_are_their_own(engine: str) -> None:
    """theta is shared, but with gamma = 1 it does not touch phi and kappa: they are those of a client alone."""
    together = small.federate(SplitGP(**LOCAL, lam=1.0, gamma=1.0), engine)
    alone = small.federate(SplitGP(**LOCAL, lam=1.0, gamma=1.0), engine)
    for _ in range(3):
        together.round()
        alone.round(clients=[0])
    for k in small.BODY + KAPPA:
        torch.testing.assert_close(together.client_model(0)[k], alone.client_model(0)[k], rtol=0, atol=1e-14)
    late = small.federate(SplitGP(**LOCAL, lam=1.0), engine)
    late.round(clients=[0])
    np.testing.assert_array_equal(late.client_model(1)["body.weight"].numpy(), small.start()["body.weight"])
    assert torch.equal(late.client_model(1)["head.weight"], late.server["w"]["head.weight"])


def test_bytes_are_those_of_phi_kappa_and_theta() -> None:
    record = small.federate(SplitGP(**LOCAL)).round()
    assert record.bytes_down == record.bytes_up == 2 * 4 * (N + N_KAPPA)


# the cut ---------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Convolutions with statistics, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
        self.hidden, self.norm, self.head = nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.hidden(self.conv(x)))))
        return out


CONV = ["conv.0.weight", "conv.0.bias", "conv.1.weight", "conv.1.bias", "conv.1.running_mean", "conv.1.running_var"]


def test_where_a_model_is_cut() -> None:
    task = Task(Net())
    whole = SplitGP()
    assert whole.first_of_server(task) == "hidden" and whole.client_side(task) == CONV
    assert whole.init(task, task.initial, SETUP)["w"]["kappa.weight"].shape == (3, 8)
    late = SplitGP(cut="head")
    assert set(task.initial) - set(late.client_side(task)) == {"head.weight", "head.bias"}
    assert late.init(task, task.initial, SETUP)["w"]["kappa.weight"].shape == (3, 5)
    mlp = Task(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert SplitGP().first_of_server(mlp) == "4"
    assert SplitGP(cut="2").client_side(mlp) == ["0.weight", "0.bias"]
    assert SplitGP().first_of_server(Task(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))) == "2"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_kappa_sees_the_input_of_the_cut(engine: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 1, 4, 4)), np.arange(6) % 3
    data = FederatedData.from_arrays([{"train": (x, y), "test": (x, y)}], classes=("a", "b", "c"))
    torch.manual_seed(0)
    net = Net().double()
    run = Federation(net, data, SplitGP(lr=0.1, local_epochs=1, batch_size=None, gamma=0.25, E_th=9.0), engine=engine)
    run.round()
    z = net.conv(torch.tensor(x))
    kappa = nn.Linear(8, 3).double()
    nn.init.zeros_(kappa.weight)
    nn.init.zeros_(kappa.bias)
    late = net.head(torch.relu(net.norm(net.hidden(z))))
    loss = nn.functional.cross_entropy
    (0.25 * loss(kappa(z), torch.tensor(y)) + 0.75 * loss(late, torch.tensor(y))).backward()
    expected = {f"kappa.{k}": v for k, v in kappa.named_parameters()} | dict(net.named_parameters())
    for k, v in expected.items():
        torch.testing.assert_close(run.server["w"][k], (v - 0.1 * v.grad).detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.server["w"]["conv.1.running_mean"], net.conv[1].running_mean)
    model = run.client_model(0)
    net.load_state_dict(run.global_model(), strict=False)  # type: ignore[arg-type]
    early = net.eval().conv(torch.tensor(x)) @ model["kappa.weight"].T + model["kappa.bias"]
    np.testing.assert_allclose(run.evaluate().loss, loss(early, torch.tensor(y)).item(), rtol=1e-9)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Net(), {"cut": "conv.0"}, r"algorithm\.cut = 'conv\.0' is no linear layer of the model.*hidden, head"),
        (Net(), {"cut": "nothing"}, r"algorithm\.cut = 'nothing'"),
        (nn.Linear(2, 3), {}, r"algorithm\.cut = '': no trained layer is left for the client's side"),
        (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), {"cut": "0"}, r"algorithm\.cut = '0': no trained layer"),
    ],
)
def test_cuts_that_cannot_be(module: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SplitGP(**options).check(Task(module), SETUP)


def test_a_task_without_classes() -> None:
    with pytest.raises(InputError, match=r"algorithm\.name = 'splitgp' needs a classifier"):
        SplitGP().check(Task(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "squared_error"), SETUP)
