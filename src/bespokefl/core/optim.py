"""Local optimisers as pure functions over trees; `core.optimizers` lists them."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bespokefl.core.hyper import hyper
from bespokefl.core.trees import Model, zeros
from bespokefl.errors import InputError

Buffers = dict[str, Any]  # what an optimiser remembers, by the names of the parameters: a tree for each


class Optimizer(Protocol):
    """A dataclass whose first field is ``lr``; the others are its options.

    Each name is on its own: a step moves the names in the gradient, and touches no other's buffers. Buffers start as
    zeros, so that zeros are a fresh start.
    """

    def init(self, params: Model) -> Buffers:
        """The buffers of the given parameters before the first step: zeros."""

    def step(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        """The moved model and the new buffers; a name without a gradient stays as it is."""


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


def _decaying(grad: Model, x: Model, weight_decay: Factor) -> Model:
    """The gradient with the weight decay added."""
    return {k: _plus(g, weight_decay, x[k]) for k, g in grad.items()} if _counts(weight_decay) else grad


@dataclass(frozen=True)
class SGD:
    """torch's SGD, without dampening. A zero buffer equals torch's "first buffer = first gradient"."""

    lr: Factor
    momentum: Factor = hyper(0.0, "momentum", low=0, below=1)
    weight_decay: Factor = hyper(0.0, "added to the gradient, times the parameter", low=0)
    nesterov: bool = hyper(False, "Nesterov's momentum: a step along g + momentum m")

    def __post_init__(self) -> None:
        if self.nesterov and not _counts(self.momentum):
            raise InputError("nesterov = true needs a momentum above 0")

    def init(self, params: Model) -> Model:
        """The momentum buffers of the given parameters (nothing without momentum)."""
        return zeros(params) if _counts(self.momentum) else {}

    def step(self, x: Model, grad: Model, buffers: Model) -> tuple[Model, Model]:
        """Moves the names in ``grad`` only."""
        grad = _decaying(grad, x, self.weight_decay)
        if _counts(self.momentum):
            m = {k: _plus(g, self.momentum, buffers[k]) for k, g in grad.items()}
            buffers = buffers | m
            grad = {k: _plus(g, self.momentum, m[k]) for k, g in grad.items()} if self.nesterov else m
        return x | {k: _minus(x[k], self.lr, g) for k, g in grad.items()}, buffers


@dataclass(frozen=True)
class Adam:
    """torch's Adam, with bias correction; weight decay is added to the gradient.

    Every parameter counts its own steps, as torch's do, so that a phase which moves some of them ages no other.
    """

    lr: Factor
    betas: tuple[Factor, Factor] = hyper((0.9, 0.999), "decay of the two moments", low=0, below=1)
    weight_decay: Factor = hyper(0.0, "added to the gradient, times the parameter", low=0)
    amsgrad: bool = hyper(False, "divide by the largest second moment so far")
    eps: Factor = hyper(1e-8, "added to the root of the second moment", above=0)

    def init(self, params: Model) -> Buffers:
        """By parameter: the moments m and v, the largest v so far (amsgrad), and the steps t."""
        zero = {k: torch.zeros_like(v) for k, v in params.items()}
        top = {k: {"top": v} if self.amsgrad else {} for k, v in zero.items()}
        return {k: {"m": v, "v": v, **top[k], "t": v.new_zeros(())} for k, v in zero.items()}

    def step(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only."""
        return self._moved(x, _decaying(grad, x, self.weight_decay), buffers)

    def _moved(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        if not grad:
            return x, buffers
        buffers = buffers | {k: self._remember(g, buffers[k]) for k, g in grad.items()}
        t = torch.stack([buffers[k]["t"] for k in grad])  # the scalars of all parameters in one operation each
        first, second = (-torch.expm1(t * _log(beta)) for beta in self.betas)  # 1 - beta^t, exact for small t too
        rates, roots = (self.lr / first).unbind(), second.sqrt().unbind()
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


@dataclass(frozen=True)
class AdamW(Adam):
    """torch's AdamW: Adam whose weight decay shrinks the parameters by itself, past the moments."""

    weight_decay: Factor = hyper(0.01, "share of the parameter that a step takes away, times the rate", low=0)

    def step(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only."""
        if _counts(self.weight_decay):
            x = x | {k: x[k] * (1 - self.lr * self.weight_decay) for k in grad}
        return self._moved(x, grad, buffers)


@dataclass(frozen=True)
class RMSprop:
    """torch's RMSprop; ``centered``: divided by the gradients' standard deviation, not by their root mean square."""

    lr: Factor
    alpha: Factor = hyper(0.99, "decay of the moments", low=0, below=1)
    eps: Factor = hyper(1e-8, "added to the root", above=0)
    weight_decay: Factor = hyper(0.0, "added to the gradient, times the parameter", low=0)
    momentum: Factor = hyper(0.0, "momentum of the divided gradients", low=0, below=1)
    centered: bool = hyper(False, "take the mean gradient's square away from the mean square")

    def init(self, params: Model) -> Buffers:
        """By parameter: the mean square v, the mean g (centered), and the momentum m."""
        names = ["v", *(["g"] if self.centered else []), *(["m"] if _counts(self.momentum) else [])]
        return {k: {name: torch.zeros_like(v) for name in names} for k, v in params.items()}

    def step(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only."""
        after, moved = {}, {}
        for k, g in _decaying(grad, x, self.weight_decay).items():
            v = self.alpha * buffers[k]["v"] + (1 - self.alpha) * (g * g)
            after[k] = {"v": v}
            if self.centered:
                after[k]["g"] = torch.lerp(buffers[k]["g"], g, 1 - self.alpha)
                v = (v - after[k]["g"] ** 2).clamp(min=0)  # no more negative by rounding
            g = g / (v.sqrt() + self.eps)
            if _counts(self.momentum):
                g = after[k]["m"] = _plus(g, self.momentum, buffers[k]["m"])
            moved[k] = _minus(x[k], self.lr, g)
        return x | moved, buffers | after


@dataclass(frozen=True)
class Adagrad:
    """torch's Adagrad: a step is divided by the root of the sum of all squares so far."""

    lr: Factor
    lr_decay: Factor = hyper(0.0, "the rate of step t is lr / (1 + (t - 1) lr_decay)", low=0)
    weight_decay: Factor = hyper(0.0, "added to the gradient, times the parameter", low=0)
    initial_accumulator_value: Factor = hyper(0.0, "what the sum of squares begins with", low=0)
    eps: Factor = hyper(1e-10, "added to the root", above=0)

    def init(self, params: Model) -> Buffers:
        """By parameter: the sum of squares v, without what it begins with, and the steps t."""
        return {k: {"v": torch.zeros_like(v), "t": v.new_zeros(())} for k, v in params.items()}

    def step(self, x: Model, grad: Model, buffers: Buffers) -> tuple[Model, Buffers]:
        """Moves the names in ``grad`` only."""
        grad = _decaying(grad, x, self.weight_decay)
        after = {k: {"v": buffers[k]["v"] + g * g, "t": buffers[k]["t"] + 1} for k, g in grad.items()}
        moved = {}
        for k, g in grad.items():
            rate = self.lr / (1 + (after[k]["t"] - 1) * self.lr_decay)
            root = (after[k]["v"] + self.initial_accumulator_value).sqrt()
            moved[k] = x[k] - rate * (g / (root + self.eps))
        return x | moved, buffers | after


def _log(beta: Factor) -> Factor:
    if isinstance(beta, Tensor):
        return beta.log()
    return math.log(beta) if beta else -math.inf
