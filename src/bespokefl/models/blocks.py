"""What the deep networks share: normalisation and stem by choice, residual sums, initialisation, checks of options.

Everything runs under ``vmap`` and in traced graphs: no pooling to a given size, no branch on a tensor.
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from bespokefl.errors import InputError
from bespokefl.models.network import Layers

Norm = Literal["group", "batch"]
Stem = Literal["auto", "cifar", "imagenet"]
MakeNorm = Callable[[int], nn.Module]  # by channels

IMAGENET_STEM_FROM = 64  # the shorter side from which "auto" takes the stem that divides it by 4
SMALLEST_IMAGENET_SIDE = 32  # a stem by 4 and three stages by 2 leave one pixel of it
SMALLEST_CIFAR_SIDE = 8  # three stages by 2 do


def norm_of(kind: str) -> MakeNorm:
    """BatchNorm, or GroupNorm with 32 groups; 16, or fewer, where 32 do not divide the channels."""
    check_choice("norm", kind, ("group", "batch"))
    return nn.BatchNorm2d if kind == "batch" else group_norm


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32 if channels % 32 == 0 else math.gcd(channels, 16), channels)


def takes_imagenet_stem(stem: str, input_shape: tuple[int, ...]) -> bool:
    """Whether the stem is 7x7, stride 2, with a max-pooling behind it, and not 3x3 with stride 1."""
    check_choice("stem", stem, ("auto", "cifar", "imagenet"))
    side = min(input_shape[1:])
    if stem == "imagenet" and side < SMALLEST_IMAGENET_SIDE:
        raise InputError(
            f"model.stem is 'imagenet', which divides images by 4 and needs at least {SMALLEST_IMAGENET_SIDE}x"
            f"{SMALLEST_IMAGENET_SIDE}, but the data has the shape {input_shape}; take 'cifar' or 'auto'"
        )
    return stem == "imagenet" or (stem == "auto" and side >= IMAGENET_STEM_FROM)


def stem_conv(in_channels: int, out_channels: int, *, imagenet: bool) -> nn.Conv2d:
    if imagenet:
        return nn.Conv2d(in_channels, out_channels, 7, stride=2, padding=3, bias=False)
    return conv3x3(in_channels, out_channels)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def overlapping_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, padding=1)


class GlobalAverage(nn.Module):
    """The mean over all pixels: one feature per channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Named(nn.Sequential):
    """A sequence whose layers are named."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def he_init(module: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Every convolution normal with the variance 2 / fan, biases 0; all else as torch has it (norms at 1 and 0)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def check_choice(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"model.{option} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def check_width(value: object, meaning: str, option: str = "width") -> None:
    if type(value) is not int or value < 1:
        raise InputError(f"model.{option} is {value!r}; it must be a whole number from 1 on: {meaning}")
