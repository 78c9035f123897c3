"""The algorithms, one file per paper. The registry is the list of files in this folder.

Every method's class can be imported from here by its name, as ``from bespokefl.algorithms import Ditto, PGFed``.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from bespokefl.core.acting import unused
from bespokefl.core.algorithm import Algorithm, Setup, Training
from bespokefl.core.hyper import HyperParameter, checked, hyperparameters
from bespokefl.core.optimizers import BESIDE, OPTIMIZERS
from bespokefl.core.registry import Chosen, Registry
from bespokefl.errors import InputError

if TYPE_CHECKING:  # at run time the registry has them
    from bespokefl.algorithms.apfl import APFL
    from bespokefl.algorithms.ditto import Ditto
    from bespokefl.algorithms.fedalt import FedAlt
    from bespokefl.algorithms.fedamp import FedAMP
    from bespokefl.algorithms.fedavg import FedAvg
    from bespokefl.algorithms.fedavg_steps import FedAvgSteps
    from bespokefl.algorithms.fedbabu import FedBABU
    from bespokefl.algorithms.fedbn import FedBN
    from bespokefl.algorithms.feddyn import FedDyn
    from bespokefl.algorithms.fedfomo import FedFomo
    from bespokefl.algorithms.fedfv import FedFV
    from bespokefl.algorithms.fedhkd import FedHKD
    from bespokefl.algorithms.fedmgda import FedMGDAPlus
    from bespokefl.algorithms.fedper import FedPer
    from bespokefl.algorithms.fedpg import FedPG
    from bespokefl.algorithms.fedprox import FedProx
    from bespokefl.algorithms.fedrep import FedRep
    from bespokefl.algorithms.fedrod import FedRoD
    from bespokefl.algorithms.fedsam import FedSAM
    from bespokefl.algorithms.fedsim import FedSim
    from bespokefl.algorithms.l2sgd import L2SGD
    from bespokefl.algorithms.lg_fedavg import LGFedAvg
    from bespokefl.algorithms.lg_mix import LGMix
    from bespokefl.algorithms.local import Local
    from bespokefl.algorithms.per_fedavg import PerFedAvg
    from bespokefl.algorithms.pfedhn import PFedHN
    from bespokefl.algorithms.pfedme import PFedMe
    from bespokefl.algorithms.pgfed import PGFed, PGFedMo
    from bespokefl.algorithms.plgu_ghn import PLGUGHN
    from bespokefl.algorithms.plgu_grep import PLGUGRep
    from bespokefl.algorithms.plgu_lf import PLGULF
    from bespokefl.algorithms.s_fedpg import SFedPG
    from bespokefl.algorithms.splitgp import SplitGP

    ALGORITHMS: Registry["AlgorithmSpec"]

__all__ = [
    "ALGORITHMS",
    "APFL",
    "L2SGD",
    "PLGUGHN",
    "PLGULF",
    "Algorithm",
    "AlgorithmSpec",
    "Ditto",
    "FedAMP",
    "FedAlt",
    "FedAvg",
    "FedAvgSteps",
    "FedBABU",
    "FedBN",
    "FedDyn",
    "FedFV",
    "FedFomo",
    "FedHKD",
    "FedMGDAPlus",
    "FedPG",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedSim",
    "LGFedAvg",
    "LGMix",
    "Local",
    "PFedHN",
    "PFedMe",
    "PGFed",
    "PGFedMo",
    "PLGUGRep",
    "PerFedAvg",
    "SFedPG",
    "Setup",
    "SplitGP",
    "Training",
    "build_algorithm",
]


class AlgorithmSpec(NamedTuple):
    """A method as it is registered."""

    name: str
    cls: type[Algorithm]
    summary: str  # one line
    paper: str
    hyperparameters: tuple[HyperParameter, ...]


def _spec(cls: type[Algorithm]) -> AlgorithmSpec:
    return AlgorithmSpec(cls.name, cls, description(cls).partition("\n")[0], cls.paper, hyperparameters(cls))


def description(cls: type[Algorithm]) -> str:
    """What the class says of itself; empty if neither it nor its file says anything."""
    own = cls.__doc__ or ""
    made_by_dataclass = own.startswith(f"{cls.__name__}(")
    return "" if made_by_dataclass else inspect.cleandoc(own)


@cache
def _registry() -> dict[str, AlgorithmSpec]:
    """The methods by name; this imports the files of all."""
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


@cache
def _algorithms() -> "Registry[AlgorithmSpec]":
    return Registry(
        "algorithms", "algorithm.name", _registry(), _adopt, "a class derived from bespokefl.core.Algorithm"
    )


def __getattr__(name: str) -> Any:
    """``ALGORITHMS``, and the methods' classes by their names."""
    if name == "ALGORITHMS":
        return _algorithms()
    if not name.startswith("_"):  # such as __path__, which importing asks for
        for spec in _registry().values():
            if spec.cls.__name__ == name:
                return spec.cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def build_algorithm(
    name: str, settings: Mapping[str, Any] | None = None, hyper: Mapping[str, Any] | None = None
) -> Algorithm:
    """An algorithm by its registry name, or by ``package.module:Class`` for your own.

    ``settings`` are shared by several methods (``lr``, ``local_epochs``, ...): what changes nothing in this one is left
    out. ``hyper`` are the method's own, which win: what changes nothing is refused.
    """
    cls = _algorithms().find(name).cls
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
