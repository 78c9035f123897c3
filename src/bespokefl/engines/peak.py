"""The most memory that one run takes, apart from what its process held before."""

import contextlib
import ctypes
import gc
import importlib
import re
import threading
from pathlib import Path
from typing import Self

import torch

_OWN = Path("/proc/self")  # Linux
_RESET_PEAK = "5"  # what clear_refs takes for it
_going: set["PeakMemory"] = set()
_changing = threading.Lock()


class PeakMemory:
    """Measures from its beginning (``with``) to ``bytes``: the peak in between, above the level at the beginning.

    On a GPU it counts what torch allocates there, on a CPU the resident memory of the process (Linux). Memory belongs
    to a process, so where several are measured at the same time none has a number.
    """

    def __init__(self) -> None:
        self._alone = True
        self._resident: int | None = None
        self._allocated: dict[int, int] = {}  # by GPU

    def __enter__(self) -> Self:
        with _changing:
            for other in _going:
                other._alone = self._alone = False
            _going.add(self)
            if self._alone:
                self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        with _changing:
            _going.discard(self)

    def bytes(self, device: torch.device) -> int | None:
        """The peak so far; None where it cannot be known."""
        if not self._alone:
            return None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            return torch.cuda.max_memory_allocated(index) - self._allocated.get(index, 0)
        peak = _status("VmHWM")
        return None if peak is None or self._resident is None else max(0, peak - self._resident)

    def _begin(self) -> None:
        importlib.import_module("torch._dynamo")  # an engine loads it when it first traces: it is of no run
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
                self._allocated[index] = torch.cuda.memory_allocated(index)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(
                0
            )  # else a run would live on what the one before freed, and seem to take less
        with contextlib.suppress(OSError):
            (_OWN / "clear_refs").write_text(_RESET_PEAK)
            self._resident = _status("VmRSS")


def _status(name: str) -> int | None:
    """A size in bytes that Linux tells of this process."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB$", (_OWN / "status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    return None
