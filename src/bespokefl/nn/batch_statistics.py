"""Normalisation by the moments of a batch's channels, or of a sample's groups of channels, in few passes over memory.

On a GPU a deep network's convolutions are quick and what lies between them is not: every elementary operation reads and
writes whole activations. Here the forward pass reads them twice and writes them once, the backward pass needs two sums
and one combination. With x^ = (x - m) r, r = (v + eps)^(-1/2), y = w x^ + b, and n numbers to a moment:

    y = x (r w) + (b - m r w)
    dx = dy (r w) - x (r^2 S / n) + (m r^2 S - r T) / n,    T = sum w dy, S = sum w dy x^

where sums are over what shares a moment. Of activations in half the precision, moments and sums are still taken in
float32, and what combines them is rounded as they are.

Clients of a stack are further groups of one normalisation: their channels lie side by side, as convolutions have them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bespokefl.nn.convolution import channels_as_clients, clients_as_channels, rows


def normalised(x: Tensor, weight: Tensor, bias: Tensor, groups: int | None, eps: float) -> Tensor:
    """(B, C, ...) with moments of each sample's ``groups`` of channels, or of each channel of the batch if None."""
    out: Tensor = _Normalised.apply(x, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return out


def mean_and_variance(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Over some dimensions; in float32 of activations in half the precision."""
    if x.dtype != torch.bfloat16:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, dtype=torch.float32) / count
    square = torch.linalg.vector_norm(x, dim=dims, dtype=torch.float32) ** 2 / count
    return mean, (square - mean**2).clamp(min=0)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int | None, eps: float) -> Tensor:
        with _as_written(x):
            mean, inverse_std = _moments(x, groups, eps)
            scale = inverse_std * _by_group(weight, groups)
            return torch.addcmul(_over(x, _by_group(bias, groups) - mean * scale), x, _over(x, scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *_NormalisedGrad.apply(x, weight, grad, ctx.groups, ctx.eps), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int | None, eps: float
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        x, weight, bias = (clients_as_channels(rows(info, v, d)) for v, d in zip((x, weight, bias), dims, strict=False))
        return channels_as_clients(normalised(x, weight, bias, groups and clients * groups, eps), clients), 0


class _NormalisedGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, grad: Tensor, groups: int | None, eps: float) -> tuple[Tensor, ...]:
        return _gradients(x, weight, grad, groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *back: Tensor) -> Any:
        def gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            return _gradients(x, weight, grad, ctx.groups, ctx.eps)

        pull = torch.func.vjp(gradients, *ctx.saved_tensors)[1]
        return *pull(back), None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, grad: Tensor, groups: int | None, eps: float
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        clients = info.batch_size
        x, weight, grad = (clients_as_channels(rows(info, v, d)) for v, d in zip((x, weight, grad), dims, strict=False))
        found = _NormalisedGrad.apply(x, weight, grad, groups and clients * groups, eps)  # type: ignore[no-untyped-call]
        return tuple(channels_as_clients(v, clients) for v in found), (0, 0, 0)


def _gradients(x: Tensor, weight: Tensor, grad: Tensor, groups: int | None, eps: float) -> tuple[Tensor, ...]:
    """Of x, weight and bias. What combines activations is (B, G, C / G) or broadcast to it."""
    with _as_written(x):
        mean, inverse_std = _moments(x, groups, eps)  # the same of the same x: a traced graph has them once
        w = _by_group(weight, groups)
        of_grad, of_product = (_by_group(_over_pixels(v), groups) for v in (grad, grad * x))
        of_normal = (of_product - mean * of_grad) * inverse_std
        shared = (0, 2) if groups is None else (2,)
        count = x.numel() // mean.numel()
        t, s = ((w * v).sum(shared, keepdim=True) / count for v in (of_grad, of_normal))
        shift, slope = (mean * inverse_std * s - t) * inverse_std, -s * inverse_std * inverse_std
        dx = torch.addcmul(_over(x, shift), x, _over(x, slope))
        dx = torch.addcmul(dx, grad, _over(x, inverse_std * w))
        return dx, of_normal.sum(0).flatten(), of_grad.sum(0).flatten()


def _as_written(x: Tensor) -> Any:
    """No autocast: it would copy whole activations to float32 for their sums."""
    return torch.autocast(x.device.type, enabled=False)


def _moments(x: Tensor, groups: int | None, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation as (B, G, 1), or (1, C, 1) of the whole batch."""
    if groups is None:
        mean, variance = mean_and_variance(x, (0, *range(2, x.ndim)))
        return mean[None, :, None], (variance + eps).rsqrt()[None, :, None]
    grouped = torch.unflatten(x, 1, (groups, -1))
    mean, variance = mean_and_variance(grouped, tuple(range(2, grouped.ndim)))
    return mean[:, :, None], (variance + eps).rsqrt()[:, :, None]


def _by_group(v: Tensor, groups: int | None) -> Tensor:
    """The last axis, of channels, as groups and their channels."""
    return torch.unflatten(v, -1, (groups or v.shape[-1], -1))


def _over(x: Tensor, v: Tensor) -> Tensor:
    """(B, G, C / G) or what broadcasts to it, ready to meet the pixels of x."""
    v = v.to(x.dtype).expand(-1, -1, x.shape[1] // v.shape[1])
    return v.flatten(1).view(-1, x.shape[1], *(1,) * (x.ndim - 2))


def _over_pixels(v: Tensor) -> Tensor:
    """Sums as (B, C)."""
    pixels = tuple(range(2, v.ndim))
    dtype = torch.float32 if v.dtype == torch.bfloat16 else v.dtype
    return v.sum(pixels, dtype=dtype) if pixels else v.to(dtype)
