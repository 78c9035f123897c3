"""Networks for images that flatten as published code does, by ``view``; ``reshape=True`` gives the same with that."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Flattening(nn.Module):
    """Parts of a network, and the two ways to change a tensor's shape."""

    def __init__(self, reshape: bool) -> None:
        super().__init__()
        self.reshape = reshape

    def shaped(self, x: Tensor, *shape: int) -> Tensor:
        return x.reshape(*shape) if self.reshape else x.view(*shape)

    def like(self, x: Tensor, other: Tensor) -> Tensor:
        return x.reshape_as(other) if self.reshape else x.view_as(other)


class Pixels(Flattening):
    """The images themselves are flattened."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, reshape: bool = False) -> None:
        super().__init__(reshape)
        channels, height, width = input_shape
        self.body = nn.Linear(channels * height * width, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.shaped(x, x.size(0), -1))))


class AfterPooling(Flattening):
    """Convolutions of two sizes with pooling, and a view before the linear layer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, reshape: bool = False) -> None:
        super().__init__(reshape)
        channels, height, width = input_shape
        self.conv1, self.conv2 = nn.Conv2d(channels, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(6 * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv1(x).relu())
        return self.head(self.shaped(self.pool(self.conv2(x)), x.size(0), -1).tanh())


class AfterNorm(Flattening):
    """A view straight after convolution and BatchNorm, then BatchNorm of features: LG-Mix's network in small."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, reshape: bool = False) -> None:
        super().__init__(reshape)
        channels, height, width = input_shape
        self.conv, self.norm = nn.Conv2d(channels, 4, 5, padding=2), nn.BatchNorm2d(4)
        self.fc, self.fc_norm = nn.Linear(4 * height * width, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return self.head(self.fc_norm(self.fc(self.shaped(x, x.size(0), -1))).relu())


class InTheMiddle(Flattening):
    """Pixels attend to one another, as a map again they are convolved; ``view_as`` and a view over two axes."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, reshape: bool = False) -> None:
        super().__init__(reshape)
        self.conv1, self.conv2 = nn.Conv2d(input_shape[0], 4, 3, stride=2), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        pixels = self.shaped(x, x.size(0), 4, -1)
        mixed = pixels @ torch.softmax(pixels.transpose(1, 2) @ pixels, -1)
        x = self.conv2(self.like(mixed.transpose(1, 2).transpose(1, 2), x)) + x
        return self.head(self.shaped(x, x.size(0) * 4, -1).mean(1).view(x.size(0), 4))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "pixels": Pixels,
    "after pooling": AfterPooling,
    "after BatchNorm": AfterNorm,
    "in the middle": InTheMiddle,
}
