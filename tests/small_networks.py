"""Networks for 8 x 8 images, as a user's own factories."""

from torch import nn


def convolutional(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    hidden = nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *hidden)


def normalised(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """BatchNorm of maps and of features, and dropout."""
    hidden = nn.Linear(144, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *hidden)
