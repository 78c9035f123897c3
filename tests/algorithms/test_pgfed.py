"""PGFed and PGFedMo: numbers worked out by hand, a reference loop in numpy, and the paper's identities by autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import small
from torch import Tensor, nn
from torch.nn import functional as F

from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.pgfed import PGFed, PGFedMo
from bespokefl.core import InputError, Model, Task, stream
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized, build_engine
from bespokefl.engines.base import Job, Result
from bespokefl.federation import Federation

both_engines = pytest.mark.parametrize("engine", [Sequential, Vectorized])

H = np.array([[1.0, 2.0], [2.0, 1.0]])  # f_i(x) = 1/2 (x - c_i) . H_i (x - c_i), H_i diagonal
C = np.array([[1.0, 0.0], [0.0, 2.0]])
START = {"x": torch.tensor([2.0, 1.0], dtype=torch.float64)}
EXAMPLE: dict[str, Any] = {"mu": 0.1, "lr": 0.1, "eta2": 0.5, "local_epochs": 2, "batch_size": None, "momentum": 0.0}


class Quadratic(nn.Module):
    """A sample is a Hessian's diagonal and a centre; the output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2))

    def forward(self, sample: Tensor) -> Tensor:
        return 0.5 * (sample[:, :2] * (self.x - sample[:, 2:]) ** 2).sum(1, keepdim=True)


def first_output(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs[:, 0]


def quadratics(
    algorithm: Algorithm, engine: Any = Sequential, h: Any = H, c: Any = C, sizes: Any = (30, 10), **options: Any
) -> Federation:
    clients = []
    for i, n in enumerate(sizes):
        rows = np.tile(np.concatenate([h[i], c[i]]), (n, 1))
        clients.append({"train": (rows, np.zeros(n)), "test": (rows[:1], np.zeros(1))})
    task = Task(Quadratic(), first_output, dtype=torch.float64)
    options = {"initial": START, "engine": engine if isinstance(engine, Spy) else engine("cpu")} | options
    return Federation(task, FederatedData.from_arrays(clients), algorithm, **options)


class Spy:
    """An engine that remembers the jobs of its rounds."""

    def __init__(self, name: str = "sequential") -> None:
        self._engine, self.jobs = build_engine(name, "cpu"), list[Job]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, job: Job) -> Result:
        self.jobs.append(job)
        return self._engine.run(job)


def near(a: Any, b: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=0, atol=1e-10
    )


def same(a: Model, b: Model) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


# the example -----------------------------------------------------------------------------------------
@both_engines
def test_three_rounds_by_hand(engine: Any) -> None:
    run = quadratics(PGFed(**EXAMPLE), engine)
    run.round()
    near(run.personal_models()["x"], [[1.81, 0.64], [1.28, 1.19]])
    near(run.server.w["x"], [1.6775, 0.7775])
    near(run.server.A, [[0.5, 0.5], [0.5, 0.5]])
    near(run.server.grads["x"], [[0.81, 1.28], [2.56, -0.81]])
    near(run.server.a, [-0.154765, -0.034645])
    run.round()
    near(run.personal_models()["x"], [[1.51676, 0.49337], [1.04327, 1.00531]])
    near(run.server.w["x"], [1.3983875, 0.621355])
    near(run.server.A, [[0.37969816, 0.25957816], [0.4328687725, 0.3127487725]])
    near(run.server.a, [-0.08936944057, 0.040626360905])
    run.round()
    near(run.personal_models()["x"], [[1.308675047333, 0.395570855876], [0.879195462368, 0.881092773735]])
    near(run.server.w["x"], [1.201305151092, 0.516951335341])
    near(run.server.A, [[0.296135391646, 0.046019590171], [0.393105599016, 0.142989797541]])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_downloads_by_hand(engine: str) -> None:
    spy = Spy(engine)
    run = quadratics(PGFed(**EXAMPLE), engine=spy)
    for _ in range(3):
        run.round()
    first, second, third = spy.jobs
    assert set(first.shared) == {"w"} and not first.per_client
    near(second.per_client["g_aux"]["x"], [[0.1685, 0.0235]] * 2)
    near(second.shared["g_bar"]["x"], [0.1685, 0.0235])
    near(third.per_client["g_aux"]["x"], [[0.073783303513, 0.011646356243], [0.087625209065, 0.011604085606]])
    near(third.shared["g_bar"]["x"], [0.130165, -0.0003975])


@both_engines
@pytest.mark.parametrize(
    ("changed", "w", "alpha"),
    [
        (
            {"alpha_order": "code"},
            [1.202525993171, 0.516947606886],
            [[0.273432081638, 0.023316280163], [0.30842055214, 0.058304750665]],
        ),
        ({"mu": 0.0}, [1.240010609375, 0.522001859375], [[0.5, 0.5], [0.5, 0.5]]),
    ],
)
def test_variants_by_hand(engine: Any, changed: dict[str, Any], w: list[float], alpha: list[list[float]]) -> None:
    run = quadratics(PGFed(**EXAMPLE | changed), engine)
    for _ in range(3):
        run.round()
    near(run.server.w["x"], w)
    near(run.server.A, alpha)


@both_engines
def test_pgfedmo_by_hand(engine: Any) -> None:
    mo, plain = quadratics(PGFedMo(**EXAMPLE, beta=0.5), engine), quadratics(PGFed(**EXAMPLE), engine)
    for _ in range(2):
        mo.round()
        plain.round()
    same(mo.personal_models(), plain.personal_models())  # the first auxiliary gradient is taken as it is
    mo.round()
    near(mo.clients.states.rows().s["x"], [[0.121141651756, 0.017573178121], [0.128062604532, 0.017552042803]])
    near(mo.personal_models()["x"], [[1.299676961166, 0.394504027938], [0.871916731184, 0.879962661867]])
    near(mo.server.w["x"], [1.192736903671, 0.51586868642])
    near(mo.server.A, [[0.297028899732, 0.046913098257], [0.393842150891, 0.143726349416]])
    from_zero = torch.tensor([1.212674786009, 0.518383621666])  # a recursion that starts at 0
    assert (mo.server.w["x"] - from_zero).abs().min() > 1e-3


# a reference loop ------------------------------------------------------------------------------------
def reference(
    h: Any, c: Any, sizes: Any, schedule: Any, *, mu: float, lr: float, eta2: float, steps: int, size: int,
    momentum: float = 0.0, weight_decay: float = 0.0, keep: bool = False, beta: float | None = None,
    zero_start: bool = False, order: str = "paper", cap: float = np.inf, bounded: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Algorithm 1 on quadratics, line by line, a client at a time."""
    n_clients = len(h)
    w, theta = START["x"].numpy().copy(), np.tile(START["x"].numpy(), (n_clients, 1))
    alpha, buffers = np.full((n_clients, n_clients), 1 / size), np.zeros((n_clients, 2))
    smoothed: dict[int, Any] = {i: np.zeros(2) for i in range(n_clients)} if zero_start else {}
    stored: dict[int, tuple[Any, float]] = {}
    for cohort in schedule:
        new, w_start = {}, w
        g_bar = mu * np.mean([g for g, _ in stored.values()], 0) if stored else np.zeros(2)
        for i in cohort:
            s = mu * sum((alpha[i, j] * g for j, (g, _) in stored.items()), np.zeros(2))
            if beta is not None and stored:
                s = (1 - beta) * s + beta * smoothed[i] if i in smoothed else s
                smoothed[i] = s
            x, m = w_start.copy(), buffers[i] if keep else np.zeros(2)
            for _ in range(steps):
                old = x
                m = momentum * m + h[i] * (x - c[i]) + s + weight_decay * x
                x = x - lr * m
                for j, (_, a) in stored.items():
                    moved = alpha[i, j] - eta2 * (a + g_bar @ (x if order == "paper" else old))
                    alpha[i, j] = min(max(0, moved), cap)
                if bounded and stored:
                    alpha[i, list(stored)] /= max(1, alpha[i, list(stored)].sum())
            g = h[i] * (x - c[i])
            theta[i], buffers[i] = x, m
            new[i] = (g, mu * (0.5 * (h[i] * (x - c[i]) ** 2).sum() - g @ x))
        total = sum(sizes[i] for i in cohort)
        w, stored = sum(sizes[i] / total * theta[i] for i in cohort), new
    return {"w": w, "theta": theta, "alpha": alpha}


MANY = np.random.default_rng(4)
MANY_H, MANY_C, MANY_SIZES = MANY.uniform(0.5, 2, (5, 2)), MANY.normal(size=(5, 2)), (3, 7, 1, 4, 9)
SCHEDULE = [[0, 1, 3], [1, 2, 4], [0, 1, 4], [2, 3, 4], [0, 1, 2]]


def many(algorithm: Algorithm, engine: Any = Sequential, **options: Any) -> Federation:
    options = {"clients_per_round": 3, "schedule": SCHEDULE} | options
    return quadratics(algorithm, engine, MANY_H, MANY_C, MANY_SIZES, **options)


@both_engines
@pytest.mark.parametrize("beta", [None, 0.8])
@pytest.mark.parametrize(
    "more", [{}, {"momentum": 0.9, "weight_decay": 0.05, "opt_state": "keep"}, {"alpha_order": "code", "momentum": 0.5}]
)
def test_partial_participation_against_the_reference(engine: Any, beta: float | None, more: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"mu": 0.3, "lr": 0.05, "eta2": 0.2}
    settings = {**shared, "local_epochs": 3, "batch_size": None, "momentum": 0.0, **more}
    run = many(PGFed(**settings) if beta is None else PGFedMo(**settings, beta=beta), engine)
    for _ in SCHEDULE:
        run.round()
    keep, order = more.get("opt_state") == "keep", more.get("alpha_order", "paper")
    numbers = {k: v for k, v in more.items() if k in ("momentum", "weight_decay")}
    expected = reference(
        MANY_H, MANY_C, MANY_SIZES, SCHEDULE, **shared, **numbers, steps=3, size=3, keep=keep, order=order, beta=beta
    )
    near(run.server.w["x"], expected["w"])
    near(run.personal_models()["x"], expected["theta"])
    near(run.server.A, expected["alpha"])
    assert (run.server.A == 0).any() and (run.server.A > 0).any()  # some weights were clamped


def test_alpha_starts_by_the_schedules_cohort() -> None:
    """Without ``clients_per_round``, too: 1/3, and not one over the number of all clients."""
    shared: dict[str, Any] = {"mu": 0.3, "lr": 0.05, "eta2": 0.2}
    run = many(PGFed(**shared, local_epochs=3, batch_size=None, momentum=0.0), clients_per_round=None)
    for _ in SCHEDULE:
        run.round()
    expected = reference(MANY_H, MANY_C, MANY_SIZES, SCHEDULE, **shared, steps=3, size=3)
    near(run.server.A, expected["alpha"])
    near(run.server.w["x"], expected["w"])


@pytest.mark.parametrize("method", [PGFed, PGFedMo])
@pytest.mark.parametrize("schedule", [[[0, 1, 2], [3, 4]], lambda t: [t, t + 1]])
def test_a_schedule_of_several_sizes_must_come_with_a_number(method: Any, schedule: Any) -> None:
    options: dict[str, Any] = {"schedule": schedule}
    with pytest.raises(InputError, match="clients_per_round"):
        many(method(**EXAMPLE), clients_per_round=None, **options)
    assert float(many(method(**EXAMPLE), clients_per_round=2, **options).server.A[0, 0]) == 0.5


@pytest.mark.parametrize("method", [PGFed, PGFedMo])
def test_rounds_of_named_clients_must_come_with_a_number(method: Any) -> None:
    """Unless they are as many as the federation's own: alpha started at 1/5, and rounds had 3 clients."""
    free: dict[str, Any] = {"schedule": None, "clients_per_round": None}
    run = many(method(**EXAMPLE), **free)
    with pytest.raises(InputError, match=r"a round has 3 or 5 clients, by .*give clients_per_round .* from 1 to 5"):
        run.round(clients=SCHEDULE[0])
    assert run.rounds_done == 0 and not len(run.clients.states.clients)
    assert run.round(clients=range(5)).failed == {}
    assert many(method(**EXAMPLE), schedule=None, clients_per_round=None, participation=0.6).round([0, 1, 3]).round == 1


def test_rounds_of_named_clients_with_a_number_are_those_of_the_schedule() -> None:
    settings: dict[str, Any] = {**EXAMPLE, "local_epochs": 3}
    named, scheduled = many(PGFed(**settings), schedule=None), many(PGFed(**settings), clients_per_round=None)
    for clients in SCHEDULE:
        named.round(clients)
        scheduled.round()
    same(named.server.w, scheduled.server.w)
    assert torch.equal(named.server.A, scheduled.server.A)


@both_engines
@pytest.mark.parametrize("bounds", [{"alpha_cap": 0.2}, {"alpha_rows": "bounded"}])
def test_bounds_of_alpha_against_the_reference(engine: Any, bounds: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"mu": 1.0, "lr": 0.05, "eta2": 1.0}
    run = many(PGFed(**shared, local_epochs=3, batch_size=None, momentum=0.0, **bounds), engine)
    free = many(PGFed(**shared, local_epochs=3, batch_size=None, momentum=0.0), engine)
    for _ in SCHEDULE:
        run.round()
        free.round()
    cap, bounded = bounds.get("alpha_cap", np.inf), "alpha_rows" in bounds
    expected = reference(MANY_H, MANY_C, MANY_SIZES, SCHEDULE, **shared, steps=3, size=3, cap=cap, bounded=bounded)
    near(run.server.A, expected["alpha"])
    near(run.server.w["x"], expected["w"])
    assert (free.server.A - run.server.A).abs().max() > 0.01  # the bound was felt


def test_a_row_of_alpha_that_outweighs_the_client_is_told() -> None:
    algorithm = PGFed(**{**EXAMPLE, "mu": 0.5})
    run = many(algorithm)
    run.round()
    assert algorithm.warnings(run.server) == {}  # mu times 1
    A = run.server.A.clone()
    A[3, run.server.ids] = 2.0
    told = algorithm.warnings(run.server._replace(A=A))
    assert "3.0 times" in told["alpha"] and "alpha_cap" in told["alpha"]
    outside = [k for k in range(5) if k not in run.server.ids.tolist()]
    A = run.server.A.clone()
    A[:, outside] = 100.0  # weights of clients that are not in use
    assert algorithm.warnings(run.server._replace(A=A)) == {}


def test_the_reference_tells_a_zero_start_apart() -> None:
    run = quadratics(PGFedMo(**EXAMPLE, beta=0.5))
    for _ in range(3):
        run.round()
    settings: dict[str, Any] = {"mu": 0.1, "lr": 0.1, "eta2": 0.5, "steps": 2, "size": 2, "beta": 0.5}
    near(run.server.w["x"], reference(H, C, (30, 10), [[0, 1]] * 3, **settings)["w"])
    wrong = reference(H, C, (30, 10), [[0, 1]] * 3, **settings, zero_start=True)["w"]
    near(wrong, [1.212674786009, 0.518383621666])


# exact invariants ------------------------------------------------------------------------------------
def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()


def samples() -> FederatedData:
    rng = np.random.default_rng(0)
    arrays = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))  # noqa: E731
    clients = [{"train": arrays(n), "test": arrays(2)} for n in (23, 8, 31, 12)]
    return FederatedData.from_arrays(clients, classes=("a", "b", "c"))


def federation(algorithm: Algorithm, engine: Any = Sequential, **options: Any) -> Federation:
    options = {"model": net(), "seed": 5, "engine": engine if isinstance(engine, Spy) else engine("cpu")} | options
    return Federation(data=samples(), algorithm=algorithm, **options)


TRAINING: dict[str, Any] = {"lr": 0.05, "momentum": 0.0, "local_epochs": 2, "batch_size": 10}


@both_engines
@pytest.mark.parametrize("grad_pass", ["exact", "code"])
def test_without_mu_it_is_fedavg_bit_for_bit(engine: Any, grad_pass: str) -> None:
    settings = {**TRAINING, "momentum": 0.9, "weight_decay": 0.01, "opt_state": "keep"}
    schedule = [[0, 1], [1, 2], [0, 2]]
    options: dict[str, Any] = {"schedule": schedule, "clients_per_round": 2, "model": net(dropout=0.3)}
    pgfed = federation(PGFed(**settings, mu=0.0, grad_pass=grad_pass), engine, **options)  # type: ignore[arg-type]
    fedavg = federation(FedAvg(**settings), engine, **options)
    for _ in schedule:
        pgfed.round()
        fedavg.round()
        same(pgfed.server.w, fedavg.server["w"])
    same(pgfed.personal_models([0, 1, 2]), fedavg.personal_models([0, 1, 2]))
    assert (pgfed.server.A == 0.5).all()
    same(pgfed.client_model(3), net().state_dict())  # never took part: the initial model


@both_engines
def test_zero_weights_make_it_fedavg(engine: Any) -> None:
    pgfed, fedavg = federation(PGFed(**TRAINING, mu=0.5, eta2=0.0), engine), federation(FedAvg(**TRAINING), engine)
    pgfed.server = pgfed.server._replace(A=torch.zeros_like(pgfed.server.A))
    for _ in range(3):
        pgfed.round()
        fedavg.round()
    # Stacked, without momentum, g + 0 has another memory layout than g, and x - lr g may round differently.
    check = same if engine is Sequential else (lambda a, b: near(flat(a), flat(b)))
    check(pgfed.server.w, fedavg.server["w"])
    check(pgfed.personal_models(), fedavg.personal_models())


@both_engines
def test_without_eta2_alpha_is_constant(engine: Any) -> None:
    run = federation(PGFed(**TRAINING, mu=0.2, eta2=0.0), engine, clients_per_round=2)
    for _ in range(3):
        run.round()
    assert (run.server.A == 0.5).all()


@both_engines
def test_alpha_is_touched_only_between_a_participant_and_the_last_rounds_ones(engine: Any) -> None:
    run = many(PGFed(**{**EXAMPLE, "eta2": 5.0}), engine)
    before = run.server.A
    for previous, now in zip([[], *SCHEDULE], SCHEDULE, strict=False):
        run.round()
        changed = torch.ne(run.server.A, before)
        allowed = torch.zeros_like(changed)
        for i in now:
            allowed[i, previous] = True
        assert not (changed & ~allowed).any()
        assert changed.any() == bool(previous)
        assert (run.server.A >= 0).all()
        before = run.server.A
    assert (before == 0).any()


@both_engines
def test_differences_of_alpha_move_by_differences_of_intercepts(engine: Any) -> None:
    run = many(PGFed(mu=0.3, lr=0.05, eta2=0.01, local_epochs=4, batch_size=None, momentum=0.0), engine)
    run.round()
    before, a, (j, k) = run.server.A, run.server.a, SCHEDULE[0][:2]
    assert a.min() < 0 < a.max()  # an intercept, not a loss
    run.round()
    assert (run.server.A > 0).all()  # nothing was clamped
    for i in SCHEDULE[1]:
        moved = (run.server.A[i, j] - run.server.A[i, k]) - (before[i, j] - before[i, k])
        near(moved, -4 * 0.01 * (a[0] - a[1]))


def test_intercepts_of_unit_quadratics() -> None:
    run = quadratics(PGFed(**EXAMPLE), h=np.ones((2, 2)))
    run.round()
    theta = run.personal_models()["x"]
    near(run.server.a, 0.1 * 0.5 * ((torch.as_tensor(C) ** 2).sum(1) - (theta**2).sum(1)))


@both_engines
def test_those_who_did_not_answer_are_not_among_the_last_rounds_clients(engine: Any) -> None:
    asked, never = (many(PGFed(**EXAMPLE), engine) for _ in range(2))
    asked.round([0, 1, 3], silent=[1])
    never.round([0, 3])
    assert asked.server.ids.tolist() == [0, 3]
    for run in (asked, never):
        run.round([1, 2])
    same(asked.server.w, never.server.w)


# the paper's identities, by autograd -----------------------------------------------------------------
def flat(model: Model) -> Tensor:
    return torch.cat([v.reshape(-1) for v in model.values()])


def risk(model: Model, data: FederatedData, client: int) -> Tensor:
    rows = torch.as_tensor(data.splits["train"][client])
    return F.cross_entropy(torch.func.functional_call(net().eval(), model, (data.x[rows],)), data.y[rows])


def risk_and_gradient(model: Model, data: FederatedData, client: int) -> tuple[Tensor, Model]:
    leaf = {k: v.clone().requires_grad_() for k, v in model.items()}
    f = risk(leaf, data, client)
    return f.detach(), dict(zip(leaf, torch.autograd.grad(f, list(leaf.values())), strict=True))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_downloads_are_gradients_of_the_taylor_risk(engine: str) -> None:
    """By theta exactly, at every theta; by alpha exactly in the mean over j."""
    mu, spy, schedule = 0.3, Spy(engine), [[0, 1, 2], [0, 2, 3], [1, 2, 3]]
    run = federation(PGFed(**TRAINING, mu=mu, eta2=0.05), spy, schedule=schedule, clients_per_round=3)
    run.round()
    run.round()
    last, now = schedule[1:]
    thetas = [run.client_model(j) for j in last]
    risks = [risk_and_gradient(x, run.data, j) for x, j in zip(thetas, last, strict=True)]
    rows = run.server.A.clone()
    run.round()
    down = spy.jobs[-1]

    def taylor(theta: Tensor, alpha: Tensor) -> Tensor:
        parts = [f + flat(g) @ (theta - flat(x)) for (f, g), x in zip(risks, thetas, strict=True)]
        return mu * (alpha * torch.stack(parts)).sum()

    for r, i in enumerate(now):
        alpha = rows[i, last].clone().requires_grad_()
        for seed in (0, 1):
            theta = torch.randn(flat(thetas[0]).shape, generator=torch.Generator().manual_seed(seed)).double()
            by_theta, by_alpha = torch.autograd.grad(taylor(theta.requires_grad_(), alpha), (theta, alpha))
            near(flat({k: v[r] for k, v in down.per_client["g_aux"].items()}), by_theta)
            approximate = down.shared["a"] + flat(down.shared["g_bar"]) @ theta.detach()
            near(approximate.mean(), by_alpha.mean())
            assert (approximate - by_alpha).abs().max() > 1e-3  # but not one by one


def test_distance_of_the_tangents_from_the_risks() -> None:
    """With unit Hessians the true gradient exceeds the auxiliary one by mu sum_j alpha_ij (theta - theta_j)."""
    spy, mu = Spy(), 0.3
    run = quadratics(PGFed(**{**EXAMPLE, "mu": mu}), h=np.ones((2, 2)), engine=spy)
    run.round()
    run.round()
    theta_j, alpha = run.personal_models()["x"], run.server.A
    run.round()
    theta = torch.tensor([0.3, -0.7], dtype=torch.float64)
    for i in range(2):
        true = mu * (alpha[i][:, None] * (theta - torch.as_tensor(C))).sum(0)
        extra = mu * (alpha[i][:, None] * (theta - theta_j)).sum(0)
        near(true - spy.jobs[-1].per_client["g_aux"]["x"][i], extra)


# the closing pass ------------------------------------------------------------------------------------
@both_engines
def test_the_closing_gradient_is_the_full_one_without_dropout_and_weight_decay(engine: Any) -> None:
    run = federation(PGFed(**TRAINING, mu=0.2, weight_decay=0.1), engine, model=net(dropout=0.5))
    run.round()
    for i in range(4):
        f, g = risk_and_gradient(run.client_model(i), run.data, i)
        near(flat({k: v[i] for k, v in run.server.grads.items()}), flat(g))
        near(run.server.a[i], 0.2 * (f - flat(g) @ flat(run.client_model(i))))


@both_engines
def test_the_authors_closing_gradient(engine: Any) -> None:
    """Shuffled, without the last incomplete batch (8 samples are fewer than a batch of 10: they stay)."""
    run = federation(PGFed(**TRAINING, grad_pass="code"), engine)
    run.round()
    for i, batches in enumerate([2, 1, 3, 1]):
        rows = run.data.splits["train"][i]
        order = rows[stream(5, "gradient", 0, i, 0).permutation(len(rows))]
        grads = []
        for k in range(batches):
            part = torch.as_tensor(order[10 * k : 10 * (k + 1)])
            module = net()
            module.load_state_dict(run.client_model(i))
            F.cross_entropy(module(run.data.x[part]), run.data.y[part]).backward()
            grads.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
        near(flat({k: v[i] for k, v in run.server.grads.items()}), torch.stack(grads).mean(0))
    exact = federation(PGFed(**TRAINING), engine)
    exact.round()
    same(exact.server.w, run.server.w)  # the pass takes nothing from the training's stream
    assert (flat(exact.server.grads) - flat(run.server.grads)).abs().max() > 1e-3


def test_the_authors_closing_gradient_is_in_train_mode() -> None:
    exact, code = (
        federation(PGFed(lr=0.05, momentum=0.0, local_epochs=1, batch_size=None, grad_pass=p), model=net(dropout=0.5))  # type: ignore[arg-type]
        for p in ("exact", "code")
    )
    exact.round()
    code.round()
    assert (flat(exact.server.grads) - flat(code.server.grads)).abs().max() > 1e-3


# PGFedMo ---------------------------------------------------------------------------------------------
@both_engines
def test_pgfedmo_without_beta_is_pgfed_bit_for_bit(engine: Any) -> None:
    settings = {**TRAINING, "mu": 0.3, "eta2": 0.05, "momentum": 0.9}
    runs = [federation(a, engine, clients_per_round=3) for a in (PGFedMo(**settings, beta=0.0), PGFed(**settings))]
    for _ in range(4):
        for run in runs:
            run.round()
    same(runs[0].server.w, runs[1].server.w)
    same(runs[0].personal_models(), runs[1].personal_models())
    assert torch.equal(runs[0].server.A, runs[1].server.A)


@both_engines
@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8])
def test_constant_downloads_give_a_constant_auxiliary_gradient(engine: Any, beta: float) -> None:
    run = quadratics(PGFedMo(**{**EXAMPLE, "lr": 0.0, "eta2": 0.0}, beta=beta), engine)
    run.round()
    assert (run.clients.states.rows().has_s == 0).all()
    for _ in range(4):
        run.round()
        near(run.clients.states.rows().s["x"], 0.1 * 0.5 * run.server.grads["x"].sum(0).expand(2, 2))


@both_engines
def test_an_absent_client_keeps_its_auxiliary_gradient_and_alpha(engine: Any) -> None:
    run = many(PGFedMo(**EXAMPLE), engine, schedule=[range(5), range(5), [0, 2, 4], [1]])
    run.round()
    run.round()
    before, rows = run.clients.states.gather(np.arange(5)), run.server.A
    run.round()
    after = run.clients.states.gather(np.arange(5))
    for i in (1, 3):
        assert torch.equal(before.s["x"][i], after.s["x"][i])
        assert torch.equal(rows[i], run.server.A[i])
    assert not torch.equal(before.s["x"][0], after.s["x"][0])


# traffic and refusals --------------------------------------------------------------------------------
@both_engines
@pytest.mark.parametrize("cls", [PGFed, PGFedMo])
def test_bytes_of_a_round(engine: Any, cls: type[PGFed]) -> None:
    n, c = sum(v.numel() for v in net().parameters()), 3
    run = federation(cls(**TRAINING), engine, clients_per_round=c)
    first, second = run.round(), run.round()
    assert (first.bytes_down, first.bytes_up) == (4 * c * n, 4 * c * (2 * n + 1))
    assert second.bytes_down == 4 * c * (3 * n + 2 * c)  # w, both gradients, a_j and alpha_ij
    assert second.bytes_up == 4 * c * (2 * n + 1 + c)
    scalars = 4 * c * (3 * c + 1)
    assert second.bytes_down + second.bytes_up == 20 * c * n + scalars


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("pgfed", {"mu": -0.1}),
        ("pgfed", {"eta2": -1.0}),
        ("pgfed", {"alpha_order": "old"}),
        ("pgfed", {"grad_pass": "none"}),
        ("pgfed", {"beta": 0.5}),
        ("pgfedmo", {"beta": 1.0}),
        ("pgfedmo", {"beta": -0.2}),
        ("pgfedmo", {"mu": float("nan")}),
    ],
)
def test_impossible_values_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        build_algorithm(name, {}, wrong)


# without the tangents --------------------------------------------------------------------------------
@both_engines
def test_exact_risks_by_hand(engine: Any) -> None:
    """Two rounds of two full-batch steps; the second round knows of both clients."""
    run = quadratics(PGFed(**EXAMPLE, taylor=False), engine)
    run.round()
    run.round()
    w = np.array([1.6775, 0.7775])
    for i in range(2):
        theta, alpha = w.copy(), np.full(2, 0.5)
        for _ in range(2):
            others = sum(alpha[j] * H[j] * (theta - C[j]) for j in range(2))
            theta = theta - 0.1 * (H[i] * (theta - C[i]) + 0.1 * others)
            f = np.array([0.5 * (H[j] * (theta - C[j]) ** 2).sum() for j in range(2)])
            alpha = np.maximum(alpha - 0.5 * 0.1 * f, 0)
        near(run.client_model(i)["x"], theta)
        near(run.server.A[i], alpha)


def test_exact_risks_have_no_order_of_the_code() -> None:
    with pytest.raises(InputError, match=r'algorithm\.alpha_order = "code".*taylor = false.*alpha_order = "paper"'):
        quadratics(PGFed(**EXAMPLE, taylor=False, alpha_order="code"))


def test_tangents_are_off_by_the_distance_to_where_they_touch() -> None:
    """Identity Hessians, one step: exact minus Taylor is -eta mu sum_j alpha_ij (w - theta_j)."""
    one_step = EXAMPLE | {"local_epochs": 1}
    runs = [quadratics(PGFed(**one_step, taylor=t), h=np.ones((2, 2))) for t in (True, False)]
    for run in runs:
        run.round()
    w, touched = runs[0].server.w["x"], runs[0].personal_models()["x"]
    for run in runs:
        run.round()
    tangents, exact = (run.personal_models()["x"] for run in runs)
    near(exact - tangents, (-0.1 * 0.1 * 0.5 * (2 * w - touched.sum(0))).expand(2, 2))


def test_exact_risks_train_a_network() -> None:
    """Both engines on ragged clients and shuffled batches agree, and differ from the tangents."""
    models = []
    for engine, taylor in ((Sequential, False), (Vectorized, False), (Sequential, True)):
        run = small.federate(PGFed(lr=0.2, mu=0.5, local_epochs=2, batch_size=3, taylor=taylor), engine("cpu"))
        for _ in range(3):
            run.round()
        models.append(torch.cat([v.flatten() for v in run.server.w.values()]))
    torch.testing.assert_close(models[0], models[1], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(models[0], models[2], atol=1e-4)


def test_pgfedmo_needs_the_tangents() -> None:
    with pytest.raises(InputError, match=r"algorithm\.taylor = false"):
        quadratics(PGFedMo(**EXAMPLE, taylor=False))
