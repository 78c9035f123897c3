"""FedHKD: two rounds worked out in numpy, uniform FedAvg as its limit, and the noise."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from tests.algorithms.small import Array, Weights
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedhkd import FedHKD
from bespokefl.core import InputError, Setup, Task, keyed_normal
from bespokefl.core.rng import step_keys
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

N, M, K = 21, 3, small.CLASSES  # parameters, features, classes
LOCAL: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
STRONG: dict[str, Any] = {"lam": 0.6, "gamma": 0.3, "T": 0.7, "noise": 0.5}
Knowledge = tuple[Array, Array]  # H and Q, zeros in Q for a class without any


def scrambled(key: int, position: int) -> float:
    """The documented hash, in Python's integers."""
    z = position * 0x9E3779B1 + key * 0x85EBCA77
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        z = ((z ^ (z >> shift)) * factor) % 2**32
    return (z + 0.5) / 2**32


def normal(key: int, count: int) -> Array:
    pairs = [(scrambled(key, 2 * k), scrambled(key, 2 * k + 1)) for k in range(count)]
    return np.array([math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v) for u, v in pairs])


def gradient(w: Weights, x: Array, y: Any, known: Knowledge | None, a: FedHKD) -> Weights:
    logits, h = small.forward(w, x)
    d_logits, d_h = (small.softmax(logits) - np.eye(K)[y]) / len(y), np.zeros_like(h)
    extra = Weights()
    if known is not None:
        H, Q = known
        told = Q.sum(1) > 0
        p = small.softmax((H @ w["head.weight"].T + w["head.bias"]) / a.T)
        if a.distance == "l2":
            slope = (p - Q) / np.maximum(np.linalg.norm(p - Q, axis=1, keepdims=True), 1e-300)
            d = p * (slope - (p * slope).sum(1, keepdims=True)) / a.T
        else:
            d = (p - Q) / a.T
        d = a.lam * d * told[:, None] / told.sum()
        extra = {"head.weight": d.T @ H, "head.bias": d.sum(0)}
        d_h = a.gamma * 2 * (h - H[y]) * told[y][:, None] / len(y)
    g = small.backward(w, x, h, d_logits)
    d_h = d_h * (1 - h**2)
    g["body.weight"] = g["body.weight"] + d_h.T @ x
    g["body.bias"] = g["body.bias"] + d_h.sum(0)
    return g | {k: g[k] + v for k, v in extra.items()}


def by_hand(
    federation: Federation, a: FedHKD, rounds: list[list[int]]
) -> tuple[Weights, Knowledge | None, list[Weights]]:
    """w, the server's knowledge, and the models that the clients trained last."""
    w, known, last = small.start(), None, [small.start(), small.start()]
    for t, clients in enumerate(rounds):
        told = []
        for i in clients:
            (x, y), v, m = small.samples()[i], w, Weights()
            rows, whole = small.batches(federation, a.train, i, t)
            for r in rows:
                g = gradient(v, x[r], y[r], known, a)
                if a.clip is not None:
                    g = {k: d * min(1, a.clip / np.linalg.norm(small.flat(g))) for k, d in g.items()}
                v, m = small.sgd(v, g, m, 0.1, 0.9)
            logits, h = small.forward(v, x)
            q = small.softmax(logits / a.T)
            key = int(step_keys(federation.seed, t, np.array([i]), 1, len(whole))[-1, 0])
            noise = a.noise * normal(key, K * M).reshape(K, M)
            has = [j for j in range(K) if (y == j).any()]
            told.append({j: (h[y == j].mean(0) + noise[j], q[y == j].mean(0), (y == j).sum()) for j in has})
            last[i] = v
        H, Q = known if known is not None else (np.zeros((K, M)), np.zeros((K, K)))
        H, Q = H.copy(), Q.copy()
        for j in range(K):
            entries = [k[j] for k in told if j in k]
            if entries and a.knowledge == "last":
                H[j], Q[j] = entries[-1][:2]
            elif entries:
                total = sum(n for _, _, n in entries)
                H[j] = sum(n / total * f for f, _, n in entries)
                Q[j] = sum(n / total * p for _, p, n in entries)
        known = H, Q
        w = small.average([last[i] for i in clients], [1 / len(clients)] * len(clients))
    return w, known, last


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize(
    ("clients", "options"),
    [
        ([[0, 1], [0, 1]], {}),
        ([[1], [0, 1], [0, 1]], {}),  # at first nobody knows of class 2
        ([[0, 1], [1], [0, 1]], {"distance": "kl"}),  # class 2 is kept
        ([[0, 1], [0, 1]], {"knowledge": "last", "clip": 0.3}),
    ],
    ids=["all", "an unknown class", "kl", "last and clip"],
)
def test_rounds_by_hand(engine: type, clients: list[list[int]], options: dict[str, Any]) -> None:
    algorithm = FedHKD(**LOCAL, **STRONG, **options)
    federation = small.federate(algorithm, engine(), schedule=clients)
    w, known, last = by_hand(federation, algorithm, clients)
    for _ in clients:
        federation.round()
    small.assert_models(federation.server["w"], w, 1e-10)
    assert known is not None
    small.assert_models(federation.server["known"], {"H": known[0], "Q": known[1]}, 1e-10)
    for i in range(2):
        small.assert_models(federation.client_model(i), last[i], 1e-10)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("personal", ["local_before_agg", "finetune"])
def test_without_weights_of_knowledge_it_is_uniform_fedavg(engine: str, personal: Any) -> None:
    schedule = [[0, 1], [1], [0, 1]]
    ours = small.federate(FedHKD(**LOCAL, lam=0, gamma=0, personal=personal), engine, schedule=schedule)
    theirs = small.federate(FedAvg(**LOCAL, weights="uniform", personal=personal), engine, schedule=schedule)
    for _ in schedule:
        ours.round()
        theirs.round()
    assert all(torch.equal(v, theirs.server["w"][k]) for k, v in ours.server["w"].items())
    assert all(torch.equal(v, theirs.personal_models()[k]) for k, v in ours.personal_models().items())


@pytest.mark.parametrize("option", [{"lam": 0.9}, {"gamma": 0.9}, {"distance": "kl"}, {"T": 2.0}, {"noise": 0.0}])
def test_every_option_matters_from_the_second_round_on(option: dict[str, Any]) -> None:
    plain, other = (small.federate(FedHKD(**LOCAL, **h)) for h in (STRONG, STRONG | option))
    for run in (plain, other):
        run.round()
    assert torch.equal(plain.server["w"]["body.weight"], other.server["w"]["body.weight"])
    for run in (plain, other):
        run.round()
    assert not torch.equal(plain.server["w"]["body.weight"], other.server["w"]["body.weight"])


def test_bytes() -> None:
    run = small.federate(FedHKD(**LOCAL))
    knowledge = K * (M + K)
    first, second = run.round(), run.round()
    assert (first.bytes_down, first.bytes_up) == (2 * 4 * N, 2 * 4 * (N + knowledge + K))  # K counts of samples
    assert (second.bytes_down, second.bytes_up) == (2 * 4 * (N + knowledge), 2 * 4 * (N + knowledge + K))


def test_predictions_that_agree_exactly_have_a_finite_gradient() -> None:
    Q = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    slope = torch.func.grad(lambda z: FedHKD().divergence(z, Q).sum())(Q.log())
    assert torch.isfinite(slope).all()


def test_noise_is_normal_and_differs_by_key() -> None:
    draws = keyed_normal(torch.tensor(5), (200, 100), torch.float64)
    assert abs(draws.mean()) < 0.02 and abs(draws.std() - 1) < 0.02
    assert abs((draws**4).mean() - 3) < 0.15 and draws.abs().max() < 6
    assert abs((draws[:, 1:] * draws[:, :-1]).mean()) < 0.02
    assert torch.equal(draws, keyed_normal(torch.tensor(5), (200, 100), torch.float64))
    other = keyed_normal(torch.tensor(6), (200, 100), torch.float64)
    assert abs((draws * other).mean()) < 0.03
    np.testing.assert_allclose(draws.flatten()[:50].numpy(), normal(5, 50), rtol=1e-12)
    assert keyed_normal(torch.tensor(5), (3,), torch.float32).dtype == torch.float32


def test_a_task_without_classes() -> None:
    task = Task(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "squared_error")
    with pytest.raises(InputError, match=r"algorithm\.name = 'fedhkd' needs a classifier"):
        FedHKD().check(task, Setup(2, (2,), 0, False))
