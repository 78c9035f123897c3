"""The network, the data and the training, as a user of Flower would write them."""

import itertools

import torch
from sklearn.datasets import load_digits
from torch import nn


def make_network(hidden: str) -> nn.Sequential:
    sizes = [64, *(int(size) for size in hidden.split(",")), 10]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def load(partition: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    rows = slice(partition * samples, (partition + 1) * samples)
    return torch.tensor(x[rows] / 16, dtype=torch.float32), torch.tensor(y[rows])


def train(network: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, batch: int) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
