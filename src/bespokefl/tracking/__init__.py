"""Runs on TensorBoard and MLflow, beside their own files: whoever watches a run gets what rounds.jsonl gets."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from bespokefl.errors import InputError
from bespokefl.tracking.base import TrackedRun, Tracker, TrackSettings
from bespokefl.tracking.observer import Tracking

__all__ = ["TRACKERS", "TrackSettings", "TrackedRun", "Tracker", "Tracking", "make_tracking"]

# By name: the package that it needs, and the module here whose `make` gives the tracker of an output folder.
TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}


def make_tracking(settings: TrackSettings, out: Path, say: Callable[[str], None]) -> Tracking:
    """The trackers that a configuration asks for; InputError if one's package is missing."""
    missing = [name for name in settings.to if importlib.util.find_spec(TRACKERS[name]) is None]
    if missing:
        raise InputError(f"track.to = {settings.to}: {' and '.join(missing)} missing; pip install 'bespokefl[track]'")
    makers = [importlib.import_module(f"bespokefl.tracking.{name}_tracker") for name in dict.fromkeys(settings.to)]
    return Tracking([module.make(settings, out) for module in makers], say)
