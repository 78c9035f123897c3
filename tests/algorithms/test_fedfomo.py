"""FedFomo: rounds against numpy, whom the server sends, and what a model is worth."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small

from bespokefl.algorithms import build_algorithm
from bespokefl.algorithms.fedfomo import FedFomo, Server
from bespokefl.algorithms.local import Local
from bespokefl.cohort import Cohort
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.errors import InputError
from bespokefl.federation import Federation
from bespokefl.task import Task

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
PARAMETERS = 21
ENGINES = ["sequential", "vectorized"]


def federate(
    algorithm: Any, engine: Any = "sequential", clients: int = 2, val: bool = True, **options: Any
) -> Federation:
    """Client i holds its samples, or those of client i mod 2 moved a little; judged on samples of its own, or not."""
    splits = []
    for i in range(clients):
        x, y = small.samples()[i % 2]
        x = x + 0.1 * (i // 2)
        held_out = {"val": (x[:3] - 0.3, y[:3])} if val else {}
        splits.append({"train": (x, y), "test": (x, y), **held_out})
    options = {"initial": {k: torch.tensor(v) for k, v in small.start().items()}, "seed": 11} | options
    data = FederatedData.from_arrays(splits, classes=("a", "b", "c"))
    return Federation(Task(small.TanhNet(), dtype=torch.float64), data, algorithm, engine=engine, **options)


# rounds ----------------------------------------------------------------------------------------------
def worth(theta: small.Weights, other: small.Weights, x: Any, y: Any, norm: int) -> float:
    d = np.linalg.norm(small.flat(other) - small.flat(theta), norm)
    return (small.loss(theta, x, y) - small.loss(other, x, y)) / d if d > 0 else 0.0


def local(run: Federation, program: Any, theta: small.Weights, m: small.Weights, i: int, t: int) -> Any:
    x, y = small.samples()[i]
    for r in small.batches(run, program, i, t)[-1]:
        theta, m = small.sgd(theta, small.gradient(theta, x[r], y[r]), m, lr=0.1, momentum=0.9)
    return theta, m


def reference(run: Federation, schedule: list[list[int]], norm: int, val: bool, keep: bool) -> Any:
    """Two clients: the other's model, once it sent one, is the only one to be had."""
    theta, sent, m = [small.start()] * 2, dict[int, small.Weights](), [small.Weights()] * 2
    P, mixed = np.zeros((2, 2)), 0
    algorithm = FedFomo(**TRAINING)
    for t, ids in enumerate(schedule):
        server = dict(sent)
        for i in ids:
            j, start = 1 - i, theta[i]
            if j in server:
                x, y = small.samples()[i]
                x, y = (x[:3] - 0.3, y[:3]) if val else (x, y)
                w = worth(start, server[j], x, y, norm)
                P[i, j] += w
                mixed += w > 0
                start = server[j] if w > 0 else start  # the only positive weight is 1 once normalised
            program = algorithm.train_by("val" if val else "train") if server else algorithm.alone
            theta[i], m[i] = local(run, program, start, m[i] if keep else small.Weights(), i, t)
            sent[i] = theta[i]
    return theta, P, mixed


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("schedule", [[[0, 1], [0, 1], [0, 1]], [[0], [0, 1], [1], [0, 1]]])
@pytest.mark.parametrize(
    ("settings", "val"),
    [({}, True), ({"distance": "l1", "explore": 0.0}, False), ({"opt_state": "keep", "M": 1}, False)],
)
def test_rounds_by_hand(engine: type, schedule: list[list[int]], settings: dict[str, Any], val: bool) -> None:
    run = federate(FedFomo(**TRAINING, **settings), engine(), val=val, schedule=schedule)
    for _ in schedule:
        run.round()
    norm, keep = 1 if settings.get("distance") == "l1" else 2, settings.get("opt_state") == "keep"
    theta, P, mixed = reference(run, schedule, norm, val, keep)
    for i in range(2):
        small.assert_models(run.client_model(i), theta[i], 1e-11)
    np.testing.assert_allclose(run.facts()["P"], P, rtol=1e-9, atol=1e-12)
    assert P[0, 1] != 0 and run.global_model() is None
    assert mixed or not val


@pytest.mark.parametrize("engine", ENGINES)
def test_several_models_by_hand(engine: str) -> None:
    """Four clients, all others to be had: weights are normalised over those that help."""
    run = federate(FedFomo(**TRAINING, M=3), engine, clients=4)
    run.round()
    theta = [{k: v.numpy() for k, v in run.client_model(i).items()} for i in range(4)]
    run.round()
    several = 0
    for i in range(4):
        x, y = small.samples()[i % 2]
        x = x + 0.1 * (i // 2)
        w = {j: worth(theta[i], theta[j], x[:3] - 0.3, y[:3], 2) for j in range(4) if j != i}
        helping = {j: v for j, v in w.items() if v > 0}
        several += len(helping) > 1
        start = theta[i]
        for j, v in helping.items():
            share = v / sum(helping.values())
            start = {k: start[k] + share * (theta[j][k] - theta[i][k]) for k in start}
        m = small.Weights()
        for r in small.batches(run, FedFomo(**TRAINING).train_by("val"), i, 1)[-1]:
            start, m = small.sgd(start, small.gradient(start, x[r], y[r]), m, lr=0.1, momentum=0.9)
        small.assert_models(run.client_model(i), start, 1e-11)
        for j, v in w.items():
            assert float(run.server.P[i, j]) == pytest.approx(v, rel=1e-9)
    assert several
    assert not run.server.P.diagonal().any()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_round_and_a_client_without_others_are_local(engine: str) -> None:
    schedule = [[0], [0], [0]]
    runs = [federate(a, engine, schedule=schedule) for a in (FedFomo(**TRAINING), Local(**TRAINING))]
    for _ in schedule:
        records = [run.round() for run in runs]
        assert records[0].bytes_down == 0
    for k, v in runs[0].personal_models().items():
        assert torch.equal(v, runs[1].personal_models()[k])


def test_where_no_model_helps_the_own_one_stays() -> None:
    """Judged on what it was trained on for long, a client's own model is the best it can get."""
    settings = {**TRAINING, "local_epochs": 40}
    runs = [federate(a, val=False) for a in (FedFomo(**settings), Local(**settings))]
    for run in runs:
        run.round()
        run.round()
    P = runs[0].server.P
    assert P[0, 1] < 0 and P[1, 0] < 0  # before clipping
    for k, v in runs[0].personal_models().items():
        torch.testing.assert_close(v, runs[1].personal_models()[k], rtol=1e-13, atol=1e-14)


def test_a_client_without_validation_samples_keeps_its_own_model() -> None:
    clients = [{"train": (x, y), "test": (x, y)} for x, y in small.samples()]
    clients[0]["val"] = clients[0]["train"]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    task = Task(small.TanhNet(), dtype=torch.float64)
    runs = [Federation(task, data, a, engine="sequential") for a in (FedFomo(**TRAINING), Local(**TRAINING))]
    for run in runs:
        run.round()
        run.round()
    assert runs[0].server.split == "val"
    assert runs[0].server.P[0, 1] != 0 and runs[0].server.P[1, 0] == 0
    for k, v in runs[0].client_model(1).items():
        torch.testing.assert_close(v, runs[1].client_model(1)[k], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_and_broken_models_are_worth_nothing(engine: str) -> None:
    """At distance 0 there is no 0 / 0, and a model with an infinite loss silences nobody."""
    run = federate(FedFomo(**TRAINING, M=3), engine, clients=4)
    run.round()
    models = {k: v.clone() for k, v in run.server.models.items()}
    for v in models.values():
        v[1] = v[0]  # as if client 1 had ended where client 0 did
    models["head.bias"][2] = torch.tensor([1e308, -1e308, 1e308], dtype=torch.float64)
    run.server = run.server._replace(models=models)
    record = run.round([0])
    assert not record.failed
    assert run.server.P[0, 1] == 0 and run.server.P[0, 2] == 0 and run.server.P[0, 3] != 0


# whom the server sends --------------------------------------------------------------------------------
def chosen(algorithm: FedFomo, P: Any, sent: Any, ids: Any, t: int, seed: int = 0) -> list[list[int]]:
    run = federate(algorithm, clients=len(sent), seed=seed)
    server = Server({}, torch.tensor(sent), torch.tensor(P, dtype=torch.float64), "val")
    found: list[list[int]] = algorithm.choose(server, Cohort(run.site, np.array(ids), t)).tolist()
    return found


N = 8
LIKING = np.random.default_rng(1).normal(size=(N, N))
ALL_SENT = [3] * N


def test_the_best_are_sent() -> None:
    found = chosen(FedFomo(M=3, explore=0.0), LIKING, ALL_SENT, [1, 4], 4)
    for i, row in zip([1, 4], found, strict=True):
        liking = LIKING[i].copy()
        liking[i] = -np.inf
        assert row == list(np.argsort(-liking)[:3])


def test_only_what_was_sent_can_be_had() -> None:
    sent = [3, -1, 2, 3, -1, 1, -1, 3]
    for pool, usable in (("all", {0, 2, 3, 5, 7}), ("last_round", {0, 3, 7})):
        algorithm = FedFomo(M=9, explore=0.5, pool=pool)  # type: ignore[arg-type]
        rows = chosen(algorithm, LIKING, sent, [0, 1], 4)
        assert set(rows[1]) == usable and len(rows[1]) == len(usable)
        assert set(rows[0]) == usable  # its own model fills the place of the one that it lacks
        assert rows[0][-1] == 0 and rows[0].count(0) == 1
    assert chosen(FedFomo(pool="last_round"), LIKING, [-1] * N, [0, 1], 0) == [[], []]


def test_exploring_is_random_and_fades() -> None:
    greedy = [chosen(FedFomo(M=3, explore=0.0), LIKING, ALL_SENT, range(N), t) for t in range(40)]
    curious = [chosen(FedFomo(M=3, explore=0.6, explore_decay=0.9), LIKING, ALL_SENT, range(N), t) for t in range(40)]
    differ = np.array([[a != b for a, b in zip(*rows, strict=True)] for rows in zip(greedy, curious, strict=True)])
    expected = 0.6 * 0.9 ** np.arange(40)
    assert abs(differ[:5].mean() - expected[:5].mean()) < 0.2
    assert differ[:5].mean() > differ[10:15].mean() > differ[30:].mean()
    always = chosen(FedFomo(M=3, explore=1.0, explore_decay=1.0), LIKING, ALL_SENT, range(N), 30)
    assert all(len(set(row)) == 3 and i not in row for i, row in enumerate(always))


def test_a_choice_does_not_depend_on_the_rest_of_the_cohort() -> None:
    algorithm = FedFomo(M=3, explore=0.5, explore_decay=1.0)
    together = chosen(algorithm, LIKING, ALL_SENT, range(N), 6)
    assert [chosen(algorithm, LIKING, ALL_SENT, [i], 6)[0] for i in range(N)] == together
    assert chosen(algorithm, LIKING, ALL_SENT, range(N), 6, seed=1) != together
    assert chosen(algorithm, LIKING, ALL_SENT, range(N), 5) != together


def test_ties_are_broken_at_random() -> None:
    zero = np.zeros((N, N))
    rows = chosen(FedFomo(M=2, explore=0.0), zero, ALL_SENT, range(N), 4)
    assert len({j for row in rows for j in row}) > 4


# traffic and refusals --------------------------------------------------------------------------------
def test_bytes_of_a_round() -> None:
    run = federate(FedFomo(**TRAINING, M=2), clients=4, schedule=[[0, 1], [1, 2], [0, 1, 2, 3]])
    n = PARAMETERS
    for down, up in ((0, 2 * n), (2 * 2 * n, 2 * (n + 2)), (4 * 2 * n, 4 * (n + 2))):
        record = run.round()
        assert (record.bytes_down, record.bytes_up) == (4 * down, 4 * up)


@pytest.mark.parametrize(("key", "value"), [("M", 0), ("explore", 1.5), ("explore_decay", -1.0), ("distance", "l3")])
def test_refusals(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"algorithm.{key} = "):
        build_algorithm("fedfomo", {}, {key: value})
