"""Options of the PLGU methods: what a layer is, norms of the perturbation, epochs of the body, weights by samples."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.algorithms import small
from tests.algorithms.test_plgu import (
    FULL,
    PLAIN,
    Chain,
    Quadratic,
    Tiny,
    as_model,
    as_vector,
    both_engines,
    close,
    f64,
    the_output,
)
from torch import Tensor, nn

from bespokefl.algorithms import plgu_lf as lf
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.plgu_ghn import Server
from bespokefl.algorithms.plgu_grep import PLGUGRep
from bespokefl.algorithms.plgu_lf import PLGULF
from bespokefl.core import Batch, InputError, Task, layers_of
from bespokefl.data import FederatedData, load
from bespokefl.federation import Federation
from bespokefl.models import build

Array = NDArray[np.float64]


# what a layer is -------------------------------------------------------------------------------------
class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


def resnet18(width: int = 2) -> nn.Module:
    """Twenty convolutions with a norm each, and a linear layer."""
    blocks: list[nn.Module] = []
    for stage in range(4):
        now = width * 2**stage
        blocks += [Block(now if stage == 0 else now // 2, now, 1 if stage == 0 else 2), Block(now, now, 1)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def test_layers_of_a_resnet18() -> None:
    task = Task(resnet18())
    batch = Batch(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), None, torch.tensor(0))
    assert task.apply(task.initial, batch)[0].shape == (2, 10)
    modules, pairs = layers_of(task), layers_of(task, "conv_norm")
    assert (len(modules), len(pairs)) == (41, 21)
    assert [len(part.params) for part in pairs] == [3] * 20 + [2]  # a weight; weight and bias of the norm
    assert [len(part.buffers) for part in pairs] == [2] * 20 + [0]
    assert {k for part in pairs for k in part.params} == set(task.names)
    assert len(layers_of(task, "conv_norm", task.body)) == 20
    names = PLGULF().layer_names(task)
    assert (len(names), names[0], names[1], names[-1]) == (21, "0", "3.conv1", "13")


@pytest.mark.parametrize(("grouping", "layers"), [("module", 41), ("conv_norm", 21)])
def test_lf_may_have_all_layers_personal_but_no_more(grouping: Any, layers: int) -> None:
    data = pictures((2, 2))
    Federation(resnet18(), data, PLGULF(D=layers, grouping=grouping))
    with pytest.raises(InputError, match=rf"algorithm\.D = {layers + 1} .* from 0 to {layers}"):
        Federation(resnet18(), data, PLGULF(D=layers + 1, grouping=grouping))


def test_scored_by_module_the_personal_layers_of_a_resnet18_are_norms() -> None:
    """A score is divided by the number of parameters, so that a norm of a few has the highest."""
    data = load("digits", clients=4, partition="dirichlet", alpha=0.3)
    task = Task(build("resnet18", data.input_shape, 10, width=8))
    run = Federation(task, data, PLGULF(lr=0.05, local_epochs=1, batch_size=20, grouping="module"), seed=0)
    run.round()
    run.round(clients=[0])  # so that w has gone on for the others
    highest = run.facts()["scores"][1].argsort()[::-1][:5]
    kinds = [task.layers[l].kind for l in highest]
    assert kinds.count("norm") >= 4
    modules = {layer.name: layer.kind for layer in task.layers}
    for part in PLGULF().layers(task):
        assert any(modules[k.rpartition(".")[0]] != "norm" for k in part.params)


def test_the_global_model_of_lf_keeps_up_with_fedavg() -> None:
    """On the demo's data; perturbed at theta it falls far behind."""
    data = load("digits", clients=20, partition="dirichlet", alpha=0.3)
    torch.manual_seed(0)
    task = Task(build("mlp", data.input_shape, 10, hidden=[200]))
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "batch_size": 20, "local_epochs": 5}
    methods = PLGULF(**settings), FedAvg(**settings), PLGULF(**settings, perturb_at="theta")
    correct = []
    for algorithm in methods:
        run = Federation(task, data, algorithm, participation=0.5, seed=0)
        run.run(10, evaluate_every=0)
        scores = run.evaluate(model="global")
        correct.append(float((scores.accuracy * scores.n).sum() / scores.n.sum()))
    ours, fedavg, at_theta = correct
    assert ours > fedavg - 0.03 and at_theta < fedavg - 0.1


def pictures(sizes: Sequence[int], side: int = 8, channels: int = 3, dtype: Any = np.float32) -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, channels, side, side)).astype(dtype), rng.integers(0, 3, n))  # noqa: E731
    return FederatedData.from_arrays([{"train": arrays(n), "test": arrays(1)} for n in sizes], classes=("a", "b", "c"))


CONV = ("0.weight", "1.weight", "1.bias")  # with its norm
STATISTICS = ("1.running_mean", "1.running_var")


def convolutional(algorithm: PLGULF, engine: str = "sequential") -> Federation:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 2, 3, bias=False),
        nn.BatchNorm2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.Linear(4, 3),
    )
    data = pictures((9, 6), side=4, channels=1, dtype=np.float64)
    return Federation(nn.Sequential(*layers).double(), data, algorithm, engine=engine)


@both_engines
def test_lf_scores_a_convolution_with_its_norm(engine: str) -> None:
    run = convolutional(PLGULF(lr=0.1, local_epochs=2, batch_size=4, grouping="conv_norm"), engine)
    run.round()
    run.round(clients=[0])
    w, own = run.server["w"], run.personal_models()
    for i in (0, 1):
        raw = []
        for names in (CONV, ("4.weight", "4.bias"), ("5.weight", "5.bias")):  # statistics do not count
            drift = np.concatenate([(own[k][i] - w[k]).numpy().ravel() for k in names])
            raw.append(np.sqrt((drift**2).sum()) / drift.size)
        np.testing.assert_allclose(run.facts()["scores"][i], np.array(raw) / sum(raw), rtol=0, atol=1e-13)


@both_engines
@pytest.mark.parametrize("D", [1, 2])
def test_lf_keeps_a_norm_and_its_statistics_with_the_convolution(engine: str, D: int) -> None:
    """With lr = 0 a client's start comes out: its own D groups, the rest from w."""
    settings: dict[str, Any] = {"local_epochs": 1, "batch_size": None, "grouping": "conv_norm", "D": D}
    run = convolutional(PLGULF(lr=0.1, **settings), engine)
    run.round()
    run.round(clients=[0])
    own, w, xi = run.client_model(1), run.server["w"], run.facts()["scores"][1]
    personal = set(np.argsort(-xi)[:D].tolist())
    still = convolutional(PLGULF(lr=0.0, **settings), engine)
    still.restore(*run.state())
    still.round(clients=[1])
    start = still.client_model(1)
    for l, names in enumerate((CONV, ("4.weight", "4.bias"), ("5.weight", "5.bias"))):
        for k in names:
            assert not torch.equal(own[k], w[k])
            assert torch.equal(start[k], own[k] if l in personal else w[k])
    source = own if 0 in personal else w
    x = run.data.x[run.data.splits["train"][1]]
    batch = nn.functional.conv2d(x, start["0.weight"]).transpose(0, 1).flatten(1)
    seen = {STATISTICS[0]: batch.mean(1), STATISTICS[1]: batch.var(1)}  # the one step moves a tenth of the way there
    for k, value in seen.items():
        torch.testing.assert_close(start[k], 0.9 * source[k] + 0.1 * value, rtol=0, atol=1e-12)


# PLGU-GRep on h phi_2 phi_1 x, squared error, in numpy -------------------------------------------------
Perturbation = Callable[[Array, Array], Array]  # of a gradient and scores


def eq12(rho: float = 0.2, p: float = 2.0) -> Perturbation:
    def epsilon(g: Array, xi: Array) -> Array:
        q = p / (p - 1)
        return np.asarray(rho * xi * np.sign(g) * np.abs(g) ** (q - 1) / (np.abs(g) ** q).sum() ** (1 / p))

    return epsilon


def each_layer_by_itself(g: Array, xi: Array) -> Array:
    """A layer of one number, divided by its own norm, is its sign."""
    return np.asarray(0.2 * xi * np.sign(g))


class Reference:
    """Algorithm 3 of one client."""

    def __init__(self, h: float, phi: Array, lr: float, momentum: float) -> None:
        self.h, self.phi, self.lr, self.momentum = h, phi, lr, momentum
        self.mh, self.mb = 0.0, np.zeros(2)

    def gradient(self, phi: Array, x: Array, y: Array) -> tuple[float, Array]:
        """By the head, and by the body."""
        error = self.h * phi.prod() * x - y
        return float((error * phi.prod() * x).mean()), np.array([(error * self.h * v * x).mean() for v in phi[::-1]])

    def head(self, x: Array, y: Array) -> None:
        self.mh = self.momentum * self.mh + self.gradient(self.phi, x, y)[0]
        self.h -= self.lr * self.mh

    def body(self, x: Array, y: Array, perturbation: Perturbation) -> None:
        before = self.phi
        self.mb = self.momentum * self.mb + self.gradient(before, x, y)[1]
        self.phi = before - self.lr * self.mb
        drift = np.abs(self.phi - before)
        epsilon = perturbation(self.gradient(self.phi, x, y)[1], drift / drift.sum())
        self.mb = self.momentum * self.mb + self.gradient(self.phi + epsilon, x, y)[1]
        self.phi = self.phi - self.lr * self.mb


def chain(clients: Sequence[tuple[Sequence[float], Sequence[float]]], engine: str, **hyper: Any) -> Federation:
    rows = [(np.array(x, dtype=np.float64)[:, None], np.array(y, dtype=np.float64)) for x, y in clients]
    data = FederatedData.from_arrays([{"train": r, "test": r} for r in rows])
    initial = {"phi1.value": f64(1), "phi2.value": f64(0.5), "head.value": f64(1)}
    algorithm = PLGUGRep(**{**FULL, "local_epochs": 2, "rho": 0.2, **hyper})
    return Federation(
        Task(Chain(), "squared_error", dtype=torch.float64), data, algorithm, engine=engine, initial=initial
    )


EXAMPLE = [([1], [2]), ([2], [-1])]
BY_HAND = [(1.166407308267, 0.824647350507), (0.821135480872, 0.12950033969)]  # the default, per client


@both_engines
@pytest.mark.parametrize(
    ("hyper", "perturbation"),
    [
        ({}, eq12()),
        ({"norm_scope": "layer"}, each_layer_by_itself),
        ({"norm_scope": "layer", "p": 3.0}, each_layer_by_itself),  # of one number all norms are alike
        ({"p": 3.0}, eq12(p=3.0)),
        ({"p": 1.5}, eq12(p=1.5)),
        ({"score_scale": "mean1", "p": 3.0}, eq12(rho=0.4, p=3.0)),
    ],
)
def test_grep_perturbations(engine: str, hyper: dict[str, Any], perturbation: Perturbation) -> None:
    bodies = []
    for (x,), (y,) in EXAMPLE:
        one = Reference(1.0, np.array([1, 0.5]), 0.1, 0.0)
        for _ in range(2):
            one.head(np.array([x]), np.array([y]))
        one.body(np.array([x]), np.array([y]), perturbation)
        bodies.append(one.phi)
    if not hyper:
        np.testing.assert_allclose(bodies, BY_HAND, rtol=0, atol=1e-11)
    run = chain(EXAMPLE, engine, **hyper)
    run.round()
    close(as_vector(run.server["phi"]), np.mean(bodies, 0).tolist(), 1e-12)


def test_grep_perturbation_of_each_layer_in_numbers() -> None:
    """Client 1 after (11): phi = (1.0818.., .6637..), h = 1.148125, scores (1/3, 2/3), both gradients negative."""
    phi, h = np.array([1.081857724609, 0.663715449219]), 1.148125
    at = phi - 0.2 * np.array([1 / 3, 2 / 3])
    error = h * at.prod() - 2
    expected = phi - 0.1 * error * h * at[::-1]
    run = chain(EXAMPLE, "sequential", norm_scope="layer")
    run.round(clients=[0])
    close(as_vector(run.server["phi"]), expected.tolist())


UNEVEN = [([1.0, 2.0, -0.5, 1.5], [2.0, 0.5, -1.0, 1.0]), ([2.0, 0.5, -1.0], [-1.0, 1.0, 0.3])]


@both_engines
@pytest.mark.parametrize("weights", ["uniform", "sample"])
@pytest.mark.parametrize("body_steps", ["batch", "epoch"])
def test_grep_two_rounds_in_batches(engine: str, weights: Any, body_steps: Any) -> None:
    """Momentum, uneven clients, scores anew in every batch of the body; client 1 misses the second round."""
    hyper: dict[str, Any] = {"batch_size": 2, "lr": 0.05, "momentum": 0.9, "weights": weights, "body_steps": body_steps}
    run = chain(UNEVEN, engine, **hyper)
    phi, heads = np.array([1, 0.5]), [1.0, 1.0]
    for t, cohort in enumerate([[0, 1], [0], [0, 1]]):
        bodies = []
        for i in cohort:
            x, y = (np.array(v) for v in UNEVEN[i])
            one = Reference(heads[i], phi, 0.05, 0.9)
            of_head, of_body = small.batches(run, run.algorithm.train, i, t)  # type: ignore[attr-defined]
            assert len(of_head) == 4 and len(of_body) == (1 if body_steps == "batch" else 2)
            for rows in of_head:
                one.head(x[rows], y[rows])
            for rows in of_body:
                one.body(x[rows], y[rows], eq12())
            bodies.append(one.phi)
            heads[i] = one.h
        p = np.array([len(UNEVEN[i][0]) for i in cohort], dtype=float) if weights == "sample" else np.ones(len(cohort))
        phi = np.average(bodies, 0, p)
        run.round(clients=cohort)
        close(as_vector(run.server["phi"]), phi.tolist(), 1e-12)
        close(run.personal_models()["head.value"].flatten(), heads, 1e-12)


# weights by samples, on examples whose clients are known one by one ----------------------------------
def repeated(rows: Sequence[Sequence[float]], targets: Sequence[float], times: Sequence[int]) -> FederatedData:
    """A client with a sample three times over has its gradients, and three times its weight."""
    split = [
        (np.array([row] * k, dtype=np.float64), np.array([y] * k, dtype=np.float64))
        for row, y, k in zip(rows, targets, times, strict=True)
    ]
    return FederatedData.from_arrays([{"train": s, "test": s} for s in split])


def average(a: Sequence[float], b: Sequence[float], p: float) -> list[float]:
    return [p * u + (1 - p) * v for u, v in zip(a, b, strict=True)]


@both_engines
@pytest.mark.parametrize(("weights", "p"), [("sample", 0.75), ("uniform", 0.5)])
def test_lf_weights(engine: str, weights: Any, p: float) -> None:
    data = repeated([(1, 2, 1, 0), (2, 1, 0, 1)], (0, 0), (3, 1))
    task = Task(Quadratic(), the_output, classifies=False, dtype=torch.float64)
    algorithm = PLGULF(**FULL, local_epochs=2, D=1, rho=0.5, weights=weights, perturb_at="theta")
    run = Federation(task, data, algorithm, engine=engine, initial=as_model([2, 2]))
    for i, theta in enumerate([(1.5, 1.75), (1.0, 2.25)]):
        run.clients.states.scatter(np.array([i]), lf.Kept({k: v[None] for k, v in as_model(theta).items()}, {}, {}))
    run.round()
    w_i = (1.896223681134, 1.213915518148), (1.49871978175, 1.800625251649)
    close(as_vector(run.server["w"]), average(*w_i, p))


@both_engines
@pytest.mark.parametrize(("weights", "p"), [("sample", 0.75), ("uniform", 0.5)])
def test_grep_weights(engine: str, weights: Any, p: float) -> None:
    run = chain([([1] * 3, [2] * 3), ([2], [-1])], engine, weights=weights)
    run.round()
    close(as_vector(run.server["phi"]), average(BY_HAND[0], BY_HAND[1], p))


@both_engines
@pytest.mark.parametrize(("weights", "p"), [("sample", (0.75, 0.25)), ("uniform", (0.5, 0.5))])
def test_ghn_weights(engine: str, weights: Any, p: Any) -> None:
    """H = b a v: the gradients of phi are weighted, the embeddings' are each client's own."""
    task = Task(Quadratic(1), the_output, classifies=False, dtype=torch.float64)
    settings = {**FULL, **PLAIN, "local_epochs": 2, "eta_h": 0.1, "eta_v": 0.1, "rho": 0.2, "weights": weights}
    run = Federation(task, repeated([(1, 2), (1, -1)], (0, 0), (3, 1)), Tiny(**settings), engine=engine)
    run.server = Server({"a": f64(1), "b": f64(0.5)}, {}, f64(1, 2)[:, None], {})
    run.round()
    v, delta, p = np.array([1, 2]), np.array([0.285, -0.38]), np.array(p)
    phi = np.array([1, 0.5])  # a, b
    pull = (p * v * delta).sum()
    g = -pull * phi[::-1]
    at = phi + 0.2 * g / np.sqrt((g**2).sum())
    close(as_vector(run.server.phi), (phi + 0.1 * pull * at[::-1]).tolist())
    close(run.server.v.flatten(), (v + 0.1 * at.prod() * delta).tolist())
