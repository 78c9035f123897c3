"""The local optimisers against torch.optim."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bespokefl.core import OPTIMIZERS, SGD, Adam, InputError
from bespokefl.core.hyper import choose
from bespokefl.core.optimizers import make_optimizer
from bespokefl.core.trees import leaves

SETTINGS = [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.5, 0.1)]
NAMES = ["w", "b", "frozen"]


def model() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (17,), "b": (), "frozen": (5,)}
    return {k: torch.randn(shape, generator=g, dtype=torch.float64) for k, shape in shapes.items()}


def gradients(steps: int, names: list[str]) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{k: torch.randn(model()[k].shape, generator=g, dtype=torch.float64) for k in names} for _ in range(steps)]


def torch_sgd(start: dict[str, Tensor], grads: list[dict[str, Tensor]], **settings: float) -> dict[str, Tensor]:
    params = {k: v.clone().requires_grad_() for k, v in start.items()}
    optimiser = torch.optim.SGD([params[k] for k in grads[0]], foreach=False, **settings)
    for grad in grads:
        for k, g in grad.items():
            params[k].grad = g.clone()
        optimiser.step()
    return {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize("names", [NAMES, ["b", "w"]])
def test_equals_torch(momentum: float, weight_decay: float, names: list[str]) -> None:
    opt, x, grads = SGD(0.1, momentum, weight_decay), model(), gradients(6, names)
    buffers = opt.init({k: x[k] for k in names})
    assert set(buffers) == (set(names) if momentum else set())
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers)
    expected = torch_sgd(model(), grads, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    assert list(x) == NAMES
    for k in NAMES:
        # Bit for bit, but for one rounding of momentum * buffer that a fused multiply-add saves.
        tolerance = 1e-15 if momentum == 0.9 else 0
        torch.testing.assert_close(x[k], expected[k], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
def test_a_learning_rate_may_be_a_tensor(momentum: float, weight_decay: float) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    opt, x, grads = SGD(rate, momentum, weight_decay), model(), gradients(4, NAMES)
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers)
    expected = torch_sgd(model(), grads, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for k in NAMES:
        torch.testing.assert_close(x[k], expected[k], rtol=1e-14, atol=1e-14)


def test_a_step_leaves_its_inputs_alone() -> None:
    opt, x, (grad,) = SGD(0.1, 0.9, 0.01), model(), gradients(1, NAMES)
    buffers = opt.init(x)
    opt.step(x, grad, buffers)
    assert all(torch.equal(x[k], v) for k, v in model().items())
    assert all(torch.equal(grad[k], v) for k, v in gradients(1, NAMES)[0].items())
    assert all((v == 0).all() for v in buffers.values())


# Adam ------------------------------------------------------------------------------------------------
ADAMS = [
    {},
    {"betas": (0.9, 0.99), "weight_decay": 0.1},
    {"amsgrad": True},
    {"amsgrad": True, "betas": (0.5, 0.6), "weight_decay": 0.01},
    {"betas": (0.0, 0.0)},
]


def torch_adam(start: dict[str, Tensor], grads: list[dict[str, Tensor]], **settings: Any) -> dict[str, Tensor]:
    """A parameter without a gradient is left alone, its step count too."""
    params = {k: v.clone().requires_grad_() for k, v in start.items()}
    optimiser = torch.optim.Adam(params.values(), foreach=False, **settings)
    for grad in grads:
        for k, v in params.items():
            v.grad = grad[k].clone() if k in grad else None
        optimiser.step()
    return {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize("settings", ADAMS)
def test_adam_equals_torch_over_many_steps(settings: dict[str, Any]) -> None:
    opt, x = Adam(0.01, **settings), model()
    # some steps move some parameters only, whose bias corrections then differ
    grads = [*gradients(40, NAMES), *gradients(25, ["b"]), *gradients(30, ["frozen", "w"]), *gradients(105, NAMES)]
    grads = [{k: g * (1 + s % 7) for k, g in grad.items()} for s, grad in enumerate(grads)]  # amsgrad's maximum matters
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers)
    expected = torch_adam(model(), grads, lr=0.01, **settings)
    for k in NAMES:
        torch.testing.assert_close(x[k], expected[k], rtol=1e-12, atol=1e-12)
    assert [int(buffers[k]["t"]) for k in NAMES] == [175, 170, 175]


def test_amsgrad_is_another_path() -> None:
    grads = [{"w": model()["w"] * scale} for scale in (10.0, *[0.1] * 30)]
    paths = [torch_adam(model(), grads, lr=0.1, betas=(0.9, 0.9), amsgrad=on)["w"] for on in (False, True)]
    assert (paths[0] - paths[1]).abs().max() > 1e-3


def test_adam_with_a_tensor_learning_rate() -> None:
    opt, x, grads = Adam(torch.tensor(0.01, dtype=torch.float64)), model(), gradients(4, NAMES)
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers)
    expected = torch_adam(model(), grads, lr=0.01)
    for k in NAMES:
        torch.testing.assert_close(x[k], expected[k], rtol=1e-12, atol=1e-12)


def test_adams_first_steps_are_exact_in_float32() -> None:
    """1 - 0.999^t has few digits left if the power is rounded first."""
    start = {k: v.float() for k, v in model().items()}
    grads = [{k: g.float() for k, g in grad.items()} for grad in gradients(3, NAMES)]
    x, opt = start, Adam(1.0)
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers)
    expected = torch_adam(
        {k: v.double() for k, v in start.items()}, [{k: g.double() for k, g in d.items()} for d in grads], lr=1.0
    )
    for k in NAMES:
        assert x[k].dtype == torch.float32
        torch.testing.assert_close(x[k].double(), expected[k], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_adam_step_leaves_its_inputs_and_other_names_alone(amsgrad: bool) -> None:
    opt, x, (grad,) = Adam(0.1, weight_decay=0.1, amsgrad=amsgrad), model(), gradients(1, ["w"])
    buffers = opt.init(x)
    moved, after = opt.step(x, grad, buffers)
    assert all(torch.equal(x[k], v) for k, v in model().items())
    assert all((v == 0).all() for of_one in buffers.values() for v in of_one.values())
    assert list(after) == list(buffers) == NAMES and after["w"].keys() == buffers["w"].keys()
    for k in ("b", "frozen"):
        assert moved[k] is x[k] and after[k] is buffers[k]
    assert (moved["w"] != x["w"]).all()


# all of them, over all of their options --------------------------------------------------------------
TORCHS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
OTHER: dict[str, dict[str, tuple[Any, ...]]] = {  # other values than the default, by option
    "sgd": {"momentum": (0.9,), "weight_decay": (0.1,), "nesterov": (True,)},
    "adam": {"betas": ((0.5, 0.6), (0.0, 0.9)), "weight_decay": (0.1,), "amsgrad": (True,), "eps": (0.1,)},
    "adamw": {"betas": ((0.5, 0.6), (0.0, 0.9)), "weight_decay": (0.0, 0.3), "amsgrad": (True,), "eps": (0.1,)},
    "rmsprop": {
        "alpha": (0.5, 0.0),
        "eps": (0.1,),
        "weight_decay": (0.1,),
        "momentum": (0.9,),
        "centered": (True,),
    },
    "adagrad": {"lr_decay": (0.2,), "weight_decay": (0.1,), "initial_accumulator_value": (0.5,), "eps": (0.1,)},
}


def combinations() -> list[tuple[str, dict[str, Any]]]:
    """Every optimiser with every subset of its options at other values."""
    found = []
    for name, options in OTHER.items():
        choices = [[(), *((option, value) for value in values)] for option, values in options.items()]
        found += [(name, dict(filter(None, chosen))) for chosen in itertools.product(*choices)]
    # torch refuses the first, and divides by eps alone in the second: the variance of a single gradient is 0
    return [
        (name, s)
        for name, s in found
        if not (s.get("nesterov") and "momentum" not in s) and not (s.get("centered") and s.get("alpha") == 0)
    ]


def torchs(name: str, start: dict[str, Tensor], grads: list[dict[str, Tensor]], lr: float, **options: Any) -> Any:
    params = {k: v.clone().requires_grad_() for k, v in start.items()}
    optimiser = TORCHS[name](params.values(), lr=lr, foreach=False, **options)
    for grad in grads:
        for k, v in params.items():
            v.grad = grad[k].clone() if k in grad else None
        optimiser.step()
    return {k: v.detach() for k, v in params.items()}


def test_every_option_is_tried() -> None:
    assert {name: set(values) for name, values in OTHER.items()} == {
        name: {*OPTIMIZERS.options(name), *OPTIMIZERS.beside.get(name, ())} for name in OPTIMIZERS
    }


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01, dtype=torch.float64)])
def test_equal_torchs_over_twenty_steps_with_all_options(name: str, lr: Any) -> None:
    """Some steps move some parameters only."""
    grads = [*gradients(11, NAMES), *gradients(4, ["b", "w"]), *gradients(5, NAMES)]
    grads = [{k: g * (1 + s % 3) for k, g in grad.items()} for s, grad in enumerate(grads)]
    seen = []
    for options in (options for own, options in combinations() if own == name):
        opt, x = OPTIMIZERS[name](lr, **options), model()  # type: ignore[call-arg]
        buffers = opt.init(x)
        assert not any(bool(v.any()) for v in leaves(buffers))
        for grad in grads:
            x, buffers = opt.step(x, grad, buffers)
        expected = torchs(name, model(), grads, 0.01, **options)
        for k in NAMES:
            torch.testing.assert_close(x[k], expected[k], rtol=1e-12, atol=1e-12, msg=lambda m, o=options: f"{o}: {m}")
        seen.append(x["w"])
    assert len({tuple(v.tolist()) for v in seen}) == len(seen)  # every option acts


@pytest.mark.parametrize("name", TORCHS)
def test_options_as_tensors_are_those_as_numbers(name: str) -> None:
    """A stack of clients may have other values each."""
    options = {k: values[0] for k, values in OTHER[name].items()}
    tensors = {
        k: tuple(map(torch.tensor, v)) if isinstance(v, tuple) else v if isinstance(v, bool) else torch.tensor(v)
        for k, v in options.items()
    }
    ends = []
    for given in (options, tensors):
        opt, x = OPTIMIZERS[name](0.01, **given), model()  # type: ignore[call-arg]
        buffers = opt.init(x)
        for grad in gradients(20, NAMES):
            x, buffers = opt.step(x, grad, buffers)
        ends.append(x)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("adamx", "algorithm.optimizer = 'adamx' is not known.*Did you mean adam"),
        (3, "algorithm.optimizer = 3: it must be a name, or a table of a name and its options"),
        ({"beta": 1}, r"algorithm.optimizer = {'beta': 1}: it must be a name, or a table"),
        ({"name": "adamw", "betta": 1}, "algorithm.optimizer.betta = 1 is not an option of 'adamw'.*betas"),
        ({"name": "sgd", "momentum": 0.9}, "algorithm.optimizer.momentum = 0.9 .* stands beside optimizer"),
        ({"name": "adamw", "betas": [1.0, 0.5]}, "optimizer.betas = .*: it must be a list of 2 numbers, each at least"),
        ({"name": "sgd", "nesterov": 1}, "algorithm.optimizer.nesterov = 1: it must be true or false"),
        ({"name": "rmsprop", "alpha": 1}, "algorithm.optimizer.alpha = 1.0: it must be a number at least 0 and below"),
        ("no_such_module:X", "'no_such_module:X' cannot be imported: importing 'no_such_module' failed"),
        ("json:lods", "'json' has no 'lods'; it must be a dataclass with the field lr first.*Did you mean loads"),
        ("json:loads", "algorithm.optimizer = 'json:loads' is a function, not a dataclass"),
        ("fractions:Fraction", "is the class Fraction, not a dataclass with the field lr first"),
    ],
)
def test_what_is_no_optimiser_is_said(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose(OPTIMIZERS, value, "algorithm.optimizer")


def test_options_have_their_types_and_names_alone_stay_names() -> None:
    assert choose(OPTIMIZERS, {"name": "adamw"}, "x") == "adamw"
    choice = choose(OPTIMIZERS, {"name": "adamw", "weight_decay": 1, "betas": [0, 0.5]}, "x")
    assert make_optimizer(choice, 0.1, {}) == OPTIMIZERS["adamw"](0.1, (0.0, 0.5), 1.0)  # type: ignore[call-arg]
    assert choose(OPTIMIZERS, choice, "x") == choice
