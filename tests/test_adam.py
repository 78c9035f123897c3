"""Adam as the local optimiser of a federation: in every method that takes it, on both engines, over interruptions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import test_contract as contract
from tests.algorithms import small
from torch import nn

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import InputError, Task
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.experiments.reading import parse_experiment
from bespokefl.federation import Federation

ADAM = {"optimizer": "adam", "lr": 0.01, "momentum": 0.0, "betas": [0.8, 0.9]}
REFUSE = {"fedpg", "s-fedpg", "per-fedavg", "pfedme", "plgu-grep"}
OWN: dict[str, dict[str, Any]] = {"plgu-grep": {"score_from": "previous"}, "fedfomo": {"weight_decay": 0.01}}
OFTEN = {
    "fedavg",
    "ditto",
    "fedrep",
    "fedrod",
    "lg-mix",
    "plgu-lf",
    "plgu-grep",
    "splitgp",
}  # one for each kind of state
TAKE = [name for name in ALGORITHMS if name not in REFUSE - OWN.keys()]


def federate(name: str, engine: Engine, **hyper: Any) -> Federation:
    settings = ADAM | {"local_epochs": 2, "batch_size": 3}
    return small.federate(build_algorithm(name, settings, OWN.get(name, {}) | hyper), engine, schedule=[[0, 1]] * 2)


def assert_like_sequential(federation: Federation, reference: Federation) -> None:
    for _ in range(2):
        reference.round()
        federation.round()
    contract.assert_close(contract.snapshot(federation), contract.snapshot(reference), 1e-9)


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in TAKE])
def test_engines_agree(name: str) -> None:
    """Two rounds with kept buffers, of clients with different numbers of steps and incomplete batches."""
    stacked, sequential = Vectorized("cpu", lanes=1, stack=2), Sequential()
    assert_like_sequential(federate(name, stacked, opt_state="keep"), federate(name, sequential, opt_state="keep"))


@pytest.mark.parametrize("stack", [1, 7])
def test_engines_agree_on_running_statistics(stack: int) -> None:
    """No parameter whose gradient is 0 but for rounding (a bias before a BatchNorm): Adam would blow that up."""
    net = contract.SmallNet(
        nn.Conv2d(2, 4, 3, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), width=16
    )
    task = Task(net, dtype=torch.float64)
    method = build_algorithm("fedavg", contract.SETTINGS | ADAM, {"amsgrad": True})
    engines = Vectorized("cpu", lanes=1, stack=stack), Sequential()
    schedule = [[0, 2, 3], [2, 5, 6]]
    assert_like_sequential(
        *(Federation(task, contract.make_data(), method, engine=e, schedule=schedule) for e in engines)
    )


@pytest.mark.parametrize(
    "engine", [Sequential, pytest.param(lambda: Vectorized("cpu", lanes=1), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["fedavg", "lg-mix", "fedrep", "plgu-grep", "fedrod", "ditto"])
def test_resumed_is_bit_equal(name: str, engine: Callable[[], Engine]) -> None:
    straight = federate(name, engine(), opt_state="keep", amsgrad=True)
    straight.round()
    tensors, meta = straight.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    straight.round()
    resumed = federate(name, engine(), opt_state="keep", amsgrad=True)
    resumed.restore(tensors, meta)
    resumed.round()
    contract.assert_same(contract.snapshot(resumed), contract.snapshot(straight))


@pytest.mark.parametrize("opt_state", ["reset", "keep"])
def test_fedavg_is_torchs_adam_by_hand(opt_state: str) -> None:
    """Two rounds of two clients; a kept optimiser goes on over the rounds, a fresh one starts its bias correction."""
    method = build_algorithm(
        "fedavg", {"lr": 0.05, "local_epochs": 2, "batch_size": 3, "optimizer": "adam", "opt_state": opt_state}
    )
    federation = small.federate(method)
    w = {k: torch.tensor(v) for k, v in small.start().items()}
    kept: dict[int, dict[str, Any]] = {}
    for round_ in range(2):
        ends = []
        for i, (x, y) in enumerate(small.samples()):
            net = small.TanhNet().double()
            net.load_state_dict(w)
            adam = torch.optim.Adam(net.parameters(), lr=0.05)
            if opt_state == "keep" and i in kept:
                adam.load_state_dict(kept[i])
            for rows in small.batches(federation, method.train, i, round_)[0]:
                adam.zero_grad()
                logits = net(torch.tensor(x[rows]))
                torch.nn.functional.cross_entropy(logits, torch.tensor(y[rows])).backward()
                adam.step()
            kept[i] = adam.state_dict()
            ends.append({k: v.detach().clone() for k, v in net.state_dict().items()})
        p = np.array(small.SIZES) / sum(small.SIZES)
        w = {k: p[0] * ends[0][k] + p[1] * ends[1][k] for k in w}
        federation.round()
        small.assert_models(federation.global_model(), {k: v.numpy() for k, v in w.items()})


@pytest.mark.parametrize("name", sorted(REFUSE))
def test_methods_without_a_use_for_it_refuse(name: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.optimizer = 'adam' \({name}\): .*; it must be 'sgd'"):
        build_algorithm(name, {"optimizer": "adam"})


@pytest.mark.parametrize("name", TAKE)
def test_every_other_method_takes_it(name: str) -> None:
    built = build_algorithm(name, ADAM, OWN.get(name))
    assert built.betas == (0.8, 0.9) and hash(built) == hash(build_algorithm(name, ADAM, OWN.get(name)))


def test_momentum_beside_it_is_refused_and_left_out_where_it_is_shared() -> None:
    told = r"algorithm\.momentum = 0\.9 \(fedavg\) changes nothing: it acts only with optimizer = 'sgd'; here .* 'adam'"
    with pytest.raises(InputError, match=told):
        build_algorithm("fedavg", {"optimizer": "adam"}, {"momentum": 0.9})
    assert build_algorithm("fedavg", {"optimizer": "adam", "momentum": 0.9}).momentum == 0


@pytest.mark.parametrize("betas", [[0.9], 0.9, [0.9, 1.0], [-0.1, 0.9], [0.9, "x"], [0.9, True], None])
def test_wrong_betas(betas: object) -> None:
    wanted = r"algorithm\.betas = .* \(fedavg\): it must be a list of 2 numbers, each at least 0 and below 1"
    with pytest.raises(InputError, match=wanted):
        build_algorithm("fedavg", {"betas": betas})


def test_an_experiment_file_names_it() -> None:
    train = {"optimizer": "adam", "betas": [0.9, 0.99], "amsgrad": True, "lr": 0.001}
    experiment = parse_experiment({"algorithms": ["fedavg"], "train": train})
    assert experiment.train.model_dump(include=set(train)) == train
    for key, value in (("optimizer", "adamx"), ("betas", [0.9]), ("betas", [0.9, 1.0]), ("amsgrad", 1)):
        with pytest.raises(InputError, match=rf"train\.{key} = "):
            parse_experiment({"algorithms": ["fedavg"], "train": {key: value}})
