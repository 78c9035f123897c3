"""Convolutions of many clients at once, each with weights of its own.

``vmap`` turns a stack of convolutions into one grouped convolution. For few input channels that is slow on a GPU: its
groups are too thin for the hardware. There the patches are laid out as rows (im2col) and all clients' products are one
batched matrix product; with many channels the grouped convolution stays, in the channels-last layout. In between it
depends: the layout pays where a gradient of the weights is wanted, too, which takes the same rows. Kernels of one pixel
are products of pixels in any case, and in bfloat16 so is a weight's gradient of very many channels, for which cuDNN has
no kernel worth the name (docs/benchmarks.md).

A convolution is bilinear, so its derivatives and theirs are three functions that call each other: the result from
(input, weight), the input's gradient from (result's gradient, weight), the weight's from (input, result's gradient).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

VERY_FEW_CHANNELS, FEW_CHANNELS = 16, 64  # below: patches as rows in any case; where they serve a gradient, too
VERY_MANY_CHANNELS = 256  # from here on patches as rows for a weight's gradient in bfloat16
ROW_MULTIPLE = 8  # of the numbers in a row, for products on tensor cores
SPLIT_ROWS = 4096  # of the sum over patches in a weight's gradient: a client's few outputs leave most of a GPU idle

Pair = tuple[int, ...]  # height, width


class Geometry(NamedTuple):
    """All about a convolution but its tensors."""

    kernel: Pair
    stride: Pair
    padding: Pair
    differentiated: bool = True  # whether a gradient of the weights will be asked for

    @property
    def of_pixels(self) -> bool:
        """Whether every pixel of the result is a product of one pixel of the input."""
        return self.kernel == (1, 1) and self.padding == (0, 0)

    def output(self, size: Sequence[int]) -> Pair:
        """Height and width of the result for an input of ``size``."""
        sides = zip(size, self.kernel, self.stride, self.padding, strict=True)
        high, wide = ((n + 2 * p - k) // s + 1 for n, k, s, p in sides)
        return high, wide


def convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The convolution of ONE client's batch, (B, C, H, W) with (O, C, kh, kw), ready for ``vmap`` and ``grad``."""
    out: Tensor = _Result.apply(x, w, geometry)  # type: ignore[no-untyped-call]
    return out


def _input_grad(grad: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    out: Tensor = _InputGrad.apply(grad, w, size, geometry)  # type: ignore[no-untyped-call]
    return out


def _weight_grad(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    out: Tensor = _WeightGrad.apply(x, grad, geometry)  # type: ignore[no-untyped-call]
    return out


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        return _plain(x, w, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.geometry = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        size = (x.shape[-2], x.shape[-1])
        dx = _input_grad(grad, w, size, ctx.geometry) if ctx.needs_input_grad[0] else None
        dw = _weight_grad(x, grad, ctx.geometry) if ctx.needs_input_grad[1] else None
        return dx, dw, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, geometry: Geometry) -> tuple[Tensor, int]:
        if dims[1] is None:  # one model on many clients' data: their batches are one
            return _folded(lambda v: _plain(v, w, geometry), x.movedim(dims[0], 0)), 0
        w = w.movedim(dims[1], 0)
        if dims[0] is None:
            return on_the_same_data(x, w, geometry), 1
        return stacked(x.movedim(dims[0], 0), w, geometry), 0


class _InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
        return _plain_input_grad(grad, w, size, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        grad, w, _, ctx.geometry = inputs
        ctx.save_for_backward(grad, w)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> Any:
        grad, w = ctx.saved_tensors
        d_grad = convolve(back, w, ctx.geometry) if ctx.needs_input_grad[0] else None
        dw = _weight_grad(back, grad, ctx.geometry) if ctx.needs_input_grad[1] else None
        return d_grad, dw, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, grad: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> tuple[Tensor, int]:
        if dims[1] is None:
            return _folded(lambda v: _plain_input_grad(v, w, size, geometry), grad.movedim(dims[0], 0)), 0
        grad, w = rows(info, grad, dims[0]), w.movedim(dims[1], 0)
        return stacked_input_grad(grad, w, size, geometry), 0


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
        return _plain_weight_grad(x, grad, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, grad, ctx.geometry = inputs
        ctx.save_for_backward(x, grad)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> Any:
        x, grad = ctx.saved_tensors
        size = (x.shape[-2], x.shape[-1])
        dx = _input_grad(grad, back, size, ctx.geometry) if ctx.needs_input_grad[0] else None
        d_grad = convolve(x, back, ctx.geometry) if ctx.needs_input_grad[1] else None
        return dx, d_grad, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, grad: Tensor, geometry: Geometry) -> tuple[Tensor, int]:
        return stacked_weight_grad(rows(info, x, dims[0]), rows(info, grad, dims[1]), geometry), 0


# one client -------------------------------------------------------------------------------------------
def _plain(x: Tensor, w: Tensor, geometry: Geometry, groups: int = 1) -> Tensor:
    return F.conv2d(x, w, None, geometry.stride, geometry.padding, 1, groups)


def _plain_input_grad(grad: Tensor, w: Tensor, size: Pair, geometry: Geometry, groups: int = 1) -> Tensor:
    x = _shape_only(grad, (grad.shape[0], w.shape[1] * groups, *size))
    return _backward(grad, x, w, geometry, groups, 0)


def _plain_weight_grad(x: Tensor, grad: Tensor, geometry: Geometry, groups: int = 1) -> Tensor:
    w = _shape_only(grad, (grad.shape[1], x.shape[1] // groups, *geometry.kernel))
    return _backward(grad, x, w, geometry, groups, 1)


def _shape_only(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What stands for a tensor that its own gradient does not depend on; its layout tells kernels to go by it."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _backward(grad: Tensor, x: Tensor, w: Tensor, geometry: Geometry, groups: int, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    stride, padding = geometry.stride, geometry.padding
    out: Tensor = torch.ops.aten.convolution_backward(
        grad, x, w, None, stride, padding, (1, 1), False, (0, 0), groups, mask
    )[which]
    return out


# many clients, on a leading axis ----------------------------------------------------------------------
def stacked(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """(N, B, C, H, W) with (N, O, C, kh, kw) gives (N, B, O, H', W')."""
    few = FEW_CHANNELS if geometry.differentiated else VERY_FEW_CHANNELS
    by_rows = x.shape[2] < few or geometry.of_pixels
    return stacked_by_rows(x, w, geometry) if by_rows else stacked_grouped(x, w, geometry)


def on_the_same_data(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """(B, C, H, W) with (N, O, C, kh, kw) gives (B, N, O, H', W'): the models' channels are those of one convolution.

    Of few input channels it is one product with the patches, whose result has the channels last in memory, as the
    grouped convolution of the next layer wants them. Rows are padded to what tensor cores take.
    """
    if x.shape[1] >= VERY_FEW_CHANNELS:
        return torch.unflatten(_plain(x, w.flatten(0, 1), geometry), 1, w.shape[:2])
    patches, kernels = _patches(x[None], geometry)[0], w.permute(0, 1, 3, 4, 2).flatten(2).flatten(0, 1)
    padding = (0, -patches.shape[1] % ROW_MULTIPLE)
    product = F.pad(patches, padding) @ F.pad(kernels, padding).T
    shape = (len(x), *geometry.output(x.shape[-2:]), *w.shape[:2])
    return product.view(shape).permute(0, 3, 4, 1, 2)


def stacked_input_grad(grad: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """(N, B, O, H', W') with (N, O, C, kh, kw) gives (N, B, C, H, W)."""
    if not geometry.of_pixels:
        return stacked_input_grad_grouped(grad, w, size, geometry)
    pixels = grad.movedim(2, -1)
    product = pixels.flatten(1, 3) @ w.flatten(2)
    return _spread(torch.unflatten(product, 1, pixels.shape[1:4]), size, geometry.stride).movedim(-1, 2)


def stacked_weight_grad(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """(N, B, C, H, W) with (N, B, O, H', W') gives (N, O, C, kh, kw)."""
    channels = x.shape[2]
    unsuited = x.dtype == torch.bfloat16 and channels >= VERY_MANY_CHANNELS
    by_rows = channels < FEW_CHANNELS or geometry.of_pixels or unsuited
    return stacked_weight_grad_by_rows(x, grad, geometry) if by_rows else stacked_weight_grad_grouped(x, grad, geometry)


# one grouped convolution
def stacked_grouped(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    n = len(w)
    return channels_as_clients(_plain(clients_as_channels(x), _grouped_weight(w), geometry, n), n)


def stacked_input_grad_grouped(grad: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    n = len(w)
    return channels_as_clients(_plain_input_grad(clients_as_channels(grad), _grouped_weight(w), size, geometry, n), n)


def stacked_weight_grad_grouped(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    n = len(x)
    return torch.unflatten(
        _plain_weight_grad(clients_as_channels(x), clients_as_channels(grad), geometry, n), 0, (n, -1)
    )


# products with patches
def stacked_by_rows(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    product = _patches(x, geometry) @ w.permute(0, 3, 4, 2, 1).flatten(1, 3)
    return torch.unflatten(product, 1, (x.shape[1], *geometry.output(x.shape[-2:]))).movedim(-1, 2)


def stacked_weight_grad_by_rows(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    n, b, channels = x.shape[:3]
    rows, patches = grad.movedim(2, -1).flatten(1, 3), _patches(x, geometry)
    parts = _divisor(b, patches.shape[1] // SPLIT_ROWS)
    split: Callable[[Tensor], Tensor] = lambda v: torch.unflatten(v, 1, (parts, -1)).flatten(0, 1)  # noqa: E731
    product = torch.unflatten(split(patches).mT @ split(rows), 0, (n, parts)).sum(1)
    return torch.unflatten(product, 1, (*geometry.kernel, channels)).permute(0, 4, 3, 1, 2)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """A row per position of the result, (N, B H' W', kh kw C), the channels of a pixel side by side."""
    (kh, kw), (sh, sw), (ph, pw) = geometry[:3]
    x = x.movedim(2, -1)
    if ph or pw:
        x = F.pad(x, (0, 0, pw, pw, ph, ph))
    return x.unfold(2, kh, sh).unfold(3, kw, sw).permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 6).flatten(1, 3)


def _spread(x: Tensor, size: Pair, stride: Pair) -> Tensor:
    """(N, B, H', W', C) as (N, B, H, W, C), ``stride`` apart, with zeros between."""
    if stride == (1, 1):
        return x
    (high, wide), (sh, sw) = size, stride
    x = F.pad(x[:, :, :, None, :, None], (0, 0, 0, sw - 1, 0, 0, 0, sh - 1)).flatten(2, 3).flatten(3, 4)
    return x[:, :, :high, :wide]  # of a side that the stride does not divide there are too many


def clients_as_channels(x: Tensor) -> Tensor:
    """(N, B, C, ...) as (B, N C, ...): as it lies in memory, if it does, else channels last. (N, C) as (N C)."""
    if x.ndim == 2:
        return x.flatten()
    if (by_sample := x.movedim(0, 1)).is_contiguous():
        return by_sample.flatten(1, 2)
    return x.movedim((0, 2), (-2, -1)).flatten(-2).movedim(-1, 1)


def _grouped_weight(w: Tensor) -> Tensor:
    return w.flatten(0, 1).contiguous(memory_format=torch.channels_last)


def channels_as_clients(x: Tensor, n: int) -> Tensor:
    """The way back."""
    channels = min(1, x.ndim - 1)
    return torch.unflatten(x, channels, (n, -1)).movedim(channels, 0)


def _folded(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.unflatten(fn(x.flatten(0, 1)), 0, x.shape[:2])


def rows(info: Any, v: Tensor, dim: int | None) -> Tensor:
    """The mapped axis first; what all share is there for each."""
    return v.expand(info.batch_size, *v.shape) if dim is None else v.movedim(dim, 0)


def _divisor(n: int, wanted: int) -> int:
    """The largest divisor of n that is at most ``wanted``."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, wanted))
