"""FedPG and S-FedPG on hand-sized problems: directions, fallbacks, absent clients, personal models, line search."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bespokefl.algorithms.fedpg import FedPG, Last
from bespokefl.algorithms.s_fedpg import SFedPG
from bespokefl.core import InputError, RunError, Task, columns_of, common_direction, min_norm, unfairness
from bespokefl.core.common_direction import Columns, Direction, fairness_weights
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.engines.base import Job, Result
from bespokefl.federation import Federation

ENGINES = pytest.mark.parametrize("engine", [Sequential, Vectorized])
EXACT: dict[str, Any] = {"grad_mode": "exact", "batch_size": None, "lr_decay": 1.0}
G = [[2.0, 0.0], [0.0, 0.5]]  # minima of f_i(x) = |x - c_i|^2 / 2
START = [1.0, 1.0]


class Point(nn.Module):
    """Output x - c: the loss is half its square."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        return self.x - c


class Plane(Point):
    """Output L + g.x for a row (L, g): any losses and gradients at x = 0."""

    def forward(self, row: Tensor) -> Tensor:
        return row[:, 0] + row[:, 1:] @ self.x


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (out**2).sum(-1)


def as_it_is(out: Tensor, y: Tensor) -> Tensor:
    return out


def federate(module: nn.Module, loss: Any, rows: Any, algorithm: FedPG, engine: Any, **options: Any) -> Federation:
    part = [(np.array([row], dtype=np.float64), np.zeros(1)) for row in rows]
    data = FederatedData.from_arrays([{"train": p, "test": p} for p in part])
    return Federation(
        Task(module, loss, head="", dtype=torch.float64), data, algorithm, engine=engine("cpu"), **options
    )


def squares(algorithm: FedPG, engine: Any = Sequential, centres: Any = G, **options: Any) -> Federation:
    return federate(Point(START), half_square, centres, algorithm, engine, **options)


def planes(losses: Any, gradients: Any, algorithm: FedPG, engine: Any = Sequential, **options: Any) -> Federation:
    rows = [[l, *np.atleast_1d(g)] for l, g in zip(losses, gradients, strict=True)]
    return federate(Plane([0.0] * (len(rows[0]) - 1)), as_it_is, rows, algorithm, engine, **options)


def moved(federation: Federation, rounds: int = 1) -> list[float]:
    """How far the G-model goes; with eta = 1 it is d'."""
    before = federation.global_model()["x"].clone()  # type: ignore[index]
    for _ in range(rounds):
        federation.round()
    return (federation.global_model()["x"] - before).tolist()  # type: ignore[index]


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-10)


# the fairness objective ----------------------------------------------------------------------------------
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.integers(0, 10**6))
def test_fairness_gradient_by_central_differences(losses: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    l, g, v, step = np.array(losses), rng.normal(size=(len(losses), 3)), rng.normal(size=3), 1e-5 * min(losses)
    h = fairness_weights(l)
    scale = 1 / np.linalg.norm(l)
    assert abs(h @ l) <= 1e-12
    assert unfairness(7 * l) == pytest.approx(unfairness(l), abs=1e-14)
    slope = (unfairness(l + step * g @ v) - unfairness(l - step * g @ v)) / (2 * step)
    assert h @ g @ v == pytest.approx(slope, abs=1e-7 * (1 + scale))


def test_fairness_numbers() -> None:
    l = np.array([1, 0.625])
    assert unfairness(l) == pytest.approx(-0.974391195695, abs=1e-10)
    assert fairness_weights(l).tolist() == near(0.101060452449, -0.161696723918)
    g = np.array([[-1, 1], [1, 0.5]])
    slopes = []
    for v in np.eye(2) * 1e-5:
        up, down = (0.5 * ((np.array(START) + s * v - np.array(G)) ** 2).sum(1) for s in (1, -1))
        slopes.append((unfairness(up) - unfairness(down)) / 2e-5)
    assert fairness_weights(l) @ g == pytest.approx(slopes, abs=1e-8)
    assert (fairness_weights(l) @ g).tolist() == near(-0.262757176367, 0.02021209049)


# the common direction ------------------------------------------------------------------------------------
@ENGINES
@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", (0.266384299411, -0.701098712755)),
        ("mean", (0.171510507394, -0.720174509012)),
    ],
)
def test_direction_numbers(engine: Any, scale: Any, expected: tuple[float, float]) -> None:
    assert moved(squares(FedPG(lr=1.0, scale=scale, **EXACT), engine)) == near(*expected)


def directed(losses: Any, gradients: Any, scale: Any) -> tuple[Columns, Direction]:
    g = {"x": torch.tensor(gradients, dtype=torch.float64)}
    c = columns_of(g, np.array(losses, dtype=np.float64), (), scale, 0.0)
    return c, common_direction(c)


def test_lambda_and_sigma_as_in_the_supplement() -> None:
    """Problem G, scale="none": the fairness column holds 82 % of the weight."""
    c, d = directed([1, 0.625], [[-1, 1], [1, 0.5]], "none")
    assert c.h.tolist() == near(0.101060452449, -0.161696723918)
    assert c.z["x"][2].tolist() == near(-0.262757176367, 0.02021209049)  # grad F
    assert min_norm(c.products).tolist() == near(0, 0.176517670054, 0.823482329946)
    assert d.sigma == pytest.approx(6.68329613589, abs=1e-10)
    assert (d.d["x"] / d.sigma).tolist() == near(0.039858221751, -0.104903134397)
    assert (d.slopes / d.sigma).tolist() == near(-0.144761356147, -0.012593345447)
    assert d.fair and d.moves and not d.fair_dropped


def test_lambda_and_sigma_of_columns_of_one_length() -> None:
    """scale="mean": the weights are of the scaled columns, the slopes of the raw gradients."""
    c, d = directed([1, 0.625], [[-1, 1], [1, 0.5]], "mean")
    assert c.r == pytest.approx(1.266123775561, abs=1e-10)
    size = c.r / np.sqrt(c.products.diagonal())
    fair = size[2] * c.z["x"][2]
    assert fair.tolist() == near(-1.26611392376, -0.004994707474)
    assert min_norm(c.products * size[:, None] * size).tolist() == near(0, 0.5, 0.5)
    assert d.sigma == pytest.approx(2.5664008848, abs=1e-10)
    assert (d.d["x"] / d.sigma).tolist() == near(0.066829195863, -0.280616529271)
    assert d.slopes.tolist() == near(-0.891685016406, -0.188576747112)


def test_lambda_and_sigma_without_the_fairness_column() -> None:
    c, d = directed([1, 1], [[-1, 1], [1, 0.5]], "none")
    assert min_norm(c.products[:2, :2]).tolist() == near(7 / 17, 10 / 17)
    assert d.sigma == pytest.approx(0.75 / np.sqrt(9 / 17), abs=1e-12)  # |mean g| over |d|
    assert (d.d["x"] / d.sigma).tolist() == near(-3 / 17, -12 / 17)
    assert (d.slopes / d.sigma).tolist() == near(-9 / 17, -9 / 17)
    assert not d.fair and not d.fair_dropped
    _, alone = directed([1], [[3, 4]], "mean")
    assert alone.sigma == 1 and alone.d["x"].tolist() == near(-3, -4) and alone.slopes.tolist() == near(-25)


@ENGINES
def test_without_the_fairness_column(engine: Any) -> None:
    """Equal losses: h = 0, and the direction is the gradients' own (-3/17, -12/17), lengthened to the mean's."""
    d = np.array(moved(planes([1, 1], [[-1, 1], [1, 0.5]], FedPG(lr=1.0, scale="none", **EXACT), engine)))
    assert (d / np.linalg.norm(d)).tolist() == near(*(np.array([-1, -4]) / np.sqrt(17)))
    assert np.linalg.norm(d) == pytest.approx(0.75, abs=1e-12)  # |mean g|
    with_column = np.array(moved(squares(FedPG(lr=1.0, scale="none", **EXACT), engine)))
    assert abs(with_column / np.linalg.norm(with_column) - d / np.linalg.norm(d)).max() > 0.1


def test_fairness_only_beyond_an_angle() -> None:
    """The losses of problem G are 13 degrees from equal."""
    beyond = moved(squares(FedPG(lr=1.0, scale="none", fair_angle=11.25, **EXACT)))
    within = moved(squares(FedPG(lr=1.0, scale="none", fair_angle=20.0, **EXACT)))
    assert beyond == near(0.266384299411, -0.701098712755)
    assert (np.array(within) / np.linalg.norm(within)).tolist() == near(*(np.array([-1, -4]) / np.sqrt(17)))


@pytest.mark.parametrize(("before", "counts"), [(0.9, True), (1.0, False), (1.1, False)])
def test_fairness_within_the_angle_if_a_loss_rose(before: float, counts: bool) -> None:
    """Client 0 has the loss 1 now; the angle of 13 degrees alone would not do."""
    federation = squares(FedPG(lr=1.0, scale="none", fair_angle=20.0, **EXACT))
    past = Last({"x": torch.tensor([5.0, 5.0], dtype=torch.float64)}, before, 0)
    federation.server = federation.server._replace(last={0: past})
    d = np.array(moved(federation))
    if counts:
        assert d.tolist() == near(0.266384299411, -0.701098712755)
    else:
        assert (d / np.linalg.norm(d)).tolist() == near(*(np.array([-1, -4]) / np.sqrt(17)))
    assert federation.server.last[0].loss == pytest.approx(1.0, abs=1e-12)  # the next round compares with this one


@ENGINES
def test_lemma_counterexample_drops_the_fairness_column(engine: Any) -> None:
    federation = planes([2, 1], [1, 1], FedPG(lr=1.0, scale="none", **EXACT), engine)
    assert moved(federation) == near(-1)
    assert federation.server.fair_dropped == 1
    facts = federation.facts()
    assert {k: v.tolist() for k, v in facts.items()} == {"step": 1.0, "fair_dropped": 1}
    moved(federation)
    assert federation.facts()["fair_dropped"] == 2


@ENGINES
def test_stationary_models_stay(engine: Any) -> None:
    for algorithm in (FedPG(lr=1.0, scale="none", **EXACT), SFedPG(lr=1.0, scale="none", **EXACT)):
        federation = planes([1, 1], [2, -1], algorithm, engine)
        assert moved(federation) == [0.0]  # exact: not noise of length |d_r|
        assert federation.server.fair_dropped == 0


@ENGINES
def test_one_client_and_vanishing_gradients(engine: Any) -> None:
    assert moved(planes([1], [[3, 4]], FedPG(lr=1.0, **EXACT), engine)) == near(-3, -4)
    assert moved(planes([1, 3], [[3, 4], [1e-9, 0]], FedPG(lr=1.0, **EXACT), engine)) == near(-3, -4)
    assert moved(planes([1, 3], [[0, 0], [0, 0]], FedPG(lr=1.0, **EXACT), engine)) == [0, 0]
    assert moved(planes([0, 0], [[3, 0], [3, 0]], FedPG(lr=1.0, **EXACT), engine)) == near(-3, 0)


def test_a_louder_client_turns_nothing() -> None:
    gradients = np.array([[-1, 1], [1, 0.5], [0.5, 2.0]])
    loud = gradients * np.array([[1], [100], [1]])
    for scale, same in (("mean", True), ("median", True), ("unit", True), ("none", False)):
        a, b = (np.array(moved(planes([1, 2, 3], g, FedPG(lr=1.0, scale=scale, **EXACT)))) for g in (gradients, loud))
        assert (abs(a / np.linalg.norm(a) - b / np.linalg.norm(b)).max() < 1e-10) == same


@given(st.integers(2, 6), st.integers(0, 10**6), st.sampled_from(["none", "mean", "median", "unit"]))
def test_no_loss_rises_to_first_order(n: int, seed: int, scale: Any) -> None:
    rng = np.random.default_rng(seed)
    losses, g = rng.random(n) + 0.5, rng.normal(size=(n, 8))
    d = np.array(moved(planes(losses, g, FedPG(lr=1.0, scale=scale, **EXACT))))
    assert (g @ d <= 1e-10).all()


def test_negative_losses_are_refused() -> None:
    with pytest.raises(RunError, match="client 1 has -2"):
        planes([1, -2], [[1, 0], [0, 1]], FedPG(lr=1.0, **EXACT)).round()


# absent clients ------------------------------------------------------------------------------------------
def test_absent_gradients_count_for_tau_rounds() -> None:
    """Client 1's gradient turns client 0's step while it is remembered."""
    g = [[1.0, 0.0], [-0.5, 1.0]]
    for tau, turned in ((0, [False, False, False]), (1, [True, False, False]), (2, [True, True, False])):
        algorithm = FedPG(lr=1e-3, scale="none", tau=tau, **EXACT)
        federation = planes([9, 9], g, algorithm, schedule=[[1], [0], [0], [0]])
        federation.round()
        assert [abs(moved(federation)[1]) > 1e-9 for _ in range(3)] == turned
    federation = planes([9, 9], g, FedPG(lr=1e-3, scale="none", **EXACT), schedule=[[1], [0], [0], [0]])
    federation.round()
    assert [abs(moved(federation)[1]) > 1e-9 for _ in range(3)] == [True, True, False]  # tau = floor(2 / 1)
    assert sorted(federation.server.last) == [0]  # older ones are forgotten


def test_absent_columns_that_block_are_dropped_oldest_first() -> None:
    """Online +x; absent -x (old) and a side-step (new): only the old one goes."""
    federation = planes(
        [9, 9, 9], [[1, 0], [-1, 0], [0.2, 1]], FedPG(lr=1e-3, scale="none", **EXACT), schedule=[[1], [2], [0]]
    )
    federation.round()
    federation.round()
    d = np.array(moved(federation))
    hull = np.array([[1, 0], [0.2, 1]], dtype=float)
    lam = np.clip((hull[1] - hull[0]) @ hull[1] / ((hull[0] - hull[1]) @ (hull[0] - hull[1])), 0, 1)
    expected = -(lam * hull[0] + (1 - lam) * hull[1])
    assert (d / np.linalg.norm(d)).tolist() == near(*(expected / np.linalg.norm(expected)))


# personal models -----------------------------------------------------------------------------------------
DIRECTIONS = [
    (0.0, [0.6, -1.2], [-0.75, -0.75]),
    (0.3, [0.72, -1.14], [-0.825, -0.675]),
    (1.0, [1.0, -1.0], [-1.0, -0.5]),
]


@ENGINES
@pytest.mark.parametrize("name", ["fedpg", "s-fedpg"])
@pytest.mark.parametrize("pm_base", ["global", "persistent"])
@pytest.mark.parametrize(("gamma", "d1", "d2"), DIRECTIONS)
def test_personal_models(engine: Any, name: str, pm_base: Any, gamma: float, d1: Any, d2: Any) -> None:
    algorithm = {"fedpg": FedPG, "s-fedpg": SFedPG}[name](
        lr=0.5, scale="none", gamma=gamma, pm_base=pm_base, pers="project", **EXACT
    )
    federation = squares(algorithm, engine)
    federation.round()
    step = 0.5 if name == "fedpg" else 0.25  # accepted by the line search
    models = federation.personal_models()["x"] - torch.tensor(START, dtype=torch.float64)
    assert (models[0] / step).tolist() == near(*d1)
    assert (models[1] / step).tolist() == near(*d2)


def test_losses_at_the_personal_model() -> None:
    federation = squares(FedPG(lr=0.5, gamma=0.3, **EXACT))
    federation.round()
    assert federation.evaluate().loss.tolist() == near(0.29725, 0.18578125)


def test_blend_has_the_same_ends() -> None:
    for gamma, d1, _ in DIRECTIONS:
        blend = {"pers": "blend"} if 0 < gamma < 1 else {}  # the ends are those of the projection
        federation = squares(FedPG(lr=0.5, gamma=gamma, **blend, **EXACT))
        federation.round()
        expected = (1 - gamma) * np.array([0.6, -1.2]) + gamma * np.array([1, -1])
        assert ((federation.client_model(0)["x"] - 1) / 0.5).tolist() == near(*expected)
        assert gamma == 0.3 or expected.tolist() == near(*d1)


def test_persistent_models_go_on_from_the_last_one() -> None:
    federation = squares(FedPG(lr=0.5, gamma=1.0, pm_base="persistent", **EXACT))
    federation.round()
    first, w = federation.client_model(0)["x"], federation.global_model()["x"]  # type: ignore[index]
    federation.round()
    own = w - torch.tensor(G[0], dtype=torch.float64)
    assert federation.client_model(0)["x"].tolist() == near(*(first - 0.5 * own).tolist())


def test_gamma_never_touches_the_global_model() -> None:
    for cls in (FedPG, SFedPG):
        ends = []
        for gamma in (0.0, 0.6, 1.0):
            federation = squares(cls(lr=0.1, gamma=gamma, **EXACT), schedule=[[0, 1], [0], [1], [0, 1]])
            moved(federation, 4)
            ends.append(federation.global_model()["x"].tolist())  # type: ignore[index]
        assert ends[0] == ends[1] == ends[2]  # exact


def test_who_never_took_part_has_the_newest_global_model() -> None:
    federation = squares(FedPG(lr=0.5, **EXACT), schedule=[[0]])
    federation.round()
    assert torch.equal(federation.client_model(1)["x"], federation.global_model()["x"])  # type: ignore[index]


@ENGINES
def test_backtracking_spares_the_others_at_a_finite_step(engine: Any) -> None:
    """Without it, curvature raises the other client's loss (.85 > .625) even for gamma = 0."""
    centres = np.array(G)
    old = 0.5 * ((np.array(START) - centres) ** 2).sum(1)
    risen = []
    for backtrack in (False, True):
        federation = squares(FedPG(lr=0.5, pers_backtrack=backtrack, **EXACT), engine)
        federation.round()
        models = federation.personal_models()["x"].numpy()
        losses = 0.5 * ((models[:, None] - centres[None]) ** 2).sum(2)  # row: model, column: client
        risen.append((losses > old + 1e-11)[~np.eye(2, dtype=bool)].any())
    assert risen == [True, False]
    with pytest.raises(InputError, match="needs gamma = 0"):
        squares(FedPG(gamma=0.5, pers_backtrack=True))


def test_rebuilt_models_are_fresh() -> None:
    federation = squares(FedPG(lr=0.5, gamma=1.0, pm_eval="rebuild", **EXACT), schedule=[[0]])
    federation.round()
    w = federation.global_model()["x"]  # type: ignore[index]
    expected = w - 0.5 * (w - torch.tensor(G, dtype=torch.float64))
    assert torch.allclose(federation.personal_models()["x"], expected, atol=1e-12)
    assert torch.allclose(federation.client_model(1)["x"], expected[1], atol=1e-12)
    with pytest.raises(InputError, match="pm_base"):
        squares(FedPG(pm_eval="rebuild", pm_base="persistent"))


# local epochs --------------------------------------------------------------------------------------------
@ENGINES
def test_pseudo_gradients(engine: Any) -> None:
    """One epoch of one step is the exact gradient; after more, gamma = 1 is the locally trained model."""
    exact = moved(squares(FedPG(lr=0.1, **EXACT), engine), 3)
    one = FedPG(lr=0.1, local_epochs=1, batch_size=None, lr_decay=1.0)
    assert moved(squares(one, engine), 3) == near(*exact)
    five = squares(FedPG(lr=0.1, local_epochs=5, batch_size=None, gamma=1.0), engine)
    five.round()
    centres = torch.tensor(G, dtype=torch.float64)
    trained = centres + 0.9**5 * (torch.tensor(START, dtype=torch.float64) - centres)
    assert torch.allclose(five.personal_models()["x"], trained, atol=1e-12)


def normalised() -> tuple[nn.Module, FederatedData]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    module(torch.randn(50, 4, dtype=torch.float64))  # statistics that are not 0 and 1
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)) + 1, rng.integers(0, 3, n))  # noqa: E731
    clients = [{"train": arrays(n), "test": arrays(2)} for n in (23, 8)]
    return module, FederatedData.from_arrays(clients, classes=("a", "b", "c"))


STATISTICS = ("1.running_mean", "1.running_var")


@ENGINES
def test_exact_gradients_leave_the_statistics_as_they_are(engine: Any) -> None:
    """One client: the step is lr times the gradient in evaluation mode, by autograd."""
    module, data = normalised()
    federation = Federation(module, data, FedPG(lr=0.1, batch_size=10, grad_mode="exact"), engine=engine("cpu"))
    start = {k: v.clone() for k, v in federation.task.initial.items()}
    rows = data.splits["train"][0]
    module.eval()
    out = module(data.x[rows])
    loss = nn.functional.cross_entropy(out, data.y[rows])
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    federation.round(clients=[0])
    for (k, _), g in zip(module.named_parameters(), gradients, strict=True):
        for model in (federation.global_model(), federation.client_model(0)):
            torch.testing.assert_close(model[k], start[k] - 0.1 * g, rtol=0, atol=1e-12)  # type: ignore[index]
    for name in ("fedpg", "s-fedpg"):
        cls = {"fedpg": FedPG, "s-fedpg": SFedPG}[name]
        federation = Federation(module, data, cls(lr=0.1, batch_size=10, grad_mode="exact"), engine=engine("cpu"))
        for _ in range(2):
            federation.round()
        for k in STATISTICS:
            assert torch.equal(federation.global_model()[k], start[k])  # type: ignore[index]
            assert all(torch.equal(own, start[k]) for own in federation.personal_models()[k])


@ENGINES
def test_local_epochs_average_the_statistics(engine: Any) -> None:
    """One step in train mode: torch's own statistics of each client, averaged by samples; P-models keep their own."""
    module, data = normalised()
    algorithm = FedPG(lr=0.1, batch_size=None, local_epochs=1)
    federation = Federation(module, data, algorithm, engine=engine("cpu"))
    federation.round()
    each = []
    for rows in data.splits["train"]:
        copied = copy.deepcopy(module).train()
        copied(data.x[rows])
        each.append(copied.state_dict())
    for k in STATISTICS:
        average = (23 * each[0][k] + 8 * each[1][k]) / 31
        torch.testing.assert_close(federation.global_model()[k], average, rtol=0, atol=1e-12)  # type: ignore[index]
        own = torch.stack([state[k] for state in each])
        torch.testing.assert_close(federation.personal_models()[k], own, rtol=0, atol=1e-12)


def test_the_step_decays() -> None:
    algorithm = FedPG(lr=0.5, lr_decay=0.5, **{k: v for k, v in EXACT.items() if k != "lr_decay"})
    federation = planes([9], [[1.0, 0.0]], algorithm)
    assert [moved(federation)[0] for _ in range(3)] == near(-0.5, -0.25, -0.125)


# the line search -----------------------------------------------------------------------------------------
def watched(engine: Any, silent: int = -1, exchanges: Collection[int] = ()) -> Any:
    """An engine that notes every trial of a line search: its step and the clients' losses.

    One client may be silent in some exchanges: 0 is the upload, then come the trials.
    """

    class Watched(engine):  # type: ignore[misc]
        def __init__(self, device: str) -> None:
            super().__init__(device)
            self.trials: list[tuple[float, list[float]]] = []
            self.exchange = -1

        def run(self, job: Job) -> Result:
            self.exchange += 1
            missing = (job.clients == silent) & (self.exchange in exchanges)
            there = np.flatnonzero(~missing)
            result: Result = super().run(job.select(there))
            if "e" in job.shared:
                self.trials.append((float(job.shared["e"]), result.uploads["loss"].tolist()))
            failed = {int(i): ConnectionError("gone") for i in job.clients[missing]}
            return result._replace(positions=there[result.positions], failed=failed)

    return Watched


MEAN_LOSS = {  # of problem G at START + e d', scale="none"
    32: 271.986130893873, 16: 64.399315446936, 8: 14.605907723468, 4: 3.209203861734, 2: 0.885851930867,
    1: 0.567925965434, 0.5: 0.619900482717, 0.25: 0.698622116358,
}  # fmt: skip
SEARCHES = [
    (0.5, [1, 0.5, 0.25], 0.25),  # decreases enough
    (1.0, [2, 1, 0.5, 0.25], 0.25),
    (4.0, [8, 4, 2, 1, 0.5], 1.0),  # none does: the largest with a mean loss below .8125
    (16.0, [32, 16, 8, 4, 2], 2.0),  # none lowers the mean loss: the smallest
]


@ENGINES
@pytest.mark.parametrize(("eta", "steps", "taken"), SEARCHES)
def test_line_search_numbers(engine: Any, eta: float, steps: list[float], taken: float) -> None:
    federation = squares(SFedPG(lr=eta, scale="none", **EXACT), watched(engine))
    d = np.array(moved(federation))
    trials = federation.engine.trials  # type: ignore[attr-defined]
    assert [e for e, _ in trials] == steps
    assert [np.mean(losses) for _, losses in trials] == near(*(MEAN_LOSS[e] for e in steps))
    assert federation.server.step == taken == federation.facts()["step"]
    assert (d / taken).tolist() == near(0.266384299411, -0.701098712755)


@ENGINES
@pytest.mark.parametrize("online", [[], [0], [0, 1], [2], [0, 1, 2]])
def test_the_search_starts_at_eta_if_a_client_of_the_last_round_is_absent(engine: Any, online: list[int]) -> None:
    """Problem G with eta = 1, as in the supplement's Algorithm 1; client 2 is not asked."""
    algorithm = SFedPG(lr=1.0, scale="none", tau=0, **EXACT)
    federation = squares(algorithm, watched(engine), centres=[*G, [0.0, 0.0]])
    federation.server = federation.server._replace(online=online)
    federation.round(clients=[0, 1])
    absent = 2 in online
    trials = federation.engine.trials  # type: ignore[attr-defined]
    assert [e for e, _ in trials] == ([1, 0.5, 0.25] if absent else [2, 1, 0.5, 0.25])
    assert [np.mean(losses) for _, losses in trials] == near(*(MEAN_LOSS[e] for e, _ in trials))
    assert federation.server.step == 0.25
    assert federation.server.online == [0, 1]


def test_the_search_starts_from_the_decayed_step() -> None:
    algorithm = SFedPG(lr=0.25, s=2, scale="none", grad_mode="exact", batch_size=None, lr_decay=0.5)
    federation = planes([9], [[1.0, 0.0]], algorithm, watched(Sequential))
    for _ in range(3):
        federation.round()
    assert [e for e, _ in federation.engine.trials] == [1.0, 0.5, 0.25]  # type: ignore[attr-defined]


@ENGINES
@pytest.mark.parametrize(
    ("eta", "missed", "steps", "voters", "taken"),
    [
        (0.5, [1, 2, 3, 4], [1], [1], 1.0),
        (0.5, [2, 3, 4], [1, 0.5], [2, 1], 0.5),  # client 1 alone stood against .5
        (4.0, [2, 3, 4, 5, 6], [8, 4, 2], [2, 1, 1], 2.0),  # client 0 goes up to 3.44
        (4.0, [1], [8, 4, 2], [1, 1, 1], 2.0),  # who missed d' cannot tell its loss along it
        (4.0, [2], [8, 4, 2], [2, 1, 1], 2.0),
    ],
)
def test_who_falls_silent_in_the_search_has_no_vote(
    engine: Any, eta: float, missed: list[int], steps: list[float], voters: list[int], taken: float
) -> None:
    """Of one voter F is always -1, so that only its own loss counts."""
    federation = squares(SFedPG(lr=eta, scale="none", **EXACT), watched(engine, 1, missed))
    record = federation.round()
    trials = federation.engine.trials  # type: ignore[attr-defined]
    assert [e for e, _ in trials] == steps
    assert [len(losses) for _, losses in trials] == voters
    assert federation.server.step == taken
    d = federation.global_model()["x"].numpy() - np.array(START)  # type: ignore[index]
    assert (d / taken).tolist() == near(0.266384299411, -0.701098712755)  # of both gradients
    assert "gone" in record.failed[1]


@ENGINES
def test_without_voters_the_step_is_eta(engine: Any) -> None:
    """The client with a gradient falls silent; the other, whose gradient vanishes, has no say."""
    algorithm = SFedPG(lr=0.5, **EXACT)
    federation = planes([1, 3], [[1e-9, 0], [3, 4]], algorithm, watched(engine, 1, [1, 2]))
    federation.round()
    assert federation.server.step == 0.5
    assert [len(losses) for _, losses in federation.engine.trials] == [1]  # type: ignore[attr-defined]
    assert (federation.global_model()["x"] / 0.5).tolist() == near(-3, -4)  # type: ignore[index]


@pytest.mark.parametrize("eta", [0.5, 1.0, 4.0, 16.0])
def test_line_search_accepts_the_first_step_that_decreases_enough(eta: float) -> None:
    """Recomputed from the formulas: steps are ub / 2^k, the accepted one passes, all longer ones fail."""
    x, centres, beta, sigma = np.array(START), np.array(G), 1e-4, 6.68329613589
    d = np.array([0.266384299411, -0.701098712755])
    g = x - centres
    old = 0.5 * (g**2).sum(1)
    fair = fairness_weights(old) @ g @ d
    tried: list[tuple[float, float]] = []
    accepted, e = None, 2 * eta
    while accepted is None and e >= eta / 2 / sigma:
        new = 0.5 * ((x + e * d - centres) ** 2).sum(1)
        tried.append((e, float(new.mean())))
        bounds = [3.439595604855, 0.299223610527]  # 2 (1 - beta) (-g_i.d') / |d'|^2, of each client
        assert (new <= old + beta * e * (g @ d)).tolist() == [e <= b for b in bounds]
        if (new <= old + beta * e * (g @ d)).all() and unfairness(new) <= unfairness(old) + beta * e * fair:
            accepted = e
        e /= 2
    lower = [e for e, loss in tried if loss < old.mean()]
    expected = accepted or (max(lower) if lower else min(tried, key=lambda trial: trial[1])[0])
    assert len(tried) <= np.floor(2 + np.log2(sigma)) + 1
    federation = squares(SFedPG(lr=eta, scale="none", **EXACT))
    record = federation.round()
    assert federation.server.step == expected
    assert record.bytes_up == 4 * 2 * (2 + 1 + len(tried))  # no trial more
    assert dict(tried).get(1.0, 0.567925965434) == pytest.approx(0.567925965434, abs=1e-10)


def test_an_absent_client_caps_the_search() -> None:
    """Three clients of whom one was there a round ago and is not now: the first trial is eta, not 2 eta."""
    tried = []
    for schedule in ([[0, 1], [0, 1]], [[0, 1, 2], [0, 1]]):
        # the third client's loss and gradient are such that its column never matters (tau = 0)
        algorithm = SFedPG(lr=1e-3, scale="none", tau=0, **EXACT)
        federation = squares(algorithm, centres=[*G, [0.0, 0.0]], schedule=schedule)
        federation.round()
        federation.round()
        tried.append(federation.server.step)
    assert tried == [2e-3, 1e-3]


def test_a_single_trial() -> None:
    """s = 0 and sigma = 1: one trial, at eta, whatever it gives."""
    federation = planes([1], [[3.0, 4.0]], SFedPG(lr=0.01, s=0, **EXACT))
    record = federation.round()
    assert federation.server.step == 0.01
    assert record.bytes_up == 4 * (2 + 1 + 1)


def test_overflow_is_a_bad_step_not_a_broken_client() -> None:
    federation = squares(SFedPG(lr=1e200, **EXACT))
    record = federation.round()
    assert not record.failed


# traffic -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_bytes(eta: float) -> None:
    """Per client: the model, the P-model and the gradient with its loss; S-FedPG adds d and two scalars a trial."""
    n, clients, trials = 2, 2, {0.5: 3, 1.0: 4}[eta]
    record = squares(FedPG(lr=eta, scale="none", **EXACT)).round()
    assert (record.bytes_down, record.bytes_up) == (4 * clients * 2 * n, 4 * clients * (n + 1))
    record = squares(SFedPG(lr=eta, scale="none", **EXACT)).round()
    assert record.bytes_down == 4 * clients * (3 * n + trials)
    assert record.bytes_up == 4 * clients * (n + 1 + trials)
