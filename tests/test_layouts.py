"""Networks that flatten images by ``view`` compute what ``reshape`` does, to the last bit, wherever they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.flattening_networks import NETWORKS, AfterNorm, AfterPooling
from tests.flower.memory import Memory, experiment, remote, shards
from tests.flower.test_contract import assert_alike, simulated
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from bespokefl.algorithms import build_algorithm
from bespokefl.cli import app
from bespokefl.core import Batch, InputError, Task
from bespokefl.data import FederatedData
from bespokefl.engines import Engine, Sequential, Vectorized
from bespokefl.experiments.loss_surface import surfaces
from bespokefl.federation import Federation
from bespokefl.models import MODELS, ModelSpec

SHAPE, CLASSES = (2, 8, 8), 3
SIZES = (6, 11, 9)  # with batches of 4 the last ones are padded
ENGINES: dict[str, Callable[[], Engine]] = {
    "sequential": Sequential,
    "side by side": lambda: Vectorized("cpu", lanes=2, stack=1),
    "one stack": lambda: Vectorized("cpu", lanes=1, stack=len(SIZES)),
}


def make_data() -> FederatedData:
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        x, y = rng.normal(size=(n + 5, *SHAPE)) + 0.3 * i, np.arange(n + 5) % CLASSES
        clients.append({"train": (x[:n], y[:n]), "test": (x[n:], y[n:])})
    return FederatedData.from_arrays(clients, classes=["a", "b", "c"])


def trained(network: str, engine: Engine, method: str = "fedavg", *, reshape: bool, **task: Any) -> Federation:
    torch.manual_seed(1)
    module = NETWORKS[network](SHAPE, CLASSES, reshape=reshape)
    settings = {"lr": 0.1, "momentum": 0.9, "local_epochs": 2, "batch_size": 4}
    built = Task(module, **{"dtype": torch.float64, **task})
    federation = Federation(built, make_data(), build_algorithm(method, settings), engine=engine, seed=2)
    for _ in range(2):
        assert federation.round().failed == {}
    return federation


def everything(federation: Federation) -> dict[str, Tensor]:
    scores = federation.evaluate()
    found = {"accuracy": torch.tensor(scores.accuracy), "loss": torch.tensor(scores.loss)}
    return {k: v.clone() for k, v in federation.state()[0].items()} | found | federation.personal_models()


@pytest.mark.filterwarnings("error")  # such as that a network cannot run vectorized
@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("network", NETWORKS)
def test_view_is_reshape_to_the_last_bit(network: str, engine: str, precision: str) -> None:
    task = {"dtype": torch.float32, "bf16": True} if precision == "bf16" else {}
    found = everything(trained(network, ENGINES[engine](), reshape=False, **task))
    wanted = everything(trained(network, ENGINES[engine](), reshape=True, **task))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("network", "method"),
    [("pixels", "fedrod"), ("after pooling", "lg-mix"), ("after BatchNorm", "fedrod"), ("in the middle", "plgu-lf")],
)
def test_engines_agree(network: str, method: str) -> None:
    wanted = everything(trained(network, Sequential(), method, reshape=False))
    for engine in ("side by side", "one stack"):
        found = everything(trained(network, ENGINES[engine](), method, reshape=False))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_a_loss_may_view_the_maps_that_a_network_answers() -> None:
    """As the Dice losses of published code do."""

    def loss(logits: Tensor, y: Tensor, *, reshape: bool) -> Tensor:
        flat = logits.reshape(len(logits), -1) if reshape else logits.view(len(logits), -1)
        return ((flat - y[:, None]) ** 2).mean(1)

    found = {}
    for reshape in (False, True):
        torch.manual_seed(0)
        task = Task(
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3)),
            lambda out, y, reshape=reshape: loss(out, y, reshape=reshape),
            dtype=torch.float64,
        )
        for name, engine in ENGINES.items():
            algorithm = build_algorithm("fedavg", {"lr": 0.1, "local_epochs": 1, "batch_size": 4})
            federation = Federation(task, make_data(), algorithm, engine=engine())
            assert federation.round().failed == {}
            found[name, reshape] = {k: v.clone() for k, v in federation.global_model().items()} | {
                "loss": torch.tensor(federation.evaluate().loss)
            }
    for name in ENGINES:
        for key, value in found[name, True].items():
            assert torch.equal(found[name, False][key], value), (name, key)


def test_surfaces_are_drawn() -> None:
    steps = np.linspace(-0.5, 0.5, 3)
    for network in NETWORKS:
        ours, wanted = (
            surfaces(trained(network, Vectorized("cpu"), reshape=reshape), steps, steps) for reshape in (False, True)
        )
        for name, one in wanted.items():
            np.testing.assert_array_equal(ours[name].loss, one.loss)


def test_what_depends_on_the_place_in_memory_is_refused() -> None:
    """It would be another number in every layout, and no error."""

    class Strided(AfterPooling):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.as_strided(x.size(), (128, 64, 8, 1)))

    task = Task(Strided(SHAPE, CLASSES), dtype=torch.float64)
    x = torch.zeros(2, *SHAPE, dtype=torch.float64)
    with pytest.raises(InputError, match=r"as_strided.*unfold"):
        task.apply(task.initial, Batch(x, torch.zeros(2), None, torch.zeros((), dtype=torch.int64)))


@pytest.mark.parametrize("write", ["method", "item", "relu", "and viewed again"])
def test_a_write_through_a_view_that_the_network_relies_on_is_refused(write: str) -> None:
    """Where a view is a copy, what is written to one of the two would not be seen in the other."""

    class Writing(AfterPooling):
        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.conv1(x))
            flat = x.view(x.size(0), -1)
            if write == "method":
                flat.clamp_(min=0)
            elif write == "item":
                flat[:, 0] = 0
            else:
                F.relu(flat, inplace=True)
            x = x.view(x.size()) if write == "and viewed again" else x
            return self.head(self.pool(self.conv2(x)).flatten(1))

    algorithm = build_algorithm("fedavg", {"lr": 0.1, "local_epochs": 1, "batch_size": 4})
    task = Task(Writing(SHAPE, CLASSES), dtype=torch.float64)
    with pytest.raises(InputError, match=r"writes .* view"):
        Federation(task, make_data(), algorithm, engine=Vectorized("cpu", lanes=1, stack=1)).round()


def test_a_write_to_a_view_alone_is_as_good_as_anywhere() -> None:
    class Rectified(AfterPooling):
        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.conv2(self.pool(self.conv1(x))))
            x = self.shaped(x, x.size(0), -1)
            return self.head(F.relu(x, inplace=True))

    results = []
    for reshape in (False, True):
        torch.manual_seed(0)
        task = Task(Rectified(SHAPE, CLASSES, reshape), dtype=torch.float64)
        algorithm = build_algorithm("fedavg", {"lr": 0.1, "local_epochs": 1, "batch_size": 4})
        federation = Federation(task, make_data(), algorithm)
        federation.round()
        results.append({k: v.clone() for k, v in federation.global_model().items()})
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


# from the command line ---------------------------------------------------------------------------------
EXPERIMENT = """
algorithms = [{{name = "{method}"}}]
[data]
clients = 3
max_samples = 150
[model]
name = "tests.flattening_networks:AfterNorm"
reshape = {reshape}
[train]
rounds = 1
local_epochs = 1
lr = 0.1
batch_size = 20
[output]
personal = true
"""


def bespoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("method", ["fedavg", "fedrod"])  # one network, and an answer of two heads
def test_export_predict_and_adapt(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "new.npz", x=rng.random((6, 1, 8, 8), dtype=np.float32))
    np.savez(tmp_path / "client.npz", x=rng.random((20, 1, 8, 8), dtype=np.float32), y=np.arange(20) % 10)
    said: dict[bool, list[str]] = {}
    for reshape in (False, True):
        folder = tmp_path / str(reshape)
        folder.mkdir()
        (folder / "exp.toml").write_text(EXPERIMENT.format(method=method, reshape=str(reshape).lower()))
        bespoke("run", folder / "exp.toml", "--out", folder / "out")
        (run,) = (folder / "out").glob("*/seed-0")
        if not reshape:  # the file is read back and compared with the model before it is kept
            bespoke("export", run, "--client", 1, "--out", folder / "m.safetensors", "--onnx")
            assert (folder / "m.onnx").is_file()
        bespoke("adapt", run, "--data", tmp_path / "client.npz", "--epochs", 2, "--out", folder / "new.safetensors")
        answer = bespoke("predict", run, tmp_path / "new.npz", "--client", 1, "--json")
        predicted = answer[answer.index('"predictions"') :]
        adapted = load_file(folder / "new.safetensors")
        said[reshape] = [predicted, str({name: value.tolist() for name, value in adapted.items()})]
    assert said[False] == said[True]


def test_silos_compute_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def viewing(input_shape: tuple[int, ...], classes: int, hidden: object = None) -> nn.Module:
        return AfterNorm(input_shape, classes)

    monkeypatch.setitem(MODELS._ours, "viewing", ModelSpec("viewing", "flattens by view", viewing, 8))
    it = experiment("fedavg", model={"name": "viewing"})
    here, there = simulated(it), remote(it, Memory(shards(tmp_path, it, [[0, 3], [4], [1, 2]])), tmp_path)
    for _ in range(2):
        here.round()
        assert there.round().failed == {}
    assert_alike(here, there, 1e-9)
