"""Stacked convolutions are the convolutions of each client: results, gradients, and gradients of gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from bespokefl.core import Batch, Task
from bespokefl.nn import convolution
from bespokefl.nn.convolution import FEW_CHANNELS, VERY_FEW_CHANNELS, VERY_MANY_CHANNELS, Geometry, convolve
from bespokefl.nn.stand_ins import StackableConv2d, stacked_clients, with_stand_ins

CLIENTS, BATCH, OUT = 3, 4, 5
GEOMETRIES = [
    Geometry((5, 5), (1, 1), (0, 0)),
    Geometry((3, 3), (2, 2), (1, 1)),
    Geometry((1, 3), (1, 2), (0, 2)),
    Geometry((1, 1), (1, 1), (0, 0)),
    Geometry((1, 1), (2, 3), (0, 0)),
    Geometry((1, 1), (1, 1), (1, 0)),
]
# Patches as rows; that or one grouped convolution, depending on whether a gradient is wanted; always the latter.
CHANNELS = [3, VERY_FEW_CHANNELS + 1, FEW_CHANNELS + 1]
Convolution = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tensors(channels: int, kernel: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x = torch.randn(CLIENTS, BATCH, channels, 9, 8, dtype=torch.float64)
    return x, torch.randn(CLIENTS, OUT, channels, *kernel, dtype=torch.float64) / channels


def both(geometry: Geometry) -> tuple[Convolution, Convolution]:
    def ours(x: Tensor, w: Tensor) -> Tensor:
        return convolve(x, w, geometry)

    def torchs(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, geometry.stride, geometry.padding)

    return ours, torchs


def cubes(conv: Convolution) -> Convolution:
    """A scalar with derivatives of every order."""
    return lambda x, w: (conv(x, w) ** 3).sum()


def one_by_one(fn: Callable[..., Tensor | tuple[Tensor, ...]], x: Tensor, w: Tensor) -> list[Tensor]:
    """``fn`` of each client in turn, results stacked."""
    rows = [fn(a, b) for a, b in zip(x, w, strict=True)]
    tuples = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [torch.stack(values) for values in zip(*tuples, strict=True)]


def assert_same(found: Tensor | tuple[Tensor, ...], expected: list[Tensor]) -> None:
    for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_stacked_equals_client_by_client(channels: int, geometry: Geometry) -> None:
    x, w = tensors(channels, geometry.kernel)
    ours, torchs = both(geometry)
    assert_same(vmap(ours)(x, w), one_by_one(torchs, x, w))
    assert_same(vmap(grad(cubes(ours), (0, 1)))(x, w), one_by_one(grad(cubes(torchs), (0, 1)), x, w))
    undifferentiated, _ = both(geometry._replace(differentiated=False))
    assert_same(vmap(undifferentiated)(x, w), one_by_one(torchs, x, w))
    by_sample = x.movedim(0, 1).contiguous().movedim(1, 0)  # as a convolution over shared data leaves it
    assert_same(vmap(undifferentiated)(by_sample, w), one_by_one(torchs, x, w))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("shared", ["data", "weights"])
def test_what_all_clients_share_is_not_stacked(shared: str, channels: int) -> None:
    geometry = GEOMETRIES[1]
    x, w = tensors(channels, geometry.kernel)
    ours, torchs = both(geometry)
    if shared == "data":
        args, dims = (x[0], w), (None, 0)
        x = x[:1].expand_as(x)
    else:
        args, dims = (x, w[0]), (0, None)
        w = w[:1].expand_as(w)
    assert_same(vmap(ours, dims)(*args), one_by_one(torchs, x, w))
    assert_same(vmap(grad(cubes(ours), (0, 1)), dims)(*args), one_by_one(grad(cubes(torchs), (0, 1)), x, w))


@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[4]], ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_second_derivatives(channels: int, geometry: Geometry) -> None:
    x, w = tensors(channels, geometry.kernel)

    def curvature(conv: Convolution) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        return grad(lambda a, b: sum((g**2).sum() for g in grad(cubes(conv), (0, 1))(a, b)), (0, 1))

    ours, torchs = both(geometry)
    found, expected = vmap(curvature(ours))(x, w), one_by_one(curvature(torchs), x, w)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


@pytest.mark.parametrize("geometry", GEOMETRIES[1:3], ids=str)
def test_very_many_channels_in_bfloat16(geometry: Geometry) -> None:
    x, w = tensors(VERY_MANY_CHANNELS, geometry.kernel)
    ours, torchs = both(geometry)
    found = vmap(grad(lambda a, b: ours(a, b).float().square().sum(), (0, 1)))(x.bfloat16(), w.bfloat16())
    expected = one_by_one(grad(lambda a, b: torchs(a, b).square().sum(), (0, 1)), x, w)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02 * float(b.abs().max()))


def test_what_is_never_left_to_a_grouped_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN has no kernel for groups that is worth it: one pixel, and weights of very many bfloat16 channels."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a grouped convolution")

    for name in ("stacked_grouped", "stacked_input_grad_grouped", "stacked_weight_grad_grouped"):
        monkeypatch.setattr(convolution, name, refuse)
    x, w = tensors(FEW_CHANNELS + 1, (1, 1))
    vmap(grad(cubes(both(GEOMETRIES[4])[0]), (0, 1)))(x, w)
    x, w = tensors(VERY_MANY_CHANNELS, (3, 3))
    result = torch.randn(CLIENTS, BATCH, OUT, 5, 4, dtype=torch.bfloat16)
    convolution.stacked_weight_grad(x.bfloat16(), result, GEOMETRIES[1])
    with pytest.raises(AssertionError, match="grouped"):
        convolution.stacked_weight_grad(x, result.double(), GEOMETRIES[1])


def test_a_long_sum_over_patches_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "SPLIT_ROWS", 16)
    x, w = tensors(3, (3, 3))
    ours, torchs = both(GEOMETRIES[1])
    assert_same(vmap(grad(cubes(ours), 1))(x, w), one_by_one(grad(cubes(torchs), 1), x, w))


@pytest.mark.parametrize("options", [{}, {"padding": "same"}, {"padding": "valid", "bias": False}, {"stride": 2}])
def test_the_module_is_torchs_with_and_without_clients(options: dict[str, object]) -> None:
    plain = nn.Conv2d(3, OUT, 3, **options, dtype=torch.float64)  # type: ignore[arg-type]
    module = with_stand_ins(nn.Conv2d(3, OUT, 3, **options, dtype=torch.float64))  # type: ignore[arg-type]
    assert isinstance(module, StackableConv2d)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(CLIENTS, BATCH, 3, 9, 8, dtype=torch.float64)
    with stacked_clients():
        stacked = vmap(module)(x)
    assert torch.equal(module(x[0]), plain(x[0]))
    assert_same(stacked, [torch.stack([plain(one) for one in x])])


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 2, padding="same"),
        nn.Conv1d(4, 4, 3),
    ],
    ids=str,
)
def test_other_convolutions_stay_torchs(conv: nn.Module) -> None:
    assert not isinstance(with_stand_ins(conv), StackableConv2d)


def test_autocast_reaches_stacked_convolutions() -> None:
    module = with_stand_ins(nn.Conv2d(3, OUT, 3))
    x = torch.randn(CLIENTS, BATCH, 3, 9, 8)
    with torch.autocast("cpu", torch.bfloat16), stacked_clients():
        found = vmap(module)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), torch.stack([module(one) for one in x]), rtol=0.05, atol=0.05)


def test_only_a_gradient_lays_out_patches_that_an_evaluation_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    stacked = convolution.stacked

    def noted(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        asked.append(geometry.differentiated)
        return stacked(x, w, geometry)

    monkeypatch.setattr(convolution, "stacked", noted)
    task = Task(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    models = {k: v.expand(CLIENTS, *v.shape) for k, v in task.initial.items()}
    x, y = torch.randn(CLIENTS, BATCH, 1, 4, 4), torch.zeros(CLIENTS, BATCH, dtype=torch.int64)
    keys = torch.zeros(CLIENTS, dtype=torch.int64)
    with stacked_clients():
        vmap(lambda model, x, y, key: task.loss(model, Batch(x, y, None, key)))(models, x, y, keys)
        vmap(lambda model, x, y, key: task.grad(model, Batch(x, y, None, key)).loss)(models, x, y, keys)
    assert asked == [False, True]
