"""Ctrl-C and SIGTERM end a run after the round that is going, so that it can be resumed from there."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(Exception):
    """The user stopped the experiment; the text says how far it came."""


class StopRequest:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked = False


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
