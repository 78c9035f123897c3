"""Convolutional networks of the papers, for images of any number of channels and any size that leaves a pixel.

The papers write convolution, ReLU, max-pooling; here the pooling comes first. ReLU is monotone, so it commutes with
the maximum: the same function and gradient, with a quarter of the ReLU evaluations and less memory to write.
"""

from collections.abc import Sequence

from torch import nn

from bespokefl.errors import InputError
from bespokefl.models.network import Layers, Network, hidden_layers

TWO_CONVS_SMALLEST_SIDE = 16  # two 5x5 convolutions without padding, each with a pooling by 2, leave one pixel of it
DIGIT_MODEL_SMALLEST_SIDE = 4  # padded convolutions keep the size: only the two poolings shrink it


def fedavg_cnn(input_shape: tuple[int, ...], classes: int) -> Network:
    """The CNN of PGFed and McMahan's FedAvg: convolutions of 32 and 64, one hidden layer of 512."""
    return _two_convs(input_shape, classes, convs=(32, 64), hidden=(512,))


def fedpg_cnn(input_shape: tuple[int, ...], classes: int, dropout: Sequence[float] = (0.0, 0.0)) -> Network:
    """FedPG's CNN for CIFAR-10: convolutions of 64 and 64, hidden layers of 384 and 192.

    ``dropout`` gives the rates after the two hidden layers. The paper names none (the default); related code of the
    same group has 0.2 and 0.5.
    """
    if not isinstance(dropout, list | tuple) or len(dropout) != 2 or not all(_is_rate(rate) for rate in dropout):
        raise InputError(
            f"model.dropout is {dropout!r}; it must be two rates, each from 0 (off) to below 1, such as [0.2, 0.5]"
        )
    return _two_convs(input_shape, classes, convs=(64, 64), hidden=(384, 192), dropout=dropout)


def lenet5(input_shape: tuple[int, ...], classes: int) -> Network:
    """LeNet-5 with ReLU and max-pooling: convolutions of 6 and 16, hidden layers of 120 and 84."""
    return _two_convs(input_shape, classes, convs=(6, 16), hidden=(120, 84))


def pfedhn_target(input_shape: tuple[int, ...], classes: int) -> Network:
    """What pFedHN's hypernetwork writes the weights of: LeNet-5 with convolutions of 16 and 32."""
    return _two_convs(input_shape, classes, convs=(16, 32), hidden=(120, 84))


def digit_model(input_shape: tuple[int, ...], classes: int) -> Network:
    """LG-Mix's network for Digits5, BatchNorm after every layer: convolutions of 64, 64, 128, then 2048 and 512."""
    channels, height, width = input_shape
    body: Layers = {}
    for i, out in enumerate((64, 64, 128), start=1):
        body[f"conv{i}"] = nn.Conv2d(channels, out, kernel_size=5, padding=2)
        body[f"bn{i}"] = nn.BatchNorm2d(out)
        if i < 3:
            body[f"pool{i}"] = nn.MaxPool2d(2)
            height, width = height // 2, width // 2
        body[f"relu{i}"] = nn.ReLU()
        channels = out
    body["flatten"] = nn.Flatten()
    features = channels * height * width
    for i, out in enumerate((2048, 512), start=1):
        body[f"fc{i}"] = nn.Linear(features, out)
        body[f"bn{i + 3}"] = nn.BatchNorm1d(out)
        body[f"relu{i + 3}"] = nn.ReLU()
        features = out
    return Network(body, features, classes)


def _two_convs(
    input_shape: tuple[int, ...],
    classes: int,
    convs: tuple[int, int],
    hidden: tuple[int, ...],
    dropout: Sequence[float] = (),
) -> Network:
    """Two rounds of 5x5 convolution and max-pooling by 2, then hidden linear layers."""
    channels, height, width = input_shape
    body: Layers = {}
    for i, out in enumerate(convs, start=1):
        body[f"conv{i}"] = nn.Conv2d(channels, out, kernel_size=5)
        body[f"pool{i}"] = nn.MaxPool2d(2)
        body[f"relu{i}"] = nn.ReLU()
        channels, height, width = out, (height - 4) // 2, (width - 4) // 2
    body |= hidden_layers(channels * height * width, hidden, dropout)
    return Network(body, hidden[-1], classes)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1
