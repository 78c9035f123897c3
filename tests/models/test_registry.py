from pathlib import Path

import pytest
import torch
from torch import nn

from bespokefl.errors import InputError
from bespokefl.models import MODELS, build


def test_names_descriptions_and_options() -> None:
    small = ["linear", "mlp", "fedavg-cnn", "fedpg-cnn", "lenet5", "digit-model", "pfedhn-target", "tangent-mlp"]
    deep = ["resnet18", "resnet50", "wrn28-10", "nfresnet18", "densenet121", "unet"]
    assert list(MODELS) == [*small, *deep]
    assert all(spec.name == name and spec.description for name, spec in MODELS.items())
    options = {name: spec.options for name, spec in MODELS.items() if spec.options}
    assert options == {
        "mlp": {"hidden": (200, 200), "norm": "none"},
        "fedpg-cnn": {"dropout": (0.0, 0.0)},
        "tangent-mlp": {"hidden": (256, 256)},
        "resnet18": {"norm": "group", "stem": "auto", "width": 64},
        "resnet50": {"norm": "group", "stem": "auto", "width": 64},
        "wrn28-10": {"norm": "group", "width": 10},
        "nfresnet18": {"width": "standard", "stem": "auto"},
        "densenet121": {"norm": "batch", "stem": "auto", "growth": 32},
        "unet": {"norm": "batch", "width": 32, "depth": 4},
    }


@pytest.mark.parametrize("shape", [(13,), (1, 8, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_perceptrons_flatten_whatever_comes(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape, 4)(torch.randn(3, *shape)).shape == (3, 4)


def test_hidden_widths() -> None:
    model = build("mlp", (6,), 2, hidden=[5, 4, 3])
    widths = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert widths == [(6, 5), (5, 4), (4, 3), (3, 2)]


@pytest.mark.parametrize(
    ("name", "shape", "options", "parts"),
    [
        ("fedavg-cn", (3, 32, 32), {}, ["model.name", "'fedavg-cn'", "Did you mean fedavg-cnn", "digit-model"]),
        ("zzz", (3, 32, 32), {}, ["'zzz'", "linear, mlp, ", "package.module:name"]),
        ("mlp", (4,), {"hiden": [3]}, ["model.hiden", "'mlp'", "Did you mean hidden"]),
        ("linear", (4,), {"hidden": [3]}, ["model.hidden", "'linear'", "none"]),
        ("mlp", (4,), {"hidden": 200}, ["model.hidden", "200", "[200, 200]"]),
        ("mlp", (4,), {"hidden": []}, ["model.hidden", "[]", "'linear'"]),
        ("mlp", (4,), {"hidden": [5, 0]}, ["model.hidden", "[5, 0]"]),
        ("mlp", (4,), {"hidden": "55"}, ["model.hidden", "'55'"]),
        ("fedpg-cnn", (3, 32, 32), {"dropout": 0.5}, ["model.dropout", "0.5", "two rates"]),
        ("fedpg-cnn", (3, 32, 32), {"dropout": [0.5, 1]}, ["model.dropout", "[0.5, 1]"]),
        ("fedavg-cnn", (1, 8, 8), {}, ["'fedavg-cnn'", "(1, 8, 8)", "16x16", "that fit: linear, mlp, digit-model"]),
        ("lenet5", (784,), {}, ["'lenet5'", "(784,)", "(channels, height, width)", "that fit: linear, mlp"]),
        ("digit-model", (1, 28, 3), {}, ["'digit-model'", "(1, 28, 3)", "4x4"]),
        ("mlp", (), {}, ["input_shape", "()"]),
        ("mlp", (3, 0), {}, ["input_shape", "(3, 0)"]),
    ],
)
def test_wrong_input_is_explained(
    name: str, shape: tuple[int, ...], options: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        build(name, shape, 10, **options)
    for part in parts:
        assert part in str(caught.value)


def test_no_classes() -> None:
    with pytest.raises(InputError, match="classes is 0"):
        build("linear", (4,), 0)


OWN = """
from torch import nn

def net(input_shape, classes, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.Linear(width, classes))

def number(input_shape, classes):
    return 7

def failing(input_shape, classes):
    raise ZeroDivisionError("inside")

constant = 1
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_model_for_tests.py").write_text(OWN)
    (tmp_path / "broken_model_for_tests.py").write_text("def net(:")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_model_for_tests"


def test_own_factory(own_module: str) -> None:
    model = build(f"{own_module}:net", (6,), 2, width=5)
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 6), (5,), (2, 5), (2,)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("own_model_for_tests:nett", ["has no 'nett'", "factory(input_shape, classes, **options)", "Did you mean net"]),
        (
            "own_model_for_tests:constant",
            ["is a int, not a function or class factory(input_shape, classes"],
        ),
        ("own_model_for_tests:number", ["returned a int", "torch.nn.Module"]),
        ("own_model_for_tests:failing", ["ZeroDivisionError: inside", "input_shape=(6,)", "classes=2"]),
        ("broken_model_for_tests:net", ["importing 'broken_model_for_tests' failed", "SyntaxError"]),
        ("no_such_module_for_tests:net", ["importing 'no_such_module_for_tests' failed", "PYTHONPATH"]),
        (":net", ["importing '' failed"]),
    ],
)
def test_own_factory_errors(own_module: str, name: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build(name, (6,), 2)
    for part in [repr(name), *parts]:
        assert part in str(caught.value)


def test_own_factory_with_an_unknown_option(own_module: str) -> None:
    with pytest.raises(InputError, match=r"options={'depth': 2} failed: TypeError: .*'depth'"):
        build(f"{own_module}:net", (6,), 2, depth=2)


def test_a_perceptron_with_batchnorm() -> None:
    layers = list(build("mlp", (6,), 2, hidden=[5, 4], norm="batch").body)  # type: ignore[arg-type]
    kinds = [type(layer).__name__ for layer in layers]
    assert kinds == ["Flatten", "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU"]
    assert [layer.num_features for layer in layers if isinstance(layer, torch.nn.BatchNorm1d)] == [5, 4]
    with pytest.raises(InputError, match=r"model\.norm is 'group'; of a perceptron it is 'none' or 'batch'"):
        build("mlp", (6,), 2, norm="group")
