"""What the shipped networks have in common: a body that computes features, and a linear head on top."""

from collections.abc import Sequence

import torch
from torch import nn

Layers = dict[str, nn.Module]  # in order; the keys name the layers: body.conv1, body.fc1, ...


class Network(nn.Module):
    """``head(body(x))``; the head is the last linear layer, the part that many methods keep personal."""

    def __init__(self, body: Layers, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for name, layer in body.items():
            self.body.add_module(name, layer)
        self.head = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x))
        return logits


def hidden_layers(
    features: int, widths: Sequence[int], dropout: Sequence[float] = (), *, batch_norm: bool = False
) -> Layers:
    """``flatten``, then linear, BatchNorm if asked for, ReLU and, where its rate is above 0, dropout for each width."""
    layers: Layers = {"flatten": nn.Flatten()}
    for i, width in enumerate(widths):
        layers[f"fc{i + 1}"] = nn.Linear(features, width)
        if batch_norm:
            layers[f"bn_fc{i + 1}"] = nn.BatchNorm1d(width)
        layers[f"relu_fc{i + 1}"] = nn.ReLU()
        if i < len(dropout) and dropout[i] > 0:
            layers[f"drop{i + 1}"] = nn.Dropout(dropout[i])
        features = width
    return layers
