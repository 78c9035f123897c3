"""Local optimisers as pure functions over trees."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bespokefl.trees import Model, zeros

Buffers = dict[str, Any]  # what an optimiser remembers, by the names of the parameters: a tree for each


class Optimizer(Protocol):
    """Each name is on its own: a step moves the names in the gradient, and touches no other's buffers."""

    def init(self, params: Model) -> Buffers:
        """The buffers of the given parameters before the first step."""

    def step(self, x: Model, grad: Model, buffers: Buffers, lr: Tensor | None = None) -> tuple[Model, Buffers]:
        """The moved model and the new buffers; ``lr`` overrides the constant rate, as a tensor of the download."""


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


@dataclass(frozen=True)
class Adam:
    """torch's Adam, with bias correction; weight decay is added to the gradient.

    Every parameter counts its own steps, as torch's do, so that a phase which moves some of them ages no other.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    amsgrad: bool = False
    eps: float = 1e-8

    def init(self, params: Model) -> Buffers:
        """By parameter: the moments m and v, the largest v so far (amsgrad), and the steps t."""
        zero = {k: torch.zeros_like(v) for k, v in params.items()}
        top = {k: {"top": v} if self.amsgrad else {} for k, v in zero.items()}
        return {k: {"m": v, "v": v, **top[k], "t": v.new_zeros(())} for k, v in zero.items()}

    def step(self, x: Model, grad: Model, buffers: Buffers, lr: Tensor | None = None) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only. ``lr`` overrides the constant rate, as a tensor of the download."""
        if self.weight_decay:
            grad = {k: torch.add(g, x[k], alpha=self.weight_decay) for k, g in grad.items()}
        buffers = buffers | {k: self._remember(g, buffers[k]) for k, g in grad.items()}
        t = torch.stack([buffers[k]["t"] for k in grad])  # the scalars of all parameters in one operation each
        first, second = (-torch.expm1(t * _log(beta)) for beta in self.betas)  # 1 - beta^t, exact for small t too
        rates, roots = ((self.lr if lr is None else lr) / first).unbind(), second.sqrt().unbind()
        moved = {}
        for k, rate, root in zip(grad, rates, roots, strict=True):
            largest = buffers[k]["top" if self.amsgrad else "v"]
            moved[k] = x[k] - rate * (buffers[k]["m"] / (largest.sqrt() / root + self.eps))
        return x | moved, buffers

    def _remember(self, g: Tensor, old: dict[str, Tensor]) -> dict[str, Tensor]:
        m = torch.lerp(old["m"], g, 1 - self.betas[0])
        v = torch.lerp(old["v"], g * g, 1 - self.betas[1])
        top = {"top": torch.maximum(old["top"], v)} if self.amsgrad else {}
        return {"m": m, "v": v, **top, "t": old["t"] + 1}


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
