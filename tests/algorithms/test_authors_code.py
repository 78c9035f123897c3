"""The authors' own code of PGFed, PGFedMo and LG-Mix, run on the samples, first models and batches of ``formulas.py``.

``authors_code.json`` holds what came out there, in float64: of each model's tensors the two numbers of ``digest``
(parameters, then those buffers that are floating), PGFed's matrix A and intercepts, LG-Mix's lambdas. Ours must agree
with the options that make it their code.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.algorithms import formulas
from torch import nn

from bespokefl.algorithms import Algorithm
from bespokefl.algorithms.lg_mix import LGMix
from bespokefl.algorithms.pgfed import PGFed, PGFedMo
from bespokefl.core.trees import rows
from bespokefl.federation import Federation
from bespokefl.models.convnets import fedavg_cnn

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "authors_code.json").read_text())
PRECISION: Any = {"rtol": 2e-12, "atol": 2e-13}
TRAINING: Any = {"local_epochs": formulas.EPOCHS, "batch_size": formulas.BATCH, "drop_last": True}
PGFED: Any = {**TRAINING, "momentum": 0.9, "opt_state": "keep", "alpha_order": "code", "grad_pass": "code"}
NET: Any = (formulas.Net, (4,), 3)
NORMED: Any = (formulas.NormNet, (2, 6, 6), 4)
CNN: Any = (lambda: fedavg_cnn((2, 16, 16), 4), (2, 16, 16), 4)
LOW: Any = {"lr": 0.05, "mu": 0.3, "eta2": 0.05}

both_engines = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def trained(kind: Any, algorithm: Algorithm, schedule: Any, engine: str) -> Federation:
    make, shape, classes = kind
    module: nn.Module = make()
    run = Federation(
        module.double(),
        formulas.federated(shape, classes),
        algorithm,
        engine=engine,
        seed=formulas.SEED,
        initial=formulas.start(module),
        clients_per_round=len(schedule[0]),
        schedule=schedule,
    )
    for _ in schedule:
        run.round()
    return run


def assert_near(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), **PRECISION)


def assert_models(run: Federation, server_model: Any, theirs: Any) -> None:
    assert_near(formulas.digest(server_model), theirs["global"])
    personal = run.personal_models()
    assert_near([formulas.digest(rows(personal, i)) for i in range(len(formulas.SIZES))], theirs["personal"])


@both_engines
@pytest.mark.parametrize(
    ("case", "kind", "algorithm", "schedule"),
    [
        ("net-full", NET, PGFed(**PGFED, **LOW), formulas.EVERYONE),
        ("net-partial", NET, PGFed(**PGFED, **LOW), formulas.SCHEDULE),
        ("net-partial-mo", NET, PGFedMo(**PGFED, **LOW, beta=0.5), formulas.SCHEDULE),
        ("cnn-partial", CNN, PGFed(**PGFED, lr=0.01, mu=0.1, eta2=0.01), formulas.SCHEDULE[:3]),
        ("norm-partial", NORMED, PGFed(**PGFED, lr=0.02, mu=0.2, eta2=0.05, buffers="local"), formulas.SCHEDULE),
    ],
)
def test_pgfed(case: str, kind: Any, algorithm: PGFed, schedule: Any, engine: str) -> None:
    run, theirs = trained(kind, algorithm, schedule, engine), RECORDED[case]
    assert_models(run, run.server.w, theirs)
    assert_near(run.server.A, theirs["A"])
    last = [int(i) for i in run.server.ids]
    assert sorted(last) == sorted(int(i) for i in theirs["a"])
    for row, i in enumerate(last):
        assert_near(run.server.a[row], theirs["a"][str(i)])
        assert_near(formulas.digest(rows(run.server.grads, row)), theirs["grad"][str(i)])


@both_engines
@pytest.mark.parametrize(
    ("case", "kind", "rounds", "more"),
    [
        ("lgmix-net", NET, 5, {"lr": 0.1}),
        ("lgmix-norm", NORMED, 5, {"lr": 0.05}),
        ("lgmix-norm-uniform", NORMED, 3, {"lr": 0.05, "weights": "uniform"}),
    ],
)
def test_lg_mix(case: str, kind: Any, rounds: int, more: Any, engine: str) -> None:
    algorithm = LGMix(**{**TRAINING, "local_epochs": 1}, **more, trace="code")
    run, theirs = trained(kind, algorithm, (tuple(range(5)),) * rounds, engine), RECORDED[case]
    assert_models(run, run.server.u, theirs)
    assert_near(run.clients.states.rows().r, [ratios[-1] for ratios in theirs["ratios"]])
    assert_near(run.facts()["lambda"], np.mean(theirs["ratios"], axis=1))
