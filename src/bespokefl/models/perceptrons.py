"""Networks that flatten whatever comes in."""

import math
from collections.abc import Sequence

from bespokefl.errors import InputError
from bespokefl.models.network import Network, hidden_layers


def linear(input_shape: tuple[int, ...], classes: int) -> Network:
    """Multinomial logistic regression."""
    return Network(hidden_layers(math.prod(input_shape), ()), math.prod(input_shape), classes)


def mlp(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (200, 200), norm: str = "none") -> Network:
    """FedPG's perceptron for Fashion-MNIST: hidden layers of 200 and 200 with ReLU; ``norm="batch"`` adds BatchNorm."""
    widths_are_right = isinstance(hidden, list | tuple) and all(type(width) is int and width > 0 for width in hidden)
    if not hidden or not widths_are_right:
        raise InputError(
            f"model.hidden is {hidden!r}; it must list the widths of the hidden layers, such as [200, 200] "
            "(for no hidden layer take the model 'linear')"
        )
    if norm not in ("none", "batch"):
        raise InputError(f"model.norm is {norm!r}; of a perceptron it is 'none' or 'batch'")
    layers = hidden_layers(math.prod(input_shape), hidden, batch_norm=norm == "batch")
    return Network(layers, hidden[-1], classes)


def tangent_mlp(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (256, 256)) -> Network:
    """LG-Mix's for EEG covariances as vectors of a tangent space: hidden layers of 256 and 256 with ReLU."""
    return mlp(input_shape, classes, hidden)
