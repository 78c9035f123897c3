"""PLGU-LF, PLGU-GRep and PLGU-GHN: numbers worked out by hand, limits, and what only they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.algorithms import plgu_lf as lf
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.algorithms.plgu_ghn import PLGUGHN, Server
from bespokefl.algorithms.plgu_grep import PLGUGRep
from bespokefl.algorithms.plgu_lf import PLGULF
from bespokefl.core import HyperNetwork, InputError, Model, Task, generate
from bespokefl.data import FederatedData
from bespokefl.federation import Federation

ENGINES = ["sequential", "vectorized"]
both_engines = pytest.mark.parametrize("engine", ENGINES)
FULL: dict[str, Any] = {"lr": 0.1, "batch_size": None}


class Coordinate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Quadratic(nn.Module):
    """f(x) = sum_l A_l (x_l - c_l)^2 / 2, a row of data being (A, c); each coordinate is a layer."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coordinate() for _ in range(layers))

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.cat([layer.value for layer in self.layers])
        A, c = rows.chunk(2, 1)
        return (A * (x - c) ** 2).sum(1) / 2


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def as_model(x: Sequence[float]) -> Model:
    return {f"layers.{l}.value": f64(v) for l, v in enumerate(x)}


def as_vector(model: Model) -> Tensor:
    return torch.cat([v.reshape(-1) for v in model.values()])


def close(a: Tensor, b: Sequence[float], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, f64(*b), rtol=0, atol=tolerance)


def one_row_each(rows: Sequence[Sequence[float]], targets: Sequence[float] | None = None) -> FederatedData:
    y = np.asarray([0.0] * len(rows) if targets is None else targets, dtype=np.float64)
    split = [(np.array([row], dtype=np.float64), y[i : i + 1]) for i, row in enumerate(rows)]
    return FederatedData.from_arrays([{"train": s, "test": s} for s in split])


def the_output(out: Tensor, y: Tensor) -> Tensor:
    return out


PAIR = [(1, 2, 1, 0), (2, 1, 0, 1)]  # A_1, c_1; A_2, c_2


def on_pair(algorithm: Algorithm, engine: str, x: Sequence[float] = (2, 2), **options: Any) -> Federation:
    task = Task(Quadratic(), the_output, classifies=False, dtype=torch.float64)
    return Federation(task, one_row_each(PAIR), algorithm, engine=engine, initial=as_model(x), **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def classified(sizes: Sequence[int] = (23, 8, 31)) -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    return FederatedData.from_arrays([{"train": arrays(n), "test": arrays(2)} for n in sizes], classes=("a", "b", "c"))


TRAINING: dict[str, Any] = {"lr": 0.05, "local_epochs": 2, "batch_size": 10}


def federation(algorithm: Algorithm, engine: str = "sequential", **options: Any) -> Federation:
    return Federation(net(), classified(), algorithm, engine=engine, seed=5, **options)


def assert_equal(a: Model, b: Model) -> None:
    assert set(a) == set(b)
    assert all(torch.equal(v, b[k]) for k, v in a.items())


def assert_close(a: Model, b: Model, tolerance: float = 1e-10) -> None:
    assert set(a) == set(b)
    for k, v in a.items():
        torch.testing.assert_close(v, b[k], rtol=0, atol=tolerance)


def rounds(run: Federation, n: int) -> Federation:
    for _ in range(n):
        run.round()
    return run


# PLGU-LF ---------------------------------------------------------------------------------------------
def lf_example(engine: str, **hyper: Any) -> Federation:
    run = on_pair(PLGULF(**FULL, **{"local_epochs": 2, "D": 1, "rho": 0.5, **hyper}), engine)
    for i, theta in enumerate([(1.5, 1.75), (1.0, 2.25)]):
        run.clients.states.scatter(np.array([i]), lf.Kept({k: v[None] for k, v in as_model(theta).items()}, {}, {}))
    return run


@both_engines
def test_lf_by_hand(engine: str) -> None:
    run = lf_example(engine, perturb_at="theta")
    run.round()
    close(as_vector(run.client_model(0)), (1.405, 1.28))
    close(as_vector(run.client_model(1)), (0.64, 1.81))
    close(as_vector(run.server["w"]), (1.697471731442, 1.507270384898))
    for i, w_i in enumerate([(1.896223681134, 1.213915518148), (1.49871978175, 1.800625251649)]):
        alone = lf_example(engine, perturb_at="theta")  # with one client the global model is that client's w_i
        alone.round(clients=[i])
        close(as_vector(alone.server["w"]), w_i)


@both_engines
def test_lf_perturbed_at_w_by_hand(engine: str) -> None:
    run = lf_example(engine)  # the default
    run.round()
    close(as_vector(run.server["w"]), (1.477333873528, 1.510801584619))
    close(as_vector(run.client_model(0)), (1.405, 1.28))  # theta does not feel it


@both_engines
def test_lf_options_by_hand(engine: str) -> None:
    """One step of client 1: theta0 = (1.5, 2), g = (.5, 4), scores (2/3, 1/3), layer 0 personal."""
    norm = 16.25**0.5

    def w_after(**hyper: Any) -> Tensor:
        run = lf_example(engine, local_epochs=1, perturb_at="theta", **hyper)
        run.round(clients=[0])
        return as_vector(run.server["w"])

    def expected(e0: float, e1: float) -> tuple[float, float]:
        return 2 - 0.1 * (0.5 + e0), 2 - 0.1 * 2 * (2 + e1)

    close(w_after(), expected(0.5 * 2 / 3 * 0.5 / norm, 0.5 / 3 * 4 / norm))
    close(w_after(score_scale="mean1"), expected(0.5 * 4 / 3 * 0.5 / norm, 0.5 * 2 / 3 * 4 / norm))
    close(w_after(norm_scope="layer"), expected(0.5 * 2 / 3, 0.5 / 3))
    close(w_after(perturb_layers="universal"), expected(0, 0.5 * 4 / norm))
    close(w_after(perturb_layers="universal", score_scale="mean1"), expected(0, 0.5 * 2 * 4 / norm))
    close(w_after(perturb_layers="universal", D=2), (2 - 0.1 * 0.5, 2 - 0.1 * 2 * 1.75))  # none universal: no epsilon
    size = (0.5**1.5 + 4**1.5) ** (1 / 3)
    close(w_after(p=3.0), expected(0.5 * 2 / 3 * 0.5**0.5 / size, 0.5 / 3 * 2 / size))


@both_engines
def test_lf_frozen_personal_layers_stay(engine: str) -> None:
    run = lf_example(engine, freeze_train=False)
    run.round()
    close(as_vector(run.client_model(0)), (1.5, 1.28))
    close(as_vector(run.client_model(1)), (1.0, 1.81))
    assert run.client_model(0)["layers.0.value"] == 1.5  # exactly


@both_engines
def test_lf_without_rho_and_personal_layers_is_uniform_fedavg(engine: str) -> None:
    run = on_pair(PLGULF(**FULL, local_epochs=3, rho=0.0, D=0), engine)
    run.round()
    close(as_vector(run.server["w"]), (1.3765, 1.3765))
    settings = {**TRAINING, "momentum": 0.9, "weights": "uniform"}
    ours, fedavg = (federation(a, engine) for a in (PLGULF(**settings, rho=0.0, D=0), FedAvg(**settings)))
    for k in range(3):
        ours.round()
        fedavg.round()
        assert_close(ours.server["w"], fedavg.server["w"], 1e-13)
        if k == 0 and engine == "sequential":
            assert_equal(ours.personal_models(), fedavg.personal_models())
        assert_close(ours.personal_models(), fedavg.personal_models(), 1e-13)


@both_engines
def test_lf_with_all_layers_personal_trains_theta_locally(engine: str) -> None:
    """D = L, rho = 0: theta_i is Local's, and w moves by their mean move where gradients are theirs."""
    settings = {**TRAINING, "momentum": 0.9}
    ours = federation(PLGULF(**settings, rho=0.0, D=3, perturb_at="theta"), engine, participation=0.7)
    local = federation(Local(**settings), engine, participation=0.7)
    for _ in range(3):
        w, before = ours.server["w"], ours.personal_models()
        asked = ours.round().clients
        local.round()
        after = ours.personal_models()
        (assert_equal if engine == "sequential" else assert_close)(after, local.personal_models())
        moved = {k: w[k] + (after[k] - before[k])[asked].mean(0) for k in w}
        assert_close(ours.server["w"], moved, 1e-13)


def test_lf_perturbed_at_w_without_rho_is_fedavg_whatever_is_personal() -> None:
    fedavg = rounds(federation(FedAvg(**TRAINING, weights="uniform")), 3).server["w"]
    at_w = rounds(federation(PLGULF(**TRAINING, rho=0.0, D=2, perturb_at="w")), 3).server["w"]
    at_theta = rounds(federation(PLGULF(**TRAINING, rho=0.0, D=2, perturb_at="theta")), 3).server["w"]
    assert_close(at_w, fedavg, 1e-13)
    assert not torch.allclose(as_vector(at_theta), as_vector(fedavg), atol=1e-6)


@both_engines
@pytest.mark.parametrize("D", [0, 1, 2, None])
def test_lf_first_round_is_sam_for_every_D(engine: str, D: int | None) -> None:
    """theta_i = w and equal scores: SAM with the radius rho / L, or rho with mean1."""
    for scale, radius in (("sum1", 0.25), ("mean1", 0.5)):
        run = on_pair(PLGULF(**FULL, local_epochs=1, rho=0.5, D=D, score_scale=scale), engine)  # type: ignore[arg-type]
        run.round()
        w = f64(2, 2)
        steps = []
        for row in PAIR:
            A, c = f64(*row[:2]), f64(*row[2:])
            g = A * (w - c)
            steps.append(A * (w + radius * g / g.norm() - c))
        close(as_vector(run.server["w"]), (w - 0.1 * (steps[0] + steps[1]) / 2).tolist())
        if scale == "sum1":
            close(as_vector(run.server["w"]), (1.722714742183, 1.722714742183))


def test_lf_first_round_is_the_same_for_every_D_with_more_steps() -> None:
    models = [rounds(federation(PLGULF(**TRAINING, D=D)), 1).server["w"] for D in (0, 2, None)]
    assert_equal(models[0], models[1])
    assert_equal(models[0], models[2])
    later = [rounds(federation(PLGULF(**TRAINING, D=D)), 2).server["w"] for D in (0, 2)]
    assert not torch.equal(as_vector(later[0]), as_vector(later[1]))


@both_engines
@pytest.mark.parametrize("D", [0, 1, 2, 3, None])
def test_lf_starts_from_w_and_D_own_layers_exactly(engine: str, D: int | None) -> None:
    run = federation(PLGULF(**TRAINING, D=D, rho=0.1), engine)
    run.round()
    run.round(clients=[0, 1])
    own = run.client_model(2)
    w = {k: v.clone() for k, v in run.server["w"].items()}
    still = federation(PLGULF(**{**TRAINING, "lr": 0.0}, D=D), engine)  # with lr = 0 theta0 is what comes out
    tensors, meta = run.state()
    still.restore(tensors, meta)
    still.round(clients=[2])
    start = still.client_model(2)
    from_own = {k for k in w if torch.equal(start[k], own[k])}
    from_w = {k for k in w if torch.equal(start[k], w[k])}
    assert len(from_own) == 2 * (1 if D is None else D) and from_own | from_w == set(w) and not from_own & from_w
    assert_equal(still.server["w"], w)


def test_lf_refuses_more_personal_layers_than_there_are() -> None:
    with pytest.raises(InputError, match=r"algorithm\.D = 4 .* from 0 to 3"):
        federation(PLGULF(**TRAINING, D=4))


@pytest.mark.parametrize("at", ["w", "theta"])
def test_lf_one_layer_is_sam(at: Any) -> None:
    task = Task(Quadratic(1), the_output, classifies=False, dtype=torch.float64)
    algorithm = PLGULF(**FULL, local_epochs=1, rho=0.5, D=1, perturb_at=at)
    run = Federation(task, one_row_each([(3, 1)]), algorithm, engine="sequential", initial=as_model([2.0]))
    for _ in range(2):  # in the second round the score is that of a drift: 1 as well
        theta, w = as_vector(run.client_model(0)), as_vector(run.server["w"])
        run.round()
        x = w if at == "w" else theta
        torch.testing.assert_close(as_vector(run.server["w"]), w - 0.1 * 3 * (x + 0.5 - 1), rtol=0, atol=1e-12)


@both_engines
def test_lf_an_absent_client_keeps_theta(engine: str) -> None:
    run = federation(PLGULF(**TRAINING), engine)
    run.round()
    before = run.client_model(1)
    run.round(clients=[0, 2])
    assert_equal(run.client_model(1), before)


@both_engines
def test_lf_counts_steps_or_epochs(engine: str) -> None:
    """Three batches of 10 are one epoch of 23 samples."""
    settings = {"lr": 0.05, "batch_size": 10}
    steps = federation(PLGULF(**settings, local_epochs=3, local_unit="steps"), engine)  # type: ignore[arg-type]
    epochs = federation(PLGULF(**settings, local_epochs=1), engine)  # type: ignore[arg-type]
    for run in (steps, epochs):
        run.round(clients=[0])
    assert_equal(steps.server["w"], epochs.server["w"])


@both_engines
def test_lf_statistics_come_from_the_unperturbed_pass(engine: str) -> None:
    """One step from theta = w: the running statistics are FedAvg's, whatever rho is."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": None, "weights": "uniform"}
    ours, fedavg = (
        rounds(Federation(module, classified(), a, engine=engine), 1).server["w"]
        for a in (PLGULF(**settings, rho=5.0), FedAvg(**settings))
    )
    for k in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(ours[k], fedavg[k], rtol=0, atol=1e-12)
    assert not torch.allclose(ours["0.weight"], fedavg["0.weight"], atol=1e-6)


def test_lf_personal_statistics_stay_with_their_layer() -> None:
    """D = L, rho = 0 is Local with BatchNorm too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    ours, local = (
        rounds(Federation(module, classified(), a, engine="sequential"), 2).personal_models()
        for a in (PLGULF(**TRAINING, rho=0.0, D=2), Local(**TRAINING))
    )
    assert_equal(ours, local)


@pytest.mark.parametrize(
    ("field", "value"),
    [("D", -1), ("rho", -0.1), ("p", 1.0), ("perturb_at", "x"), ("grouping", "block"), ("score_scale", "max")],
)
def test_lf_impossible_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"algorithm.{field}"):
        build_algorithm("plgu-lf", {}, {field: value})


# PLGU-GRep -------------------------------------------------------------------------------------------
class Chain(nn.Module):
    """h * phi_2 * phi_1 * x."""

    def __init__(self) -> None:
        super().__init__()
        self.phi1, self.phi2, self.head = Coordinate(), Coordinate(), Coordinate()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.phi2(self.phi1(x)))
        return out


def grep_example(engine: str, **hyper: Any) -> Federation:
    task = Task(Chain(), "squared_error", dtype=torch.float64)
    initial = {"phi1.value": f64(1), "phi2.value": f64(0.5), "head.value": f64(1)}
    epochs = {} if "head_epochs" in hyper else {"local_epochs": 2}
    full = {key: value for key, value in FULL.items() if key != "local_epochs"}
    algorithm = PLGUGRep(**{**full, **epochs, "rho": 0.2, **hyper})
    return Federation(task, one_row_each([(1,), (2,)], (2, -1)), algorithm, engine=engine, initial=initial)


@both_engines
@pytest.mark.parametrize(
    ("hyper", "phi", "each"),
    [
        (
            {},
            (0.99377139457, 0.477073845098),
            [(1.166407308267, 0.824647350507), (0.821135480872, 0.12950033969)],
        ),
        (
            {"perturb_grad": "reuse"},
            None,
            [(1.165769562906, 0.82585618968), (0.822668041981, 0.128313736606)],
        ),
        ({"rho": 0.0}, (1.010767435856, 0.480046890461), None),
    ],
    ids=["fresh", "reuse", "rho=0"],
)
def test_grep_by_hand(engine: str, hyper: dict[str, Any], phi: Any, each: Any) -> None:
    run = grep_example(engine, **hyper)
    run.round()
    if phi:
        close(as_vector(run.server["phi"]), phi)
    heads = run.personal_models()["head.value"]
    close(heads.flatten(), (1.148125, 0.62))  # whatever rho is
    for i, phi_i in enumerate(each or ()):
        alone = grep_example(engine, **hyper)  # with one client the server's body is its own
        alone.round(clients=[i])
        close(as_vector(alone.server["phi"]), phi_i)


def plain_grep(module: nn.Module, x: Tensor, y: Tensor, rho: float, xi: Tensor | None, mean1: bool) -> None:
    """Algorithm 3 of one client in plain torch on one batch: two head steps, then the body."""
    body, head = [module[0], module[2]], module[4]  # type: ignore[index]
    params = [v for layer in body for v in layer.parameters()]

    def grads(wrt: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(nn.functional.cross_entropy(module(x), y), wrt))

    @torch.no_grad()
    def move(wrt: list[Tensor], by: list[Tensor], factor: float) -> None:
        for v, d in zip(wrt, by, strict=True):
            v += factor * d

    for _ in range(2):
        heads = list(head.parameters())
        move(heads, grads(heads), -0.05)
    g = grads(params)
    move(params, g, -0.05)
    if xi is None:
        sizes = f64(*(sum(v.numel() for v in layer.parameters()) for layer in body))
        drift = torch.stack([(g[2 * l].pow(2).sum() + g[2 * l + 1].pow(2).sum()).sqrt() for l in (0, 1)]) / sizes
        xi = drift / drift.sum()
    xi = xi * 2 if mean1 else xi
    fresh = grads(params)
    length = torch.cat([v.flatten() for v in fresh]).norm()
    epsilon = [rho * xi[k // 2] * v / length for k, v in enumerate(fresh)]
    move(params, epsilon, 1.0)
    last = grads(params)
    move(params, epsilon, -1.0)
    move(params, last, -0.05)


@both_engines
@pytest.mark.parametrize("mean1", [False, True])
def test_grep_is_the_plain_loop(engine: str, mean1: bool) -> None:
    """rho = 0 as well: two plain steps of the body on one batch."""
    for rho in (0.0, 0.4):
        scale: Any = "mean1" if mean1 else "sum1"
        settings: dict[str, Any] = {"lr": 0.05, "local_epochs": 2, "batch_size": None}
        run = federation(PLGUGRep(**settings, rho=rho, score_scale=scale), engine)
        run.round()
        rows = run.data.splits["train"]
        modules = [net() for _ in rows]
        for module, mine in zip(modules, rows, strict=True):
            plain_grep(module, run.data.x[mine], run.data.y[mine], rho, None, mean1)
        for k, v in run.server["phi"].items():
            torch.testing.assert_close(v, torch.stack([m.state_dict()[k] for m in modules]).mean(0), rtol=0, atol=1e-12)
        for i, module in enumerate(modules):
            own = run.client_model(i)
            for k in ("4.weight", "4.bias"):
                torch.testing.assert_close(own[k], module.state_dict()[k], rtol=0, atol=1e-12)
            assert torch.equal(own["0.weight"], run.server["phi"]["0.weight"])  # the newest body


@both_engines
def test_grep_scores_against_the_body_sent_last(engine: str) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "local_epochs": 2, "batch_size": None, "rho": 0.4}
    run = federation(PLGUGRep(**settings, score_from="previous"), engine)
    run.round(clients=[1])  # client 0 takes part for the first time in round 2: equal scores, although phi has moved
    run.round(clients=[0])
    module, mine = net(), run.data.splits["train"][0]
    first = federation(PLGUGRep(**settings, score_from="previous"), engine)
    first.round(clients=[1])
    module.load_state_dict({**net().state_dict(), **first.server["phi"]})
    plain_grep(module, run.data.x[mine], run.data.y[mine], 0.4, f64(0.5, 0.5), False)
    for k, v in run.server["phi"].items():
        torch.testing.assert_close(v, module.state_dict()[k], rtol=0, atol=1e-12)
    sent, phi = first.server["phi"], run.server["phi"]  # client 1 sent the first body, and now gets the second
    raw = torch.stack([
        torch.cat([(sent[f"{l}.{n}"] - phi[f"{l}.{n}"]).flatten() for n in ("weight", "bias")]).norm() / size
        for l, size in ((0, 25), (2, 24))
    ])  # fmt: skip
    head = {k: v for k, v in run.client_model(1).items() if k.startswith("4.")}
    module.load_state_dict({**phi, **head})
    mine = run.data.splits["train"][1]
    plain_grep(module, run.data.x[mine], run.data.y[mine], 0.4, raw / raw.sum(), False)
    run.round(clients=[1])
    for k, v in run.server["phi"].items():
        torch.testing.assert_close(v, module.state_dict()[k], rtol=0, atol=1e-12)


def test_grep_first_move_does_not_set_the_scores_by_its_length() -> None:
    """xi depends on the gradient's direction only: the perturbation of two tiny steps of different size is the same."""
    moved = []
    for lr in (1e-7, 1e-6):
        run = grep_example("sequential", lr=lr, rho=0.5)
        run.round(clients=[0])
        moved.append((as_vector(run.server["phi"]) - f64(1, 0.5)) / lr)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=0)


@both_engines
def test_grep_heads_do_not_depend_on_rho_and_are_never_sent(engine: str) -> None:
    runs = [federation(PLGUGRep(**TRAINING, rho=rho), engine, clients_per_round=2) for rho in (0.0, 0.7)]
    records = [run.round() for run in runs]
    n_body = sum(v.numel() for k, v in net().named_parameters() if not k.startswith("4."))
    for record in records:
        assert (record.bytes_down, record.bytes_up) == (4 * 2 * n_body, 4 * 2 * n_body)
    assert set(runs[0].server["phi"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    models = [run.personal_models() for run in runs]
    for k in ("4.weight", "4.bias"):
        assert torch.equal(models[0][k], models[1][k])
    assert not torch.equal(models[0]["0.weight"], models[1]["0.weight"])
    assert runs[0].global_model() is None


def test_grep_a_client_that_never_took_part_has_the_initial_head() -> None:
    run = federation(PLGUGRep(**TRAINING))
    run.round(clients=[0])
    model = run.client_model(2)
    assert torch.equal(model["4.weight"], net().state_dict()["4.weight"])
    assert torch.equal(model["0.weight"], run.server["phi"]["0.weight"])
    assert not torch.equal(model["0.weight"], net().state_dict()["0.weight"])


@both_engines
def test_grep_options_of_the_batches(engine: str) -> None:
    """An epoch of one batch is one batch; head_epochs takes the place of local_epochs."""
    base = rounds(grep_example(engine), 2).state()[0]
    assert_equal(rounds(grep_example(engine, body_steps="epoch"), 2).state()[0], base)
    assert_equal(rounds(grep_example(engine, head_epochs=2), 2).state()[0], base)
    one, all_ = (
        rounds(federation(PLGUGRep(**TRAINING, body_steps=b), engine), 1).server["phi"]  # type: ignore[arg-type]
        for b in ("batch", "epoch")
    )
    assert not torch.allclose(as_vector(one), as_vector(all_), atol=1e-6)


def test_grep_statistics_come_from_the_first_pass_of_the_body() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": None, "weights": "uniform"}
    ours, fedavg = (
        rounds(Federation(module, classified(), a, engine="sequential"), 1).server
        for a in (PLGUGRep(**settings, rho=5.0), FedAvg(**settings))
    )
    for k in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(ours["phi"][k], fedavg["w"][k], rtol=0, atol=1e-12)  # another order of the samples


def test_grep_needs_a_body() -> None:
    with pytest.raises(InputError, match="no trained layer before its head"):
        Federation(nn.Linear(4, 3).double(), classified(), PLGUGRep(**TRAINING))


# PLGU-GHN --------------------------------------------------------------------------------------------
class TinyH(nn.Module):
    """H(v; a, b) = b a v."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(1, device="meta")), nn.Parameter(torch.empty(1, device="meta"))

    def forward(self, v: Tensor) -> Model:
        return {"layers.0.value": self.b * self.a * v}


@dataclass(frozen=True)
class Tiny(PLGUGHN):
    name: ClassVar[str] = "tiny-ghn"

    def hypernetwork(self, task: Task, n_clients: int) -> nn.Module:
        return TinyH()


PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "momentum_h": 0.0, "weight_decay_h": 0.0, "clip": None}


def ghn_example(engine: str, **hyper: Any) -> Federation:
    """f_i(w) = (w - c_i)^2 / 2, c = (2, -1)."""
    settings = {**FULL, **PLAIN, "local_epochs": 2, "eta_h": 0.1, "eta_v": 0.1, "rho": 0.2, **hyper}
    task = Task(Quadratic(1), the_output, classifies=False, dtype=torch.float64)
    run = Federation(task, one_row_each([(1, 2), (1, -1)]), Tiny(**settings), engine=engine)
    run.server = Server({"a": f64(1), "b": f64(0.5)}, {}, f64(1, 2)[:, None], {})
    return run


@both_engines
@pytest.mark.parametrize(
    ("hyper", "phi", "v", "w"),
    [
        (
            {},
            (0.983876470843, 0.474125735421),
            (1.021078793736, 1.971894941686),
            (0.476314015356, 0.919851830532),
        ),
        ({"rho": 0.0}, (0.988125, 0.47625), (1.01425, 1.981), (0.47730050332, 0.932247766406)),
        ({"embed_at": "clean"}, (0.983876470843, 0.474125735421), (1.01425, 1.981), None),
    ],
    ids=["perturbed", "rho=0", "clean"],
)
def test_ghn_by_hand(engine: str, hyper: dict[str, Any], phi: Any, v: Any, w: Any) -> None:
    run = ghn_example(engine, **hyper)
    close(run.personal_models()["layers.0.value"].flatten(), (0.5, 1.0))
    run.round()
    close(as_vector(run.server.phi), phi)
    close(run.server.v.flatten(), v)
    if w:
        close(run.personal_models()["layers.0.value"].flatten(), w)


@both_engines
def test_ghn_recomputed_delta_by_hand(engine: str) -> None:
    """The second Delta is that of two steps from H(v; phi + epsilon), and the traffic doubles."""
    run = ghn_example(engine, ghn_delta="recompute")
    record = run.round()
    a, b = 1 + 0.0894427191, 0.5 + 0.1788854382
    v, c = f64(1, 2), f64(2, -1)
    delta = (0.81 - 1) * (a * b * v - c)
    expected = f64(1, 0.5) + 0.1 * torch.stack([(b * v * delta).mean(), (a * v * delta).mean()])
    close(as_vector(run.server.phi), expected.tolist(), 1e-9)
    close(run.server.v.flatten(), (v + 0.1 * a * b * delta).tolist(), 1e-9)
    assert record.bytes_down == record.bytes_up == 2 * 2 * 4


def ghn(engine: str = "sequential", algorithm: type[PLGUGHN] = PLGUGHN, **hyper: Any) -> Federation:
    settings = {**PLAIN, "lr": 0.05, "local_epochs": 1, "batch_size": None, "width": 6, "embed": 3, **hyper}
    return federation(algorithm(**settings), engine)


def objective(run: Federation, phi: Model, v: Tensor, clients: Sequence[int]) -> Tensor:
    """The mean over the clients of f_i(H(v_i; phi)), for autograd."""
    module, H = net(), run.algorithm.hypernetwork(run.task, 3)  # type: ignore[attr-defined]
    models = generate(H, phi, v)
    losses = []
    for row, i in enumerate(clients):
        mine = run.data.splits["train"][i]
        out = torch.func.functional_call(module, {k: w[row] for k, w in models.items()}, (run.data.x[mine],))
        losses.append(nn.functional.cross_entropy(out, run.data.y[mine]))
    return torch.stack(losses).mean()


@both_engines
@pytest.mark.parametrize("clients", [[0, 1, 2], [0, 2]])
def test_ghn_step_is_autograd_through_the_hypernetwork(engine: str, clients: list[int]) -> None:
    """K = 1, rho = 0: Delta_i = -eta grad f_i, so the steps are eta_h eta and eta_v eta times autograd's gradients."""
    run = ghn(engine, rho=0.0, eta_h=0.3, eta_v=0.2)
    before = run.server
    phi = {k: w.clone().requires_grad_() for k, w in before.phi.items()}
    v = before.v[clients].clone().requires_grad_()
    *g, g_v = torch.autograd.grad(objective(run, phi, v, clients), [*phi.values(), v])
    run.round(clients=clients)
    for k, d in zip(phi, g, strict=True):
        torch.testing.assert_close(run.server.phi[k], before.phi[k] - 0.3 * 0.05 * d, rtol=0, atol=1e-13)
    stepped = before.v[clients] - 0.2 * 0.05 * len(clients) * g_v  # no 1/C: each v_i belongs to one client
    torch.testing.assert_close(run.server.v[clients], stepped, rtol=0, atol=1e-13)
    absent = [i for i in range(3) if i not in clients]
    assert torch.equal(run.server.v[absent], before.v[absent])


@both_engines
def test_ghn_recomputed_is_exact_sam(engine: str) -> None:
    """K = 1: the gradient of the mean loss at phi + rho g / ||g||, by autograd."""
    run = ghn(engine, rho=0.3, eta_h=0.3, ghn_delta="recompute")
    phi = {k: w.clone().requires_grad_() for k, w in run.server.phi.items()}
    v = run.server.v
    g = torch.autograd.grad(objective(run, phi, v, range(3)), list(phi.values()))
    length = torch.cat([d.flatten() for d in g]).norm()
    at = {k: (w + 0.3 * d / length).detach().requires_grad_() for (k, w), d in zip(phi.items(), g, strict=True)}
    second = torch.autograd.grad(objective(run, at, v, range(3)), list(at.values()))
    run.round()
    for (k, w), d in zip(phi.items(), second, strict=True):
        torch.testing.assert_close(run.server.phi[k], w.detach() - 0.3 * 0.05 * d, rtol=0, atol=1e-12)


class FixedTrunk(nn.Module):
    """Linear in phi: one head per tensor on the embedding itself."""

    def __init__(self, target: Model, embed: int) -> None:
        super().__init__()
        self.inner = HyperNetwork(target, embed, embed, 0)
        self.inner.trunk = nn.Sequential()

    def forward(self, v: Tensor) -> Model:
        models: Model = self.inner(v)
        return models


@dataclass(frozen=True)
class LinearH(PLGUGHN):
    name: ClassVar[str] = "linear-ghn"

    def hypernetwork(self, task: Task, n_clients: int) -> nn.Module:
        return FixedTrunk(task.params(task.initial), 3)


def test_ghn_linear_in_phi_does_not_depend_on_rho() -> None:
    flat, sharp = (rounds(ghn(algorithm=LinearH, rho=rho, embed_at="clean"), 2).server for rho in (0.0, 5.0))
    assert_close(flat.phi, sharp.phi, 1e-13)
    bent = [as_vector(rounds(ghn(rho=rho), 2).server.phi) for rho in (0.0, 5.0)]
    assert not torch.allclose(*bent, atol=1e-6)


@both_engines
def test_ghn_nothing_learned_changes_nothing(engine: str) -> None:
    run = ghn(engine, lr=0.0, rho=0.3)
    before = run.server
    run.round()
    assert_equal(run.server.phi, before.phi)
    assert torch.equal(run.server.v, before.v)


def test_ghn_clips_and_keeps_momentum() -> None:
    free, clipped = (rounds(ghn(eta_h=1.0, eta_v=1.0, rho=0.0, clip=c, lr=1e-3), 1).server for c in (None, 1e-5))
    start = ghn().server
    moves = [torch.cat([as_vector(s.phi) - as_vector(start.phi), (s.v - start.v).flatten()]) for s in (free, clipped)]
    assert moves[0].norm() > 2e-5 > 1.1e-5 > moves[1].norm() > 0
    heavy = rounds(ghn(momentum_h=0.9), 1).server
    assert_equal(heavy.phi, rounds(ghn(), 1).server.phi)  # the first step has no past
    assert heavy.m.keys() == heavy.phi.keys()


def test_ghn_layerwise_perturbation() -> None:
    g = {"a.weight": f64(3, 0), "a.bias": f64(4), "b.weight": f64(12)}
    even = PLGUGHN(rho=0.5).perturbation(g)
    assert_close(even, {k: 0.5 * d / 13 for k, d in g.items()}, 1e-14)
    raw = f64(5 / 3, 12)
    xi = raw / raw.sum()
    scaled = {k: 0.5 * xi[0 if k[0] == "a" else 1] * d / 13 for k, d in g.items()}
    assert_close(PLGUGHN(rho=0.5, ghn_layerwise=True).perturbation(g), scaled, 1e-14)


def test_ghn_architecture_and_its_limits() -> None:
    n = sum(v.numel() for v in net().parameters())
    run = federation(PLGUGHN(**TRAINING))  # three clients: embeddings of 1 + 3 // 4
    assert run.server.v.shape == (3, 1)
    assert sum(v.numel() for v in run.server.phi.values()) == (1 + 1) * 100 + 2 * 101 * 100 + 101 * n
    thin = federation(PLGUGHN(**TRAINING, head_rank=2))
    assert sum(v.numel() for v in thin.server.phi.values()) == (1 + 1) * 100 + 2 * 101 * 100 + 6 * 2 * 100 + 3 * n
    thin.round()
    again, other = federation(PLGUGHN(**TRAINING)), Federation(nn.Linear(4, 3).double(), classified(), PLGUGHN())
    assert_equal(run.server.phi, again.server.phi)
    assert not torch.equal(other.server.v, run.server.v)  # another initial model, another stream
    with pytest.raises(InputError, match="head_rank"):
        federation(PLGUGHN(**TRAINING, width=10_000_000))


@pytest.mark.parametrize("name", ["plgu-lf", "plgu-ghn"])
def test_bytes_are_those_of_fedavg(name: str) -> None:
    n = sum(v.numel() for v in net().parameters())
    record = federation(build_algorithm(name, TRAINING), clients_per_round=2).round()
    assert (record.bytes_down, record.bytes_up) == (4 * 2 * n, 4 * 2 * n)
