"""For finding mistakes: the sequential reference, stopped by the first error, which says where it happened."""

import contextlib
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

from bespokefl.core.program import Rows
from bespokefl.core.trees import Tree
from bespokefl.engines.base import Job
from bespokefl.engines.sequential import Sequential
from bespokefl.errors import BespokeError

_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_WRITTEN = (_PACKAGE / "algorithms", _PACKAGE / "models")  # what somebody writes who works on the package itself


class ClientError(BespokeError):
    """A client's program raised: in which round, of which client, at which stage, and the user's own line last."""


class Debug(Sequential):
    """Runs a program client by client, eagerly, and ends with the first error; results are the sequential engine's.

    The program and the module run as they are written: ``print`` prints, ``breakpoint()`` stops. With ``client`` it
    stops for that client alone.
    """

    name = "debug"
    left_out = ()

    def __init__(self, device: torch.device | str = "cpu", *, tf32: bool = True, client: int | None = None) -> None:
        super().__init__(device, tf32=tf32)
        self.client = client

    def _client(self, job: Job, r: int, plans: list[list[Rows]]) -> tuple[dict[str, Tree], Tree]:
        stops = self.client is None or int(job.clients[r]) == self.client
        with contextlib.nullcontext() if stops else _no_breakpoints():
            return super()._client(job, r, plans)

    def _stage(self, job: Job, r: int, stage: str, function: Callable[..., Tree], *values: Any) -> Tree:
        try:
            return super()._stage(job, r, stage, function, *values)
        except BdbQuit:  # somebody left the debugger
            raise KeyboardInterrupt from None
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            where = f"round {job.round + 1}, client {int(job.clients[r])}, {stage} ({name})"
            raise ClientError(f"{where}: {type(error).__name__}: {error}\n{_own_line(error)}") from error


@contextlib.contextmanager
def _no_breakpoints() -> Iterator[None]:
    before = sys.breakpointhook
    sys.breakpointhook = lambda *args, **kwargs: None
    try:
        yield
    finally:
        sys.breakpointhook = before


def _own_line(error: Exception) -> str:
    """The innermost line of the user's files; where there is none, of the method or the model, or else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _within(frame, _PACKAGE, _TORCH)]
    ours = [frame for frame in frames if _within(frame, *_WRITTEN)]
    frame = (users or ours or list(frames))[-1]
    return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'


def _within(frame: FrameSummary, *folders: Path) -> bool:
    return any(Path(frame.filename).is_relative_to(folder) for folder in folders)
