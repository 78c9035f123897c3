"""What the vectorized engine decides, and what it does when something does not fit."""

import shutil
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedfomo import FedFomo
from bespokefl.core import InputError, Task
from bespokefl.core.trees import leaves, nbytes, tree_map
from bespokefl.data import Dataset, FederatedData, federate, load
from bespokefl.engines import Sequential, Vectorized, build_engine
from bespokefl.engines.vectorized import Layout
from bespokefl.federation import Federation
from bespokefl.models import build

ALGORITHM = FedAvg(lr=0.1, momentum=0.9, local_epochs=1, batch_size=8)
SIZES = (3, 20, 9, 31, 14)


def make_data(shape: tuple[int, ...] = (6,)) -> FederatedData:
    rng = np.random.default_rng(0)
    return FederatedData.from_arrays(
        [{"train": (x := rng.normal(size=(n, *shape)), rng.integers(0, 2, n)), "test": (x[:2], [0, 1])} for n in SIZES]
    )


def trained(engine: Any, module: nn.Module, data: FederatedData | None = None) -> Federation:
    federation = Federation(Task(module, dtype=torch.float64), data or make_data(), ALGORITHM, engine=engine)
    federation.round()
    return federation


def assert_equal_models(a: Federation, b: Federation) -> None:
    left, right = a.personal_models(), b.personal_models()
    for k in left:
        torch.testing.assert_close(left[k], right[k], rtol=1e-12, atol=1e-12)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


class DropsMissing(nn.Module):
    """Boolean indexing: the shape of the result depends on the data, which vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.isfinite().all(1)]


def test_a_module_that_vmap_refuses_runs_one_by_one_and_is_named() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), DropsMissing(), nn.Linear(4, 2))
    engine = Vectorized("cpu", stack=5, lanes=1)
    with pytest.warns(UserWarning, match=r"DropsMissing '1' cannot run vectorized .* one after another") as caught:
        stuck = trained(engine, module)
        stuck.round()
    assert len([w for w in caught if "cannot run vectorized" in str(w.message)]) == 1  # said once
    reference = trained(Sequential(), module)
    reference.round()
    assert_equal_models(stuck, reference)


class Branches(nn.Module):
    """A branch on a tensor's value cannot be traced; the sleep lets lanes meet inside the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x if x.sum() > 1e9 else 2 * x


@pytest.mark.filterwarnings("ignore:.*cannot run vectorized")
def test_lanes_that_fall_back_do_not_disturb_each_other() -> None:
    """They share one module, whose dropout key and head input belong to one client at a time."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), Branches(), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))

    federation = Federation(
        Task(net(), dtype=torch.float64), make_data(), ALGORITHM, engine=Vectorized("cpu", lanes=4, stack=1)
    )
    assert not federation.round().failed
    assert_equal_models(federation, trained(Sequential(), net()))


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize("stack", [1, 5])
def test_randomness_without_a_key_is_refused(stack: int) -> None:
    with pytest.raises(InputError, match=r"random generator .*batch\.key"):
        trained(Vectorized("cpu", lanes=1, stack=stack), nn.Sequential(nn.Linear(6, 2), Noisy()))


@pytest.mark.parametrize(
    ("model", "shape", "wanted"),
    [
        ("linear", (64,), Layout(1, None)),
        ("mlp", (784,), Layout(2, None)),
        ("fedavg-cnn", (3, 32, 32), Layout(2, 1)),
        ("digit-model", (3, 28, 28), Layout(2, 1)),
    ],
)
def test_layout_on_a_cpu_with_two_cores(
    model: str, shape: tuple[int, ...], wanted: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bespokefl.engines.vectorized._cores", lambda: 2)
    assert Vectorized("cpu").layout(Task(build(model, shape, 10))) == wanted


def test_a_user_s_layout_wins() -> None:
    task = Task(build("fedavg-cnn", (3, 32, 32), 10))
    assert Vectorized("cpu", lanes=3, stack=4).layout(task) == Layout(3, 4)


@pytest.mark.parametrize("limit", [1, 8_000, 10**12])
def test_chunks_by_memory_change_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespokefl.engines.budget.free_bytes", lambda device: limit)
    engine = Vectorized("cpu", lanes=1)
    federation = trained(engine, small_net())
    assert (engine.plan()["memory"] is None) == (limit == 10**12)  # kept only if it cut the cohort
    assert_equal_models(federation, trained(Sequential(), small_net()))


def test_an_adopted_memory_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespokefl.engines.budget.free_bytes", lambda device: 10**12)
    first, second = Vectorized("cpu", lanes=1), Vectorized("cpu", lanes=1)
    second.load_state({**first.plan(), "memory": 1})
    trained(second, small_net())
    assert second.plan()["memory"] == 1


def test_memory_between_the_phases_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedFomo's clients meet M others' models, their differences and these in one row, before they train."""
    monkeypatch.setattr("bespokefl.engines.budget.free_bytes", lambda device: 1)
    task, engine = Task(small_net(), dtype=torch.float64), Vectorized("cpu", lanes=1, stack=5)
    federation = Federation(task, make_data(), FedFomo(M=4, batch_size=2), engine=engine)
    federation.round()  # the first: nobody has a model to send
    federation.round()
    assert max(engine._budget._client_bytes.values()) > 3 * 4 * nbytes(task.initial)


def test_memory_at_the_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squares(FedAvg):
        def finish(self, task: Task, down: Any, c: Any) -> Any:
            upload, state = super().finish(task, down, c)
            flat = torch.cat([v.flatten() for v in leaves(upload)])
            products = flat[:, None] * flat[None]  # as many models as a model has weights
            return tree_map(lambda v: v + 0 * products.sum(), upload), state

    monkeypatch.setattr("bespokefl.engines.budget.free_bytes", lambda device: 1)
    task, engine = Task(small_net(), dtype=torch.float64), Vectorized("cpu", lanes=1, stack=5)
    Federation(task, make_data(), Squares(batch_size=2), engine=engine).round()
    assert max(engine._budget._client_bytes.values()) > task.size * nbytes(task.initial)


def test_phases_in_which_clients_have_different_orders() -> None:
    """FedFomo judges on validation samples, then trains: who has most of the one has least of the other here."""
    rng = np.random.default_rng(0)
    data = FederatedData.from_arrays(
        [
            {split: (rng.normal(size=(n, 6)), rng.integers(0, 2, n)) for split, n in sizes.items()}
            for sizes in ({"train": n, "val": 40 - n, "test": 2} for n in SIZES)
        ]
    )
    algorithm = FedFomo(M=2, lr=0.1, local_epochs=1, batch_size=4)
    stacked, reference = (
        Federation(Task(small_net(), dtype=torch.float64), data, algorithm, engine=engine)
        for engine in (Vectorized("cpu", lanes=1, stack=5), Sequential())
    )
    for _ in range(3):
        stacked.round()
        reference.round()
    assert_equal_models(stacked, reference)


def test_out_of_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tried = Vectorized("cpu", lanes=1, stack=5), []
    fast = engine._fast

    def scarce(job: Any, plans: Any, rows: Any) -> Any:
        tried.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no more")
        return fast(job, plans, rows)

    monkeypatch.setattr(engine, "_fast", scarce)
    federation = Federation(Task(small_net(), dtype=torch.float64), make_data(), ALGORITHM, engine=engine)
    record = federation.round()
    assert max(tried) > 2 and min(tried) <= 2
    assert not record.failed
    assert_equal_models(federation, trained(Sequential(), small_net()))


def test_what_ran_out_of_memory_is_let_go_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, held, alive = Vectorized("cpu", lanes=1, stack=5), [], []
    fast = engine._fast

    def scarce(job: Any, plans: Any, rows: Any) -> Any:
        alive.extend(ref for ref in held if ref() is not None)
        mine = torch.zeros(1)
        if len(rows) > 1:
            held.append(weakref.ref(mine))
            mine.of_itself = mine  # type: ignore[attr-defined]  # as a traced function's frames are
            raise torch.OutOfMemoryError("no more")
        return fast(job, plans, rows)

    monkeypatch.setattr(engine, "_fast", scarce)
    Federation(Task(small_net(), dtype=torch.float64), make_data(), ALGORITHM, engine=engine).round()
    assert len(held) > 1
    assert not alive


@pytest.mark.parametrize("samples", [60_000, 1_797])
def test_padding_waste_of_a_dirichlet_partition(samples: int) -> None:
    """100 clients at Dirichlet 0.3, 25 per round, batches of 50: also where a client holds less than a batch."""
    rng = np.random.default_rng(1)
    y = np.arange(samples) % 10
    dataset = Dataset("random", rng.normal(size=(samples, 4)).astype(np.float32), y, tuple("0123456789"))
    data = federate(dataset, clients=100, partition="dirichlet", alpha=0.3)
    algorithm = FedAvg(lr=0.01, local_epochs=2, batch_size=50)
    federation = Federation(Task(nn.Linear(4, 10)), data, algorithm, engine=Vectorized("cpu"), participation=0.25)
    for _ in range(3):
        assert 1 <= federation.round().waste < 1.25


def test_threads_and_default_type_are_put_back() -> None:
    before = torch.get_num_threads(), torch.get_default_dtype()
    trained(Vectorized("cpu"), small_net())
    trained(Sequential(), small_net())
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_give_the_same_numbers() -> None:
    compiled = trained(Vectorized("cpu", lanes=1, compile=True), small_net())
    assert_equal_models(compiled, trained(Sequential(), small_net()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "vectorised"}, "engine.name = 'vectorised'.*Did you mean vectorized"),
        ({"device": "tpu9"}, "engine.device = 'tpu9'"),
        ({"compile": "yes"}, "engine.compile = 'yes'"),
        ({"lanes": 0}, "engine.lanes = 0"),
        ({"stack": -2}, "engine.stack = -2"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_engine(**options)


def test_embedded_digits_learn() -> None:
    """Five rounds of a linear model get most digits right, on either engine."""
    data = load("digits", clients=5, partition="iid")
    for engine in (Vectorized("cpu"), Sequential()):
        federation = Federation(
            Task(build("linear", (1, 8, 8), 10)), data, FedAvg(lr=0.5, local_epochs=6, batch_size=20), engine=engine
        )
        history = federation.run(5, evaluate_every=0)
        assert history.summary()["mean"] > 0.9


def test_an_adopted_plan_keeps_the_layout_of_every_model() -> None:
    tiny, middling = Task(nn.Linear(4, 2)), Task(nn.Linear(400, 200))
    first, second = Vectorized("cpu"), Vectorized("cpu")
    first._cores = 3  # of another machine
    second.load_state(first.plan())
    assert [second.layout(task) for task in (tiny, middling)] == [Layout(1, None), Layout(3, None)]
