"""LG-Mix: numbers worked out by hand, the limits of lambda, and the traces."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.lg_mix import DISTANCES, Kept, LGMix, share, valid, vectors
from bespokefl.algorithms.local import Local
from bespokefl.core import Batch, Batches, InputError, Model, Task, ordered, stream
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


@dataclass(frozen=True)
class InOrder(LGMix):
    """One sample a step, in stored order."""

    @property
    def epochs(self) -> Batches:
        return ordered("train", 1)


@dataclass(frozen=True)
class Forced(InOrder):
    """With a given lambda."""

    forced: float = 0.0

    def lam(self, kept: Kept) -> Tensor:
        return torch.full_like(kept.r, self.forced)


@dataclass(frozen=True)
class FixedShare(LGMix):
    """With a given lambda, on shuffled batches."""

    forced: float = 0.0

    def lam(self, kept: Kept) -> Tensor:
        return torch.full_like(kept.r, self.forced)


class TwoWeights(nn.Module):
    """h = w1 x, output w2 h."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


START = {
    "body.weight": torch.tensor([[1.0]], dtype=torch.float64),
    "head.weight": torch.tensor([[0.5]], dtype=torch.float64),
}
SAMPLES = ([(1.0, 1.0), (2.0, 1.0)], [(1.0, -1.0), (3.0, 0.5)])


def example(algorithm: Algorithm, engine: Any, samples: Any = SAMPLES, **options: Any) -> Federation:
    clients = []
    for rows in samples:
        xy = np.array(rows)
        arrays = (xy[:, :1], xy[:, 1:])
        clients.append({"train": arrays, "test": arrays})
    task = Task(TwoWeights(), "squared_error", dtype=torch.float64)
    data = FederatedData.from_arrays(clients)
    return Federation(task, data, algorithm, engine=engine("cpu"), **{"initial": START, **options})


def pair(model: Model) -> Tensor:
    """(w1, w2), or one row of it per client."""
    parts = [model["body.weight"], model["head.weight"]]
    return torch.cat([v.reshape(-1, 1) for v in parts], 1).squeeze(0)


def near(a: Any, b: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=0, atol=1e-10
    )


def same(a: Model, b: Model) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


def close(a: Model, b: Model) -> None:
    assert a.keys() == b.keys()
    for k in a:
        near(a[k], b[k])


# the example -----------------------------------------------------------------------------------------
@both_engines
def test_two_rounds_by_hand(engine: Any) -> None:
    run = example(InOrder(lr=0.1, weights="uniform"), engine)
    run.round()
    near(run.clients.states.rows().r, [5.2025 / 10.2025, 8.700625 / 18.700625])
    near(run.clients.states.rows().r, [0.509924038226, 0.465258514087])
    near(pair(run.server.u), [0.943246875, 0.3715453125])
    near(pair(run.personal_models()), [[0.977783074001, 0.449215507841], [0.911735788201, 0.300678444174]])
    run.round()
    kept = run.clients.states.rows()
    near(kept.r, [0.528175858965, 0.463841672335])
    near(kept.r_sum / kept.rounds, [0.519049948595, 0.464550093211])  # lambda: the mean of the raw ratios
    near(pair(run.server.u), [0.936585328022, 0.341930263387])
    near(pair(run.personal_models()), [[0.987074013599, 0.462277322978], [0.890796753776, 0.232867569555]])


@both_engines
def test_updates_by_hand(engine: Any) -> None:
    """The update of a client alone is the server's."""
    for c, expected in ((0, [0.010975, 0.0238625]), (1, [-0.12448125, -0.280771875])):
        run = example(InOrder(lr=0.1), engine)
        run.round([c])
        near(pair(run.server.u) - pair(START), expected)


@both_engines
@pytest.mark.parametrize(
    ("lam", "u", "personal"),
    [
        (0.0, [0.928814315894, 0.319156156387], [[0.928814315894, 0.319156156387]] * 2),
        (1.0, None, [[1.015303448229, 0.537292377732], [0.844149220767, 0.151332594425]]),
        (0.37, [0.93772055397, 0.334602288558], None),
    ],
)
def test_forced_lambda_by_hand(engine: Any, lam: float, u: Any, personal: Any) -> None:
    run = example(Forced(lr=0.1, weights="uniform", forced=lam), engine)
    for _ in range(3):
        run.round()
    if u is not None:
        near(pair(run.server.u), u)
    if personal is not None:
        near(pair(run.personal_models()), personal)
    near(pair(run.personal_models()).mean(0), pair(run.server.u))  # one lambda for all: the mean is u


@both_engines
@pytest.mark.parametrize("history", ["none", "past"])
def test_history(engine: Any, history: Any) -> None:
    """In the first round all are the raw ratio; in the second ``none`` is the second one, ``past`` the first."""
    code, other = (example(InOrder(lr=0.1, weights="uniform", history=h), engine) for h in ("code", history))
    code.round()
    other.round()
    same(code.personal_models(), other.personal_models())
    start, r0 = pair(other.personal_models()), other.clients.states.rows().r.clone()
    other.round()
    r1 = other.clients.states.rows().r
    near(r1, [0.528175858965, 0.463841672335])
    lam = (r1 if history == "none" else r0)[:, None]
    dw = torch.tensor([[0.024072463531, 0.052606063451], [-0.037395557487, -0.111836161677]], dtype=torch.float64)
    near(pair(other.personal_models()), start + lam * dw + (1 - lam) * dw.mean(0))
    code.round()
    assert (pair(code.personal_models()) - pair(other.personal_models())).abs().max() > 1e-5


@both_engines
def test_eta_g_scales_the_global_update(engine: Any) -> None:
    run = example(InOrder(lr=0.1, weights="uniform", eta_g=0.5), engine)
    run.round()
    du = pair(run.server.u) - pair(START)
    near(du, 0.5 * torch.tensor([0.943246875 - 1, 0.3715453125 - 0.5], dtype=torch.float64))
    dw = torch.tensor([[0.010975, 0.0238625], [-0.12448125, -0.280771875]], dtype=torch.float64)
    lam = run.clients.states.rows().r[:, None]
    near(pair(run.personal_models()), pair(START) + lam * dw + (1 - lam) * du)


# limits ----------------------------------------------------------------------------------------------
def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Linear(6, 3)).double()


def federation(algorithm: Algorithm, engine: Any = Sequential, sizes: Any = (23, 8, 31), **options: Any) -> Federation:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    clients = [{"train": arrays(n), "test": arrays(2)} for n in sizes]
    data = FederatedData.from_arrays(clients, classes=("a", "b", "c"))
    return Federation(data=data, algorithm=algorithm, engine=engine("cpu"), **{"model": net(), "seed": 5, **options})


TRAINING: dict[str, Any] = {"lr": 0.05, "local_epochs": 2, "batch_size": 10}


@both_engines
@pytest.mark.parametrize("norm", [False, True])
def test_lambda_0_is_fedavg(engine: Any, norm: bool) -> None:
    mix = federation(FixedShare(**TRAINING, forced=0.0), engine, model=net(norm))
    fedavg = federation(FedAvg(**TRAINING), engine, model=net(norm))
    for _ in range(3):
        mix.round()
        fedavg.round()
    for c in range(3):
        same(mix.client_model(c), mix.server.u)  # exactly
    close(mix.server.u, fedavg.server["w"])


@both_engines
@pytest.mark.parametrize("norm", [False, True])
def test_lambda_1_is_local(engine: Any, norm: bool) -> None:
    mix = federation(FixedShare(**TRAINING, momentum=0.9, opt_state="keep", forced=1.0), engine, model=net(norm))
    local = federation(Local(**TRAINING, momentum=0.9, opt_state="keep"), engine, model=net(norm))
    for _ in range(3):
        mix.round()
        local.round()
    close(mix.personal_models(), local.personal_models())


@both_engines
def test_one_lambda_for_all_keeps_the_weighted_mean_at_u(engine: Any) -> None:
    run = federation(FixedShare(**TRAINING, forced=0.37), engine)
    for _ in range(3):
        run.round()
    p = torch.tensor([23, 8, 31], dtype=torch.float64) / 62
    close({k: torch.tensordot(p, v, 1) for k, v in run.personal_models().items()}, run.server.u)
    apart = federation(LGMix(**TRAINING), engine)  # lambdas of their own: not so
    for _ in range(3):
        apart.round()
    means = {k: torch.tensordot(p, v, 1) for k, v in apart.personal_models().items()}
    assert max((means[k] - v).abs().max() for k, v in apart.server.u.items()) > 1e-8


@both_engines
def test_a_single_client_is_the_global_model(engine: Any) -> None:
    run = federation(LGMix(**TRAINING), engine, sizes=(23,))
    for _ in range(3):
        run.round()
    close(run.client_model(0), run.server.u)


@both_engines
@pytest.mark.parametrize("trace", ["paper", "centred", "code"])
def test_without_learning_r_is_a_half_and_nothing_moves(engine: Any, trace: Any) -> None:
    run = federation(LGMix(lr=0.0, local_epochs=2, batch_size=10, trace=trace), engine)
    run.round()
    run.round()
    assert (run.clients.states.rows().r == 0.5).all()
    same(run.server.u, net().state_dict())
    for c in range(3):
        same(run.client_model(c), net().state_dict())


@both_engines
def test_lambda_lies_between_0_and_1(engine: Any) -> None:
    run = federation(LGMix(**{**TRAINING, "lr": 0.5}, history="none"), engine)
    for _ in range(3):
        run.round()
        r = run.clients.states.rows().r
        assert ((r > 0) & (r < 1) & (r != 0.5)).all()


@both_engines
def test_dead_features_give_a_half(engine: Any) -> None:
    run = example(InOrder(lr=0.1), engine, samples=([(0.0, 1.0)], [(1.0, 1.0)]))
    run.round()
    assert run.clients.states.gather(np.arange(2)).r[0] == 0.5


@both_engines
def test_batch_norm_statistics_are_mixed_like_weights(engine: Any) -> None:
    alone, start = [], net(norm=True).state_dict()
    for c in range(2):
        run = federation(LGMix(**TRAINING), engine, model=net(norm=True))
        run.round([c])
        alone.append({k: v - start[k] for k, v in run.server.u.items()})
    run = federation(LGMix(**TRAINING, weights="uniform"), engine, model=net(norm=True))
    run.round([0, 1])
    assert "1.running_mean" in run.server.u
    for c, lam in enumerate(run.clients.states.gather(np.arange(2)).r):
        for k, v in run.client_model(c).items():
            near(v, start[k] + lam * alone[c][k] + (1 - lam) * (alone[0][k] + alone[1][k]) / 2)


@both_engines
def test_features_mode(engine: Any) -> None:
    """With BatchNorm even equal weights have other features in training; in evaluation mode they are the same."""
    settings: dict[str, Any] = {"lr": 0.0, "local_epochs": 1, "batch_size": None}
    code, both = (
        federation(LGMix(**settings, features_mode=m), engine, model=net(norm=True)) for m in ("as_code", "both_eval")
    )
    code.round()
    both.round()
    assert (both.clients.states.rows().r == 0.5).all()
    assert ((code.clients.states.rows().r - 0.5).abs() > 1e-3).all()


# traces ----------------------------------------------------------------------------------------------
LOCAL = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
COMMON = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)


def ratio(trace: Any, factor: float = 1.0, padding: int = 0) -> Tensor:
    """Of the features above, as they come in two batches."""
    task, mix = Task(nn.Linear(2, 1), "squared_error", dtype=torch.float64), LGMix(trace=trace)
    energies = []
    for h in (LOCAL * factor, COMMON * factor):
        energy = mix.no_energy(task)
        for part in (h[:2], h[2:]):
            weights = torch.cat([torch.ones(len(part)), torch.zeros(padding)]).double() if padding else None
            rows = torch.cat([part, part[:1].expand(padding, 2)])
            energy = mix.plus(energy, rows, Batch(rows, rows, weights, torch.tensor(0)))
        energies.append(mix.energy(energy))
    return share(*energies)


@pytest.mark.parametrize(
    ("trace", "expected"), [("paper", 0.575), ("code", 0.469156940533), ("centred", 0.444444444444)]
)
def test_traces_by_hand(trace: str, expected: float) -> None:
    near(ratio(trace), expected)
    near(ratio(trace, factor=7.0), expected)
    near(ratio(trace, padding=3), expected)


def test_the_sum_of_squares_is_the_trace() -> None:
    near(torch.stack([torch.outer(h, h) for h in LOCAL]).sum(0).trace(), (LOCAL**2).sum())


@both_engines
@pytest.mark.parametrize(("trace", "counted"), [("code", slice(-1)), ("centred", slice(None))])
def test_centred_traces_in_a_round(engine: Any, trace: Any, counted: slice) -> None:
    run = federation(LGMix(lr=0.2, local_epochs=1, batch_size=None, trace=trace, history="none"), engine)
    run.round()
    u, mine = run.server.u, run.personal_models()
    run.round()
    for c, rows in enumerate(run.data.splits["train"]):
        values = []
        for model in ({k: v[c] for k, v in mine.items()}, u):
            h = torch.tanh(run.data.x[rows] @ model["0.weight"].T + model["0.bias"])
            h = h - h.mean(0)
            values.append(torch.linalg.svdvals(h.T @ h / len(h))[counted].sum())
        near(run.clients.states.gather(np.array([c])).r, [values[0] / (values[0] + values[1])])


# participation, traffic, refusals --------------------------------------------------------------------
@both_engines
def test_absent_clients_stay_while_u_moves(engine: Any) -> None:
    run = federation(LGMix(**TRAINING), engine)
    run.round([0, 1])
    before, u = run.client_model(1), run.server.u
    run.round([0, 2])  # client 2's copy of u is old: it is sent anew
    same(run.client_model(1), before)
    assert not torch.equal(run.server.u["0.weight"], u["0.weight"])
    run.round()
    copies = run.clients.states.gather(np.arange(3)).u
    for c in range(3):
        same({k: v[c] for k, v in copies.items()}, run.server.u)


@both_engines
def test_bytes_of_a_round(engine: Any) -> None:
    """One update each way; lambda stays on the client. Those who were away are sent u as well."""
    n = sum(v.numel() for v in net().parameters())
    run = federation(LGMix(**TRAINING), engine)
    for _ in range(2):
        record = run.round()
        assert (record.bytes_down, record.bytes_up) == (4 * 3 * n, 4 * 3 * n)
    record = run.round([0, 1])
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)
    record = run.round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * 3 * n, 4 * 3 * n)


@pytest.mark.parametrize(
    "wrong", [{"eta_g": 0.0}, {"trace": "svd"}, {"history": "all"}, {"features_mode": "train"}, {"eta_g": -1.0}]
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        build_algorithm("lg-mix", {}, wrong)


def test_a_single_feature_is_refused_for_the_codes_trace() -> None:
    with pytest.raises(InputError, match=r"needs a linear head .* of at least 2 inputs"):
        example(InOrder(lr=0.1, trace="code"), Sequential)


# statistics ------------------------------------------------------------------------------------------


@both_engines
def test_variances_stay_positive(engine: Any) -> None:
    """A client of many steps has a low variance already, and gets the updates of others, who still lower theirs."""
    rng = np.random.default_rng(0)
    clients = [(0.1 * rng.normal(size=(n, 3)), rng.integers(0, 2, n)) for n in (64, 16, 16, 16, 16)]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    data = FederatedData.from_arrays(clients)
    method = FixedShare(lr=0.01, batch_size=2, local_epochs=1, forced=0.3)
    run = Federation(module, data, method, engine=engine())
    for _ in range(4):
        run.round()
        for model in (run.personal_models(), run.global_model()):
            assert model is not None and (model["1.running_var"] > 0).all()
        assert np.isfinite(run.evaluate().loss).all()


def test_a_variance_that_mixing_made_negative_is_the_trained_one() -> None:
    mixed = {"n.running_var": torch.tensor([0.5, -0.1]), "n.running_mean": torch.tensor([-1.0, 1.0])}
    trained = {"n.running_var": torch.tensor([0.3, 0.2]), "n.running_mean": torch.zeros(2)}
    found = valid(mixed, trained)
    assert found["n.running_var"].tolist() == pytest.approx([0.5, 0.2])
    assert found["n.running_mean"].tolist() == [-1.0, 1.0]


# what is shown of it --------------------------------------------------------------------------------


@both_engines
def test_distances_of_layers_between_local_and_global_models(engine: Any) -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(12, 3)), rng.integers(0, 2, 12)) for _ in range(3)]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    run = Federation(module, FederatedData.from_arrays(clients), LGMix(lr=0.5, batch_size=4), engine=engine())
    assert (run.facts()[DISTANCES] == 0).all()
    for _ in range(2):
        run.round()
    u, found = run.global_model(), run.facts()[DISTANCES]
    assert u is not None and found.shape == (3, 2)
    for client in range(3):
        w = run.client_model(client)
        for place, layer in enumerate(("0", "2")):
            flat = [np.concatenate([m[f"{layer}.{k}"].numpy().ravel() for k in ("weight", "bias")]) for m in (w, u)]
            expected = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
            assert expected > 0
            np.testing.assert_allclose(found[client, place], expected, rtol=1e-12)


# maps -----------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3, padding=1)
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)))
        return out


@both_engines
@pytest.mark.parametrize("map_features", ["mean", "pixels"])
def test_lambda_of_a_model_of_masks(engine: Any, map_features: Any) -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 1, 5, 5)), rng.integers(0, 2, (6, 5, 5))) for _ in range(2)]
    torch.manual_seed(0)
    task = Task(Convolutions(), "dice", dtype=torch.float64)
    data = FederatedData.from_arrays(clients, test=0.3)
    method = LGMix(lr=2.0, batch_size=1, local_epochs=1, map_features=map_features)
    run = Federation(task, data, method, engine=engine())
    run.round()
    for client, rows in enumerate(data.splits["train"]):
        net = Convolutions().double()
        net.load_state_dict(task.initial)
        order = rng_order(run.seed, client, rows)
        local = common = 0.0
        for row in order:
            x, y = data.x[row][None], data.y[row][None].long()
            with torch.no_grad():
                common += energy(task.initial, x, map_features)
                local += energy(net.state_dict(), x, map_features)
            net.zero_grad()
            p = torch.softmax(net(x), 1)[:, 1]
            loss = 1 - (2 * (p * y).sum() + 1) / ((p**2).sum() + y.sum() + 1)
            loss.backward()
            with torch.no_grad():
                for v in net.parameters():
                    v -= 2.0 * v.grad  # type: ignore[operator]
        assert abs(local - common) > 1e-3 * common
        np.testing.assert_allclose(run.facts()["lambda"][client], local / (local + common), rtol=1e-9)


def rng_order(seed: int, client: int, rows: np.ndarray) -> np.ndarray:
    return rows[stream(seed, "batch", 0, client, 0).permutation(len(rows))]


def energy(model: Model, x: Tensor, map_features: str) -> float:
    h = torch.relu(nn.functional.conv2d(x, model["body.weight"], model["body.bias"], padding=1))
    return float((h.mean((2, 3)) if map_features == "mean" else h).square().sum())


@both_engines
@pytest.mark.parametrize("trace", ["code", "centred"])
@pytest.mark.parametrize("map_features", ["mean", "pixels"])
def test_centred_traces_of_maps(engine: Any, trace: Any, map_features: Any) -> None:
    """Against numpy's covariance of all vectors that were met."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 1, 5, 5)), rng.integers(0, 2, (6, 5, 5))) for _ in range(2)]
    torch.manual_seed(0)
    task = Task(Convolutions(), "dice", dtype=torch.float64)
    data = FederatedData.from_arrays(clients, test=0.3)
    method = LGMix(lr=2.0, batch_size=2, local_epochs=1, trace=trace, map_features=map_features)
    run = Federation(task, data, method, engine=engine())
    run.round()
    for client, rows in enumerate(data.splits["train"]):
        net = Convolutions().double()
        net.load_state_dict(task.initial)
        order, met = rng_order(run.seed, client, rows), {"local": [], "common": []}
        for k in range(0, len(order), 2):
            x, y = data.x[order[k : k + 2]], data.y[order[k : k + 2]].long()
            for name, model in (("local", net.state_dict()), ("common", task.initial)):
                h = torch.relu(nn.functional.conv2d(x, model["body.weight"], model["body.bias"], padding=1)).detach()
                met[name].append(h.mean((2, 3)) if map_features == "mean" else h.movedim(1, -1).flatten(0, 2))
            net.zero_grad()
            p = torch.softmax(net(x), 1)[:, 1].flatten(1)
            g = y.flatten(1)
            (1 - (2 * (p * g).sum(1) + 1) / ((p**2).sum(1) + g.sum(1) + 1)).mean().backward()
            with torch.no_grad():
                for v in net.parameters():
                    v -= 2.0 * v.grad  # type: ignore[operator]
        values = {name: np.linalg.eigvalsh(np.cov(torch.cat(h).numpy().T, bias=True)) for name, h in met.items()}
        kept = {name: v[1:].sum() if trace == "code" else v.sum() for name, v in values.items()}
        wanted = kept["local"] / (kept["local"] + kept["common"])
        assert abs(wanted - 0.5) > 1e-4
        np.testing.assert_allclose(run.facts()["lambda"][client], wanted, rtol=1e-9)


def test_vectors_of_the_heads_input() -> None:
    h = torch.randn(3, 4, 5, 6)
    assert vectors(h, "pixels").shape == (3, 30, 4)
    torch.testing.assert_close(vectors(h, "mean")[:, 0], h.flatten(2).mean(2))
    assert torch.equal(vectors(h[:, :, 0, 0], "pixels")[:, 0], h[:, :, 0, 0])
    assert vectors(h[:, :, 0], "pixels").shape == (3, 1, 24)  # a sequence is taken as it is


def test_energy_of_all_pixels_is_the_default() -> None:
    """Eq. (5) with every output of a convolutional head: Sigma is a sum over samples and pixels."""
    assert LGMix().map_features == "pixels"
