"""Local optimisers as pure functions over trees."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bespokefl.core.trees import Model, zeros

Buffers = dict[str, Any]  # what an optimiser remembers, by the names of the parameters: a tree for each


class Optimizer(Protocol):
    """Each name is on its own: a step moves the names in the gradient, and touches no other's buffers."""

    def init(self, params: Model) -> Buffers:
        """The buffers of the given parameters before the first step."""

    def step(self, x: Model, grad: Model, buffers: Buffers, lr: Tensor | None = None) -> tuple[Model, Buffers]:
        """The moved model and the new buffers; ``lr`` overrides the constant rate, as a tensor of the download."""


Factor = float | Tensor  # a constant, or a scalar of one client, where clients of a stack have different ones


def _plus(a: Tensor, s: Factor, b: Tensor) -> Tensor:
    """a + s b."""
    return torch.addcmul(a, s, b) if isinstance(s, Tensor) else torch.add(a, b, alpha=s)


def _minus(a: Tensor, s: Factor, b: Tensor) -> Tensor:
    """a - s b."""
    return torch.addcmul(a, s, b, value=-1) if isinstance(s, Tensor) else torch.sub(a, b, alpha=s)


def _counts(s: Factor) -> bool:
    """Whether the factor may be other than 0: a tensor may, for some client."""
    return isinstance(s, Tensor) or s != 0


@dataclass(frozen=True)
class SGD:
    """torch's SGD: no dampening, no Nesterov. A zero buffer equals torch's "first buffer = first gradient"."""

    lr: Factor
    momentum: Factor = 0.0
    weight_decay: Factor = 0.0

    def init(self, params: Model) -> Model:
        """The momentum buffers of the given parameters (nothing without momentum)."""
        return zeros(params) if _counts(self.momentum) else {}

    def step(self, x: Model, grad: Model, buffers: Model, lr: Tensor | None = None) -> tuple[Model, Model]:
        """Moves the names in ``grad`` only. ``lr`` overrides the constant rate, as a tensor of the download."""
        if _counts(self.weight_decay):
            grad = {k: _plus(g, self.weight_decay, x[k]) for k, g in grad.items()}
        if _counts(self.momentum):
            grad = {k: _plus(g, self.momentum, buffers[k]) for k, g in grad.items()}
            buffers = buffers | grad
        if lr is None:
            moved = {k: _minus(x[k], self.lr, g) for k, g in grad.items()}
        else:
            moved = {k: x[k] - lr * g for k, g in grad.items()}
        return x | moved, buffers


@dataclass(frozen=True)
class Adam:
    """torch's Adam, with bias correction; weight decay is added to the gradient.

    Every parameter counts its own steps, as torch's do, so that a phase which moves some of them ages no other.
    """

    lr: Factor
    betas: tuple[Factor, Factor] = (0.9, 0.999)
    weight_decay: Factor = 0.0
    amsgrad: bool = False
    eps: float = 1e-8

    def init(self, params: Model) -> Buffers:
        """By parameter: the moments m and v, the largest v so far (amsgrad), and the steps t."""
        zero = {k: torch.zeros_like(v) for k, v in params.items()}
        top = {k: {"top": v} if self.amsgrad else {} for k, v in zero.items()}
        return {k: {"m": v, "v": v, **top[k], "t": v.new_zeros(())} for k, v in zero.items()}

    def step(self, x: Model, grad: Model, buffers: Buffers, lr: Tensor | None = None) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only. ``lr`` overrides the constant rate, as a tensor of the download."""
        if not grad:
            return x, buffers
        if _counts(self.weight_decay):
            grad = {k: _plus(g, self.weight_decay, x[k]) for k, g in grad.items()}
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


def _log(beta: Factor) -> Factor:
    if isinstance(beta, Tensor):
        return beta.log()
    return math.log(beta) if beta else -math.inf
