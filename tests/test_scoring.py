"""What Federation.evaluate reports, against a plain loop over clients with a plain module."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Model, Task, trees
from bespokefl.data.federated import FederatedData
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.federation import Federation

SIZES = [(30, 7), (12, 300), (5, 0), (21, 64)]  # train and test: more than a scoring batch, none, and some
ENGINES = ["sequential", "vectorized"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def federated(*, regression: bool = False) -> FederatedData:
    rng = np.random.default_rng(0)
    splits: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    end = 0
    for train, test in SIZES:
        splits["train"].append(np.arange(end, end + train))
        splits["test"].append(rng.permutation(np.arange(end + train, end + train + test)))
        splits["val"].append(np.empty(0, dtype=np.int64))
        end += train + test
    x = torch.as_tensor(rng.normal(size=(end, 4)))
    y = torch.as_tensor(rng.normal(size=end) if regression else rng.integers(0, 3, end))
    names = tuple(str(i) for i in range(len(SIZES)))
    return FederatedData(
        x, y, {k: tuple(v) for k, v in splits.items()}, () if regression else ("a", "b", "c"), names, {}
    )


@functools.cache
def trained_alone(engine: str) -> Federation:
    """Local models after a round; for tests that only read."""
    federation = Federation(net(), federated(), Local(local_epochs=1, batch_size=10), engine=engine)
    federation.round()
    return federation


def by_hand(data: FederatedData, model: Model, rows: np.ndarray) -> tuple[float, float]:
    """Accuracy and mean loss of one model on some rows."""
    if not len(rows):
        return float("nan"), float("nan")
    module = net().eval()
    module.load_state_dict(model, strict=False)
    with torch.no_grad():
        logits = module(data.x[rows])
    y = data.y[rows]
    return float((logits.numpy().argmax(1) == y.numpy()).mean()), float(F.cross_entropy(logits, y))


def assert_scores(evaluation: Evaluation, expected: list[tuple[float, float]]) -> None:
    np.testing.assert_array_equal(evaluation.accuracy, [a for a, _ in expected])
    np.testing.assert_allclose(evaluation.loss, [loss for _, loss in expected], rtol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_personal_models_on_their_own_splits(engine: str) -> None:
    data, federation = federated(), trained_alone(engine)
    models = [federation.client_model(i) for i in range(4)]
    assert not torch.equal(models[0]["0.weight"], models[1]["0.weight"])
    for split in ("test", "train"):
        scores = federation.evaluate(split)
        rows = data.splits[split]
        assert scores.clients.tolist() == [0, 1, 2, 3] and scores.n.tolist() == [len(r) for r in rows]
        assert_scores(scores, [by_hand(data, m, r) for m, r in zip(models, rows, strict=True)])
    some = federation.evaluate(clients=[3, 1])
    assert some.clients.tolist() == [3, 1] and some.n.tolist() == [64, 300]
    assert_scores(some, [by_hand(data, models[i], data.splits["test"][i]) for i in (3, 1)])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_global_model(engine: str) -> None:
    data = federated()
    federation = Federation(net(), data, FedAvg(local_epochs=1, batch_size=10), engine=engine)
    federation.round()
    w = federation.global_model()
    assert w is not None
    assert_scores(federation.evaluate(model="global"), [by_hand(data, w, r) for r in data.splits["test"]])


@pytest.mark.parametrize("engine", ENGINES)
def test_given_rows_take_the_place_of_the_split(engine: str) -> None:
    data, federation = federated(), trained_alone(engine)
    union = np.concatenate(data.splits["test"])
    rows = [union, union[:1], union[5:9], np.empty(0, dtype=np.int64)]
    scores = federation.evaluate(rows=rows)
    assert scores.n.tolist() == [len(union), 1, 4, 0]
    assert_scores(scores, [by_hand(data, federation.client_model(i), rows[i]) for i in range(4)])


@pytest.mark.parametrize("engine", ENGINES)
def test_given_rows_are_only_scored_on_and_never_tuned_on(engine: str) -> None:
    data = federated()
    tuned = FedAvg(local_epochs=1, batch_size=10, personal="finetune")
    federation = Federation(net(), data, tuned, engine=engine)
    models = [federation.client_model(i) for i in range(4)]
    rows = [r[:4] for r in data.splits["train"]]
    scores = federation.evaluate("train", rows=rows)
    assert_scores(scores, [by_hand(data, m, r) for m, r in zip(models, rows, strict=True)])


@pytest.mark.parametrize("engine", ENGINES)
def test_ties_go_to_the_lowest_class(engine: str) -> None:
    data = federated()
    zero = {k: torch.zeros_like(v) for k, v in Task(net(), dtype=torch.float64).initial.items()}
    scores = Federation(net(), data, FedAvg(), engine=engine, initial=zero).evaluate()
    expected = [float((data.y[r] == 0).double().mean()) for r in data.splits["test"]]
    np.testing.assert_array_equal(scores.accuracy, expected)
    np.testing.assert_allclose(scores.loss[[0, 1, 3]], np.log(3), rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_regression_has_a_loss_and_no_accuracy(engine: str) -> None:
    data = federated(regression=True)
    torch.manual_seed(0)
    module = nn.Linear(4, 1).double()
    task = Task(module, "squared_error", dtype=torch.float64)
    scores = Federation(task, data, FedAvg(), engine=engine).evaluate()
    assert np.isnan(scores.accuracy).all() and np.isnan(scores.loss[2])
    for i in (0, 1, 3):
        rows = data.splits["test"][i]
        error = (module(data.x[rows])[:, 0] - data.y[rows]).detach().numpy()
        np.testing.assert_allclose(scores.loss[i], 0.5 * np.mean(error**2), rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_reads_and_never_writes(engine: str) -> None:
    data, module = federated(), nn.Linear(4, 3)
    algorithm = FedAvg(local_epochs=1, batch_size=10, momentum=0.9, opt_state="keep", personal="finetune")
    watched, other = (Federation(module, data, algorithm, engine=engine, participation=0.5) for _ in range(2))
    for _ in range(2):
        first = watched.evaluate()
        np.testing.assert_array_equal(first.loss, watched.evaluate().loss)  # nothing moved on
        watched.evaluate("train", "global")
        watched.personal_models()
        watched.round()
        other.round()
    (a, meta_a), (b, meta_b) = watched.state(), other.state()
    del meta_a["engine"], meta_b["engine"]  # how much memory there was
    assert meta_a == meta_b and list(a) == list(b)
    assert all(torch.equal(v, b[k]) for k, v in a.items())


def test_personal_models_come_in_the_order_asked_for() -> None:
    federation = trained_alone("sequential")
    stacked = federation.personal_models([2, 0])
    for r, client in enumerate((2, 0)):
        one = federation.client_model(client)
        assert all(torch.equal(v, one[k]) for k, v in trees.rows(stacked, r).items())


def test_a_model_that_does_not_exist() -> None:
    federation = trained_alone("sequential")
    with pytest.raises(InputError, match="Local has no global model"):
        federation.evaluate(model="global")
    with pytest.raises(InputError, match="model = 'best'"):
        federation.evaluate(model="best")
