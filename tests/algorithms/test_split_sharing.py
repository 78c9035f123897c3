"""FedPer, FedRep, LG-FedAvg, FedBABU, FedAlt, FedSim, FedBN: a shared part on the server, the rest with the clients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.algorithms import small
from tests.algorithms.small import BODY, HEAD, Weights
from torch import Tensor, nn

from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.algorithms.fedalt import FedAlt
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedbabu import FedBABU
from bespokefl.algorithms.fedbn import FedBN
from bespokefl.algorithms.fedper import FedPer, PartialSharing, last_layers
from bespokefl.algorithms.fedrep import FedRep
from bespokefl.algorithms.fedsim import FedSim
from bespokefl.algorithms.lg_fedavg import LGFedAvg
from bespokefl.core import InputError, Task
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation

both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])
LR, MOMENTUM, DECAY = 0.1, 0.8, 0.03
TRAINING: dict[str, Any] = {
    "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "local_epochs": 2, "batch_size": 3,
}  # fmt: skip
WITHOUT_EPOCHS = {key: value for key, value in TRAINING.items() if key != "local_epochs"}  # FedRep has its own
PLAIN: dict[str, Any] = {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}
SCHEDULE = [[0, 1], [1], [0, 1]]
ALL = BODY + HEAD


# the family in numpy ---------------------------------------------------------------------------------
class Step(NamedTuple):
    """A pass over a batch that moves the named weights."""

    names: tuple[str, ...]
    train: bool = True


Gradient = Callable[[Weights, small.Array, NDArray[np.int64], bool], tuple[Weights, Weights]]


def tanh_net(w: Weights, x: small.Array, y: NDArray[np.int64], train: bool) -> tuple[Weights, Weights]:
    return small.gradient(w, x, y), {}


class Rules(NamedTuple):
    private: tuple[str, ...]
    phases: Sequence[Sequence[Step]]  # per phase, the passes over each of its batches
    p: Callable[[Sequence[int]], Sequence[float]] = lambda ids: [small.SIZES[i] / _total(ids) for i in ids]
    keep: bool = False  # momentum
    mu: float = 0.0
    eta_g: float = 1.0


def _total(ids: Sequence[int]) -> int:
    return sum(small.SIZES[i] for i in ids)


def alike(ids: Sequence[int]) -> list[float]:
    return [1 / len(ids)] * len(ids)


def descend(
    w: Weights, m: Weights, i: int, rows: Any, steps: Sequence[Step], net: Gradient, lr: float = LR
) -> tuple[Weights, Weights]:
    x, y = small.samples()[i]
    for names, train in steps:
        g, buffers = net(w, x[rows], y[rows], train)
        w, m = small.sgd(w, {k: g[k] + DECAY * w[k] for k in names}, m, lr, MOMENTUM)
        w = w | buffers
    return w, m


def play(run: Federation, start: Weights, rules: Rules, net: Gradient = tanh_net) -> tuple[Weights, list[Weights]]:
    """The shared part and the clients' private parts after the rounds of the schedule."""
    algorithm = run.algorithm
    assert isinstance(algorithm, PartialSharing)
    phi = {k: v for k, v in start.items() if k not in rules.private}
    own = [{k: start[k] for k in rules.private} for _ in small.SIZES]
    momenta: list[Weights] = [{} for _ in small.SIZES]

    def pulled(w: Weights, x: small.Array, y: NDArray[np.int64], train: bool) -> tuple[Weights, Weights]:
        g, buffers = net(w, x, y, train)
        return {k: v + rules.mu * (w[k] - start[k]) * (k in rules.private) for k, v in g.items()}, buffers

    for t, clients in enumerate(SCHEDULE):
        sent = []
        for i in clients:
            w, m = phi | own[i], momenta[i] if rules.keep else {}
            for steps, rows in zip(rules.phases, small.batches(run, algorithm.train, i, t), strict=True):
                for r in rows:
                    w, m = descend(w, m, i, r, steps, pulled)
            sent.append({k: w[k] for k in phi})
            own[i], momenta[i] = {k: w[k] for k in rules.private}, m
        average = small.average(sent, rules.p(clients))
        phi = {k: phi[k] + rules.eta_g * (v - phi[k]) for k, v in average.items()}
    return phi, own


HEAD_THEN_BODY = ([Step(HEAD, train=False)], [Step(BODY)])
METHODS: dict[str, tuple[PartialSharing, Rules]] = {
    "fedper": (FedPer(**TRAINING), Rules(HEAD, [[Step(ALL)]])),
    "fedper, kept momentum": (FedPer(**TRAINING, opt_state="keep"), Rules(HEAD, [[Step(ALL)]], keep=True)),
    "fedrep": (FedRep(**WITHOUT_EPOCHS, head_epochs=3), Rules(HEAD, HEAD_THEN_BODY, alike)),
    "fedrep, kept momentum": (
        FedRep(**WITHOUT_EPOCHS, head_epochs=2, body_epochs=2, weights="sample", opt_state="keep"),
        Rules(HEAD, HEAD_THEN_BODY, keep=True),
    ),
    "lg-fedavg": (LGFedAvg(**TRAINING), Rules(BODY, [[Step(ALL)]])),
    "lg-fedavg, two passes": (
        LGFedAvg(**TRAINING, update="body_then_head"),
        Rules(BODY, [[Step(BODY), Step(HEAD)]]),
    ),
    "fedalt": (FedAlt(**TRAINING, v_epochs=1), Rules(HEAD, HEAD_THEN_BODY)),
    "fedalt, pulled": (
        FedAlt(**TRAINING, u_epochs=1, mu=0.4, eta_g=0.7, count="batches"),
        Rules(HEAD, HEAD_THEN_BODY, lambda ids: [0.6, 0.4] if len(ids) == 2 else [1.0], mu=0.4, eta_g=0.7),
    ),
    "fedsim": (FedSim(**TRAINING, eta_g=1.3, weights="uniform"), Rules(HEAD, [[Step(ALL)]], alike, eta_g=1.3)),
    "fedsim, pulled": (
        FedSim(**TRAINING, mu=0.4, opt_state="keep"),
        Rules(HEAD, [[Step(ALL)]], mu=0.4, keep=True),
    ),
}


@both_engines
@pytest.mark.parametrize("case", METHODS)
def test_by_hand(case: str, engine: type) -> None:
    algorithm, rules = METHODS[case]
    run = small.federate(algorithm, engine(), schedule=SCHEDULE)
    for _ in SCHEDULE:
        run.round()
    phi, own = play(run, small.start(), rules)
    small.assert_models(run.server["phi"], phi, 1e-11)
    for i, v in enumerate(own):
        small.assert_models(run.client_model(i), phi | v, 1e-11)  # the newest phi, whoever trained it


# FedBABU: P is fine-tuned ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("engine", "part", "names", "finetune_lr", "weights"),
    [
        (Sequential, "whole", ALL, None, "uniform"),
        (Vectorized, "whole", ALL, 0.25, "sample"),
        (Sequential, "body", BODY, 0.0, "sample"),
        (Sequential, "head", HEAD, 0.25, "uniform"),
    ],
)
def test_fedbabu_by_hand(
    engine: type, part: Any, names: tuple[str, ...], finetune_lr: float | None, weights: Any
) -> None:
    algorithm = FedBABU(**TRAINING, finetune_part=part, finetune_epochs=2, finetune_lr=finetune_lr, weights=weights)
    run = small.federate(algorithm, engine(), schedule=SCHEDULE)
    for _ in SCHEDULE:
        run.round()
    rules = Rules(HEAD, [[Step(BODY)]], alike) if weights == "uniform" else Rules(HEAD, [[Step(BODY)]])
    phi, own = play(run, small.start(), rules)
    common = run.global_model()
    assert common is not None
    small.assert_models(common, phi | {k: small.start()[k] for k in HEAD}, 1e-11)
    program = algorithm.personal_model(run.server, None).program  # type: ignore[arg-type]
    for i in range(2):
        w, m = phi | own[i], Weights()
        (rows,) = small.batches(run, program, i, len(SCHEDULE))
        assert len(rows) == [6, 4][i]
        for r in rows:
            w, m = descend(w, m, i, r, [Step(names)], tanh_net, LR if finetune_lr is None else finetune_lr)
        small.assert_models(run.client_model(i), w, 1e-11)


def test_fedbabu_never_touches_the_head_before_fine_tuning() -> None:
    run = small.federate(FedBABU(**TRAINING, opt_state="keep"))
    run.round()
    states = run.clients.states.gather(np.arange(2))
    for k in HEAD:
        for i in range(2):
            assert np.array_equal(states.v[k][i].numpy(), small.start()[k])
    models = run.personal_models()
    assert not torch.equal(models["head.weight"][0], models["head.weight"][1])


# FedRep tunes heads at the end -----------------------------------------------------------------------
@both_engines
def test_fedrep_tunes_the_head_on_a_copy(engine: type) -> None:
    algorithm = FedRep(**WITHOUT_EPOCHS, head_epochs=1, last_head_epochs=2)
    run = small.federate(algorithm, engine(), schedule=[[0]])
    run.round()
    phi, own = run.server["phi"], run.clients.states.gather(np.arange(2)).v
    before = {k: v.clone() for k, v in run.state()[0].items()}
    program = algorithm.personal_model(run.server, None).program  # type: ignore[arg-type]
    for i in range(2):  # client 1 never took part: it tunes the initial head
        w: Weights = {k: v.numpy() for k, v in phi.items()} | {k: v[i].numpy() for k, v in own.items()}
        m = Weights()
        for r in small.batches(run, program, i, 1)[0]:
            w, m = descend(w, m, i, r, [Step(HEAD)], tanh_net)
        small.assert_models(run.client_model(i), w, 1e-12)
    for k, v in run.state()[0].items():
        assert torch.equal(v, before[k])


# BatchNorm: what moves when, and where it stays ------------------------------------------------------
class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, small.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


NORM = ("norm.weight", "norm.bias")
STATISTICS = ("norm.running_mean", "norm.running_var")


def norm_start() -> Weights:
    rng = np.random.default_rng(5)
    w = {"norm.weight": rng.normal(size=2), "norm.bias": rng.normal(size=2)}
    w |= {"norm.running_mean": rng.normal(size=2), "norm.running_var": np.array([0.6, 1.7])}
    return w | {k: small.start()[k][..., :2] if k == "head.weight" else small.start()[k] for k in HEAD}


def norm_net(w: Weights, x: small.Array, y: NDArray[np.int64], train: bool) -> tuple[Weights, Weights]:
    mean, var = (x.mean(0), x.var(0)) if train else (w["norm.running_mean"], w["norm.running_var"])
    normal = (x - mean) / np.sqrt(var + 1e-5)
    h = normal * w["norm.weight"] + w["norm.bias"]
    d = (small.softmax(h @ w["head.weight"].T + w["head.bias"]) - np.eye(small.CLASSES)[y]) / len(y)
    d_h = d @ w["head.weight"]
    g = {"norm.weight": (d_h * normal).sum(0), "norm.bias": d_h.sum(0), "head.weight": d.T @ h, "head.bias": d.sum(0)}
    unbiased = var * len(x) / max(len(x) - 1, 1)
    moved = {"norm.running_mean": mean, "norm.running_var": unbiased}
    return g, {k: 0.9 * w[k] + 0.1 * v for k, v in moved.items()} if train else {}


NORM_METHODS: dict[str, tuple[PartialSharing, Rules]] = {
    "fedbn": (FedBN(**TRAINING, drop_last=True), Rules(NORM + STATISTICS, [[Step(NORM + HEAD)]])),
    "fedbn, kept momentum": (
        FedBN(**TRAINING, drop_last=True, opt_state="keep", weights="uniform"),
        Rules(NORM + STATISTICS, [[Step(NORM + HEAD)]], alike, keep=True),
    ),
    "fedrep": (
        FedRep(**WITHOUT_EPOCHS, drop_last=True, head_epochs=2),
        Rules(HEAD, [[Step(HEAD, train=False)], [Step(NORM)]], alike),
    ),
    "lg-fedavg": (LGFedAvg(**TRAINING, drop_last=True), Rules(NORM + STATISTICS, [[Step(NORM + HEAD)]])),
}


@both_engines
@pytest.mark.parametrize("case", NORM_METHODS)
def test_batch_norm_by_hand(case: str, engine: type) -> None:
    algorithm, rules = NORM_METHODS[case]
    clients = [{"train": xy, "test": xy} for xy in small.samples()]
    run = Federation(
        Task(NormNet(), dtype=torch.float64),
        FederatedData.from_arrays(clients, classes=("a", "b", "c")),
        algorithm,
        engine=engine(),
        initial={k: torch.tensor(v) for k, v in norm_start().items()},
        schedule=SCHEDULE,
    )
    for _ in SCHEDULE:
        run.round()
    phi, own = play(run, norm_start(), rules, norm_net)
    small.assert_models(run.server["phi"], phi, 1e-11)
    for i, v in enumerate(own):
        small.assert_models(run.client_model(i), phi | v, 1e-11)


# a federation of three clients on other models ------------------------------------------------------
def federated() -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    clients = [{"train": arrays(n), "test": arrays(2)} for n in (13, 8, 11)]
    return FederatedData.from_arrays(clients, classes=("a", "b", "c"))


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def federate(algorithm: Algorithm, model: nn.Module, engine: Any = "sequential", **options: Any) -> Federation:
    return Federation(model, federated(), algorithm, engine=engine, **options)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for k, v in a.items():
        assert torch.equal(v, b[k]), k


@pytest.mark.parametrize(
    ("general", "special"),
    [
        (FedAlt(v_epochs=3, u_epochs=2, weights="uniform", **PLAIN), FedRep(head_epochs=3, body_epochs=2, **PLAIN)),
        (FedSim(private_layers=2), FedPer(private_layers=2)),
    ],
    ids=["fedalt is fedrep", "fedsim is fedper"],
)
@both_engines
def test_limits_bit_for_bit(engine: type, general: Algorithm, special: Algorithm) -> None:
    runs = []
    for algorithm in (general, special):
        unused = algorithm.unused().keys() & {"local_epochs"}
        settings = {**vars(algorithm), **{k: v for k, v in TRAINING.items() if k not in unused}, "opt_state": "keep"}
        run = federate(type(algorithm)(**settings), with_norm(), engine(), schedule=[[0, 2], [1, 2]])
        run.round()
        run.round()
        runs.append(run)
    assert_same(runs[0].server["phi"], runs[1].server["phi"])
    assert_same(runs[0].personal_models(), runs[1].personal_models())


@both_engines
def test_fedbn_without_norms_is_fedavg_bit_for_bit(engine: type) -> None:
    bn, avg = (
        federate(a, deep(), engine(), schedule=[[0, 2], [1, 2]])
        for a in (FedBN(**TRAINING, opt_state="keep"), FedAvg(**TRAINING, opt_state="keep", personal="global"))
    )
    for _ in range(2):
        bn.round()
        avg.round()
    assert_same(bn.server["phi"], avg.server["w"])
    assert_same(bn.personal_models(), avg.personal_models())


@pytest.mark.parametrize(
    ("name", "hyper", "sent"),
    [
        ("fedper", {}, 25 + 36),
        ("fedper", {"private_layers": 2}, 25),
        ("fedrep", {"last_head_epochs": 1}, 25 + 36),
        ("lg-fedavg", {}, 21),
        ("lg-fedavg", {"shared_layers": 2}, 36 + 21),
        ("fedbabu", {}, 25 + 36),
        ("fedalt", {"mu": 1.0}, 25 + 36),
        ("fedalt", {"private_layers": 2}, 25),
        ("fedsim", {"mu": 1.0}, 25 + 36),
        ("fedbn", {}, 25 + 36 + 21),
    ],
)
def test_bytes_are_those_of_the_shared_part(name: str, hyper: dict[str, Any], sent: int) -> None:
    run = federate(build_algorithm(name, TRAINING, hyper), deep(), clients_per_round=2)
    record = run.round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * sent, 4 * 2 * sent)
    assert run.has_global == (name == "fedbabu")


# which tensors are private ---------------------------------------------------------------------------
class HeadFirst(nn.Module):
    """The head is written down first, and has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_last_layers() -> None:
    task = Task(with_norm())
    head, norm = {"3.weight", "3.bias"}, {f"1.{k}" for k in ("weight", "bias", "running_mean", "running_var")}
    assert set(last_layers(task)) == head
    assert set(last_layers(task, 2)) == head | norm
    assert set(last_layers(task, 3)) == set(task.initial)
    task = Task(HeadFirst())
    head = {k for k in task.initial if k.startswith("head.")}
    assert "head.0.running_mean" in head
    assert set(last_layers(task)) == head
    assert set(last_layers(task, 2)) == head | {k for k in task.initial if k.startswith("body.3.")}
    shared = {k for k in task.initial if k.startswith("body.0.")}
    assert set(task.initial) - set(FedPer(private_layers=3).private(task)) == shared
    assert set(LGFedAvg(shared_layers=3).private(task)) == shared


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg", "fedbabu", "fedalt", "fedsim", "fedbn", "plgu-grep"])
def test_models_are_in_the_order_of_the_network(name: str) -> None:
    torch.manual_seed(0)
    run = federate(build_algorithm(name, TRAINING), HeadFirst().double())
    run.round()
    assert list(run.client_model(1)) == list(run.task.initial)
    common = run.global_model()
    if name == "fedbabu":
        assert common is not None and list(common) == list(run.task.initial)
        assert torch.equal(common["head.1.weight"], run.task.initial["head.1.weight"])
        assert not torch.equal(common["body.0.weight"], run.task.initial["body.0.weight"])
    else:
        assert common is None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.shortcut = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.last = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 1, 2, 2)
        out: Tensor = self.last(self.bn(self.conv(x)) + self.shortcut(x))
        return out


def residual() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), nn.Flatten(), nn.Linear(8, 3)).double()


@both_engines
def test_fedbn_keeps_the_norms_of_shortcuts_too(engine: type) -> None:
    run = federate(FedBN(**TRAINING), residual(), engine())
    run.round(clients=[0, 1])
    shared = {f"{k}.{n}" for k in ("0.conv", "0.shortcut.0", "2") for n in ("weight", "bias")}
    assert set(run.server["phi"]) == shared
    models, initial = run.personal_models(), run.task.initial
    for k in initial:
        if k in shared:
            assert torch.equal(models[k][0], models[k][2])
            continue
        assert not torch.equal(models[k][0], models[k][1]), k
        assert torch.equal(models[k][2], initial[k])  # never took part
    assert torch.equal(models["0.shortcut.1.running_var"][2], torch.ones(2).double())


# the options -----------------------------------------------------------------------------------------
def test_two_passes_count_a_batch_once_in_the_statistics() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": None}
    joint, two = (federate(LGFedAvg(**settings, update=update), with_norm()) for update in ("joint", "body_then_head"))
    joint.round()
    two.round()
    a, b = joint.personal_models(), two.personal_models()
    for k in ("0.weight", "1.weight", "1.running_mean", "1.running_var"):
        assert torch.equal(a[k], b[k])
    assert not torch.equal(a["3.weight"], b["3.weight"])


def test_the_servers_rate_leaves_statistics_alone() -> None:
    plain, fast = (federate(FedSim(**TRAINING, eta_g=eta_g), with_norm()) for eta_g in (1.0, 50.0))
    plain.round()
    fast.round()
    for k in ("1.running_mean", "1.running_var"):
        assert torch.equal(plain.server["phi"][k], fast.server["phi"][k])
    start = plain.task.initial
    for k in ("0.weight", "1.bias"):
        moves = [run.server["phi"][k] - start[k] for run in (plain, fast)]
        torch.testing.assert_close(moves[1], 50 * moves[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "p"),
    [
        ({}, [13 / 32, 8 / 32, 11 / 32]),
        ({"count": "batches"}, [5 / 12, 3 / 12, 4 / 12]),
        ({"count": "batches", "drop_last": True}, [4 / 9, 2 / 9, 3 / 9]),
        ({"count": "batches", "batch_size": 12}, [2 / 4, 1 / 4, 1 / 4]),
        ({"count": "batches", "batch_size": 12, "drop_last": True}, [1 / 3] * 3),
        ({"count": "batches", "batch_size": None}, [1 / 3] * 3),
    ],
)
def test_weights_by_batches(settings: dict[str, Any], p: list[float]) -> None:
    settings = {**TRAINING, **settings}
    alone = []
    for i in range(3):
        run = federate(FedAlt(**settings), deep())
        run.round(clients=[i])
        alone.append(run.server["phi"])
    run = federate(FedAlt(**settings), deep())
    run.round()
    for k, v in run.server["phi"].items():
        torch.testing.assert_close(v, sum(p[i] * alone[i][k] for i in range(3)), rtol=0, atol=1e-14)


def test_epochs_of_fedalt_are_local_epochs_by_default() -> None:
    settings = {**TRAINING, "local_epochs": 3}
    runs = [federate(a, deep()) for a in (FedAlt(**settings), FedAlt(**WITHOUT_EPOCHS, v_epochs=3, u_epochs=3))]
    for run in runs:
        run.round()
    assert_same(runs[0].server["phi"], runs[1].server["phi"])


# refusals --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg", "fedbabu", "fedalt", "fedsim"])
def test_a_model_without_a_body_is_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"algorithm\.name = '{name}': the model has no trained layer before its head"
    ):
        federate(build_algorithm(name, TRAINING), nn.Linear(4, 3).double())


def test_fedbn_needs_something_to_share() -> None:
    federate(FedBN(**TRAINING), nn.Linear(4, 3).double()).round()  # no norm at all: FedAvg
    with pytest.raises(InputError, match="nothing to share"):
        federate(FedBN(**TRAINING), nn.Sequential(nn.LayerNorm(4)).double())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fedper", "private_layers"),
        ("fedalt", "private_layers"),
        ("fedsim", "private_layers"),
        ("lg-fedavg", "shared_layers"),
    ],
)
def test_too_many_last_layers(name: str, key: str) -> None:
    federate(build_algorithm(name, hyper={key: 2}), deep())
    with pytest.raises(InputError, match=rf"algorithm\.{key} = 3 \({name}\): the model has 3 layers .* from 1 to 2"):
        federate(build_algorithm(name, hyper={key: 3}), deep())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fedrep", "head_epochs", 0),
        ("fedrep", "body_epochs", 0),
        ("fedrep", "last_head_epochs", -1),
        ("fedper", "private_layers", 0),
        ("lg-fedavg", "shared_layers", 0),
        ("lg-fedavg", "update", "both"),
        ("fedbabu", "finetune_epochs", 0),
        ("fedbabu", "finetune_part", "all"),
        ("fedbabu", "finetune_lr", -0.1),
        ("fedalt", "v_epochs", 0),
        ("fedalt", "u_epochs", 0),
        ("fedsim", "eta_g", 0.0),
        ("fedsim", "mu", -1.0),
        ("fedsim", "count", "clients"),
    ],
)
def test_ranges(name: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{key} = .*\({name}\): it must be"):
        build_algorithm(name, hyper={key: value})
