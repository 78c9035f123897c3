"""FedSAM: two clients by hand, and its limits."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import Tensor, nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedsam import FedSAM
from bespokefl.core import InputError, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

TRAINING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 3}
both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])


def perturbed_gradient(w: small.Weights, x: small.Array, y: Any, rho: float) -> small.Weights:
    g = small.gradient(w, x, y)
    size = np.sqrt(sum((v**2).sum() for v in g.values()))  # over all parameters
    return small.gradient({k: w[k] + rho * g[k] / size for k in w}, x, y)


def trained(w: small.Weights, samples: Any, batches: Any, rho: float) -> small.Weights:
    (x, y), v, m = samples, w, small.Weights()
    for r in batches:
        v, m = small.sgd(v, perturbed_gradient(v, x[r], y[r], rho), m, lr=0.1, momentum=0.9)
    return v


@both_engines
@pytest.mark.parametrize(
    ("eta_g", "weights", "p"), [(1.0, "uniform", (1 / 2, 1 / 2)), (1.5, "sample", (7 / 11, 4 / 11))]
)
def test_by_hand(engine: type, eta_g: float, weights: Any, p: Any) -> None:
    algorithm = FedSAM(**TRAINING, rho=0.3, eta_g=eta_g, weights=weights)
    federation = small.federate(algorithm, engine())
    w = small.start()
    for t in range(2):
        federation.round()
        rows = [small.batches(federation, algorithm.train, i, t)[0] for i in range(2)]
        models = [trained(w, small.samples()[i], rows[i], 0.3) for i in range(2)]
        average = small.average(models, p)
        w = {k: w[k] + eta_g * (average[k] - w[k]) for k in w}
    small.assert_models(federation.server["w"], w)
    for i, v in enumerate(models):
        small.assert_models(federation.client_model(i), v)


@both_engines
def test_fine_tuning_takes_perturbed_steps(engine: type) -> None:
    algorithm = FedSAM(**TRAINING, rho=0.3, personal="finetune", finetune_epochs=2)
    federation = small.federate(algorithm, engine())
    for i in range(2):
        (rows,) = small.batches(federation, algorithm.tuned, i, 0)
        small.assert_models(federation.client_model(i), trained(small.start(), small.samples()[i], rows, 0.3))


@both_engines
def test_without_rho_it_is_uniform_fedavg_bit_for_bit(engine: type) -> None:
    ours = small.federate(FedSAM(**TRAINING, rho=0.0), engine())
    fedavg = small.federate(FedAvg(**TRAINING, weights="uniform"), engine())
    for _ in range(2):
        ours.round()
        fedavg.round()
    for k, v in fedavg.server["w"].items():
        assert torch.equal(ours.server["w"][k], v)


def no_loss(out: Tensor, y: Tensor) -> Tensor:
    return 0 * out.sum(1)


@both_engines
def test_where_there_is_no_gradient_there_is_no_perturbation(engine: type) -> None:
    samples = [{"train": xy, "test": xy} for xy in small.samples()]
    task = Task(small.TanhNet(), no_loss, classifies=False, dtype=torch.float64)
    federation = Federation(task, FederatedData.from_arrays(samples), FedSAM(**TRAINING), engine=engine())
    before = {k: v.clone() for k, v in federation.server["w"].items()}
    assert not federation.round().failed
    for k, v in before.items():
        assert torch.equal(federation.server["w"][k], v)


@pytest.mark.parametrize("eta_g", [1.0, 3.0])
def test_running_statistics_are_those_of_the_unperturbed_pass_and_never_beyond_the_mean(eta_g: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    data = FederatedData.from_arrays([{"train": xy, "test": xy} for xy in small.samples()], classes=("a", "b", "c"))
    runs = []
    for algorithm in (
        FedSAM(lr=0.1, local_epochs=1, batch_size=None, rho=0.5, eta_g=eta_g),
        FedAvg(lr=0.1, local_epochs=1, batch_size=None, weights="uniform"),
    ):
        run = Federation(Task(net, dtype=torch.float64), data, algorithm, engine="sequential")
        run.round()
        runs.append(run.server["w"])
    for k in ("1.running_mean", "1.running_var"):  # after one step, which starts from the same model
        assert torch.equal(runs[0][k], runs[1][k])
    assert not torch.equal(runs[0]["0.weight"], runs[1]["0.weight"])


def test_bytes_of_a_round() -> None:
    n = small.flat(small.start()).size
    record = small.federate(FedSAM(**TRAINING)).round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)


@pytest.mark.parametrize("wrong", [{"rho": -0.1}, {"eta_g": 0.0}])
def test_refusals(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        FedSAM(**wrong)  # type: ignore[arg-type]
