"""A federation whose samples and first model are formulas: what other code was run on, too, to compare numbers.

Nothing is drawn at random but the order of samples in batches, which is the library's own (``orders``).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bespokefl.core import Model, stream
from bespokefl.data.federated import FederatedData

Array = NDArray[np.float64]

SEED = 3
SIZES = (23, 8, 31, 12, 17)
SCHEDULE = ((0, 1, 3), (1, 2, 4), (0, 1, 4), (2, 3, 4), (0, 1, 2), (0, 3, 4))
EVERYONE = (tuple(range(5)),) * 4
BATCH, EPOCHS = 5, 2


def wave(shape: tuple[int, ...], salt: int) -> Array:
    """Numbers between -1/2 and 1/2, the same on every machine."""
    k = np.arange(int(np.prod(shape)), dtype=np.int64)
    return (((17 * k * k + 31 * k + 101 * salt + 7) % 1009) / 1009 - 0.5).reshape(shape)


def samples(shape: tuple[int, ...], classes: int) -> list[tuple[Array, NDArray[np.int64]]]:
    """Each client's train samples: skewed labels, and a shift of its own and of each class."""
    clients = []
    for i, n in enumerate(SIZES):
        k = np.arange(n)
        y = (k * k + i * (k % 3) + i) % classes
        x = 2 * wave((n, *shape), 11 + i) + wave((len(SIZES), *shape), 5)[i] + wave((classes, *shape), 23)[y]
        clients.append((x, y.astype(np.int64)))
    return clients


def federated(shape: tuple[int, ...], classes: int) -> FederatedData:
    clients = [{"train": xy, "test": xy} for xy in samples(shape, classes)]
    return FederatedData.from_arrays(clients, classes=tuple(str(c) for c in range(classes)))


def start(module: nn.Module) -> Model:
    """A first model for a module, tensor by tensor in its order; normalisation statistics are its own."""
    moving = dict(module.named_parameters())
    tensors = {k: v for k, v in module.state_dict().items() if v.is_floating_point()}
    return {k: initial(v, salt) if k in moving else v.double() for salt, (k, v) in enumerate(tensors.items())}


def initial(v: Tensor, salt: int) -> Tensor:
    if v.ndim == 1:
        return torch.tensor(0.5 + 0.2 * wave(tuple(v.shape), salt))
    return torch.tensor(wave(tuple(v.shape), salt) * 2 / np.sqrt(v[0].numel()))


def orders(name: str, round: int, client: int, epoch: int) -> list[NDArray[np.int64]]:
    """The rows of a client's full batches in an epoch."""
    n = SIZES[client]
    size = min(BATCH, n)
    rows = stream(SEED, name, round, client, epoch).permutation(n)
    return [rows[k * size : (k + 1) * size] for k in range(n // size)]


def digest(model: Any) -> Array:
    """Of each tensor: its norm, and its product with a wave, which tells where its values stand."""
    tensors = [np.asarray(v, dtype=np.float64) for v in (model.values() if isinstance(model, dict) else model)]
    return np.array([[np.sqrt((v**2).sum()), (v * wave(v.shape, 3)).sum()] for v in tensors])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.fc1(x)))
        return out


class NormNet(nn.Module):
    """With BatchNorm behind both layers but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.fc1, self.bn2 = nn.Linear(5 * 9, 8), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, feature: bool = False) -> Any:
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        h = torch.relu(self.bn2(self.fc1(x.flatten(1))))
        return (h, self.fc(h)) if feature else self.fc(h)
