"""Ctrl-C and SIGTERM end a run after the round that is going, so that it can be resumed from there."""

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_LATER = 0.02  # seconds until a signal that came in the middle of an import is looked at again


class Interrupted(Exception):
    """The user stopped the experiment; the text says how far it came."""


class StopRequest:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked = False


STOPPED = 130  # the exit code of a command that a signal stopped


class _Command:
    """Whether a command of the command line has begun."""

    begun = False


def listen() -> None:
    """From now on Ctrl-C and SIGTERM end the program, and raise KeyboardInterrupt once a command has `begun`.

    Raised inside an import it might come out as another error, so an import ends first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _heard)


def begun() -> None:
    """A command has begun, and says itself how it was stopped."""
    _Command.begun = True


def _heard(number: int, frame: FrameType | None) -> None:
    if not _Command.begun:
        print("stopped before anything was done", file=sys.stderr, flush=True)
        os._exit(STOPPED)
    if not _imports(frame):
        raise KeyboardInterrupt
    threading.Timer(_LATER, _thread.interrupt_main, [number]).start()


def _imports(frame: FrameType | None) -> bool:
    """Whether an import is what was interrupted, or one of the callers."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def stop_on_signals(announce: Callable[[], None]) -> Iterator[StopRequest]:
    """The first signal is noted and announced, a second one stops at once with KeyboardInterrupt."""
    request = StopRequest()

    def note(_signal: int, _frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True
        announce()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may listen to signals
        yield request
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
