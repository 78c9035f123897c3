"""What a federation checks and reports beside the contract of algorithms."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Task
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation


def make_data(targets: str = "labels") -> FederatedData:
    rng = np.random.default_rng(0)
    clients = []
    for n in (8, 12, 20):
        x = rng.normal(size=(n, 4))
        clients.append((x, x[:, :1] * 2.0 if targets == "real" else rng.integers(0, 2, n)))
    return FederatedData.from_arrays(clients, seed=0)


def federate(**options: Any) -> Federation:
    algorithm = options.pop("algorithm", FedAvg(lr=0.1, batch_size=4))
    return Federation(options.pop("model", nn.Linear(4, 2)), options.pop("data", make_data()), algorithm, **options)


def test_sampling_is_keyed_by_seed_and_round() -> None:
    first = [federate(seed=1, clients_per_round=2).round().clients.tolist() for _ in range(2)]
    assert first[0] == first[1]
    several = federate(seed=1, clients_per_round=2)
    drawn = [several.round().clients.tolist() for _ in range(12)]
    assert drawn[0] == first[0] and len({tuple(d) for d in drawn}) == 3


@pytest.mark.parametrize(("share", "wanted"), [(1.0, 3), (0.67, 2), (0.34, 1), (0.01, 1)])
def test_cohort_size(share: float, wanted: int) -> None:
    assert len(federate(participation=share).round().clients) == wanted


def test_cohort_size_survives_rounding() -> None:
    assert Federation(nn.Linear(4, 2), _many(100), FedAvg(), participation=0.29).setup.cohort_size == 29


def _many(clients: int) -> FederatedData:
    x = np.ones((4, 4))
    return FederatedData.from_arrays([(x, np.array([0, 1, 0, 1]))] * clients)


def test_a_schedule_is_followed_and_its_end_is_said() -> None:
    federation = federate(schedule=[[2], [0, 1]])
    assert [federation.round().clients.tolist() for _ in range(2)] == [[2], [0, 1]]
    with pytest.raises(InputError, match="schedule names the clients of 2 rounds; this is round 3"):
        federation.round()
    assert federate(schedule=lambda t: [t]).run(3, evaluate_every=0).rounds[2].clients.tolist() == [2]


def test_a_schedule_may_hold_generators_and_arrays() -> None:
    federation = federate(schedule=[(k for k in (2, 0, 2)), np.array([1, 0])])
    assert [federation.round().clients.tolist() for _ in range(2)] == [[0, 2], [0, 1]]
    assert federation.setup.cohort_size == 2


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[0], [0, 3]], r"clients = \[0, 3\]: ids of a round are some of 0 to 2"),
        ([[0], []], r"clients = \[\]: ids of a round"),
        ([], "schedule names the clients of 0 rounds"),
        ([[0], [True, False, True]], r"clients = \[True, False, True\]: ids of a round are whole numbers"),
        ([[0.7, 1.2]], r"clients = \[0\.7, 1\.2\]: ids of a round are whole numbers"),
    ],
)
def test_a_schedule_is_refused_before_the_first_round(schedule: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(schedule=schedule)


def test_the_cohorts_size_comes_from_the_schedule() -> None:
    assert federate(schedule=[[0, 1], [1, 2]]).setup.cohort_size == 2
    assert federate(schedule=[[0], [1, 2]]).setup.cohort_sizes == (1, 2)
    assert federate(schedule=[[0], [1, 2]], clients_per_round=2).setup.cohort_size == 2
    assert federate(schedule=lambda t: [0], clients_per_round=1).setup.cohort_size == 1
    with pytest.raises(InputError, match=r"a round has 1, 2 or 3 clients, by .*schedule.*give clients_per_round"):
        _ = federate(schedule=[[0], [1, 2], [2], range(3)]).setup.cohort_size
    with pytest.raises(InputError, match=r"a round has an unknown number of clients.*give clients_per_round"):
        _ = federate(schedule=lambda t: [0]).setup.cohort_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0.0}, "participation = 0.0"),
        ({"clients_per_round": 4}, "clients_per_round = 4: it is a number from 1 to 3"),
        ({"initial": {"weight": torch.zeros(2, 4)}}, "initial has the tensors"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(**options)


def test_unknown_clients_of_a_round() -> None:
    with pytest.raises(InputError, match="some of 0 to 2"):
        federate().round([1, 3])
    with pytest.raises(InputError, match="whole numbers"):  # a mask, which would be read as the clients 0 and 1
        federate().round(np.array([True, False, True]))


def test_regression_has_losses_but_no_accuracy() -> None:
    federation = federate(data=make_data("real"), model=Task(nn.Linear(4, 1), "squared_error", dtype=torch.float64))
    before = federation.evaluate().loss.mean()
    history = federation.run(10, evaluate_every=0)
    assert history.evaluations[10].loss.mean() < 0.2 * before
    assert np.isnan(history.accuracy).all()
    with pytest.raises(InputError, match="no client has an accuracy"):
        history.summary()


def test_a_loss_of_ones_own_can_still_be_a_classification() -> None:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y, label_smoothing=0.1, reduction="none")

    assert np.isnan(federate(model=Task(nn.Linear(4, 2), loss)).evaluate().accuracy).all()
    assert not np.isnan(federate(model=Task(nn.Linear(4, 2), loss, classifies=True)).evaluate().accuracy).any()


def test_hyperparameters_are_checked_however_an_algorithm_is_made() -> None:
    with pytest.raises(InputError, match=r"algorithm\.lr = -1"):
        FedAvg(lr=-1)
    assert type(FedAvg(lr=1).lr) is float


@dataclass(frozen=True)
class Forgetful(Local):
    """Its clients return another state than they began with."""

    name: ClassVar[str] = "forgetful"

    def finish(self, task: Any, down: Any, c: Any) -> Any:
        return {}, {"x": c.x}


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_a_state_of_another_structure_is_explained(engine: type[Any]) -> None:
    with pytest.raises(TypeError, match=r"(?s)finish returned a client state .* init_client's is"):
        federate(algorithm=Forgetful(lr=0.1), engine=engine("cpu")).round()


def test_rows_and_summary() -> None:
    history = federate().run(4, evaluate_every=2)
    rows = history.rows()
    assert [(r["round"], r["client"]) for r in rows] == [(t, c) for t in (2, 4) for c in range(3)]
    assert history.summary()["mean"] == pytest.approx(np.mean([r["accuracy"] for r in rows if r["round"] == 4]))
