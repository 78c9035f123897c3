"""Residual networks: ResNet-18 and ResNet-50 (He et al., CVPR 2016), Wide ResNet 28-10 (Zagoruyko and Komodakis, 2016).

PLGU takes them with GroupNorm in the place of BatchNorm, LG-Mix a ResNet-18 with BatchNorm. Convolutions start as in He
et al., normal with the variance 2 / fan-out; every norm starts as the identity (the last one of a block too, not at 0),
the head as torch's linear layer.
"""

from collections.abc import Callable

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

WRN_SMALLEST_SIDE = 4  # two stages by 2 leave one pixel of it
WRN_BLOCKS = (28 - 4) // 6  # of each of its three stages


def resnet18(
    input_shape: tuple[int, ...], classes: int, norm: str = "group", stem: str = "auto", width: int = 64
) -> Network:
    """Four stages of two blocks, 64 to 512 channels: 20 convolutions and the head."""
    return _resnet(input_shape, classes, (2, 2, 2, 2), basic_block, 1, norm, stem, width)


def resnet50(
    input_shape: tuple[int, ...], classes: int, norm: str = "group", stem: str = "auto", width: int = 64
) -> Network:
    """Four stages of 3, 4, 6 and 3 bottlenecks, 256 to 2048 channels; the 3x3 convolution of a block has its stride."""
    return _resnet(input_shape, classes, (3, 4, 6, 3), bottleneck, 4, norm, stem, width)


def wrn28_10(input_shape: tuple[int, ...], classes: int, norm: str = "group", width: int = 10) -> Network:
    """Three stages of four pre-activation blocks, 16 ``width`` to 64 ``width`` channels, without dropout."""
    check_width(width, "10 for WRN-28-10")
    make_norm, channels = norm_of(norm), 16
    body: Layers = {"conv1": conv3x3(input_shape[0], channels)}
    for stage, stride in enumerate((1, 2, 2), start=1):
        out = 16 * 2 ** (stage - 1) * width
        blocks: Layers = {}
        for k in range(1, WRN_BLOCKS + 1):
            blocks[f"block{k}"] = PreActivation(channels, out, stride if k == 1 else 1, make_norm)
            channels = out
        body[f"stage{stage}"] = Named(blocks)
    body |= {"norm": make_norm(channels), "relu": nn.ReLU(), "average": GlobalAverage()}
    network = Network(body, channels, classes)
    he_init(network, "fan_out")
    return network


def _resnet(
    input_shape: tuple[int, ...],
    classes: int,
    blocks: tuple[int, ...],
    branch: Callable[[int, int, int, MakeNorm], Named],
    expansion: int,
    norm: str,
    stem: str,
    width: int,
) -> Network:
    """A stem, stages of ``blocks`` residual blocks whose channels double and whose sides halve, and the average."""
    check_width(width, "the channels of the stem, 64 in the paper")
    make_norm, imagenet = norm_of(norm), takes_imagenet_stem(stem, input_shape)
    body: Layers = {"conv1": stem_conv(input_shape[0], width, imagenet=imagenet), "norm1": make_norm(width)}
    body["relu1"] = nn.ReLU()
    if imagenet:
        body["pool1"] = overlapping_pool()
    channels = width
    for stage, count in enumerate(blocks):
        inner, out = width * 2**stage, width * 2**stage * expansion
        layers: Layers = {}
        for k in range(count):
            stride = 2 if stage and not k else 1
            layers[f"block{k + 1}"] = Residual(
                branch(channels, inner, stride, make_norm), projection(channels, out, stride, make_norm)
            )
            channels = out
        body[f"stage{stage + 1}"] = Named(layers)
    network = Network(body | {"average": GlobalAverage()}, channels, classes)
    he_init(network, "fan_out")
    return network


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def basic_block(channels: int, inner: int, stride: int, norm: MakeNorm) -> Named:
    return Named(
        {
            "conv1": conv3x3(channels, inner, stride),
            "norm1": norm(inner),
            "relu1": nn.ReLU(),
            "conv2": conv3x3(inner, inner),
            "norm2": norm(inner),
        }
    )


def bottleneck(channels: int, inner: int, stride: int, norm: MakeNorm) -> Named:
    return Named(
        {
            "conv1": conv1x1(channels, inner),
            "norm1": norm(inner),
            "relu1": nn.ReLU(),
            "conv2": conv3x3(inner, inner, stride),
            "norm2": norm(inner),
            "relu2": nn.ReLU(),
            "conv3": conv1x1(inner, 4 * inner),
            "norm3": norm(4 * inner),
        }
    )


def projection(channels: int, out: int, stride: int, norm: MakeNorm) -> nn.Module:
    """The shortcut of a block: a 1x1 convolution where its shape changes, else nothing."""
    if stride == 1 and channels == out:
        return nn.Identity()
    return Named({"conv": conv1x1(channels, out, stride), "norm": norm(out)})


class PreActivation(nn.Module):
    """h = relu(norm(x)); conv(relu(norm(conv(h)))) + x, or + a 1x1 convolution of h where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), conv3x3(channels, out, stride)
        self.norm2, self.conv2 = norm(out), conv3x3(out, out)
        self.shortcut = conv1x1(channels, out, stride) if stride > 1 or channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(h)))) + shortcut
        return out
