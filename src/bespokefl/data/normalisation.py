"""From stored values to the float32 inputs of a model."""

import numpy as np
import numpy.typing as npt
import torch

from bespokefl.data.dataset import IntArray
from bespokefl.errors import unknown_name

NORMALISATIONS = {
    "unit": "pixels to [0, 1]; other data as they are",
    "half": "(v - 0.5) / 0.5 of the unit values",
    "channel": "mean 0 and standard deviation 1 per channel (or feature) over all clients' train samples",
}
_CHUNK = 1024  # rows at a time in float64


def normalise(x: npt.NDArray[np.uint8] | npt.NDArray[np.float32], how: str, train: IntArray) -> torch.Tensor:
    """Float32 copy of x; only `channel` looks at the train rows."""
    if how not in NORMALISATIONS:
        raise unknown_name("data.normalize", how, NORMALISATIONS)
    values = torch.from_numpy(x.astype(np.float32))
    if x.dtype == np.uint8:
        values /= 255
    if how == "half":
        values.sub_(0.5).div_(0.5)
    elif how == "channel":
        mean, std = channel_moments(values, train)
        shape = (1, -1) + (1,) * (values.ndim - 2)
        values.sub_(mean.float().view(shape)).div_(std.float().view(shape))
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
