"""AUC, F1, Dice and the like as Federation.evaluate reports them, against scikit-learn and scipy, client by client."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import directed_hausdorff
from sklearn import metrics as sk
from torch import Tensor, nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.local import Local
from bespokefl.core import InputError, Task, Training
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.engines.base import Job, Resident, Result
from bespokefl.evaluation.segmentation_metrics import boundary
from bespokefl.experiments.loss_surface import surfaces
from bespokefl.experiments.selection import Selection
from bespokefl.federation import Federation
from bespokefl.federation import federation as federation_module
from bespokefl.federation.attacks import Attack
from bespokefl.results.summary import further_figures

ENGINES = ["sequential", "vectorized"]
SIZES = [(30, 7), (12, 300), (5, 0), (21, 64), (9, 513)]  # train and test: some, several batches, none


def data_of(classes: int, y: Any = None) -> FederatedData:
    rng = np.random.default_rng(0)
    rows = iter(np.split(np.arange(sum(map(sum, SIZES))), np.cumsum([n for pair in SIZES for n in pair])[:-1]))
    pairs = [(next(rows), rng.permutation(next(rows))) for _ in SIZES]
    splits = {
        "train": tuple(train for train, _ in pairs),
        "test": tuple(test for _, test in pairs),
        "val": (np.empty(0, dtype=np.int64),) * len(SIZES),
    }
    total = sum(map(sum, SIZES))
    x = torch.as_tensor(rng.normal(size=(total, 4)))
    labels = rng.integers(0, classes, total)
    labels[splits["test"][0]] = 1  # a client with one class only
    names = tuple(str(i) for i in range(len(SIZES)))
    return FederatedData(x, torch.as_tensor(labels), splits, tuple("abcdef"[:classes]), names, {})


def trained(engine: Any, classes: int) -> Federation:
    torch.manual_seed(0)
    federation = Federation(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, classes)).double(),
        data_of(classes),
        Local(local_epochs=1, batch_size=5, lr=0.3),
        engine=engine,
    )
    federation.round()
    return federation


kept = functools.cache(trained)  # for tests that only read


def logits_of(federation: Federation, client: int, rows: np.ndarray) -> np.ndarray:
    model = federation.client_model(client)
    hidden = torch.relu(federation.data.x[rows] @ model["0.weight"].T + model["0.bias"])
    return (hidden @ model["2.weight"].T + model["2.bias"]).numpy()


@pytest.mark.parametrize("engine", ENGINES)
def test_two_classes_against_scikit_learn(engine: str) -> None:
    federation = kept(engine, 2)
    found = federation.evaluate()
    assert list(found.further) == ["auc", "sensitivity", "specificity", "f1"] and found.main is found.accuracy
    assert all(np.isnan(values[2]) for values in found.further.values())  # no test samples
    assert np.isnan(found.further["auc"][0])  # one class
    for client in (0, 1, 3, 4):
        rows = federation.data.splits["test"][client]
        logits, y = logits_of(federation, client, rows), federation.data.y[rows].numpy()
        p = np.exp(logits[:, 1]) / np.exp(logits).sum(1)
        answer = logits.argmax(1)
        if client:
            assert found.further["auc"][client] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-12)
            assert found.further["specificity"][client] == pytest.approx(sk.recall_score(y, answer, pos_label=0))
        assert found.further["sensitivity"][client] == pytest.approx(sk.recall_score(y, answer))
        f1 = sk.f1_score(y, answer, labels=[0, 1], average="macro", zero_division=0)
        assert found.further["f1"][client] == pytest.approx(f1)
        low, high = sorted(found.further[name][client] for name in ("sensitivity", "specificity"))
        assert client == 0 or low <= found.accuracy[client] <= high
    np.testing.assert_array_equal(found.accuracy, federation.evaluate(closer=True).accuracy)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_classes_against_scikit_learn(engine: str) -> None:
    federation = kept(engine, 4)
    assert federation.evaluate().further == {}  # only on request
    found = federation.evaluate(closer=True)
    assert sorted(found.further) == ["balanced_accuracy", "f1"]
    for client in (0, 1, 3, 4):
        rows = federation.data.splits["test"][client]
        answer, y = logits_of(federation, client, rows).argmax(1), federation.data.y[rows].numpy()
        expected = sk.f1_score(y, answer, average="macro", zero_division=0)
        assert found.further["f1"][client] == pytest.approx(expected)
        expected = sk.recall_score(y, answer, labels=np.unique(y), average="macro")
        assert found.further["balanced_accuracy"][client] == pytest.approx(expected)
    assert np.isnan(found.further["f1"][2])


def test_clients_in_several_groups_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept of some clients at a time, so that memory does not grow with their number."""
    whole = kept("vectorized", 2).evaluate()
    monkeypatch.setattr(federation_module, "SCORING_BYTES", 2 * 768 * 2 * 8)
    engine = Counted()
    federation = trained(engine, 2)
    engine.calls = 0
    parts = federation.evaluate()
    assert engine.calls == 3  # 5 clients, 2 at a time
    for a, b in zip(whole[:4], parts[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    for name in whole.further:
        np.testing.assert_array_equal(whole.further[name], parts.further[name])


def test_a_diverged_client_has_no_auc_and_harms_nobody() -> None:
    federation = trained("vectorized", 2)
    expected = federation.evaluate().further
    broken = {name: v * np.nan for name, v in federation.personal_models([1]).items()}
    federation.clients.states.scatter(np.array([1]), Training(broken, {}))
    found = federation.evaluate().further
    assert np.isnan([values[1] for values in found.values()]).all()
    for name, values in found.items():
        np.testing.assert_array_equal(np.delete(values, 1), np.delete(expected[name], 1))


def test_a_run_of_two_classes_reports_the_selected_round() -> None:
    federation = kept("vectorized", 2)
    selection = Selection(federation, "last", 1, 0.1, cross=True)
    test = federation.evaluate()
    selection.consider(1, test, None)
    assert selection.score is not None
    np.testing.assert_array_equal(selection.score.further["auc"], test.further["auc"])
    back = selection.score.from_tensors(selection.score.tensors())
    assert list(back.further) == list(selection.score.further)
    np.testing.assert_array_equal(back.further["f1"], test.further["f1"])


def test_malicious_clients_have_no_scores_and_no_part_in_a_surface() -> None:
    torch.manual_seed(0)
    attack = Attack("noise", clients=[1, 4])
    federation = Federation(nn.Linear(4, 2).double(), data_of(2), FedAvg(batch_size=5), attack=attack)
    federation.round()
    selection = Selection(federation, "last", 1, 0.5, cross=True)
    selection.consider(1, federation.evaluate(), None)
    score = selection.score
    assert score is not None and len(score.further["auc"]) == len(SIZES)
    assert np.isnan([values[[1, 4]] for values in score.further.values()]).all()
    assert np.isnan(score.g_accuracy[[1, 4]]).all() and not np.isnan(score.g_accuracy[[0, 3]]).any()
    figures = further_figures(score, [], None, malicious=2)
    assert figures["clients_without_test"] == 1 and figures["f1_left_out"] == 1 and figures["auc_left_out"] == 2
    assert figures["f1"] == pytest.approx(score.further["f1"][[0, 3]].mean())
    found = surfaces(federation, np.zeros(1), np.zeros(1))
    assert found["global"].about["rows_available"] == 7 + 64
    assert {found[name].about["client"] for name in ("worst", "best")} == {0, 3}


# every model on every client's test data ------------------------------------------------------------


class Counted(Vectorized):
    """Notes how often it runs, and how many rows it gathers."""

    calls = 0

    def run(self, job: Job) -> Result:
        self.calls += 1
        return super().run(job)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_all_models_on_shared_rows_against_a_double_loop(engine: Any) -> None:
    federation = trained(engine(), 3)
    test = federation.data.splits["test"]
    shared = np.concatenate(test)
    found = federation.evaluate(rows=shared)
    assert found.n.tolist() == [len(shared)] * len(SIZES)
    for client in range(len(SIZES)):
        hits = 0
        for other in range(len(SIZES)):
            rows = test[other]
            hits += int((logits_of(federation, client, rows).argmax(1) == federation.data.y[rows].numpy()).sum())
        assert found.accuracy[client] == hits / len(shared)
    apart = federation.evaluate(rows=[shared] * len(SIZES))
    np.testing.assert_array_equal(found.accuracy, apart.accuracy)
    np.testing.assert_allclose(found.loss, apart.loss, rtol=1e-12)


def test_shared_rows_are_gathered_once_for_a_stack_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    plain = Resident.gather

    def noted(self: Resident, rows: Tensor) -> tuple[Tensor, Tensor]:
        if rows.numel() > 1:  # the engine looks at one row to know its size
            gathered.append(rows.numel())
        return plain(self, rows)

    engine = Counted()
    federation = trained(engine, 3)
    federation.evaluate()
    monkeypatch.setattr(Resident, "gather", noted)
    engine.calls, shared = 0, np.concatenate(federation.data.splits["test"])
    federation.evaluate(rows=shared)
    assert engine.calls == 1  # not one for each client, nor for each pair
    batches = -(-len(shared) // 256)
    assert len(gathered) == batches and sum(gathered) <= 256 * batches
    gathered.clear()
    federation.evaluate(rows=[shared] * len(SIZES))
    assert sum(gathered) >= len(SIZES) * len(shared)  # what a list costs


# masks ----------------------------------------------------------------------------------------------


class Maps(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Conv2d(4, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)))
        return out


def images(sizes: Sequence[int] = (9, 14, 5)) -> FederatedData:
    rng = np.random.default_rng(1)
    clients = []
    for n in sizes:
        y = np.zeros((n, 8, 10), dtype=np.int64)
        for k in range(n - 1):  # the last one stays empty
            a, b = rng.integers(0, 6, 2)
            y[k, a : a + 3, b : b + 4] = 1 + k % 2
        clients.append((y[:, None] + rng.normal(scale=0.7, size=(n, 2, 8, 10)), y))
    return FederatedData.from_arrays(clients, test=0.5)


def hausdorff_by_scipy(a: np.ndarray, b: np.ndarray) -> float:
    if not a.any() or not b.any():
        return float(np.hypot(*a.shape)) if a.any() or b.any() else 0.0
    points = [np.argwhere(boundary(mask)) for mask in (a, b)]
    return max(directed_hausdorff(points[0], points[1])[0], directed_hausdorff(points[1], points[0])[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_against_plain_loops(engine: str) -> None:
    torch.manual_seed(0)
    data, module = images(), Maps().double()
    task = Task(module, "dice", dtype=torch.float64)
    federation = Federation(task, data, FedAvg(lr=1.0, local_epochs=3, batch_size=4), engine=engine)
    federation.run(rounds=2)
    assert list(federation.evaluate().further) == ["dice"]
    found = federation.evaluate(closer=True)
    np.testing.assert_array_equal(found.main, found.further["dice"])
    for client, rows in enumerate(data.splits["test"]):
        module.load_state_dict(federation.client_model(client))
        y = data.y[rows].numpy()
        with torch.no_grad():
            answer = module(data.x[rows]).argmax(1).numpy()
        dices, distances = [], []
        for one, truth in zip(answer, y, strict=True):
            for label in (1, 2):
                a, b = one == label, truth == label
                dices.append(1.0 if not (a.any() or b.any()) else sk.f1_score(b.ravel(), a.ravel()))
                distances.append(hausdorff_by_scipy(a, b))
        assert found.further["dice"][client] == pytest.approx(np.mean(dices), abs=1e-12)
        assert found.further["hausdorff"][client] == pytest.approx(np.mean(distances), abs=1e-12)
        assert found.accuracy[client] == pytest.approx((answer == y).mean(), abs=1e-12)
    assert 0.1 < found.further["dice"].mean() < 1


def test_a_model_that_does_not_answer_with_maps_is_refused() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(160, 3))
    with pytest.raises(InputError, match=r"model\.name: the labels are masks of \(8, 10\) pixels.*shape \(3,\)"):
        Federation(Task(flat, "dice"), images(), FedAvg())
    with pytest.raises(InputError, match="3 classes"):
        Federation(Task(Maps(classes=2), "dice"), images(), FedAvg())
