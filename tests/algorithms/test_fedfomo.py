"""FedFomo: rounds against numpy, whom the server sends, and what a model is worth."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small

from bespokefl.algorithms import build_algorithm
from bespokefl.algorithms.fedfomo import FedFomo, Server
from bespokefl.algorithms.local import Local
from bespokefl.core import Cohort, InputError, Task
from bespokefl.data import load
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation
from bespokefl.models import build

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
PARAMETERS = 21
ENGINES = ["sequential", "vectorized"]


def federate(
    algorithm: Any, engine: Any = "sequential", clients: int = 2, val: bool = True, **options: Any
) -> Federation:
    """Client i holds its samples, or those of client i mod 2 moved a little; judged on samples of its own, or not."""
    splits = []
    for i in range(clients):
        held_out = {"val": samples_of(i, val=True)} if val else {}
        splits.append({"train": samples_of(i), "test": samples_of(i), **held_out})
    options = {"initial": {k: torch.tensor(v) for k, v in small.start().items()}, "seed": 11} | options
    data = FederatedData.from_arrays(splits, classes=("a", "b", "c"))
    return Federation(Task(small.TanhNet(), dtype=torch.float64), data, algorithm, engine=engine, **options)


# rounds ----------------------------------------------------------------------------------------------
def samples_of(i: int, val: bool = False) -> Any:
    x, y = small.samples()[i % 2]
    x = x + 0.1 * (i // 2)
    return (x[:3] - 0.3, y[:3]) if val else (x, y)


def mixture(weights: list[float], models: list[small.Weights]) -> small.Weights:
    return {k: np.asarray(sum(w * m[k] for w, m in zip(weights, models, strict=True))) for k in models[0]}


class Reference:
    """FedFomo in numpy, where everybody is sent all models that others ever sent (M = N - 1)."""

    def __init__(self, run: Federation, algorithm: FedFomo, clients: int, judges: set[int], held_out: bool) -> None:
        self.run, self.algorithm, self.judges, self.held_out = run, algorithm, judges, held_out
        self.theta, self.before = [small.start()] * clients, [small.start()] * clients
        self.m, self.sent = [small.Weights()] * clients, dict[int, small.Weights]()
        self.P, self.positive = np.zeros((clients, clients)), 0

    def round(self, t: int, ids: list[int]) -> None:
        sent = dict(self.sent)
        for i in ids:
            start = self.mixed(i, sent)
            keep = self.algorithm.opt_state == "keep"
            theta, m = start, self.m[i] if keep else small.Weights()
            x, y = samples_of(i)
            program = self.algorithm.train_by("train")  # judging draws no batches, so this one's last phase has them
            for r in small.batches(self.run, program, i, t)[-1]:
                theta, m = small.sgd(theta, small.gradient(theta, x[r], y[r]), m, lr=0.1, momentum=0.9)
            self.theta[i], self.before[i], self.m[i], self.sent[i] = theta, start, m, theta

    def mixed(self, i: int, sent: dict[int, small.Weights]) -> small.Weights:
        if i not in self.judges:
            return self.theta[i]
        candidates = {i: self.theta[i]} | {j: sent[j] for j in sent if j != i}
        x, y = samples_of(i, self.held_out)
        yardstick = small.loss(self.before[i], x, y)
        positive = {}
        for j, model in candidates.items():
            norm = 1 if self.algorithm.distance == "l1" else 2
            d = np.linalg.norm(small.flat(model) - small.flat(self.before[i]), norm)
            w = (yardstick - small.loss(model, x, y)) / d if d > 0 else 0.0
            self.P[i, j] += w
            if w > 0:
                positive[j] = w
        self.positive += len(positive)
        if not positive:
            return self.theta[i] if self.algorithm.fallback == "trained" else self.before[i]
        total = sum(positive.values())
        return mixture([w / total for w in positive.values()], [candidates[j] for j in positive])


FULL, PARTIAL = [[0, 1, 2, 3]] * 4, [[0], [0, 1, 2], [3, 1], [0, 2], [0], [1, 2, 3]]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"distance": "l1", "opt_state": "keep"},
    {"fallback": "previous"},
    {"fallback": "previous", "lr_decay": 1.0, "local_epochs": 1},
]


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["", "l1", "previous", "short"])
@pytest.mark.parametrize("held_out", [True, False])
def test_rounds_by_hand(engine: type, schedule: list[list[int]], settings: dict[str, Any], held_out: bool) -> None:
    algorithm = FedFomo(**TRAINING | {"M": 3} | settings)
    run = federate(algorithm, engine(), clients=4, val=held_out, schedule=schedule)
    wanted = Reference(run, algorithm, 4, set(range(4)), held_out)
    for t, ids in enumerate(schedule):
        run.round()
        wanted.round(t, ids)
        for i in range(4):
            small.assert_models(run.client_model(i), wanted.theta[i], 1e-11)
        np.testing.assert_allclose(run.facts()["P"], wanted.P, rtol=1e-8, atol=1e-11)
    assert wanted.positive >= 4 and run.global_model() is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fallback", ["trained", "previous"])
def test_a_client_without_validation_samples_keeps_its_own_model(engine: str, fallback: Any) -> None:
    clients = [{"train": samples_of(i), "test": samples_of(i)} for i in range(4)]
    for i in (0, 3):
        clients[i]["val"] = samples_of(i, val=True)
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    initial = {k: torch.tensor(v) for k, v in small.start().items()}
    algorithm = FedFomo(**TRAINING, M=3, fallback=fallback)
    run = Federation(Task(small.TanhNet(), dtype=torch.float64), data, algorithm, engine=engine, initial=initial)
    wanted = Reference(run, algorithm, 4, {0, 3}, held_out=True)
    for t in range(3):
        run.round()
        wanted.round(t, list(range(4)))
    assert run.server.split == "val" and wanted.P[0].any() and not run.server.P[1].any()
    for i in range(4):
        small.assert_models(run.client_model(i), wanted.theta[i], 1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_nobody_elses_model_it_is_local_while_training_helps(engine: str) -> None:
    """The first round, and a client that never meets another: its own progress is the only candidate."""
    schedule = [[0], [0], [0]]
    runs = [federate(a, engine, schedule=schedule, val=False) for a in (FedFomo(**TRAINING), Local(**TRAINING))]
    for _ in schedule:
        records = [run.round() for run in runs]
        assert records[0].bytes_down == 0
    assert runs[0].server.P[0, 0] > 0
    for k, v in runs[0].personal_models().items():
        assert torch.equal(v, runs[1].personal_models()[k])


def test_where_nothing_helps_the_trained_model_stays_or_the_one_before_comes_back() -> None:
    """On validation labels that the training never shows every model is worse than the first one."""
    x, y = small.samples()[0]
    client = {"train": (x, np.zeros_like(y)), "test": (x, y), "val": (x, np.ones_like(y))}
    data = FederatedData.from_arrays([client] * 2, classes=("a", "b", "c"))
    task = Task(small.TanhNet(), dtype=torch.float64)
    methods = [FedFomo(**TRAINING), FedFomo(**TRAINING, fallback="previous"), Local(**TRAINING)]
    trained, previous, local = (Federation(task, data, a, engine="sequential") for a in methods)
    for run in (trained, previous, local):
        run.round()
        run.round()
    assert (trained.server.P < 0).all() and (previous.server.P < 0).all()  # before clipping
    for k, v in trained.personal_models().items():
        assert torch.equal(v, local.personal_models()[k])
    kept = previous.clients.states.gather(np.array([0]))
    for k, v in task.initial.items():
        assert torch.equal(kept.start[k][0], v) and not torch.equal(kept.x[k][0], v)


@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_positive_on_the_demos_data(seed: int) -> None:
    """With the newest model as the yardstick, and no candidate itself, nine of 350 were, and the method was Local."""
    data = load("digits", clients=20, partition="dirichlet", alpha=0.3, seed=seed)
    torch.manual_seed(seed)
    task = Task(build("mlp", data.input_shape, len(data.classes), hidden=[200]))
    algorithm = FedFomo(lr=0.05, momentum=0.9, batch_size=20, local_epochs=5)
    run = Federation(task, data, algorithm, engine="vectorized", participation=0.5, seed=seed)
    own, others = [], []
    for _ in range(8):
        before = run.server.P.clone()
        run.round()
        helped = before < run.server.P
        own.append(int(helped.diagonal().sum()))
        others.append(int(helped.sum()) - own[-1])
    assert min(own[1:]) >= 5 and np.mean(own[1:]) >= 7  # of the ten clients of a round
    assert sum(others) >= 15


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_and_broken_models_are_worth_nothing(engine: str) -> None:
    """At distance 0 there is no 0 / 0, and a model with an infinite loss silences nobody."""
    run = federate(FedFomo(**TRAINING, M=3), engine, clients=4)
    run.round()
    models = {k: v.clone() for k, v in run.server.models.items()}
    for k, v in models.items():
        v[1] = torch.tensor(small.start()[k])  # as if client 1 had ended where client 0 began
    models["head.bias"][2] = torch.tensor([1e308, -1e308, 1e308], dtype=torch.float64)
    run.server = run.server._replace(models=models)
    record = run.round([0])
    assert not record.failed
    assert run.server.P[0, 1] == 0 and run.server.P[0, 2] == 0 and run.server.P[0, 3] != 0


# whom the server sends --------------------------------------------------------------------------------
def chosen(algorithm: FedFomo, P: Any, sent: Any, ids: Any, t: int, seed: int = 0) -> list[list[int]]:
    run = federate(algorithm, clients=len(sent), seed=seed)
    server = Server({}, torch.tensor(sent), torch.tensor(P, dtype=torch.float64), "val")
    found: list[list[int]] = algorithm.choose(server, Cohort(run.clients, np.array(ids), t)).tolist()
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
        assert rows[0][-1] == 0 and rows[0].count(0) == 1  # and is not judged a second time
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
    # down: 2 models each, and which of these are no fillers; up: the model, and the weights of these and of its own
    for down, up in ((0, 2 * (n + 1)), (2 * 2 * (n + 1), 2 * (n + 3)), (4 * 2 * (n + 1), 4 * (n + 3))):
        record = run.round()
        assert (record.bytes_down, record.bytes_up) == (4 * down, 4 * up)


@pytest.mark.parametrize(
    ("key", "value"), [("M", 0), ("explore", 1.5), ("explore_decay", -1.0), ("distance", "l3"), ("fallback", "x")]
)
def test_refusals(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"algorithm.{key} = "):
        build_algorithm("fedfomo", {}, {key: value})
