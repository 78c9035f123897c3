"""Robust averages against numpy and scipy, what one bad model can do to them, and the methods that offer them."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.test_contract import algorithm, assert_close, assert_same, federate, snapshot

from bespokefl.algorithms import ALGORITHMS
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import InputError, Model, ModelAveraging, RunError, robust
from bespokefl.core.trees import mean, rows, sub
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation.attacks import Attack

Array = NDArray[np.float64]
RULES: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed": {"trim": 0.25},
    "krum": {"krum_f": 1},
    "multi-krum": {"aggregation": "krum", "krum_f": 1, "krum_keep": 3},
    "clip": {},
    "clip to 0.1": {"aggregation": "clip", "clip_norm": 0.1},
}
AVERAGING = [name for name, spec in ALGORITHMS.items() if issubclass(spec.cls, ModelAveraging)]
WITHOUT = ["fedamp", "feddyn", "fedfomo", "fedfv", "fedmgda+", "fedpg", "local", "pfedhn", "plgu-ghn", "s-fedpg"]


def rule(name: str) -> dict[str, Any]:
    return {"aggregation": name} | RULES[name]


def models(n: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Model, Model, torch.Tensor]:
    """Stacked models, what they started from, and weights."""
    rng = np.random.default_rng(seed)
    start = {"a": torch.tensor(rng.normal(size=(3, 2))).to(dtype), "b": torch.tensor(rng.normal(size=4)).to(dtype)}
    stacked = {k: v + torch.tensor(0.3 * rng.normal(size=(n, *v.shape))).to(dtype) for k, v in start.items()}
    p = torch.tensor(rng.dirichlet(np.ones(n)))
    return stacked, start, p


def flat(tree: Model, n: int | None = None) -> Array:
    parts = [v.double().numpy().reshape((-1,) if n is None else (n, -1)) for v in tree.values()]
    return np.concatenate(parts, -1)


# the rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_median_is_numpys(n: int, dtype: torch.dtype) -> None:
    stacked, _, _ = models(n, dtype)
    found: Model = robust.median(stacked)
    np.testing.assert_allclose(flat(found), np.median(flat(stacked, n), 0), rtol=1e-7 if dtype.itemsize == 4 else 1e-15)
    assert found["a"].dtype == dtype and found["a"].shape == (3, 2)


@pytest.mark.parametrize(("n", "trim"), [(10, 0.1), (8, 0.25), (9, 0.4), (5, 0.2), (7, 0.0)])
def test_the_trimmed_mean_is_scipys(n: int, trim: float) -> None:
    stacked, start, p = models(n)
    found = FedAvg(aggregation="trimmed", trim=trim).average(stacked, start, p)
    np.testing.assert_allclose(flat(found), scipy.stats.trim_mean(flat(stacked, n), trim, axis=0), rtol=1e-13)


def brute_force_krum(x: Array, f: int) -> Array:
    """Scores by the definition: each model's squared distances to its n - f - 2 nearest others."""
    n = len(x)
    scores = np.full(n, np.inf)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        scores[i] = min(sum(((x[i] - x[j]) ** 2).sum() for j in near) for near in combinations(others, n - f - 2))
    return scores


@given(n=st.integers(5, 8), f=st.integers(0, 2), keep=st.integers(1, 3), seed=st.integers(0, 1000))
def test_krum_is_the_brute_force_one(n: int, f: int, keep: int, seed: int) -> None:
    if n < 2 * f + 3:
        return
    stacked, start, p = models(n, seed=seed)
    best = np.sort(np.argsort(brute_force_krum(flat(stacked, n), f))[:keep])
    for known in (start, None):
        np.testing.assert_array_equal(robust.krum(stacked, known, f, keep), best)
    found = FedAvg(aggregation="krum", krum_f=f, krum_keep=keep).average(stacked, start, p)
    by_hand = np.average(flat(stacked, n)[best], axis=0, weights=p.numpy()[best])
    np.testing.assert_allclose(flat(found), by_hand, rtol=1e-13)


@pytest.mark.parametrize("limit", [0.2, 0.9, 50.0, None])
def test_clipped_updates_by_hand(limit: float | None) -> None:
    stacked, start, p = models(8)
    found = FedAvg(aggregation="clip", clip_norm=limit).average(stacked, start, p)
    d = flat(stacked, 8) - flat(start)
    norms = np.linalg.norm(d, axis=1)
    limit = np.median(norms) if limit is None else limit
    by_hand = flat(start) + p.numpy() @ (d * np.minimum(1, limit / norms)[:, None])
    np.testing.assert_allclose(flat(found), by_hand, rtol=1e-13)
    if limit == 50.0:  # nobody is clipped
        np.testing.assert_allclose(flat(found), flat(mean(stacked, p)), rtol=1e-14)


def test_differences_are_clipped_from_zero() -> None:
    stacked, start, p = models(8)
    method = FedAvg(aggregation="clip")
    delta = sub(stacked, start)
    np.testing.assert_allclose(
        flat(method.average(delta, None, p)), flat(method.average(stacked, start, p)) - flat(start), rtol=1e-12
    )


def test_models_that_did_not_move_are_not_divided_by_zero() -> None:
    _, start, p = models(5)
    still = {k: v.expand(5, *v.shape).clone() for k, v in start.items()}
    found = FedAvg(aggregation="clip").average(still, start, p)
    np.testing.assert_allclose(flat(found), flat(start), rtol=1e-15)


def test_the_mean_is_the_mean_bit_for_bit() -> None:
    stacked, start, p = models(8)
    assert_same(FedAvg().average(stacked, start, p), mean(stacked, p))


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    stacked, start, p = models(8)
    method, order = FedAvg(**rule(name)), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    straight, shuffled = (method.average(m, start, w) for m, w in ((stacked, p), (rows(stacked, order), p[order])))
    np.testing.assert_allclose(flat(shuffled), flat(straight), rtol=1e-13)


@pytest.mark.parametrize("bad", [1e9, -1e9, 1e30])
@pytest.mark.parametrize("name", [name for name in RULES if name != "trimmed"] + ["trimmed"])
def test_one_client_far_away_changes_little(name: str, bad: float) -> None:
    """The result stays as near to the start as the honest models are; the mean goes off with the bad one."""
    stacked, start, p = models(9, torch.float32)
    p = torch.full_like(p, 1 / 9)
    honest = np.linalg.norm(flat(stacked, 9) - flat(start), axis=1)[:-1].max()
    for v in stacked.values():
        v[-1] = bad
    found = FedAvg(**rule(name)).average(stacked, start, p)
    assert np.linalg.norm(flat(found) - flat(start)) <= honest
    assert np.linalg.norm(flat(mean(stacked, p)) - flat(start)) > abs(bad) / 10


def test_krum_tells_near_models_apart_beside_one_far_away() -> None:
    """Distances of 1e-3 beside a model at 1e9: measured from the mean of all they would drown in rounding."""
    stacked, start, _ = models(7)
    near = {k: start[k] + 1e-3 * (v - start[k]) for k, v in stacked.items()}
    without = robust.krum(rows(near, torch.arange(6)), start, 1)
    for v in near.values():
        v[-1] = 1e9
    six_neighbours_of_seven = robust.krum(near, start, 2)
    assert six_neighbours_of_seven == without


# the methods -----------------------------------------------------------------------------------------


def test_who_averages_models_has_the_option_and_nobody_else() -> None:
    assert sorted([*AVERAGING, *WITHOUT]) == sorted(ALGORITHMS)
    for name, spec in ALGORITHMS.items():
        options = {parameter.name for parameter in spec.hyperparameters}
        assert ("aggregation" in options) == (name in AVERAGING)


@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_averages_by_the_chosen_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large number in the place of the rule's result reaches the server's state."""
    federation = federate(name, Sequential(), hyper={"aggregation": "median"}, schedule=[[0, 1, 3]])
    monkeypatch.setattr("bespokefl.core.averaging.median", lambda m: {k: marked(v) for k, v in m.items()})
    federation.round()
    tensors = federation.state()[0]
    floats = [v for k, v in tensors.items() if k.startswith("server") and v.is_floating_point()]
    assert any((v > MARK / 2).any() for v in floats)


MARK = 12345.0


def marked(v: Any) -> Any:
    return {k: marked(w) for k, w in v.items()} if isinstance(v, dict) else torch.full_like(v[0], MARK)


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize(
    ("hyper", "clients", "message"),
    [
        ({"aggregation": "krum"}, 2, r"algorithm.krum_f = 0 \(.*\): Krum needs at least 2 f \+ 3 = 3 .* there are 2"),
        ({"aggregation": "krum", "krum_f": 2}, 6, r"algorithm.krum_f = 2 .* = 7 clients .* there are 6"),
        ({"aggregation": "krum", "krum_f": 1, "krum_keep": 6}, 6, "algorithm.krum_keep = 6 .* at most 5"),
        ({"aggregation": "trimmed"}, 5, "algorithm.trim = 0.1 .* cuts none of the 5 clients .* at least 0.2"),
    ],
)
def test_too_few_clients_for_a_rule_are_refused(name: str, hyper: Any, clients: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(name, Sequential(), hyper=hyper, clients_per_round=clients)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"trim": 0.5}, "algorithm.trim = 0.5 .* below 0.5"),
        ({"aggregation": "mode"}, "algorithm.aggregation = 'mode'.*'median'"),
        ({"clip_norm": 0.0}, "algorithm.clip_norm = 0.0 .*above 0"),
        ({"krum_keep": 0}, "algorithm.krum_keep = 0 .*at least 1"),
    ],
)
def test_values_out_of_range_are_refused(hyper: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        algorithm("fedavg", **hyper)


def test_a_method_without_the_option_refuses_it() -> None:
    with pytest.raises(InputError, match=r"algorithm.aggregation = 'median'.*fedpg"):
        algorithm("fedpg", aggregation="median")


def test_krum_says_so_when_too_few_answer() -> None:
    federation = federate("fedavg", Sequential(), hyper={"aggregation": "krum", "krum_f": 1})
    with pytest.raises(RunError, match="only 4 clients answered; Krum with f = 1 needs 5"):
        federation.round([0, 1, 2, 3, 5], silent=[2])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"aggregation": "trimmed", "trim": 0.25}, r"algorithm.trim = 0.25 \(fedavg\) cuts none of the 3 clients"),
        ({"aggregation": "krum", "krum_f": 1}, r"Krum needs at least 2 f \+ 3 = 5 clients in a round, and there are 3"),
    ],
)
def test_rounds_of_named_clients_are_checked_before_they_run(hyper: Any, message: str) -> None:
    """A mean that cut nobody was taken for a trimmed one, without a word."""
    federation = federate("fedavg", Sequential(), hyper=hyper)
    with pytest.raises(InputError, match=message):
        federation.round([0, 1, 2])
    assert federation.rounds_done == 0


OTHERS = ("ditto", "fedrep", "fedrod", "lg-mix", "l2sgd", "pgfed", "plgu-lf")


@pytest.mark.parametrize("name", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@pytest.mark.parametrize("aggregation", ["median", "trimmed", "krum", "clip"])
def test_engines_agree_with_every_rule(name: str, aggregation: str) -> None:
    hyper, model = rule(aggregation), "mlp" if name == "fedavg" else "batchnorm"
    runs = [
        federate(name, engine, model, hyper=hyper, schedule=[range(7), range(5)])
        for engine in (Sequential(), Vectorized("cpu", lanes=1, stack=7))
    ]
    for run in runs:
        run.round()
        run.round()
    assert_close(snapshot(runs[1]), snapshot(runs[0]), 1e-9)


@pytest.mark.parametrize("aggregation", ["median", "trimmed", "krum", "clip"])
def test_a_rule_keeps_the_global_model_where_the_mean_loses_it(aggregation: str) -> None:
    """One of seven uploads 100 times its update, in every round."""
    honest = federate("fedavg", Sequential(), clients_per_round=7)
    plain, guarded = (
        federate("fedavg", Sequential(), hyper=h, clients_per_round=7, attack=Attack("scale", clients=[4]))
        for h in ({}, rule(aggregation))
    )
    for run in (honest, plain, guarded):
        for _ in range(3):
            run.round()
    w = flat(honest.global_model() or {})
    far, near = (np.linalg.norm(flat(run.global_model() or {}) - w) for run in (plain, guarded))
    assert near < 2 and far > 10 * near
