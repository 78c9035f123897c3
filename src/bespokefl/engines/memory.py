"""How much memory there is for a cohort."""

import contextlib
import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that a run may still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    limits = [_available_ram()]
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # inside a container the group's limit counts
        limits.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return max(min(limits), 0)


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
    """The most memory used so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
