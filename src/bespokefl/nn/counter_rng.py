"""Random numbers that a client's program computes from a key: the same on every engine and in any order of clients."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def keyed_normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal draws, a function of ``key`` (an integer scalar, as ``batch.key``) and the position alone."""
    positions = torch.arange(math.prod(shape), device=key.device).view(*shape)
    radius = (-2 * _uniform(key, 2 * positions).log()).sqrt()
    return (radius * torch.cos(2 * math.pi * _uniform(key, 2 * positions + 1))).to(dtype)  # Box and Muller


def keyed_bits(key: Tensor, positions: Tensor) -> Tensor:
    """A 32-bit hash of key and position, as int64."""
    z = positions * 0x9E3779B1 + key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        z = ((z ^ (z >> shift)) * factor) & 0xFFFFFFFF
    return z


def _uniform(key: Tensor, positions: Tensor) -> Tensor:
    """Draws inside (0, 1)."""
    return (keyed_bits(key * 0x85EBCA77, positions).double() + 0.5) / 2**32
