"""The local optimisers by name, and one's own: a dataclass with ``init`` and ``step``, as ``module:name``."""

import dataclasses
from typing import Any

import torch

from bespokefl.core.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from bespokefl.core.registry import Chosen, Registry, options_of, told
from bespokefl.core.trees import leaves
from bespokefl.errors import InputError

# The options of SGD and Adam that are hyper-parameters of every method; those of others stand in their table.
BESIDE = {"sgd": ("momentum", "weight_decay"), "adam": ("betas", "weight_decay", "amsgrad")}


def _adopt(name: str, value: Any) -> type[Optimizer] | None:
    fits = isinstance(value, type) and dataclasses.is_dataclass(value) and {"init", "step"} <= {*dir(value)}
    first = [field.name for field in dataclasses.fields(value)][:1] if fits else []
    return value if first == ["lr"] else None


OPTIMIZERS: Registry[type[Optimizer]] = Registry(
    "optimizers",
    "algorithm.optimizer",
    {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "adagrad": Adagrad},
    _adopt,
    "a dataclass with the field lr first, and methods init(params) and step(x, grad, buffers)",
    lambda cls: options_of(cls, 1),
    BESIDE,
)


def make_optimizer(choice: str | Chosen, lr: float, beside: dict[str, Any]) -> Optimizer:
    """An optimiser with its options; ``beside`` are those that are not with its name."""
    chosen = Chosen.of(choice)
    cls: Any = OPTIMIZERS.find(chosen.name)
    own: Optimizer = cls(lr, **beside, **dict(chosen.options))
    return own


def check_optimizer(choice: str | Chosen, lr: float, beside: dict[str, Any], method: str) -> None:
    """InputError for options that do not go together, and for an optimiser of somebody's own that cannot step."""
    key = f"{OPTIMIZERS.key} = {Chosen.of(choice)} ({method})"
    try:
        optimizer = make_optimizer(choice, lr, beside)
        if Chosen.of(choice).name not in OPTIMIZERS:
            _try(optimizer)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    except Exception as error:
        raise InputError(f"{key} fails: {told(error)}") from error


def _try(optimizer: Optimizer) -> None:
    """A step of one of two parameters."""
    x = {"a": torch.ones(2), "b": torch.ones(())}
    buffers = optimizer.init(x)
    if any(bool(v.any()) for v in leaves(buffers)):
        raise InputError("init gives buffers other than zeros, but zeros are what methods take for a fresh start")
    moved, after = optimizer.step(x, {"a": torch.ones(2)}, buffers)
    if list(moved) != list(x) or any(moved[k].shape != v.shape for k, v in x.items()):
        raise InputError("step(x, grad, buffers) must return (x, buffers), x with all names and shapes that it got")
    if not torch.equal(moved["b"], x["b"]):
        raise InputError("step moves a parameter that is not in the gradient; it must leave it as it is")
    if [v.shape for v in leaves(after)] != [v.shape for v in leaves(buffers)]:
        raise InputError("step returns other buffers than init gives; they must keep their names and shapes")
