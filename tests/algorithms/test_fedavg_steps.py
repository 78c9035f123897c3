"""FedAvg and then steps of the clients' own: both phases in numpy, what is scored when, and what does not fit."""

from typing import Any

import numpy as np
import pytest
from tests.algorithms import small

from bespokefl.algorithms import fedavg_steps
from bespokefl.algorithms.fedavg_steps import FedAvgSteps
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.errors import InputError
from bespokefl.federation import Federation

SCHEDULE = [[0], [0, 1], [1], [0], [0, 1]]  # in the last three, all clients take a step whoever is asked
TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize(
    ("mu", "step_lr", "opt_state", "at_once"),
    [(0.0, None, "reset", 2048), (0.4, 0.3, "keep", 2048), (0.4, 0.3, "reset", 4)],
)
def test_by_hand(
    engine: type, mu: float, step_lr: float | None, opt_state: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedavg_steps, "SAMPLES_AT_ONCE", at_once)
    algorithm = FedAvgSteps(**TRAINING, opt_state=opt_state, after=2, mu=mu, step_lr=step_lr)
    run = small.federate(algorithm, engine(), schedule=SCHEDULE)
    data, w, kept = small.samples(), small.start(), [{}, {}]
    for t in range(2):
        run.round()
        models = []
        for i in SCHEDULE[t]:
            x, m = w, kept[i] if opt_state == "keep" else {}
            for r in small.batches(run, algorithm.train, i, t)[0]:
                x, m = small.sgd(x, small.gradient(x, data[i][0][r], data[i][1][r]), m, 0.1, 0.9)
            models.append(x)
            kept[i] = m
        n = [small.SIZES[i] for i in SCHEDULE[t]]
        w = small.average(models, [v / sum(n) for v in n])
        small.assert_models(run.server["w"], w)
        for i in range(2):
            small.assert_models(run.client_model(i), w)
    theta, momenta = [w, w], [{}, {}]
    for _ in range(3):
        run.round()
        for i in range(2):
            own, other = (small.gradient(theta[i], *data[j]) for j in (i, 1 - i))
            g = {k: own[k] + mu * other[k] for k in w}  # N - 1 is 1
            theta[i], momenta[i] = small.sgd(theta[i], g, momenta[i], 0.1 if step_lr is None else step_lr, 0.9)
        small.assert_models(run.server["w"], w)
        for i in range(2):
            small.assert_models(run.client_model(i), theta[i])


def test_the_others_share_mu_however_many_they_are() -> None:
    """Three clients: the mean over the others of their mean risks, whatever their sizes are."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 2)), rng.integers(0, small.CLASSES, n)) for n in (2, 5, 9)]
    data = FederatedData.from_arrays([{"train": xy, "test": xy} for xy in clients], classes=("a", "b", "c"))
    reference = small.federate(FedAvgSteps(after=1))
    algorithm = FedAvgSteps(lr=0.5, local_epochs=1, batch_size=None, after=1, mu=0.6)
    run = Federation(reference.task, data, algorithm, engine="sequential", clients_per_round=1)
    run.round()
    w = {k: v.numpy().copy() for k, v in run.server["w"].items()}
    run.round()
    for i in range(3):
        own, *others = (small.gradient(w, *clients[j]) for j in (i, (i + 1) % 3, (i + 2) % 3))
        wanted = {k: w[k] - 0.5 * (own[k] + 0.3 * (others[0][k] + others[1][k])) for k in w}
        small.assert_models(run.client_model(i), wanted)


def test_what_does_not_fit_is_refused() -> None:
    one = FederatedData.from_arrays(
        [{"train": small.samples()[0], "test": small.samples()[0]}], classes=("a", "b", "c")
    )
    task = small.federate(FedAvgSteps()).task
    with pytest.raises(InputError, match=r"algorithm\.mu = 0\.1 \(fedavg-steps\).*there is one client.*mu = 0"):
        Federation(task, one, FedAvgSteps(mu=0.1))
    Federation(task, one, FedAvgSteps())
    for wrong in ({"after": 0}, {"mu": -0.1}, {"step_lr": -1.0}):
        with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))} = "):
            FedAvgSteps(**wrong)  # type: ignore[arg-type]


def test_only_the_own_risk_can_be_apart() -> None:
    assert "samples" in FedAvgSteps(mu=0.1).remote_unsupported and not FedAvgSteps().remote_unsupported
