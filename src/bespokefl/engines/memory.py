"""How much memory there is for a cohort."""

import contextlib
import ctypes
import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that a run may still take on the device."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        return max(min(int(free + cached), card_bytes(device) - allocated), 0)
    limits = [_available_ram()]
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # inside a container the group's limit counts
        limits.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return max(min(limits), 0)


def card_bytes(device: torch.device) -> int:
    """Memory of the GPU, or this process's part of it."""
    total = torch.cuda.mem_get_info(device)[1]
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)  # newer torch has it
    return int(total * fraction)


def share_card(processes: int) -> None:
    """This process is one of several on its GPU: each takes its part, so that none finds the card filled by others."""
    if processes > 1:
        torch.cuda.set_per_process_memory_fraction(1 / processes)


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 2 * 2**30


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process ever used: of the device, or of its own on a CPU. `peak` has that of a run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Asks glibc to keep up to half a GiB of freed memory instead of returning it at once (Linux; else nothing).

    A stacked step allocates the same tens of megabytes each time. Given back and asked for again, their pages are
    cleared by the kernel every time, which costs as much as the matrix product that fills them.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**29)
        mallopt(mmap_threshold, 2**25)  # the largest that glibc takes
