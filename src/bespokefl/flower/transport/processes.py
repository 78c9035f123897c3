"""Processes that belong together: none outlives the one that started it, however that one ends.

A child reads its standard input, which its parent never writes to: when the parent ends, even by SIGKILL, the pipe
closes and the child ends too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from bespokefl.errors import RunError

GRACE = 5.0  # seconds that a process has for an orderly end


class Child:
    """A module of this package as a process of its own; ends with the `with` block."""

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        output: IO[bytes] | None = None if log is None else log.open("ab")
        # A session of its own: Ctrl-C reaches the parent alone, who ends its children in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **(env or {})},
            start_new_session=True,
        )
        if output is not None:
            output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status of a process that has ended."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def last_words(self, lines: int = 5) -> str:
        """The end of the log, for a message about what went wrong."""
        text = "" if self.log is None else self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])

    def stop(self) -> None:
        self.ask_to_stop()
        if self.wait(GRACE) is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # with whatever it has started itself

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def check_alive(children: Iterable[Child]) -> None:
    """RunError, in one line, where one has ended."""
    for child in children:
        if (status := child.poll()) is not None:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise RunError(f"a process of the federation ended ({how}); its log is {child.log}")


def end_with_parent() -> None:
    """For the child: ends this process when the pipe from its parent closes."""

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def stop_on_sigterm() -> None:
    """For the child: SIGTERM unwinds the stack, so that what is open gets closed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
