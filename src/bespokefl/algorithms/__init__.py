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
from bespokefl.errors import InputError, unknown_name

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


ALGORITHMS: dict[str, AlgorithmSpec] = _registry()


def build_algorithm(
    name: str, settings: Mapping[str, Any] | None = None, hyper: Mapping[str, Any] | None = None
) -> Algorithm:
    """An algorithm by its registry name, or by ``package.module:Class`` for your own.

    ``settings`` are shared by several methods (``lr``, ``local_epochs``, ...): what changes nothing in this one is left
    out. ``hyper`` are the method's own, which win: what changes nothing is refused.
    """
    cls = _import(name) if ":" in name else _known(name)
    shared, own = (checked(cls, values or {}, name) for values in (settings, hyper))
    idle = unused(cls, {f.name: f.default for f in fields(cls)} | shared | own)
    return cls(**{key: value for key, value in shared.items() if key not in idle} | own)


def _known(name: str) -> type[Algorithm]:
    if name not in ALGORITHMS:
        raise unknown_name("algorithm.name", name, ALGORITHMS)
    return ALGORITHMS[name].cls


def _import(name: str) -> type[Algorithm]:
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"algorithm.name = {name!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise InputError(f"algorithm.name = {name!r} is not a class derived from bespokefl.algorithms.Algorithm")
    return cls
