"""What a tracker is told, and by which names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bespokefl.progress import Line

State = Literal["finished", "failed", "stopped"]

# The keys of a round's line, and what they are called in a tracker.
NAMES = {
    "mean": "accuracy/mean",
    "std": "accuracy/std",
    "worst5": "accuracy/worst5",
    "top5": "accuracy/top5",
    "val_mean": "accuracy/val_mean",
    "loss": "loss/test",
    "bytes_down": "traffic/bytes_down",
    "bytes_up": "traffic/bytes_up",
    "seconds": "time/seconds",
}
EVERY_ROUND = NAMES["seconds"]  # a figure that no round lacks


class TrackSettings(Protocol):
    """What [track] says."""

    @property
    def to(self) -> Sequence[str]: ...

    @property
    def mlflow_uri(self) -> str | None: ...

    @property
    def experiment(self) -> str | None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker meets it."""

    folder: Path
    algorithm: str
    label: str
    seed: int
    document: dict[str, Any]  # the resolved configuration

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.seed}"


class Tracker(Protocol):
    """Trackers are told of one run at a time."""

    name: str

    def open(self, run: TrackedRun) -> int:
        """Begin with a run, or go on with it; the last round that it already has."""

    def log(self, round_: int, figures: dict[str, float]) -> None:
        """What a round gave."""

    def close(self, state: State, summary: dict[str, Any] | None) -> None:
        """The run is over for now; a finished one has a summary."""

    def report(self, path: Path) -> None:
        """The report of the whole experiment is written."""


def figures_of(line: Line) -> dict[str, float]:
    """A round's figures, without those that it does not have."""
    return {name: float(line[key]) for key, name in NAMES.items() if line.get(key) is not None}


def final_figures(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of a summary, those of new clients included."""
    new = {f"new_clients_{key}": value for key, value in (summary.get("new_clients") or {}).items()}
    numbers = {key: value for key, value in (summary | new).items() if isinstance(value, int | float)}
    return {f"final/{key}": float(value) for key, value in numbers.items() if not isinstance(value, bool)}
