"""L2SGD: two clients by hand, by rounds and by coins, and its limits Local and FedAvg."""

from typing import Any

import pytest
import torch
from tests.algorithms import small

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.l2sgd import L2SGD, runs
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, stream
from bespokefl.engines import Sequential, Vectorized

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
SEED = 11  # of small.federate
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def epochs(n: int, purpose: str, round: int, client: int, count: int) -> list[Any]:
    """Shuffled batches of 3, on the documented random streams."""
    orders = [stream(SEED, purpose, round, client, epoch).permutation(n) for epoch in range(count)]
    return [order[k : k + 3] for order in orders for k in range(0, n, 3)]


def descended(v: small.Weights, client: int, batches: list[Any], momentum: float) -> small.Weights:
    (x, y), m = small.samples()[client], small.Weights()
    for r in batches:
        v, m = small.sgd(v, small.gradient(v, x[r], y[r]), m, lr=0.1, momentum=momentum)
    return v


def towards(x: small.Weights, x_bar: small.Weights, kappa: float) -> small.Weights:
    return {k: x[k] - kappa * (x[k] - x_bar[k]) for k in x}


@both_engines
@pytest.mark.parametrize(("weights", "p"), [("uniform", (0.5, 0.5)), ("sample", (7 / 11, 4 / 11))])
def test_by_hand(engine: type, weights: Any, p: Any) -> None:
    schedule = [[0, 1], [0], [0, 1]]
    federation = small.federate(L2SGD(**TRAINING, kappa=0.3, weights=weights), engine(), schedule=schedule)
    x = [small.start(), small.start()]
    for t, online in enumerate(schedule):
        federation.round()
        for i in online:
            x[i] = descended(x[i], i, epochs(small.SIZES[i], "batch", t, i, 2), 0.9)
        x_bar = small.average(x, p) if len(online) == 2 else x[0]  # of the cohort
        for i in online:
            x[i] = towards(x[i], x_bar, 0.3)
        small.assert_models(federation.server["x_bar"], x_bar)
        for i in range(2):
            small.assert_models(federation.client_model(i), x[i])


@both_engines
def test_coins_by_hand(engine: type) -> None:
    """Three rounds of eight coins, which start with tails and with heads, and end with either."""
    algorithm = L2SGD(lr=0.1, batch_size=3, form="coin", kappa=0.3, p=0.4, flips=8)
    federation = small.federate(algorithm, engine())
    n, x, x_bar, seen = small.flat(small.start()).size, [small.start()] * 2, small.start(), set()
    for t in range(5):
        record = federation.round()
        coins = stream(SEED, "coin", t).random(8) < 0.4
        seen |= {("first", bool(coins[0])), ("last", bool(coins[-1]))}
        exchanges, run, used = 0, -1, 0  # runs of tails in this round, and the steps in the current one
        for k, heads in enumerate(coins):
            before = k > 0 and coins[k - 1]
            if not heads:
                if k == 0 or before:
                    run, used = run + 1, 0
                for i in range(2):
                    batches = epochs(small.SIZES[i], f"batch {run}", t, i, 8)
                    x[i] = descended(x[i], i, [batches[used]], 0.0)
                used += 1
            else:
                run = max(run, 0)  # a round that starts with heads has an empty run of tails in front
                exchanges += not before
                x_bar = small.average(x, (0.5, 0.5))
                x = [towards(v, x_bar, 0.3) for v in x]
        assert (record.bytes_down, record.bytes_up) == (4 * 2 * n * exchanges, 4 * 2 * n * exchanges)
        small.assert_models(federation.server["x_bar"], x_bar)
        for i in range(2):
            small.assert_models(federation.client_model(i), x[i])
    assert len(seen) == 4


def test_runs_of_coins() -> None:
    T, H = False, True
    assert runs([T, T, H, T, H, H]) == [(2, 1), (1, 2)]
    assert runs([H, H, T]) == [(0, 2), (1, 0)]
    assert runs([T, T]) == [(2, 0)]
    assert runs([H]) == [(0, 1)]


def test_without_heads_nothing_is_sent() -> None:
    federation = small.federate(L2SGD(lr=0.1, batch_size=3, form="coin", p=0.0, flips=4))
    record = federation.round()
    assert record.bytes_down == record.bytes_up == 0
    small.assert_models(federation.server["x_bar"], small.start())
    expected = descended(small.start(), 0, epochs(7, "batch 0", 0, 0, 2)[:4], 0.0)
    small.assert_models(federation.client_model(0), expected)


@both_engines
def test_a_silent_client_is_as_if_never_asked_between_exchanges(engine: type) -> None:
    algorithm = L2SGD(lr=0.1, batch_size=3, form="coin", p=0.5, flips=8)
    asked, never = small.federate(algorithm, engine()), small.federate(algorithm, engine())
    asked.round([0, 1], silent=[1])
    never.round([0])
    assert asked.clients.states.clients == never.clients.states.clients == [0]
    for k, v in never.server["x_bar"].items():
        assert torch.equal(asked.server["x_bar"][k], v)
        assert torch.equal(asked.personal_models()[k], never.personal_models()[k])


@both_engines
@pytest.mark.parametrize("opt_state", ["reset", "keep"])
def test_no_way_to_the_mean_is_local_bit_for_bit(engine: type, opt_state: Any) -> None:
    schedule = [[0, 1], [1], [0, 1]]
    ours = small.federate(L2SGD(**TRAINING, opt_state=opt_state, kappa=0.0), engine(), schedule=schedule)
    local = small.federate(Local(**TRAINING, opt_state=opt_state), engine(), schedule=schedule)
    for _ in schedule:
        ours.round()
        local.round()
    for k, v in local.personal_models().items():
        assert torch.equal(ours.personal_models()[k], v)


@both_engines
@pytest.mark.parametrize("opt_state", ["reset", "keep"])
def test_all_the_way_to_the_mean_is_uniform_fedavg_bit_for_bit(engine: type, opt_state: Any) -> None:
    ours = small.federate(L2SGD(**TRAINING, opt_state=opt_state, kappa=1.0), engine())
    fedavg = small.federate(FedAvg(**TRAINING, opt_state=opt_state, weights="uniform", personal="global"), engine())
    for _ in range(3):
        ours.round()
        fedavg.round()
    for k, v in fedavg.personal_models().items():
        assert torch.equal(ours.personal_models()[k], v)
        assert torch.equal(ours.server["x_bar"][k], v[0])


def test_the_step_to_the_mean_leaves_the_mean() -> None:
    federation = small.federate(L2SGD(**TRAINING, kappa=0.7))
    federation.round()
    models = federation.personal_models()
    for k, v in federation.server["x_bar"].items():
        torch.testing.assert_close(models[k].mean(0), v, rtol=0, atol=1e-15)
        assert not torch.equal(models[k][0], models[k][1])


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    record = small.federate(L2SGD(**TRAINING)).round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)


@pytest.mark.parametrize("wrong", [{"kappa": 1.01}, {"kappa": -0.1}, {"p": 1.0}, {"flips": 0}, {"form": "dice"}])
def test_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))} = "):
        L2SGD(**wrong)
