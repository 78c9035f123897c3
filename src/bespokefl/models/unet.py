"""U-Net (Ronneberger et al., MICCAI 2015) for segmentation: an image in, a map of logits (classes, height, width) out.

LG-Mix's network for retinal images, in the form with norms and with padded convolutions, which keep the size. The head
is the last 1x1 convolution: its input, the features h that methods look at, is the map of the last decoder (``width``,
height, width), and its answer to such a map are the logits. Convolutions start normal with the variance 2 over the
number of inputs of an output, norms as the identity.
"""

import math

import torch
from torch import Tensor, nn

from bespokefl.errors import InputError
from bespokefl.models.blocks import MakeNorm, Named, check_width, conv3x3, he_init, norm_of

DEPTH = 4  # poolings by 2 on the way down, and as many steps up
SMALLEST_SIDE = 2  # what a single pooling leaves a pixel of


def unet(
    input_shape: tuple[int, ...], classes: int, norm: str = "batch", width: int = 32, depth: int = DEPTH
) -> nn.Module:
    """``width`` channels in full size, twice as many after each of the ``depth`` poolings."""
    check_width(width, "the channels of the first level, 32 by default")
    if type(depth) is not int or not 1 <= depth <= DEPTH:
        raise InputError(f"model.depth is {depth!r}; it is the number of poolings, a whole number from 1 to {DEPTH}")
    multiple = 2**depth
    if any(side % multiple for side in input_shape[1:]):
        raise InputError(
            f"model.name is 'unet', which halves images {depth} times, but the data has the shape {input_shape}; its "
            f"height and width must be multiples of {multiple}"
        )
    network = UNet(input_shape[0], classes, width, norm_of(norm), depth)
    he_init(network, "fan_in")
    return network


class UNet(nn.Module):
    """Levels on the way down, the bottom, and levels on the way up, each beside the level of its size."""

    def __init__(self, channels: int, classes: int, width: int, norm: MakeNorm, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(
            two_convs(a, b, norm) for a, b in zip([channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = two_convs(widths[-2], widths[-1], norm)
        self.up = nn.ModuleList(
            Up(below, here, norm) for here, below in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for level in self.down:
            x = level(x)
            beside.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for level, of_its_size in zip(self.up, reversed(beside), strict=True):
            x = level(x, of_its_size)
        logits: Tensor = self.head(x)
        return logits


class Up(nn.Module):
    """Twice the size by a transposed convolution, then two convolutions on it beside the level of that size."""

    def __init__(self, below: int, here: int, norm: MakeNorm) -> None:
        super().__init__()
        self.grow, self.convs = nn.ConvTranspose2d(below, here, 2, stride=2), two_convs(2 * here, here, norm)
        nn.init.normal_(self.grow.weight, std=math.sqrt(2 / below))  # one pixel of input for each of output

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat([self.grow(x), beside], 1))
        return out


def two_convs(channels: int, out: int, norm: MakeNorm) -> Named:
    return Named(
        {
            "conv1": conv3x3(channels, out),
            "norm1": norm(out),
            "relu1": nn.ReLU(),
            "conv2": conv3x3(out, out),
            "norm2": norm(out),
            "relu2": nn.ReLU(),
        }
    )
