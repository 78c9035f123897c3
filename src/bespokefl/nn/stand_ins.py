"""Stand-ins for the modules whose behaviour depends on the batch as a whole, so that padding and stacking are safe.

Names and values of parameters and buffers stay those of the modules they replace.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from bespokefl.errors import InputError
from bespokefl.nn.batch_statistics import mean_and_variance, normalised
from bespokefl.nn.convolution import Geometry, convolve
from bespokefl.nn.counter_rng import keyed_bits


class MaskedBatchNorm(nn.Module):
    """BatchNorm whose batch statistics leave padded samples out; the sample weights arrive with the call.

    Running statistics are replaced, never written in place, so that a caller may keep or drop the new ones.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        if norm.track_running_stats and norm.momentum is None:
            raise InputError(
                "BatchNorm with momentum=None (a cumulative average) is not supported; set a number, e.g. 0.1"
            )
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name in ("running_mean", "running_var"):
            value = getattr(norm, name)
            self.register_buffer(name, None if value is None else value.clone())
        self.sample_weights: Tensor | None = None  # set for the length of one call by Task

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_var is not None:
            if _torch_asks_for_a_layout(x) or (_CLIENTS_ARE_STACKED.get() and x.dtype != self.running_mean.dtype):
                # F.batch_norm's rule for vmap wants one type
                return self._normalised(x, self.running_mean, self.running_var).to(x.dtype)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if self.sample_weights is not None or _torch_asks_for_a_layout(x):
            count, mean, variance = self._statistics(x)
            if self.sample_weights is None:
                out = normalised(x, *_affine(self, x), None, self.eps)
            else:
                out = self._normalised(x, mean, variance)
        else:
            count = torch.full((), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
            out, mean, inverse_std = torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps)
            variance = (inverse_std.detach() ** -2 - self.eps).clamp(min=0)  # saves a second pass over x
        if self.running_mean is not None and self.running_var is not None and self.momentum is not None:
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean = torch.lerp(self.running_mean, mean.detach().to(self.running_mean.dtype), self.momentum)
            self.running_var = torch.lerp(self.running_var, unbiased.to(self.running_var.dtype), self.momentum)
        return out

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many numbers of a channel count, their mean and their variance."""
        reduced, pixels = (0, *range(2, x.ndim)), x.numel() // (x.shape[0] * x.shape[1])
        if self.sample_weights is None:
            mean, variance = mean_and_variance(x, reduced)
            return torch.full((), x.shape[0] * pixels, dtype=mean.dtype, device=x.device), mean, variance
        w = self.sample_weights.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))
        count = (w.sum() * pixels).clamp(min=1)
        mean = (w * x).sum(reduced) / count
        variance = (w * (x - mean.view(self._shape(x))) ** 2).sum(reduced) / count
        return count, mean, variance

    def _normalised(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        shape = self._shape(x)
        out = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    @staticmethod
    def _shape(x: Tensor) -> tuple[int, ...]:
        return (1, -1, *(1,) * (x.ndim - 2))


class PlainGroupNorm(nn.GroupNorm):
    """GroupNorm from elementary operations: the fused one asks for a memory layout, which vmap cannot tell."""

    def forward(self, x: Tensor) -> Tensor:
        if _CLIENTS_ARE_STACKED.get():
            return normalised(x, *_affine(self, x), self.num_groups, self.eps)
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        variance, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
        out = ((groups - mean) * (variance + self.eps).rsqrt()).reshape(x.shape)
        if not self.affine:
            return out
        shape = (1, -1, *(1,) * (x.ndim - 2))
        return out * self.weight.view(shape) + self.bias.view(shape)


def _affine(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight and bias, 1 and 0 if it has none."""
    weight, bias = norm.weight, norm.bias
    if weight is None or bias is None:
        return torch.ones(x.shape[1], device=x.device), torch.zeros(x.shape[1], device=x.device)
    return weight, bias  # type: ignore[return-value]


class StackableConv2d(nn.Conv2d):
    """A convolution that is quick with a client axis, too; without one it is torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        if not _CLIENTS_ARE_STACKED.get():
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        out = convolve(x, weight, self._geometry)
        return out if bias is None else out + bias.view(-1, 1, 1)

    @property
    def _geometry(self) -> Geometry:
        padding = self.padding
        if isinstance(padding, str):  # "same" has an odd kernel: `can_replace` sees to it
            padding = tuple(k // 2 if padding == "same" else 0 for k in self.kernel_size)
        return Geometry(self.kernel_size, self.stride, padding, _DIFFERENTIATED.get())

    @staticmethod
    def can_replace(conv: nn.Conv2d) -> bool:
        usual = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
        return usual and not (conv.padding == "same" and any(k % 2 == 0 for k in conv.kernel_size))


_CLIENTS_ARE_STACKED = ContextVar("clients_are_stacked", default=False)
_DIFFERENTIATED = ContextVar("differentiated", default=False)


def _torch_asks_for_a_layout(x: Tensor) -> bool:
    """Whether BatchNorm's own kernels would choose by memory layout, which ``vmap`` cannot tell."""
    return _CLIENTS_ARE_STACKED.get() and x.is_cuda


@contextlib.contextmanager
def _true(variable: ContextVar[bool]) -> Iterator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


def stacked_clients() -> contextlib.AbstractContextManager[None]:
    """Where modules are called under ``vmap`` over clients."""
    return _true(_CLIENTS_ARE_STACKED)


def differentiated() -> contextlib.AbstractContextManager[None]:
    """Where modules are called to be differentiated."""
    return _true(_DIFFERENTIATED)


class KeyedDropout(nn.Module):
    """Dropout from a hash of (key, layer, position): the same mask in any engine.

    Padded rows come last in a batch, so they do not shift the positions of real ones.
    """

    def __init__(self, p: float, layer: int, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.whole_channels = p, layer, whole_channels
        self.key: Tensor | None = None  # set for the length of one call by Task

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.key is None:
            raise RuntimeError("dropout in training mode was called outside a Task")
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if self.whole_channels else x.shape
        positions = torch.arange(
            shape.numel() if isinstance(shape, torch.Size) else shape[0] * shape[1], device=x.device
        )
        bits = keyed_bits(self.key + self.layer * 0x85EBCA77, positions.view(shape))
        return x * (bits >= int(self.p * 2**32)).to(x.dtype) / (1 - self.p or 1)  # p = 1 drops all


def with_stand_ins(module: nn.Module) -> nn.Module:
    """Replaces BatchNorm, GroupNorm, dropout and convolution modules in place, at any depth, and returns the module."""
    layers = 0

    def replacement(child: nn.Module) -> nn.Module | None:
        nonlocal layers
        if isinstance(child, _BatchNorm):
            return MaskedBatchNorm(child)
        if isinstance(child, nn.GroupNorm):
            return _with_tensors_of(
                child, PlainGroupNorm(child.num_groups, child.num_channels, child.eps, child.affine)
            )
        if type(child) is nn.Conv2d and StackableConv2d.can_replace(child):
            return _with_tensors_of(child, _conv_like(child))
        if isinstance(child, _InstanceNorm) and child.track_running_stats:
            raise InputError(
                f"{type(child).__name__} with track_running_stats=True is not supported (padding would enter its "
                "statistics); leave it at False, or use BatchNorm or GroupNorm"
            )
        if isinstance(child, _DropoutNd):
            if not isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                raise InputError(f"{type(child).__name__} draws randomness that cannot be keyed; use nn.Dropout")
            layers += 1
            return KeyedDropout(child.p, layers, whole_channels=not isinstance(child, nn.Dropout))
        return None

    whole = replacement(module)
    if whole is not None:
        return whole
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
    return module


def _conv_like(conv: nn.Conv2d) -> StackableConv2d:
    stand_in = StackableConv2d(conv.in_channels, conv.out_channels, 1, bias=conv.bias is not None, device="meta")
    stand_in.kernel_size, stand_in.stride, stand_in.padding = conv.kernel_size, conv.stride, conv.padding
    return stand_in


def _with_tensors_of(original: nn.Module, stand_in: nn.Module) -> nn.Module:
    for name, value in original.named_parameters(recurse=False):
        setattr(stand_in, name, value)
    return stand_in
