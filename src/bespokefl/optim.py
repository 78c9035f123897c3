"""Local optimisers as pure functions over trees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bespokefl.trees import Model, zeros


@dataclass(frozen=True)
class SGD:
    """torch's SGD: no dampening, no Nesterov. A zero buffer equals torch's "first buffer = first gradient"."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, params: Model) -> Model:
        """The momentum buffers of the given parameters (nothing without momentum)."""
        return zeros(params) if self.momentum else {}

    def step(self, x: Model, grad: Model, buffers: Model, lr: Tensor | None = None) -> tuple[Model, Model]:
        """Moves the names in ``grad`` only. ``lr`` overrides the constant rate, as a tensor of the download."""
        if self.weight_decay:
            grad = {k: torch.add(g, x[k], alpha=self.weight_decay) for k, g in grad.items()}
        if self.momentum:
            grad = {k: torch.add(g, buffers[k], alpha=self.momentum) for k, g in grad.items()}
            buffers = buffers | grad
        if lr is None:
            moved = {k: torch.sub(x[k], g, alpha=self.lr) for k, g in grad.items()}
        else:
            moved = {k: x[k] - lr * g for k, g in grad.items()}
        return x | moved, buffers
