"""Personalised federated learning: an algorithm written for one client, run on many.

``import bespokefl as bfl`` is the front door. Its names are loaded when they are first used, so that the import itself
takes no time; ``bfl.Federation`` brings PyTorch, ``bfl.report`` Altair, and so on.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bespokefl.api.commands import adapt, export, report, reproduce, results, tune
    from bespokefl.api.experiment import ExperimentHistory, run_experiment
    from bespokefl.core import Algorithm, Task, hyper
    from bespokefl.data import FederatedData, load
    from bespokefl.errors import InputError
    from bespokefl.experiments.listing import list_algorithms, list_datasets, list_models
    from bespokefl.experiments.load_run import load_run
    from bespokefl.federation import Federation, History
    from bespokefl.models import build as build_model

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "ExperimentHistory",
    "FederatedData",
    "Federation",
    "History",
    "InputError",
    "Task",
    "adapt",
    "build_model",
    "export",
    "hyper",
    "list_algorithms",
    "list_datasets",
    "list_models",
    "load",
    "load_run",
    "report",
    "reproduce",
    "results",
    "run_experiment",
    "tune",
]

# Where each name lives: its module and, where that differs, what it is called there. The imports above say the same to
# type checkers.
_HOMES = {
    "Algorithm": "core",
    "ExperimentHistory": "api.experiment",
    "FederatedData": "data",
    "Federation": "federation",
    "History": "federation",
    "InputError": "errors",
    "Task": "core",
    "adapt": "api.commands",
    "build_model": "models:build",
    "export": "api.commands",
    "hyper": "core",
    "list_algorithms": "experiments.listing",
    "list_datasets": "experiments.listing",
    "list_models": "experiments.listing",
    "load": "data",
    "load_run": "experiments.load_run",
    "report": "api.commands",
    "reproduce": "api.commands",
    "results": "api.commands",
    "run_experiment": "api.experiment",
    "tune": "api.commands",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _FrontDoor(ModuleType):
    """Keeps ``bfl.report``, ``bfl.results`` and ``bfl.reproduce`` functions beside the packages of the same names.

    Importing a package's module also sets it as an attribute of the package, which would hide the function. The
    modules are imported as ever: ``from bespokefl.results.store import connect``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
