"""pFedHN: two rounds worked out in numpy, PLGU-GHN as its neighbour, and what travels."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import numpy_hypernetwork as hn
from tests.algorithms import small
from tests.algorithms.small import Array, Weights
from torch import nn

from bespokefl.algorithms.pfedhn import HyperNetworked, PFedHN
from bespokefl.algorithms.plgu_ghn import PLGUGHN
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.errors import InputError
from bespokefl.federation import Federation

N_BODY, N_HEAD = 9, 12
H: dict[str, Any] = {"width": 4, "embed": 2, "n_hidden": 1}
LOCAL: dict[str, Any] = {
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "local_epochs": 4,
    "batch_size": 3,
    "local_unit": "steps",
}
SERVER: dict[str, Any] = {"eta_h": 0.3, "eta_v": 0.2, "momentum_h": 0.8, "weight_decay_h": 0.02, "clip": 0.4}


def test_the_defaults_of_both_methods_differ_where_their_docstrings_say() -> None:
    ours, theirs = PLGUGHN(), PFedHN()
    shared = [field.name for field in fields(HyperNetworked)]
    assert {key for key in shared if getattr(ours, key) != getattr(theirs, key)} == {"n_hidden", "embed_opt"}


def clipped(g: Weights, limit: float | None) -> Weights:
    size = np.sqrt(sum((v**2).sum() for v in g.values()))
    return g if limit is None or size <= limit else {k: limit / size * v for k, v in g.items()}


def decayed_sgd(
    w: Weights, g: Weights, m: Weights, lr: float, momentum: float, decay: float
) -> tuple[Weights, Weights]:
    return small.sgd(w, {k: v + decay * w[k] for k, v in g.items()}, m, lr, momentum)


def by_hand(federation: Federation, algorithm: PFedHN, rounds: list[list[int]]) -> tuple[Weights, Array, list[Weights]]:
    """phi, v, and every client's model after the rounds."""
    phi, v = hn.values(federation.server.phi), federation.server.v.numpy().copy()
    names = small.BODY if algorithm.private_head else small.BODY + small.HEAD
    shapes = {k: small.start()[k] for k in names}
    heads = [small.start() for _ in range(2)]
    m: Weights = {}
    m_v: Weights = {}
    for t, clients in enumerate(rounds):
        for group in [clients] if algorithm.server_step == "cohort" else [[i] for i in clients]:
            g, g_v = {k: np.zeros_like(value) for k, value in phi.items()}, np.zeros_like(v)
            for i in group:
                sent = heads[i] | hn.write(phi, v[i], shapes)
                (x, y), w, local = small.samples()[i], sent, Weights()
                (rows,) = small.batches(federation, algorithm.train, i, t)
                for r in rows:
                    step = clipped(small.gradient(w, x[r], y[r]), algorithm.clip)
                    w, local = decayed_sgd(w, step, local, 0.2, 0.9, 0.01)
                heads[i] = w
                pulled, g_v[i] = hn.pull(phi, v[i], {k: sent[k] - w[k] for k in names})
                g = {name: g[name] + value / len(group) for name, value in pulled.items()}
            together = clipped({**g, "v": g_v}, algorithm.clip)
            g_v = together.pop("v")
            phi, m = decayed_sgd(phi, together, m, 0.3, 0.8, 0.02)
            if algorithm.embed_opt == "sgd":
                stepped, m_v = decayed_sgd({"v": v}, {"v": g_v}, m_v, 0.2, 0.8, 0.02)
                v = stepped["v"]
            else:
                v = v - 0.2 * g_v
    own = small.HEAD if algorithm.private_head else ()
    return phi, v, [{k: heads[i][k] for k in own} | hn.write(phi, v[i], shapes) for i in range(2)]


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("clients", [[[0, 1], [0, 1]], [[0], [0, 1]]], ids=["all", "partial"])
@pytest.mark.parametrize(
    "options",
    [{}, {"server_step": "cohort", "embed_opt": "plain"}, {"private_head": True, "clip": None}],
    ids=["official", "cohort", "private head"],
)
def test_two_rounds_by_hand(engine: type, clients: list[list[int]], options: dict[str, Any]) -> None:
    algorithm = PFedHN(**{**H, **LOCAL, **SERVER, **options})
    federation = small.federate(algorithm, engine(), schedule=clients)
    phi, v, models = by_hand(federation, algorithm, clients)
    for _ in clients:
        federation.round()
    small.assert_models(federation.server.phi, phi, 1e-11)
    np.testing.assert_allclose(federation.server.v.numpy(), v, rtol=1e-11, atol=1e-12)
    for i, w in enumerate(models):
        small.assert_models(federation.client_model(i), w, 1e-11)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_mean_of_a_cohort_is_plgu_ghn_without_perturbation(engine: str) -> None:
    shared = {**H, **LOCAL, **SERVER, "embed_opt": "plain"}
    ours = small.federate(PFedHN(**shared, server_step="cohort"), engine)
    theirs = small.federate(PLGUGHN(**shared, rho=0.0), engine)
    for run in (ours, theirs):
        run.round()
        run.round()
    assert all(torch.equal(v, theirs.server.phi[k]) for k, v in ours.server.phi.items())
    assert torch.equal(ours.server.v, theirs.server.v)


def test_one_client_is_the_same_in_both_kinds_of_step() -> None:
    runs = [small.federate(PFedHN(**H, **LOCAL, server_step=s)) for s in ("client", "cohort")]  # type: ignore[arg-type]
    for run in runs:
        run.round(clients=[1])
        run.round(clients=[0])
    assert all(torch.equal(v, runs[1].server.phi[k]) for k, v in runs[0].server.phi.items())
    for run in runs:
        run.round(clients=[0, 1])
    assert not torch.equal(*(run.server.phi["trunk.0.weight"] for run in runs))


@pytest.mark.parametrize("embed_opt", ["sgd", "plain"])
def test_absent_embeddings_move_only_with_the_optimiser_of_phi(embed_opt: Any) -> None:
    run = small.federate(PFedHN(**H, **LOCAL, embed_opt=embed_opt))
    run.round(clients=[1])
    before = run.server.v
    run.round(clients=[0])
    assert not torch.equal(run.server.v[0], before[0])
    assert torch.equal(run.server.v[1], before[1]) == (embed_opt == "plain")


def test_the_hypernetwork_learns_the_clients_models() -> None:
    """The sign: steps along Delta lower the losses of H(v_i; phi)."""
    run = small.federate(PFedHN(width=20, eta_h=0.1, eta_v=0.1, local_epochs=10, local_unit="steps", lr=0.05))
    before = run.evaluate().loss
    for _ in range(10):
        run.round()
    assert (run.evaluate().loss < before - 0.1).all()


def test_sizes_and_defaults() -> None:
    run = small.federate(PFedHN())
    assert run.server.v.shape == (2, 1)  # floor(1 + N / 4)
    n = N_BODY + N_HEAD
    assert sum(v.numel() for v in run.server.phi.values()) == (1 + 1) * 100 + 3 * 101 * 100 + 101 * n
    (rows,) = small.batches(run, PFedHN(batch_size=3, local_unit="steps", local_epochs=50).train, 1, 0)
    assert len(rows) == 50
    (rows,) = small.batches(run, PFedHN(batch_size=3, local_epochs=2).train, 1, 0)
    assert len(rows) == 4


def test_bytes_and_state() -> None:
    for private, n in ((False, N_BODY + N_HEAD), (True, N_BODY)):
        run = small.federate(PFedHN(**H, **LOCAL, private_head=private))
        record = run.round(silent=[1])
        assert (record.bytes_down, record.bytes_up) == (2 * 4 * n, 4 * n)
        assert run.clients.states.clients == ([0] if private else [])
        assert not run.has_global


def test_nothing_to_write() -> None:
    x, y = small.samples()[0]
    data = FederatedData.from_arrays([{"train": (x, y), "test": (x, y)}], classes=("a", "b", "c"))
    with pytest.raises(InputError, match=r"algorithm\.private_head = true: .* no trained layer before its head"):
        Federation(nn.Linear(2, 3).double(), data, PFedHN(private_head=True))
