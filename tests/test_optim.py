"""The local optimisers against torch.optim."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bespokefl.core import SGD, Adam

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
def test_a_tensor_learning_rate_overrides_the_constant(momentum: float, weight_decay: float) -> None:
    opt, x, grads = SGD(123.0, momentum, weight_decay), model(), gradients(4, NAMES)
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers, lr=torch.tensor(0.1, dtype=torch.float64))
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
    opt, x, grads = Adam(123.0), model(), gradients(4, NAMES)
    buffers = opt.init(x)
    for grad in grads:
        x, buffers = opt.step(x, grad, buffers, lr=torch.tensor(0.01, dtype=torch.float64))
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
