"""Checkpoints: what a run needs to go on after a kill as if nothing had happened."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bespokefl.experiments import checkpoint
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.federation.loop import RoundLoop

OF_FEDERATION, OF_CALLBACKS = "federation", "callbacks"
CHECKPOINT_SHARE = 0.03  # of the time, at most, when checkpoint.every is "auto"


class Checkpoints(Callback):
    """Saves the federation and the state of all callbacks, and takes them back at the start.

    Args:
        folder: where checkpoints lie.
        every: so many rounds, or ``auto``: so that saving takes a small share of the time.
        notes: what is written beside them, to know the run by.
        say: is told what was wrong with newer checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        every: int | Literal["auto"] = "auto",
        notes: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder, self._every, self._notes, self._say = folder, every, dict(notes or {}), say
        self._saved_at, self._pause = time.monotonic(), 0.0

    def resume(self, run: Rounds) -> None:
        stored = checkpoint.load_newest(self._folder)
        if stored is None:
            return
        for warning in stored.warnings:
            self._say(f"warning: {warning}; going on from round {stored.step}")
        restore(run.federation, stored)
        for one in run.callbacks:
            one.restore(part(stored.tensors, one.name) | stored.meta.get(OF_CALLBACKS, {}).get(one.name, {}))
        if stored.step == run.until:  # else the next save does it
            checkpoint.tidy(self._folder, stored.step, keep=1)

    def on_round(self, run: Rounds) -> None:
        if run.stop or run.is_last or self._due(run.newest.round):
            self._save(run)

    def on_end(self, run: Rounds) -> None:
        """The rounds that are whole are kept of a run that cannot go on."""
        if run.ended_early is not None and run.done == run.federation.rounds_done:
            self._save(run)

    def _due(self, round_: int) -> bool:
        if self._every != "auto":
            return round_ % self._every == 0
        return time.monotonic() - self._saved_at >= self._pause

    def _save(self, run: Rounds) -> None:
        began = time.monotonic()
        for one in run.callbacks:
            one.flush()
        tensors, meta = run.federation.state()
        contents = {f"{OF_FEDERATION}/{name}": value for name, value in tensors.items()}
        plain: dict[str, dict[str, Any]] = {}
        for one in run.callbacks:
            for name, value in one.state().items():
                if isinstance(value, Tensor):
                    contents[f"{one.name}/{name}"] = value
                else:
                    plain.setdefault(one.name, {})[name] = value
        notes = {**self._notes, **({OF_CALLBACKS: plain} if plain else {})}
        done = run.federation.rounds_done
        checkpoint.save(self._folder, done, contents, {**meta, **notes}, keep=1 if done == run.until else 2)
        self._saved_at, self._pause = time.monotonic(), (time.monotonic() - began) / CHECKPOINT_SHARE


def restore(federation: RoundLoop, stored: checkpoint.Checkpoint) -> None:
    """Put a federation into the state of a checkpoint."""
    federation.restore(part(stored.tensors, OF_FEDERATION), stored.meta)


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}
