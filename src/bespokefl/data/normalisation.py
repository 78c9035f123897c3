"""From stored values to the float32 inputs of a model."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from bespokefl.data.dataset import IntArray
from bespokefl.errors import InputError, unknown_name

NORMALISATIONS = {
    "unit": "pixels to [0, 1]; other data as they are",
    "half": "(v - 0.5) / 0.5 of the unit values",
    "channel": "mean 0 and standard deviation 1 per channel (or feature) over all clients' train samples",
}
_CHUNK = 1024  # rows at a time in float64


Stored = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | IntArray
Moments = Mapping[str, Sequence[float]]  # "mean" and "std" of each channel; empty unless they are used


def normalise(x: Stored, how: str, train: IntArray) -> torch.Tensor:
    """Float32 copy of x; only `channel` looks at the train rows."""
    return normalise_and_tell(x, how, train)[0]


def normalise_and_tell(x: Stored, how: str, train: IntArray) -> tuple[torch.Tensor, Moments]:
    """Float32 copy of x (of tokens: as they are), and what `normalise_alike` needs to do the same to other data."""
    if how not in NORMALISATIONS:
        raise unknown_name("data.normalize", how, NORMALISATIONS)
    _check_numbers(x, how)
    values, moments = _unit(x), {}
    if how == "channel":
        mean, std = channel_moments(values, train)
        moments = {"mean": mean.tolist(), "std": std.tolist()}
    return _scaled(values, how, moments), moments


def normalise_alike(x: Stored, how: str, moments: Moments) -> torch.Tensor:
    """Float32 copy of x, treated as the data that the moments came from."""
    return _scaled(_unit(x), how, moments)


def _check_numbers(x: Stored, how: str) -> None:
    if x.dtype == np.int64 and how != "unit":
        raise InputError(
            f"data.normalize = {how!r} is for numbers, and x holds tokens (whole numbers); it must be 'unit', or say "
            "data.inputs = 'numbers'."
        )


def _unit(x: Stored) -> torch.Tensor:
    if x.dtype == np.int64:
        return torch.from_numpy(x.copy())
    values = torch.from_numpy(x.astype(np.float32))
    return values.div_(255) if x.dtype == np.uint8 else values


def _scaled(values: torch.Tensor, how: str, moments: Moments) -> torch.Tensor:
    if how == "half":
        values.sub_(0.5).div_(0.5)
    elif how == "channel":
        shape = (1, -1) + (1,) * (values.ndim - 2)
        mean, std = (torch.tensor(moments[key], dtype=torch.float64).float().view(shape) for key in ("mean", "std"))
        values.sub_(mean).div_(std)
    return values


def channel_moments(values: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population standard deviation (1 where constant) along axis 1, summed in float64 chunk by chunk.

    Values are shifted by the first chunk's mean, so that large means do not cancel the variance away.
    """
    shift: torch.Tensor | None = None
    first = torch.zeros(values.shape[1], dtype=torch.float64)
    second = torch.zeros_like(first)
    for start in range(0, len(rows), _CHUNK):
        chunk = values[torch.from_numpy(rows[start : start + _CHUNK])].double()
        chunk = chunk.reshape(len(chunk), values.shape[1], -1)
        if shift is None:
            shift = chunk.mean(dim=(0, 2), keepdim=True)
        chunk -= shift
        first += chunk.sum(dim=(0, 2))
        second += chunk.square_().sum(dim=(0, 2))
    assert shift is not None  # every client has train samples
    count = len(rows) * values[0, 0].numel()
    offset = first / count
    mean = shift.flatten() + offset
    std = (second / count - offset.square()).clamp_min(0).sqrt()
    varies = std > 1e-7 * mean.abs()  # below it, float32 cannot tell the values apart
    return mean, torch.where(varies, std, torch.ones_like(std))
