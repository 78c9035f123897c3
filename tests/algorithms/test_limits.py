"""Limit cases of the baselines, and FedAvg against a loop of plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespokefl.algorithms import Algorithm
from bespokefl.algorithms.ditto import Ditto
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedprox import FedProx
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Model, stream, trees
from bespokefl.data.federated import FederatedData
from bespokefl.federation import Federation

SIZES = [23, 8, 31]
SEED = 5
ENGINES = ["sequential", "vectorized"]
TRAINING: dict[str, Any] = {"lr": 0.05, "local_epochs": 2, "batch_size": 10}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def federated(sizes: list[int] = SIZES) -> FederatedData:
    """Everything a client has is in its train split, but for two samples."""
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    return FederatedData.from_arrays([{"train": arrays(n), "test": arrays(2)} for n in sizes], classes=("a", "b", "c"))


def federation(algorithm: Algorithm, engine: str = "sequential", **options: Any) -> Federation:
    options = {"data": federated(), "model": net(), "seed": SEED} | options
    return Federation(algorithm=algorithm, engine=engine, **options)


def plain_epochs(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    data: FederatedData,
    client: int,
    round: int,
    epochs: int,
    purpose: str = "batch",
) -> None:
    """Local training as one would write it without this library, on the documented random streams."""
    rows = data.splits["train"][client]
    for epoch in range(epochs):
        order = rows[stream(SEED, purpose, round, client, epoch).permutation(len(rows))]
        for start in range(0, len(order), 10):
            batch = order[start : start + 10]
            optimiser.zero_grad()
            F.cross_entropy(module(data.x[batch]), data.y[batch]).backward()
            optimiser.step()


def plain_fedavg(
    data: FederatedData, rounds: int, *, weights: str = "sample", keep: bool = False, momentum: float = 0.0
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The global model and the clients' last local ones."""
    clients = [net() for _ in SIZES[: data.clients]]
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=momentum) for m in clients]
    w = {k: v.clone() for k, v in net().state_dict().items()}
    n = torch.tensor([len(r) for r in data.splits["train"]], dtype=torch.float64)
    p = n / n.sum() if weights == "sample" else torch.ones_like(n) / len(n)
    for round in range(rounds):
        for i, module in enumerate(clients):
            module.load_state_dict(w)
            if not keep:
                optimisers[i] = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
            plain_epochs(module, optimisers[i], data, i, round, 2)
        w = {k: sum(p[i] * m.state_dict()[k] for i, m in enumerate(clients)) for k in w}  # type: ignore[misc]
    return w, [m.state_dict() for m in clients]


def assert_equal(a: Model, b: Model) -> None:
    assert set(a) == set(b)
    assert all(torch.equal(v, b[k]) for k, v in a.items())


def assert_close(a: Model, b: Model) -> None:
    assert set(a) == set(b)
    for k, v in a.items():
        torch.testing.assert_close(v, b[k], rtol=1e-11, atol=1e-13)


# FedAvg against plain torch --------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_of_one_client_is_plain_sgd(engine: str, momentum: float) -> None:
    data = federated(SIZES[:1])
    run = federation(
        FedAvg(**TRAINING, momentum=momentum, opt_state="keep" if momentum else "reset"), engine, data=data
    )
    module = net()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
    for round in range(3):
        run.round()
        plain_epochs(module, optimiser, data, 0, round, 2)
    assert_close(run.server["w"], module.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("weights", "opt_state", "momentum"),
    [("sample", "reset", 0.0), ("uniform", "reset", 0.9), ("sample", "keep", 0.9)],
)
def test_fedavg_is_the_plain_loop(engine: str, weights: Any, opt_state: Any, momentum: float) -> None:
    run = federation(FedAvg(**TRAINING, weights=weights, opt_state=opt_state, momentum=momentum), engine)
    for _ in range(2):
        run.round()
    w, local = plain_fedavg(run.data, 2, weights=weights, keep=opt_state == "keep", momentum=momentum)
    assert_close(run.server["w"], w)
    for i, model in enumerate(local):
        assert_close(run.client_model(i), model)  # local_before_agg


def test_weights_by_hand() -> None:
    """Each client's answer from a round of its own, averaged by hand."""
    answers = []
    for i in range(3):
        alone = federation(FedAvg(**TRAINING))
        alone.round(clients=[i])
        answers.append(alone.server["w"])
    for kind, p in (("sample", [23 / 62, 8 / 62, 31 / 62]), ("uniform", [1 / 3] * 3)):
        run = federation(FedAvg(**TRAINING, weights=kind))  # type: ignore[arg-type]
        run.round()
        by_hand = {k: sum(p[i] * answers[i][k] for i in range(3)) for k in answers[0]}
        assert_close(run.server["w"], by_hand)
        some = federation(FedAvg(**TRAINING, weights=kind))  # type: ignore[arg-type]
        some.round(clients=[0, 1])
        share = p[0] / (p[0] + p[1])  # weights are those of the cohort, not of the federation
        assert_close(some.server["w"], {k: share * v + (1 - share) * answers[1][k] for k, v in answers[0].items()})


@pytest.mark.parametrize("cls", [FedAvg, FedProx, Ditto, Local])
def test_kept_and_reset_momentum_differ_only_with_momentum(cls: type[Algorithm]) -> None:
    def after_two_rounds(momentum: float, opt_state: Any) -> Model:
        run = federation(cls(**TRAINING, momentum=momentum, opt_state=opt_state))
        run.round()
        run.round()
        return run.personal_models()

    with pytest.raises(InputError, match=r"opt_state = 'keep' .* changes nothing"):
        after_two_rounds(0.0, "keep")
    kept, reset = after_two_rounds(0.9, "keep"), after_two_rounds(0.9, "reset")
    assert all(not torch.equal(kept[k], reset[k]) for k in kept)


# limits of the methods -------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "training",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.01, "opt_state": "keep"},
    ],
)
def test_fedprox_without_mu_is_fedavg_bit_for_bit(engine: str, training: dict[str, Any]) -> None:
    settings = {**TRAINING, **training}
    runs = [federation(a, engine, participation=0.7) for a in (FedProx(**settings, mu=0.0), FedAvg(**settings))]
    for _ in range(2):
        for run in runs:
            run.round()
    assert_equal(runs[0].server["w"], runs[1].server["w"])
    assert_equal(runs[0].personal_models(), runs[1].personal_models())


def test_fedprox_pulls_towards_the_global_model() -> None:
    moved = []
    for mu in (0.0, 1.0, 10.0):
        run = federation(FedProx(**TRAINING, mu=mu))
        start = run.server["w"]
        run.round()
        moved.append(float(trees.norm(trees.sub(run.server["w"], start))))
    assert moved[0] > moved[1] > moved[2] > 0


@pytest.mark.parametrize(("engine", "momentum"), [("sequential", 0.0), ("sequential", 0.9), ("vectorized", 0.9)])
def test_ditto_without_lambda_is_local(engine: str, momentum: float) -> None:
    ditto, local = (
        federation(a, engine, participation=0.7)
        for a in (Ditto(**TRAINING, momentum=momentum, lam=0.0), Local(**TRAINING, momentum=momentum))
    )
    for _ in range(3):
        ditto.round()
        local.round()
    check = assert_equal if engine == "sequential" else assert_close
    check(ditto.personal_models(), local.personal_models())


def test_dittos_global_model_is_uniform_fedavg() -> None:
    ditto, fedavg = federation(Ditto(**TRAINING, lam=2.0)), federation(FedAvg(**TRAINING, weights="uniform"))
    for _ in range(2):
        ditto.round()
        fedavg.round()
    assert_equal(ditto.server["w"], fedavg.server["w"])


@pytest.mark.parametrize("engine", ENGINES)
def test_dittos_personal_model_by_hand(engine: str) -> None:
    """v <- v - eta (grad f(v) + lam (v - w)) from v = w0, with a w that has moved before and stays."""
    run = federation(Ditto(lr=0.05, local_epochs=3, batch_size=None, lam=3.0), engine)
    run.round(clients=[0])  # moves w, not v_1
    w = run.server["w"]
    run.round(clients=[1])
    module, rows = net(), run.data.splits["train"][1]
    for _ in range(3):
        module.zero_grad()
        F.cross_entropy(module(run.data.x[rows]), run.data.y[rows]).backward()
        with torch.no_grad():
            for k, v in module.named_parameters():
                assert v.grad is not None
                v -= 0.05 * (v.grad + 3.0 * (v - w[k]))
    assert_close(run.client_model(1), module.state_dict())


# the scored model ------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
def test_global_scores_the_newest_model_for_all(engine: str) -> None:
    run = federation(FedAvg(**TRAINING, personal="global"), engine)
    run.round(clients=[0, 1])
    for i in range(3):
        assert_equal(run.client_model(i), run.server["w"])


@pytest.mark.parametrize("engine", ENGINES)
def test_local_before_agg_is_the_last_local_model_or_the_newest_global_one(engine: str) -> None:
    run = federation(FedAvg(**TRAINING), engine)
    assert_equal(run.client_model(0), net().state_dict())
    run.round(clients=[0])
    first = run.server["w"]  # the only client's model
    run.round(clients=[1])
    assert_equal(run.client_model(0), first)
    assert_equal(run.client_model(1), run.server["w"])
    assert_equal(run.client_model(2), run.server["w"])  # never took part
    assert not torch.equal(first["0.weight"], run.server["w"]["0.weight"])


@pytest.mark.parametrize("engine", ENGINES)
def test_finetune_trains_a_copy_of_the_newest_model(engine: str) -> None:
    run = federation(FedAvg(**TRAINING, momentum=0.9, personal="finetune", finetune_epochs=3), engine)
    run.round(clients=[0, 2])
    before, meta = run.state()
    tuned = [run.client_model(i) for i in range(3)]
    run.evaluate()
    for i, model in enumerate(tuned):
        module = net()
        module.load_state_dict(run.server["w"])
        optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        plain_epochs(module, optimiser, run.data, i, 1, 3, purpose="finetune")
        assert_close(model, module.state_dict())
        assert_equal(run.client_model(i), model)  # the same again
    after, meta_after = run.state()
    assert_equal(before, after)
    assert meta["clients"] == meta_after["clients"] and run.rounds_done == 1


def test_the_choice_of_the_scored_model_does_not_change_training() -> None:
    runs = [federation(FedAvg(**TRAINING, personal=p)) for p in ("global", "local_before_agg", "finetune")]
    for run in runs:
        run.run(2)
    assert_equal(runs[0].server["w"], runs[1].server["w"])
    assert_equal(runs[0].server["w"], runs[2].server["w"])


# Local -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
def test_local_trains_the_sampled_or_everyone(engine: str) -> None:
    sampled, everyone = (federation(Local(**TRAINING, local_every_round=e), engine) for e in (False, True))
    for run in (sampled, everyone):
        run.round(clients=[2])
        run.round(clients=[0, 2])
    for i, (rounds_sampled, rounds_all) in enumerate([([1], [0, 1]), ([], [0, 1]), ([0, 1], [0, 1])]):
        for run, rounds in ((sampled, rounds_sampled), (everyone, rounds_all)):
            module = net()
            for round in rounds:
                plain_epochs(module, torch.optim.SGD(module.parameters(), lr=0.05), run.data, i, round, 2)
            assert_close(run.client_model(i), module.state_dict())
    assert sampled.global_model() is None


# traffic ---------------------------------------------------------------------------------------------
def test_bytes_of_a_round() -> None:
    n = sum(v.numel() for v in net().parameters())
    for cls, expected in ((FedAvg, 8 * 2 * n), (Ditto, 8 * 2 * n), (Local, 0)):
        run = federation(cls(**TRAINING), clients_per_round=2)
        for _ in range(2):
            record = run.round()
            assert len(record.clients) == 2
            assert record.bytes_down + record.bytes_up == expected
            assert record.bytes_down == record.bytes_up


def test_a_silent_client_is_sent_to_but_answers_nothing() -> None:
    n = sum(v.numel() for v in net().parameters())
    run = federation(FedAvg(**TRAINING))
    record = run.round(silent=[1])
    assert (record.bytes_down, record.bytes_up) == (4 * 3 * n, 4 * 2 * n)
    other = federation(FedAvg(**TRAINING))
    other.round(clients=[0, 2])
    assert_equal(run.server["w"], other.server["w"])
    assert run.clients.states.clients == [0, 2]
