"""FedRoD: two rounds worked out in numpy, its limits, and how its personal model answers."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.algorithms import numpy_hypernetwork as hn
from tests.algorithms import small
from tests.algorithms.small import Array, Weights
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedrod import FedRoD
from bespokefl.core import InputError, Phase, Program, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

N, N_HEAD = 21, 12
LOCAL: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}


def histogram(y: NDArray[np.int64]) -> Array:
    return np.array([(y == j).sum() for j in range(small.CLASSES)], dtype=np.float64)


def personal_logits(w: Weights, head: Weights, x: Array) -> Array:
    logits, h = small.forward(w, x)
    return np.asarray(logits + h @ head["head.weight"].T + head["head.bias"])


def by_hand(
    federation: Federation, algorithm: FedRoD, rounds: list[list[int]]
) -> tuple[Weights, Weights, list[Weights]]:
    """w, nu, and the clients' personal heads after the rounds."""
    w, nu = small.start(), hn.values(federation.server["nu"])
    shapes = {k: w[k] for k in small.HEAD}
    own = [shapes for _ in range(2)]
    hyper = algorithm.head == "hyper"
    share = [histogram(y) / len(y) for _, y in small.samples()]
    for t, clients in enumerate(rounds):
        generic, written = [], []
        for i in clients:
            (x, y), v, m, mp = small.samples()[i], w, Weights(), Weights()
            p = nu if hyper else own[i]
            log_n = np.log(np.maximum(histogram(y), 1e-12))
            _, rows = small.batches(federation, algorithm.train, i, t)
            for r in rows:
                hot = np.eye(small.CLASSES)[y[r]]
                logits, h = small.forward(v, x[r])
                head = hn.write(p, share[i], shapes) if hyper else p
                d = (small.softmax(personal_logits(v, head, x[r])) - hot) / len(r)
                g_head = {"head.weight": d.T @ h, "head.bias": d.sum(0)}
                g = small.backward(v, x[r], h, (small.softmax(logits + log_n) - hot) / len(r))
                v, m = small.sgd(v, g, m, 0.1, 0.9)
                p, mp = small.sgd(p, hn.pull(p, share[i], g_head)[0] if hyper else g_head, mp, 0.1, 0.9)
            generic.append(v)
            written.append(p)
            own[i] = p
        n = np.array([small.SIZES[i] for i in clients])
        w = small.average(generic, n / n.sum())
        nu = small.average(written, n / n.sum()) if hyper else nu
    return w, nu, [hn.write(nu, share[i], shapes) for i in range(2)] if hyper else own


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("clients", [[[0, 1], [0, 1]], [[1], [0, 1]], [[0, 1], [0]]], ids=["all", "late", "absent"])
@pytest.mark.parametrize("head", ["linear", "hyper"])
def test_two_rounds_by_hand(engine: type, clients: list[list[int]], head: Any) -> None:
    algorithm = FedRoD(**LOCAL, head="linear") if head == "linear" else FedRoD(**LOCAL, head="hyper", width=4)
    federation = small.federate(algorithm, engine(), schedule=clients)
    w, nu, heads = by_hand(federation, algorithm, clients)
    for _ in clients:
        federation.round()
    small.assert_models(federation.server["w"], w, 1e-11)
    small.assert_models(federation.server["nu"], nu, 1e-11)
    small.assert_models(federation.global_model(), w, 1e-11)  # type: ignore[arg-type]
    found = federation.evaluate()
    for i, (x, y) in enumerate(small.samples()):
        own = {f"personal.{k}": v for k, v in heads[i].items()}
        small.assert_models(federation.client_model(i), w | own, 1e-11)
        logits = personal_logits(w, heads[i], x)
        loss = -np.log(small.softmax(logits)[np.arange(len(y)), y]).mean()
        np.testing.assert_allclose(found.loss[i], loss, rtol=1e-10)
        assert found.accuracy[i] == (logits.argmax(1) == y).mean()
    assert np.allclose(federation.evaluate(model="global").loss, [small.loss(w, x, y) for x, y in small.samples()])


def test_the_personal_loss_does_not_move_the_generic_model() -> None:
    linear, hyper = (small.federate(FedRoD(**LOCAL, head=h)) for h in ("linear", "hyper"))  # type: ignore[arg-type]
    for run in (linear, hyper):
        run.round()
        run.round()
    assert all(torch.equal(v, hyper.server["w"][k]) for k, v in linear.server["w"].items())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_with_balanced_classes_the_generic_model_is_fedavgs(engine: str) -> None:
    rng = np.random.default_rng(2)
    clients = [{"train": (rng.normal(size=(n, 2)), np.arange(n) % 3)} for n in (6, 9)]
    data = FederatedData.from_arrays([c | {"test": c["train"]} for c in clients], classes=("a", "b", "c"))
    runs = []
    for algorithm in (FedRoD(**LOCAL), FedAvg(**LOCAL)):
        torch.manual_seed(0)
        runs.append(Federation(small.TanhNet().double(), data, algorithm, engine=engine))
        runs[-1].round()
        runs[-1].round()
    for k, v in runs[0].server["w"].items():
        torch.testing.assert_close(v, runs[1].server["w"][k], rtol=0, atol=1e-12)


def test_a_client_that_never_took_part() -> None:
    """Its own head is the initial one; the hypernetwork writes one for it."""
    linear, hyper = (small.federate(FedRoD(**LOCAL, head=h)) for h in ("linear", "hyper"))  # type: ignore[arg-type]
    for run in (linear, hyper):
        run.round(clients=[0])
    mine = linear.client_model(1)
    np.testing.assert_array_equal(mine["personal.head.weight"].numpy(), small.start()["head.weight"])
    assert torch.equal(mine["body.weight"], linear.server["w"]["body.weight"])
    written = hyper.personal_models()["personal.head.weight"]
    assert not torch.equal(written[0], written[1])
    shapes = {k: small.start()[k] for k in small.HEAD}
    expected = hn.write(hn.values(hyper.server["nu"]), histogram(small.samples()[1][1]) / 4, shapes)
    np.testing.assert_allclose(written[1].numpy(), expected["head.weight"], rtol=1e-12)


def test_bytes_and_state() -> None:
    linear = small.federate(FedRoD(**LOCAL))
    record = linear.round()
    assert record.bytes_down == record.bytes_up == 2 * 4 * N
    nu = 3 * 5 + 5 + 5 * 5 + 5 + 6 * N_HEAD  # two layers of 5, and a head for each tensor
    hyper = small.federate(FedRoD(**LOCAL, head="hyper", width=5))
    record = hyper.round()
    assert record.bytes_down == record.bytes_up == 2 * 4 * (N + nu)
    assert linear.clients.states.clients == [0, 1] and hyper.clients.states.clients == []


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_head_of_several_layers(engine: str) -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), deep).double()
    x, y = small.samples()[0]
    data = FederatedData.from_arrays([{"train": (x, y), "test": (x, y)}], classes=("a", "b", "c"))
    run = Federation(Task(net, head="2", dtype=torch.float64), data, FedRoD(**LOCAL), engine=engine)
    run.round()
    model = run.client_model(0)
    assert {k for k in model if k.startswith("personal.")} == {f"personal.{k}" for k in run.task.head}
    generic, personal = ({k: model[f"{prefix}2.{k}"] for k in deep.state_dict()} for prefix in ("", "personal."))
    z = torch.tanh(torch.tensor(x) @ model["0.weight"].T + model["0.bias"])
    logits = sum(torch.func.functional_call(deep, head, (z,)) for head in (generic, personal))
    loss = nn.functional.cross_entropy(logits, torch.tensor(y))  # type: ignore[arg-type]
    np.testing.assert_allclose(run.evaluate().loss, loss.item(), rtol=1e-12)


def test_counting_draws_nothing() -> None:
    """The batches are those of FedAvg."""
    algorithm = FedRoD(**LOCAL)
    run = small.federate(algorithm)
    plain = Program(algorithm.begin, (Phase(algorithm.step, algorithm.epochs),), algorithm.finish)
    ours, theirs = small.batches(run, algorithm.train, 0, 1)[1], small.batches(run, plain, 0, 1)[0]
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_task_without_classes() -> None:
    pair = np.zeros((2, 2)), np.zeros(2)
    data = FederatedData.from_arrays([{"train": pair, "test": pair}])
    with pytest.raises(InputError, match=r"algorithm\.name = 'fedrod' needs a classifier"):
        Federation(Task(nn.Linear(2, 1), "squared_error"), data, FedRoD())
