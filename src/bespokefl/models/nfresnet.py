"""NF-ResNet-18: a residual network without normalisation (Brock et al., ICLR 2021), FedPG's for CIFAR-100.

Signals keep their variance by design: kernels are standardised (mean 0, norm 1 over what enters an output channel,
times a learned gain), the ReLU is scaled to keep the variance of a normal input, and a pre-activation block computes

    x + 0.2 f(x / s),    s^2 the variance that x has at the start of training:

1 behind the stem and behind a projecting shortcut, 0.2^2 more after each block. Kernels start normal with the variance
1 / fan-in, gains at 1, biases at 0, the head as torch's linear layer. The scalar at the end of a branch, 0 at
the start, that some variants have (SkipInit) is left out.

``width="standard"`` is ResNet-18's layout, four stages of two blocks with 64 to 512 channels; "sibling" is that of
related code of FedPG's group: a 3x3 stem of 64, max-pooling, three stages with 16, 32 and 64 channels (two blocks each
here).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespokefl.models.blocks import GlobalAverage, Named, check_choice, overlapping_pool, takes_imagenet_stem
from bespokefl.models.network import Layers, Network

RELU_GAIN = 1.7139588594436646  # the authors' estimate of sqrt(2 / (1 - 1 / pi)): 1 / std of a normal's ReLU
RESIDUAL_SCALE = 0.2
BLOCKS = 2  # of a stage


def nfresnet18(input_shape: tuple[int, ...], classes: int, width: str = "standard", stem: str = "auto") -> Network:
    """A normaliser-free ResNet-18; ``stem`` is that of resnet18, for the standard width only."""
    check_choice("width", width, ("standard", "sibling"))
    imagenet = takes_imagenet_stem(stem, input_shape) and width == "standard"
    kernel, stride, padding = (7, 2, 3) if imagenet else (3, 1, 1)
    channels = 64
    body: Layers = {"conv1": StandardisedConv2d(input_shape[0], channels, kernel, stride, padding)}
    if imagenet or width == "sibling":
        body["pool1"] = overlapping_pool()
    variance = 1.0
    for stage, out in enumerate((64, 128, 256, 512) if width == "standard" else (16, 32, 64)):
        layers: Layers = {}
        for k in range(BLOCKS):
            block = NormFreeBlock(channels, out, 2 if stage and not k else 1, math.sqrt(variance))
            variance = (1.0 if block.shortcut is not None else variance) + RESIDUAL_SCALE**2
            layers[f"block{k + 1}"], channels = block, out
        body[f"stage{stage + 1}"] = Named(layers)
    return Network(body | {"relu": ScaledReLU(), "average": GlobalAverage()}, channels, classes)


class StandardisedConv2d(nn.Conv2d):
    """A convolution with gain (W - mean) / (sqrt(fan-in) std), each output channel for itself."""

    SMALLEST = 1e-4  # of fan-in times the variance, as in the authors' code

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(channels, out, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(out))
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        fan_in = self.weight.numel() // self.weight.shape[0]
        scale = self.gain.view(-1, 1, 1, 1) * (variance * fan_in).clamp(min=self.SMALLEST).rsqrt()
        out: Tensor = self._conv_forward(x, (self.weight - mean) * scale, self.bias)
        return out


class ScaledReLU(nn.Module):
    """ReLU with the variance of a standard normal input kept."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * RELU_GAIN


class NormFreeBlock(nn.Module):
    """h = relu(x) / std, scaled; 0.2 conv(relu(conv(h))) + x, or + a 1x1 convolution of h where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, std: float) -> None:
        super().__init__()
        self.std = std  # of x at the start of training
        self.relu1, self.conv1 = ScaledReLU(), StandardisedConv2d(channels, out, 3, stride, padding=1)
        self.relu2, self.conv2 = ScaledReLU(), StandardisedConv2d(out, out, 3, padding=1)
        self.shortcut = StandardisedConv2d(channels, out, 1, stride) if stride > 1 or channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(x) / self.std
        shortcut = x if self.shortcut is None else self.shortcut(h)
        out: Tensor = RESIDUAL_SCALE * self.conv2(self.relu2(self.conv1(h))) + shortcut
        return out
