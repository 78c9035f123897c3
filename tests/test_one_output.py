"""A model of one output on data of two classes trains and scores as one of two outputs whose first is 0."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tests.flower.memory import Memory, experiment, remote, shards
from tests.flower.test_contract import assert_alike as assert_same_run
from tests.flower.test_contract import simulated
from tests.small_networks import one_logit
from torch import Tensor, nn
from typer.testing import CliRunner

from bespokefl import models
from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.cli import app
from bespokefl.core import Batch, InputError, Task, class_logits
from bespokefl.data import FederatedData, load
from bespokefl.evaluation.binary_metrics import binary_scores
from bespokefl.federation import Federation
from bespokefl.federation.new_clients import Joining, join
from bespokefl.products.predict import load_personal_model
from bespokefl.results.files import read_csv

SETTINGS = {"lr": 0.3, "local_epochs": 2, "batch_size": 4}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("ditto", {}),
    ("pgfed", {}),
    ("fedper", {}),
    ("per-fedavg", {}),
    ("lg-mix", {}),
    ("fedrod", {}),
    ("fedhkd", {"noise": 0.0}),
]

FLAT_TOO = ("fedavg", "fedrod", "fedhkd")  # answers (samples,), not (samples, 1)


class OneLogit(nn.Module):
    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.flat = nn.Linear(3, 4), nn.Linear(4, 1), flat

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(torch.tanh(self.body(x)))
        return z[:, 0] if self.flat else z


class ZeroAndLogit(OneLogit):
    """The same parameters; the answer has a logit for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.head = PairedLinear(4, 1)


class PairedLinear(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        z = super().forward(h)
        return torch.cat([torch.zeros_like(z), z], 1)


def two_classes() -> FederatedData:
    rng = np.random.default_rng(5)
    clients = []
    for n in (33, 29, 37):
        x = rng.normal(size=(n, 3))
        clients.append((x, (x.sum(1) + rng.normal(size=n) > 0.4).astype(int)))
    return FederatedData.from_arrays(clients, test=0.4, val=0.1, seed=1, classes=("no", "yes"))


def federated(module: nn.Module, algorithm: Algorithm, engine: str, loss: Any = "cross_entropy") -> Federation:
    torch.manual_seed(3)
    for p in module.double().parameters():
        nn.init.normal_(p, std=0.5)
    task = Task(module, loss, classifies=True, dtype=torch.float64)
    return Federation(task, two_classes(), algorithm, engine=engine, seed=2)


def assert_alike(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("name", "own"), METHODS, ids=[name for name, _ in METHODS])
def test_one_logit_trains_and_scores_as_two_of_which_the_first_is_zero(
    name: str, own: dict[str, Any], engine: str
) -> None:
    runs = []
    for module in (OneLogit(), ZeroAndLogit(), *([OneLogit(flat=True)] if name in FLAT_TOO else [])):
        federation = federated(module, build_algorithm(name, SETTINGS, own), engine)
        federation.run(2)
        runs.append(federation)
    one, *others = runs
    for other in others:
        assert_alike(one.personal_models(), other.personal_models())
        for split in ("test", "val"):
            a, b = one.evaluate(split), other.evaluate(split)
            np.testing.assert_allclose(a.accuracy, b.accuracy)
            np.testing.assert_allclose(a.loss, b.loss, rtol=1e-10)
            assert set(a.further) == {"auc", "sensitivity", "specificity", "f1"} == set(b.further)
            for metric, values in a.further.items():
                np.testing.assert_allclose(values, b.further[metric], err_msg=metric)


@pytest.mark.parametrize("flat", [False, True])
def test_the_numbers_by_hand(flat: bool) -> None:
    federation = federated(OneLogit(flat), build_algorithm("fedavg", SETTINGS | {"batch_size": 50}, {}), "vectorized")
    federation.run(2)
    found, data = federation.evaluate(), federation.data
    for client, rows in enumerate(data.splits["test"]):
        model = OneLogit().double()
        model.load_state_dict(federation.client_model(client))
        z, y = model(data.x[rows])[:, 0].detach(), data.y[rows]
        answer = (z > 0).long()
        assert found.accuracy[client] == (answer == y).double().mean()
        loss = nn.functional.binary_cross_entropy_with_logits(z, y.double())
        np.testing.assert_allclose(found.loss[client], loss, rtol=1e-12)
        pairs = (z[y == 1][:, None] > z[y == 0]).double().mean()
        np.testing.assert_allclose(found.further["auc"][client], pairs)
        np.testing.assert_allclose(found.further["sensitivity"][client], answer[y == 1].double().mean())
        np.testing.assert_allclose(found.further["specificity"][client], 1 - answer[y == 0].double().mean())
        both = binary_scores(torch.stack([torch.zeros_like(z), z], 1).numpy(), y.numpy())
        np.testing.assert_allclose(found.further["f1"][client], both.f1)
    assert 0 < found.accuracy.mean() < 1


def test_the_gradient_is_that_of_binary_cross_entropy() -> None:
    task = federated(OneLogit(), build_algorithm("local", SETTINGS, {}), "sequential").task
    model, data = OneLogit().double(), two_classes()
    model.load_state_dict(task.initial)
    nn.functional.binary_cross_entropy_with_logits(model(data.x)[:, 0], data.y.double()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(task.grad(task.initial, batch_of(data)).grad[name], p.grad, rtol=1e-12, atol=1e-15)


def batch_of(data: FederatedData) -> Batch:
    return Batch(data.x, data.y, None, torch.zeros((), dtype=torch.int64))


def test_a_loss_of_the_users_own_meets_the_models_own_output() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        assert out.shape[1:] == (1,)
        return nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.to(out.dtype), reduction="none")

    fedrod = build_algorithm("fedrod", SETTINGS, {})
    for algorithm in (build_algorithm("ditto", SETTINGS, {}), fedrod, build_algorithm("splitgp", SETTINGS, {})):
        named, mine = (federated(OneLogit(), algorithm, "vectorized", loss) for loss in ("cross_entropy", own))
        for federation in (named, mine):
            federation.run(2)
        assert_alike(named.personal_models(), mine.personal_models())
        np.testing.assert_allclose(named.evaluate().accuracy, mine.evaluate().accuracy)


def test_splitgp_leaves_where_the_two_classes_entropy_is_small() -> None:
    algorithm = build_algorithm("splitgp", SETTINGS, {"E_th": 0.68})
    federation = federated(OneLogit(), algorithm, "vectorized")
    federation.run(3)
    model, batch = federation.client_model(0), batch_of(federation.data)
    out, h, _ = federation.task.apply(model, batch, at="head")
    early = algorithm.client_exit(model, h)  # type: ignore[attr-defined]
    p = torch.sigmoid(early)
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    leaves = entropy <= 0.68
    assert early.shape == out.shape == (len(batch.x), 1) and 0 < leaves.sum() < len(batch.x)
    torch.testing.assert_close(algorithm.outputs(federation.task, model, batch), torch.where(leaves, early, out))


def test_new_clients_join_a_model_of_one_output() -> None:
    algorithm = build_algorithm("fedavg", SETTINGS, {})
    federations = [federated(module, algorithm, "vectorized") for module in (OneLogit(), ZeroAndLogit())]
    joined = [join(federation, two_classes(), Joining(epochs=2)) for federation in federations]
    np.testing.assert_allclose(joined[0].accuracy, joined[1].accuracy)
    np.testing.assert_allclose(joined[0].loss, joined[1].loss)


def test_one_logit_beside_zero() -> None:
    z = torch.tensor([1.5, -2.0])
    for out in (z, z[:, None]):
        assert class_logits(out).tolist() == [[0, 1.5], [0, -2.0]]
    two = torch.randn(3, 2)
    assert class_logits(two) is two


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (1, [0, 1, 2], "1 output.* 3 classes.* at least 3"),
        (2, [0, 1, 2], "2 outputs.* 3 classes.* at least 3"),
        (1, [0, 0, 0], "one class"),
    ],
)
def test_too_few_outputs_are_refused_before_training(
    outputs: int, labels: list[int], message: str, engine: str
) -> None:
    data = FederatedData.from_arrays([(np.eye(3).repeat(3, 0), np.repeat(labels, 3))] * 2)
    with pytest.raises(InputError, match=message):
        Federation(nn.Linear(3, outputs).double(), data, build_algorithm("fedavg", {}, {}), engine=engine)


def finished_run(folder: Path) -> Path:
    (folder / "exp.toml").write_text(
        'seeds = [0]\nalgorithm = { name = "ditto" }\n[model]\nname = "tests.small_networks:one_logit"\n'
        "[data]\nparity = true\nclients = 3\npartition = 'iid'\nmax_samples = 240\n"
        "[train]\nrounds = 3\nlocal_epochs = 3\nbatch_size = 10\nlr = 0.3\n[output]\npersonal = true\n"
    )
    result = CliRunner().invoke(app, ["run", str(folder / "exp.toml"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return folder / "out" / "ditto" / "seed-0"


def test_a_run_its_predictions_and_its_files(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    data = load("digits", 3, "iid", parity=True, max_samples=240)
    rows, columns = data.splits["test"][1], read_csv(run / "clients.csv")
    y = data.y[rows].numpy()
    np.save(tmp_path / "new.npy", data.x[rows].numpy())
    found = load_personal_model(run, client=1).predict([tmp_path / "new.npy"])
    odd = np.array([one.probabilities["odd"] for one in found])
    assert [one.label for one in found] == [("even", "odd")[int(p > 0.5)] for p in odd]
    assert np.mean([one.label == data.classes[label] for one, label in zip(found, y, strict=True)]) == pytest.approx(
        columns["accuracy"][1]
    )
    assert columns["auc"][1] == pytest.approx(roc_auc_score(y, odd)) and columns["auc"][1] > 0.5

    arguments = ["export", str(run), "--client", "1", "--out", str(tmp_path / "m.safetensors"), "--onnx"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    z = torch.from_numpy(session.run(None, {"x": data.x[rows].numpy()})[0])
    assert z.shape == (len(rows), 1)
    np.testing.assert_allclose(torch.sigmoid(z)[:, 0], odd, rtol=1e-4, atol=1e-6)


def test_silos_of_a_model_with_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(input_shape: tuple[int, ...], classes: int, hidden: Any = ()) -> nn.Module:
        return one_logit(input_shape, classes)

    monkeypatch.setitem(models.MODELS._ours, "one-logit", models.registry.ModelSpec("one-logit", "one output", factory))
    it = experiment("ditto", clients=3, data={"parity": True}, model={"name": "one-logit"})
    here = simulated(it)
    there = remote(it, Memory(shards(tmp_path, it, [[0], [1, 2]])), tmp_path)
    for _ in range(2):
        here.round()
        assert there.round().failed == {}
    assert_same_run(here, there, 1e-9)
    np.testing.assert_allclose(here.evaluate().further["auc"], there.evaluate().further["auc"])
    assert here.evaluate().loss.mean() > 0.05
