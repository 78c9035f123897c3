"""DenseNet-121 (Huang et al., CVPR 2017): every layer of a block sees the outputs of all before it.

LG-Mix's network for Camelyon17. Convolutions start normal with the variance 2 / fan-in, norms as the identity, the
head's bias at 0.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespokefl.models.blocks import (
    GlobalAverage,
    MakeNorm,
    Named,
    check_width,
    conv1x1,
    conv3x3,
    he_init,
    norm_of,
    overlapping_pool,
    stem_conv,
    takes_imagenet_stem,
)
from bespokefl.models.network import Layers, Network

BOTTLENECK = 4  # channels of a layer's 1x1 convolution, in growth rates


def densenet121(
    input_shape: tuple[int, ...], classes: int, norm: str = "batch", stem: str = "auto", growth: int = 32
) -> Network:
    """Blocks of 6, 12, 24 and 16 layers; ``growth`` is the number of channels that each adds."""
    return densenet(input_shape, classes, (6, 12, 24, 16), norm, stem, growth)


def densenet(
    input_shape: tuple[int, ...], classes: int, blocks: tuple[int, ...], norm: str, stem: str, growth: int
) -> Network:
    """Dense blocks of so many layers; between them a 1x1 convolution halves the channels, and pooling the sides."""
    check_width(growth, "the channels that a layer adds, 32 in the paper", option="growth")
    make_norm, imagenet, channels = norm_of(norm), takes_imagenet_stem(stem, input_shape), 2 * growth
    body: Layers = {"conv1": stem_conv(input_shape[0], channels, imagenet=imagenet), "norm1": make_norm(channels)}
    body["relu1"] = nn.ReLU()
    if imagenet:
        body["pool1"] = overlapping_pool()
    for b, layers in enumerate(blocks, start=1):
        body[f"block{b}"] = Named(
            {f"layer{k + 1}": DenseLayer(channels + k * growth, growth, make_norm) for k in range(layers)}
        )
        channels += layers * growth
        if b < len(blocks):
            body[f"transition{b}"] = _transition(channels, make_norm)
            channels //= 2
    body |= {"norm": make_norm(channels), "relu": nn.ReLU(), "average": GlobalAverage()}
    network = Network(body, channels, classes)
    he_init(network, "fan_in")
    nn.init.zeros_(network.head.bias)
    return network


def _transition(channels: int, norm: MakeNorm) -> Named:
    halved = conv1x1(channels, channels // 2)
    return Named({"norm": norm(channels), "relu": nn.ReLU(), "conv": halved, "pool": nn.AvgPool2d(2)})


class DenseLayer(nn.Module):
    """Adds ``growth`` channels to its input: conv 3x3(relu(norm(conv 1x1(relu(norm(x))))))."""

    def __init__(self, channels: int, growth: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), conv1x1(channels, BOTTLENECK * growth)
        self.norm2, self.conv2 = norm(BOTTLENECK * growth), conv3x3(BOTTLENECK * growth, growth)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)
