"""Hyper-parameters that change nothing: every one of every method is moved, and what it does is what is declared.

In each configuration a hyper-parameter changes a number of the run (the states of server and clients, the clients'
models, their scores), or `unused` names it; and one that is not for ever unused acts in one of them.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, ModelAveraging, Task, hyper, never, unless, when
from bespokefl.core.acting import ALWAYS, conditions
from bespokefl.data import FederatedData
from bespokefl.federation import Federation

Config = dict[str, Any]
BASE: Config = {"lr": 0.2, "local_epochs": 1, "batch_size": 2}
# Beside it, so that few rounds of few clients show what acts:
START: dict[str, Config] = {
    "fedavg-steps": {"after": 2, "mu": 0.3},
    "fedfomo": {"M": 1, "explore": 1.0},
    "fedfv": {"lr": 1.0},
    "fedrep": {"head_epochs": 1},
    "pfedme": {"K": 1},
    "per-fedavg": {"batch_size": 1},
    "pfedhn": {"clip": 0.5},
    "pgfed": {"lr": 5.0},
    "pgfedmo": {"lr": 5.0},
    "splitgp": {"E_th": 1.0},
    "plgu-ghn": {"clip": 0.5},
}
# Configurations by method, each with the hyper-parameters that are moved in it, beside all of them in BASE.
EVERY: list[tuple[Config, list[str]]] = [
    ({"momentum": 0.5}, ["opt_state"]),
    ({"optimizer": "adam", "momentum": 0.0}, ["betas", "amsgrad", "opt_state", "momentum", "weight_decay"]),
    (
        {"optimizer": "rmsprop", "momentum": 0.0, "weight_decay": 0.0},
        ["betas", "amsgrad", "opt_state", "momentum", "weight_decay"],
    ),
    ({"batch_size": None}, ["drop_last"]),
]
AVERAGING: list[tuple[Config, list[str]]] = [
    ({"aggregation": "median"}, ["weights", "trim", "krum_f", "krum_keep", "clip_norm"]),
    ({"aggregation": "trimmed", "trim": 0.34}, ["weights", "trim"]),
    ({"aggregation": "krum"}, ["weights", "krum_f", "krum_keep"]),
    ({"aggregation": "krum", "krum_keep": 2}, ["weights"]),
    ({"aggregation": "clip"}, ["weights", "clip_norm"]),
]
FINE_TUNED: list[tuple[Config, list[str]]] = [({"personal": "finetune"}, ["finetune_epochs"])]
OWN: dict[str, list[tuple[Config, list[str]]]] = {
    "apfl": [({"adaptive": False}, ["alpha_decay"])],
    "fedalt": [({"v_epochs": 2}, ["local_epochs"]), ({"v_epochs": 1, "u_epochs": 2}, ["local_epochs"])],
    "fedfomo": [({"explore": 0.0}, ["explore_decay"]), ({"lr": 20.0}, ["fallback"])],  # training that harms
    "fedmgda+": [({"eta_g_decay": 0.5}, ["eta_g_every"])],
    "fedpg": [
        ({"gamma": 0.5}, ["pers"]),
        ({"gamma": 1.0}, ["pers"]),
        ({"grad_mode": "exact"}, ["local_epochs", "momentum", "weight_decay", "drop_last", "weights", "lr"]),
        ({"grad_mode": "exact", "momentum": 0.5}, ["opt_state"]),
    ],
    "fedrod": [({"head": "hyper"}, ["width"])],
    "fedsim": [({"weights": "uniform"}, ["count"]), ({"aggregation": "median"}, ["count"])],
    "l2sgd": [({"form": "coin", "p": 0.5}, ["p", "flips", "local_epochs"])],
    "per-fedavg": [({"variant": "fo"}, ["delta"])],
    "pfedme": [({"local_unit": "steps"}, ["R", "local_epochs"])],
    "plgu-ghn": [({"ghn_layerwise": True}, ["score_scale"])],
    "plgu-grep": [
        ({"head_epochs": 2}, ["local_epochs"]),
        ({"score_from": "previous", "optimizer": "adam"}, ["betas", "amsgrad"]),
    ],
    "plgu-lf": [({"D": 0}, ["freeze_train", "perturb_layers"])],
}
OWN["s-fedpg"] = [*OWN["fedpg"], ({"beta": 0.9}, ["s"])]
OWN["fedalt"] += OWN["fedsim"]
ELSEWHERE = ("s", "fallback", "map_features")  # need another configuration, or another network
FEW = ("fedavg", "fedsim", "pfedhn", "per-fedavg")  # all configurations of all methods take a minute and more


class Net(nn.Module):
    """Three layers and a normalisation with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)
        self.middle, self.head = nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(torch.tanh(self.norm(self.conv(x))).flatten(1)).tanh())
        return out


def some_data() -> FederatedData:
    rng = np.random.default_rng(3)
    clients = []
    for i, n in enumerate((4, 5, 3, 6, 4, 5)):
        x, y = rng.normal(size=(n, 1, 3, 3)) + 0.3 * i, np.arange(n) * (i + 1) % 3
        clients.append({"train": (x, y), "val": (x[:2] + 0.1, y[:2]), "test": (x, y)})
    return FederatedData.from_arrays(clients, classes=("a", "b", "c"))


DATA = some_data()
torch.manual_seed(0)
TASK = Task(Net(), dtype=torch.float64)
SOME, MANY = [[0, 1, 2], [1, 2, 3], [0, 2, 3]], [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 2, 3, 4, 5]]


def moved(algorithm: Algorithm, values: Config) -> Algorithm:
    """A copy with other values, also where they are refused because they change nothing."""
    other = copy.copy(algorithm)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


def numbers(algorithm: Algorithm) -> dict[str, Tensor]:
    """All that a run of some rounds leaves."""
    many = algorithm.name == "fedfomo" or getattr(algorithm, "aggregation", "") == "krum"
    schedule = MANY if many else SOME
    federation = Federation(TASK, DATA, algorithm, engine="sequential", seed=5, schedule=schedule)
    for _ in schedule:
        federation.round()
    tensors, _ = federation.state()
    scores = federation.evaluate()
    models = {f"model {k}": v for k, v in federation.personal_models().items()}
    return tensors | models | {"loss": torch.as_tensor(scores.loss), "accuracy": torch.as_tensor(scores.accuracy)}


def alike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """An entry that only one of them has was made for nothing if it did not change the others."""
    return all(
        ours[k].shape == theirs[k].shape and torch.equal(ours[k].nan_to_num(7.7), theirs[k].nan_to_num(7.7))
        for k in ours.keys() & theirs.keys()
    )


def others(field: "Field[Any]", hint: Any, value: Any) -> list[Any]:
    """Some other legal values."""
    if field.metadata.get("among") is not None:
        return [name for name in field.metadata["among"] if name != value]
    found: list[Any] = []
    for option in get_args(hint) or (hint,) if get_origin(hint) not in (Literal, tuple) else (hint,):
        if get_origin(option) is Literal:
            found += get_args(option)
        elif get_origin(option) is tuple:
            found.append((0.5, 0.7))
        elif option in (bool, NoneType, str):
            found += {bool: [False, True], NoneType: [None], str: ["head", "middle"]}[option]
        else:
            here = option(0.05 if option is float else 2) if value is None else value
            ends = [field.metadata[k] for k in ("high", "low") if field.metadata.get(k) is not None]
            least = field.metadata.get("low") or 0
            found += (
                [here + 1, max(here - 1, least), least] if option is int else [here / 2, here + 0.1, *map(float, ends)]
            )
    return [v for v in found if (type(v), v) != (type(value), value) and legal(field, v)]


def legal(field: "Field[Any]", value: Any) -> bool:
    low, high, above, below = (field.metadata.get(k) for k in ("low", "high", "above", "below"))
    return not isinstance(value, int | float) or (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def acts(algorithm: Algorithm, name: str, reference: Mapping[str, Tensor]) -> bool:
    """Whether another value changes a number, or is refused for another reason than changing nothing."""
    field = next(f for f in fields(algorithm) if f.name == name)
    values = others(field, get_type_hints(type(algorithm))[name], getattr(algorithm, name))
    refused = False
    for value in values[:1] if name in algorithm.unused() else values:
        other = moved(algorithm, {name: value})
        try:
            if other.optimizer != "sgd" and other.only_sgd:
                raise InputError("see Algorithm.__post_init__")
            if not alike(numbers(other), reference):
                return True
        except InputError:
            refused = True
    return refused


def walks(name: str, thorough: bool) -> Iterator[tuple[Algorithm, list[str]]]:
    """A method in some configurations, each with the hyper-parameters to move; thorough: those of all methods too."""
    cls, base = ALGORITHMS[name].cls, BASE | START.get(name, {})
    known = [f.name for f in fields(cls) if f.name not in ELSEWHERE]
    yield moved(cls(), base), known
    configs = [*OWN.get(name, []), *(FINE_TUNED if {"personal", "finetune_epochs"} <= {*known} else [])]
    if thorough:
        configs += [*EVERY, *(AVERAGING if issubclass(cls, ModelAveraging) else [])]
    for config, names in configs:
        algorithm = moved(cls(), base | config)
        if algorithm.optimizer == "sgd" or not algorithm.only_sgd:
            yield algorithm, names


def acting(name: str, thorough: bool) -> dict[str, bool]:
    """The method's hyper-parameters, and whether they act in some configuration; in none otherwise than declared."""
    found: dict[str, bool] = {}
    for algorithm, names in walks(name, thorough):
        reference, unused = numbers(algorithm), algorithm.unused()
        for hyper_parameter in names:
            really = acts(algorithm, hyper_parameter, reference)
            assert really == (hyper_parameter not in unused), (hyper_parameter, unused.get(hyper_parameter), algorithm)
            found[hyper_parameter] = found.get(hyper_parameter, False) or really
    return found


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in FEW])
def test_what_is_declared_to_act_acts_and_nothing_else(name: str) -> None:
    acting(name, thorough=False)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_every_hyper_parameter_acts_in_some_configuration_or_is_never_used(name: str) -> None:
    declared = conditions(ALGORITHMS[name].cls)
    never_used = {k for k, condition in declared.items() if not condition.ways}
    if all(algorithm.optimizer == "sgd" for algorithm, _ in walks(name, thorough=True)):
        never_used |= {"betas", "amsgrad"}
    assert {k for k, really in acting(name, thorough=True).items() if not really} == never_used


def test_lg_mixs_map_features_act_where_the_heads_input_is_a_map() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 1, 4, 4)), rng.integers(0, 2, size=(4, 4, 4))
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
    data = FederatedData.from_arrays([{"train": (x, y), "test": (x, y)}, {"train": (-x, y), "test": (x, y)}])
    lams = []
    for map_features in ("mean", "pixels"):
        method = build_algorithm("lg-mix", BASE, {"map_features": map_features})
        federation = Federation(Task(net, "dice", dtype=torch.float64), data, method, engine="sequential")
        federation.round()
        lams.append(federation.state()[0])
    assert any(not torch.equal(v, lams[1][k]) for k, v in lams[0].items())


# what is said of it ------------------------------------------------------------------------------------
def test_python_refuses_what_changes_nothing_and_names_both() -> None:
    told = (
        "algorithm.trim = 0.3 (fedavg) changes nothing: it acts only with aggregation = 'trimmed'; here aggregation is "
    )
    with pytest.raises(InputError) as error:
        FedAvg(trim=0.3)
    assert str(error.value) == told + "'mean'. Leave trim out."
    assert FedAvg(trim=0.3, aggregation="trimmed").unused().keys().isdisjoint({"trim"})
    with pytest.raises(
        InputError, match=r"algorithm\.weights = 'uniform' \(local\) changes nothing: nothing is averaged"
    ):
        Local(weights="uniform")


def test_shared_settings_that_change_nothing_are_left_out() -> None:
    algorithm = build_algorithm("pfedme", {"momentum": 0.9, "lr": 0.3})
    assert (algorithm.momentum, algorithm.lr) == (0.0, 0.3)
    with pytest.raises(InputError, match="both of its updates are plain steps"):
        build_algorithm("pfedme", {}, {"momentum": 0.9})


@dataclass(frozen=True)
class Child(Local):
    """Says when its own hyper-parameter acts, narrows what its bases say, and lifts it."""

    name: ClassVar[str] = "child"
    acts: ClassVar = {"weights": ALWAYS, "lr": unless(depth=(1, 2)), "momentum": when(depth=3)}

    depth: int = hyper(3, "how deep", low=0)
    width: int = hyper(4, "how wide", low=1, when=when(depth=(1, 2)) & when(optimizer="sgd") | when(amsgrad=True))


def test_how_a_method_declares_it() -> None:
    assert Child().unused().keys() == {"width", "opt_state", "betas", "amsgrad"}
    assert Child(depth=2).unused().keys() == {"lr", "momentum", "opt_state", "betas", "amsgrad"}
    assert Child(depth=2).unused()["lr"] == "it acts only with depth other than 1 or 2; here depth is 2"
    assert Child().unused()["width"] == (
        "it acts only with depth = 1 or 2, or with amsgrad = true; here depth is 3 and amsgrad is false"
    )
    assert conditions(Child)["opt_state"] == conditions(Algorithm)["opt_state"]
    assert never("why").why_not({}) == "why"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_declared_concerns_hyper_parameters_that_exist(name: str) -> None:
    cls = ALGORITHMS[name].cls
    known = {f.name for f in fields(cls)}
    assert conditions(cls).keys() <= known
    assert set(itertools.chain.from_iterable(condition.names for condition in conditions(cls).values())) <= known
