"""Memory numbers that are at least plausible."""

import os

import pytest
import torch

from bespokefl.engines.memory import free_bytes, peak_bytes

CPU = torch.device("cpu")


def test_free_memory_is_positive_and_less_than_all() -> None:
    free = free_bytes(CPU)
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_peak_grows_with_what_is_used_and_never_falls() -> None:
    before = peak_bytes(CPU)
    block = torch.ones(before + 2**26, dtype=torch.uint8)  # more than all that was ever used
    assert peak_bytes(CPU) >= block.numel()
    highest = peak_bytes(CPU)
    del block
    assert peak_bytes(CPU) >= highest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu() -> None:
    device = torch.device("cuda")
    block = torch.ones(2**26, dtype=torch.uint8, device=device)
    assert peak_bytes(device) >= block.numel()
    assert 0 < free_bytes(device) < torch.cuda.get_device_properties(device).total_memory
