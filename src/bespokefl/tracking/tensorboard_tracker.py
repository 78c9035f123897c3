"""TensorBoard: event files in the folder `tensorboard` of each run."""

from pathlib import Path
from typing import Any

from bespokefl.results.tomlfile import dumps
from bespokefl.tracking.base import State, TrackedRun, TrackSettings, final_figures

FOLDER = "tensorboard"
FLUSH_SECONDS = 10


def make(settings: TrackSettings, out: Path) -> "TensorBoard":
    return TensorBoard()


class TensorBoard:
    """Events cannot be taken back, so a resumed run's are written anew from its rounds: one file, every round once."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._last = 0

    def open(self, run: TrackedRun) -> int:
        from torch.utils.tensorboard import SummaryWriter

        for old in (run.folder / FOLDER).glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(run.folder / FOLDER), flush_secs=FLUSH_SECONDS)
        self._writer.add_text("config", _block(dumps(run.document)))
        self._last = 0
        return 0

    def log(self, round_: int, figures: dict[str, float]) -> None:
        self._last = round_
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round_)

    def close(self, state: State, summary: dict[str, Any] | None) -> None:
        for name, value in final_figures(summary or {}).items():
            self._writer.add_scalar(name, value, self._last)
        self._writer.add_text("state", state)
        self._writer.close()

    def report(self, path: Path) -> None:
        """There is no place for files."""


def _block(text: str) -> str:
    """As it is, in TensorBoard's Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())
