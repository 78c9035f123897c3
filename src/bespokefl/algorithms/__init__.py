"""The algorithms, one file per paper. The registry is the list of files in this folder."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from bespokefl.core.acting import unused
from bespokefl.core.algorithm import Algorithm, Setup, Training
from bespokefl.core.hyper import HyperParameter, checked, hyperparameters
from bespokefl.core.optimizers import BESIDE, OPTIMIZERS
from bespokefl.core.registry import Chosen, Registry
from bespokefl.errors import InputError

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmSpec", "Setup", "Training", "build_algorithm"]


class AlgorithmSpec(NamedTuple):
    name: str
    cls: type[Algorithm]
    summary: str  # one line
    paper: str
    hyperparameters: tuple[HyperParameter, ...]


def _spec(cls: type[Algorithm]) -> AlgorithmSpec:
    return AlgorithmSpec(cls.name, cls, description(cls).partition("\n")[0], cls.paper, hyperparameters(cls))


def description(cls: type[Algorithm]) -> str:
    """What the class says of itself, for a second method of a file, or else its file."""
    own = vars(cls).get("__doc__") or ""
    made_by_dataclass = own.startswith(f"{cls.__name__}(")
    return inspect.cleandoc(own) if own and not made_by_dataclass else inspect.getdoc(inspect.getmodule(cls)) or ""


def _registry() -> dict[str, AlgorithmSpec]:
    found: dict[str, AlgorithmSpec] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for cls in vars(module).values():
            own = isinstance(cls, type) and issubclass(cls, Algorithm) and cls.__module__ == module.__name__
            if own and "name" in vars(cls):
                found[cls.name] = _spec(cls)
    return dict(sorted(found.items()))


def _adopt(name: str, value: Any) -> AlgorithmSpec | None:
    if not (isinstance(value, type) and issubclass(value, Algorithm)):
        return None
    return AlgorithmSpec(
        name, value, description(value).partition("\n")[0], getattr(value, "paper", ""), hyperparameters(value)
    )


ALGORITHMS: Registry[AlgorithmSpec] = Registry(
    "algorithms", "algorithm.name", _registry(), _adopt, "a class derived from bespokefl.core.Algorithm"
)


def build_algorithm(
    name: str, settings: Mapping[str, Any] | None = None, hyper: Mapping[str, Any] | None = None
) -> Algorithm:
    """An algorithm by its registry name, or by ``package.module:Class`` for your own.

    ``settings`` are shared by several methods (``lr``, ``local_epochs``, ...): what changes nothing in this one is left
    out. ``hyper`` are the method's own, which win: what changes nothing is refused.
    """
    cls = ALGORITHMS.find(name).cls
    shared, own = (checked(cls, values or {}, name) for values in (settings, hyper))
    _refuse_beside(cls, shared | own, name)
    idle = unused(cls, {f.name: f.default for f in fields(cls)} | shared | own)
    return cls(**{key: value for key, value in shared.items() if key not in idle} | own)


def _refuse_beside(cls: type[Algorithm], told: Mapping[str, Any], method: str) -> None:
    """InputError for an option that stands beside an optimiser which takes it with its name."""
    optimizer = Chosen.of(told.get("optimizer", cls.optimizer)).name
    beside = BESIDE.get(optimizer, ())
    for name in {name for names in BESIDE.values() for name in names} & told.keys():
        if name not in beside and name in OPTIMIZERS.options(optimizer):
            raise InputError(
                f"algorithm.{name} = {told[name]!r} ({method}) stands beside optimizer = {optimizer!r}, which has a "
                f"{name} of its own: write optimizer = {{name = {optimizer!r}, {name} = ...}} and leave {name} out"
            )
