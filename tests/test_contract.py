"""The contract that every registered algorithm is held to, on both engines."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.core import RunError, Task
from bespokefl.core.acting import ALWAYS, conditions
from bespokefl.data import FederatedData
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.engines.base import Job, Result
from bespokefl.federation import Federation

SIZES = (5, 12, 23, 2, 40, 17, 9)  # ragged: with batches of 8, clients of 1 to 5 steps an epoch, last ones of 1 to 8
CLASSES = 3
SETTINGS = {"lr": 0.05, "momentum": 0.9, "local_epochs": 2, "batch_size": 8}


class SmallNet(nn.Module):
    """Body and head; the body is given."""

    def __init__(self, *body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def _conv() -> tuple[nn.Module, ...]:
    return nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Tanh()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: SmallNet(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), width=6),
    "batchnorm": lambda: SmallNet(*_conv(), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(16), width=16),
    "groupnorm": lambda: SmallNet(*_conv(), nn.GroupNorm(2, 4), nn.Flatten(), width=16),
    "dropout": lambda: SmallNet(*_conv(), nn.Dropout2d(0.25), nn.Flatten(), nn.Dropout(0.5), width=16),
}

LAYOUTS: dict[str, Callable[[], Engine]] = {
    "one stack": lambda: Vectorized("cpu", lanes=1, stack=len(SIZES)),
    "two lanes of stacks of 3": lambda: Vectorized("cpu", lanes=2, stack=3),
    "side by side": lambda: Vectorized("cpu", lanes=2, stack=1),
}

OTHERS = [layout for layout in LAYOUTS if layout != "one stack"]

# what an engine does for any algorithm alike is tested for itself; with every algorithm on the fast one it is slow
both_engines = pytest.mark.parametrize("engine", [Sequential, pytest.param(Vectorized, marks=pytest.mark.slow)])
every_algorithm = pytest.mark.parametrize("name", list(ALGORITHMS))


def make_data(broken: int | None = None) -> FederatedData:
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):  # as many test samples as train samples
        x = rng.normal(size=(2 * n, 2, 6, 6)) + 0.1 * i
        y = np.concatenate([np.arange(n), np.arange(n)]) % CLASSES
        clients.append({"train": (x[:n], y[:n]), "test": (x[n:], y[n:])})
    data = FederatedData.from_arrays(clients, classes=["a", "b", "c"])
    if broken is not None:
        data.x[torch.as_tensor(data.splits["train"][broken])] = torch.nan
    return data


def kept(name: str) -> dict[str, str]:
    """State of the optimiser that stays from round to round, for a method that has any."""
    acts = conditions(ALGORITHMS[name].cls).get("opt_state", ALWAYS).ways
    return {"opt_state": "keep"} if acts else {}


def federate(name: str, engine: Engine, model: str = "mlp", **options: Any) -> Federation:
    torch.manual_seed(1)
    task = Task(MODELS[model](), dtype=torch.float64)
    hyper = options.pop("hyper", {})
    options.setdefault("clients_per_round", 5)
    data = options.pop("data", None) or make_data()
    return Federation(task, data, algorithm(name, **hyper), engine=engine, **options)


def algorithm(name: str, **hyper: Any) -> Algorithm:
    return build_algorithm(name, SETTINGS, hyper)


def snapshot(federation: Federation) -> dict[str, torch.Tensor]:
    """All that a federation holds and shows, by name."""
    tensors = {k: v.clone() for k, v in federation.state()[0].items()}
    tensors |= {f"personal.{k}": v.clone() for k, v in federation.personal_models().items()}
    evaluation = federation.evaluate()
    return tensors | {"accuracy": torch.tensor(evaluation.accuracy), "loss": torch.tensor(evaluation.loss)}


def assert_close(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float, *, nan_alike: bool = False
) -> None:
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(
            a[k], b[k], rtol=tolerance, atol=tolerance, equal_nan=nan_alike, msg=lambda m, k=k: f"{k}: {m}"
        )


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("mlp", "two lanes of stacks of 3"),
        ("batchnorm", "one stack"),
        ("groupnorm", "side by side"),
        ("dropout", "one stack"),
        pytest.param("batchnorm", "side by side", marks=pytest.mark.slow),
        pytest.param("mlp", "one stack", marks=pytest.mark.slow),
        pytest.param("mlp", "side by side", marks=pytest.mark.slow),
        pytest.param("groupnorm", "one stack", marks=pytest.mark.slow),
        pytest.param("dropout", "side by side", marks=pytest.mark.slow),
    ],
)
@every_algorithm
def test_vectorized_equals_sequential(name: str, model: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged clients, two rounds: any way to run them gives the reference's numbers, whatever the chunks."""
    if layout == "one stack":  # in spite of all the padding
        monkeypatch.setattr("bespokefl.engines.buckets.TARGET_WASTE", 99)
    schedule = [[0, 2, 3, 4, 5], range(7)]  # the second shrinks from 7 through a stack of 6 that holds 5
    reference = federate(name, Sequential(), model, schedule=schedule)
    federation = federate(name, LAYOUTS[layout](), model, schedule=schedule)
    for _ in schedule:  # warnings are errors: a fallback to the sequential engine would show
        reference.round()
        federation.round()
    assert_close(snapshot(federation), snapshot(reference), 1e-10)


class Shuffling:
    """An engine that is asked in one order and works in another."""

    def __init__(self) -> None:
        self._engine = Vectorized("cpu")
        self._rng = np.random.default_rng(3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, job: Job) -> Result:
        order = self._rng.permutation(len(job.clients))
        result = self._engine.run(job.select(order))
        assert len(result.positions) == len(order)
        back = torch.as_tensor(np.argsort(order))
        uploads, states = pytree.tree_map(lambda v: v[back], (result.uploads, result.states))
        return result._replace(uploads=uploads, states=states)


@every_algorithm
def test_order_of_clients_changes_nothing(name: str) -> None:
    straight, shuffled = federate(name, Vectorized("cpu")), federate(name, Shuffling())
    for _ in range(2):
        straight.round()
        shuffled.round()
    assert_close(snapshot(straight), snapshot(shuffled), 1e-12)


@both_engines
@every_algorithm
def test_absent_and_silent_clients_are_untouched(name: str, engine: type[Any]) -> None:
    federation = federate(name, engine("cpu"), schedule=[range(7), [0, 2, 4]])
    federation.round()
    before = federation.clients.states.gather(np.arange(7))
    federation.round(silent={2})
    after = federation.clients.states.gather(np.arange(7))
    for i in (1, 2, 3, 5, 6):
        for a, b in zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True):
            assert torch.equal(a[i], b[i]), f"client {i}"


@every_algorithm
def test_a_silent_client_is_as_if_never_asked_for_the_others(name: str) -> None:
    asked = federate(name, Vectorized("cpu"))
    asked.round([0, 2, 4, 5], silent=[4])
    never = federate(name, Vectorized("cpu"))
    never.round([0, 2, 5])
    assert_close(snapshot(asked), snapshot(never), 1e-12)


@every_algorithm
def test_evaluation_changes_nothing(name: str) -> None:
    watched, alone = federate(name, Vectorized("cpu")), federate(name, Vectorized("cpu"))
    for _ in range(2):
        before, meta = watched.state()
        before = {k: v.clone() for k, v in before.items()}
        for model in ("personal", "global") if watched.has_global else ("personal",):
            watched.evaluate(model=model)
        watched.personal_models([3, 1])
        assert_same(watched.state()[0], before)
        assert watched.state()[1] == meta
        watched.round()
        alone.round()
    assert_same(snapshot(watched), snapshot(alone))


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@every_algorithm
def test_resumed_is_bit_equal(name: str, engine: type[Any]) -> None:
    straight = federate(name, engine("cpu"), "batchnorm", hyper=kept(name))
    straight.round()
    straight.round()
    tensors, meta = straight.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    straight.round()
    straight.round()
    resumed = federate(name, engine("cpu"), "batchnorm", hyper=kept(name))
    resumed.restore(tensors, meta)
    assert resumed.rounds_done == 2
    resumed.round()
    resumed.round()
    assert_same(snapshot(resumed), snapshot(straight))


@every_algorithm
def test_state_keeps_its_structure_and_types(name: str) -> None:
    federation = federate(name, Vectorized("cpu"), hyper=kept(name))
    initial = federation.clients.states.initial
    federation.round()
    rows = federation.clients.states.rows()
    assert pytree.tree_structure(rows) == pytree.tree_structure(initial)
    for new, old in zip(pytree.tree_leaves(rows), pytree.tree_leaves(initial), strict=True):
        assert new.dtype == old.dtype and new.shape[1:] == old.shape


@every_algorithm
def test_only_participants_have_state(name: str) -> None:
    federation = federate(name, Vectorized("cpu"), schedule=[[1, 4], [4, 5]])
    federation.round()
    federation.round()
    assert set(federation.clients.states.clients) <= {1, 4, 5}


@both_engines
@every_algorithm
def test_a_client_that_answers_nan_is_left_out(name: str, engine: type[Any]) -> None:
    """The round equals one in which that client was silent, and says why."""
    broken = federate(name, engine("cpu"), "batchnorm", data=make_data(broken=4))
    record = broken.round(range(7))
    assert list(record.failed) == [4]
    assert "not finite" in record.failed[4]
    silent = federate(name, engine("cpu"), "batchnorm", data=make_data(broken=4))
    silent.round(range(7), silent=[4])
    # a method that trains at evaluation gives the client with broken data a broken model, in both
    assert_close(snapshot(broken), snapshot(silent), 1e-12, nan_alike=True)


@pytest.mark.parametrize(
    "layout", ["sequential", "one stack", *(pytest.param(w, marks=pytest.mark.slow) for w in OTHERS)]
)
@every_algorithm
def test_a_client_whose_program_fails_is_left_out(name: str, layout: str) -> None:
    """A label outside the classes raises inside that client's loss."""

    def data() -> FederatedData:
        made = make_data()
        made.y[torch.as_tensor(made.splits["train"][5])] = CLASSES + 4  # refused where data are made
        return made

    def engine() -> Engine:
        return Sequential() if layout == "sequential" else LAYOUTS[layout]()

    broken = federate(name, engine(), data=data())
    record = broken.round([0, 2, 5])
    assert list(record.failed) == [5]
    silent = federate(name, engine(), data=data())
    silent.round([0, 2, 5], silent=[5])
    assert_close(broken_free(broken), broken_free(silent), 1e-12)


def broken_free(federation: Federation) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in federation.state()[0].items()}


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@every_algorithm
def test_a_round_without_any_answer_fails_clearly(name: str, engine: type[Any]) -> None:
    federation = federate(name, engine("cpu"), data=make_data(broken=4))
    with pytest.raises(RunError, match=r"round 1: none of the 1 clients .*client 4: answered .* not finite"):
        federation.round([4])
    with pytest.raises(RunError, match="all were silent"):
        federate(name, engine("cpu")).round([0, 1], silent=[0, 1])


@every_algorithm
def test_float32_stays_float32(name: str) -> None:
    torch.manual_seed(1)
    task = Task(MODELS["batchnorm"]())
    federation = Federation(task, make_data(), algorithm(name), engine=Vectorized("cpu"))
    federation.round()
    dtypes = {v.dtype for v in federation.personal_models().values()}
    dtypes |= {v.dtype for v in (federation.global_model() or {}).values()}
    assert dtypes == {torch.float32}


@every_algorithm
def test_bf16_stays_near_float32(name: str) -> None:
    models = []
    for bf16 in (False, True):
        torch.manual_seed(1)
        task = Task(MODELS["groupnorm"](), bf16=bf16)
        federation = Federation(task, make_data(), algorithm(name), engine=Vectorized("cpu"))
        federation.round()
        models.append(torch.cat([v.flatten() for v in federation.personal_models().values()]))
    exact, rough = models
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() / exact.norm() < 0.05
