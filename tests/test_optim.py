"""The local optimiser against torch.optim.SGD."""

import pytest
import torch
from torch import Tensor

from bespokefl.optim import SGD

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
