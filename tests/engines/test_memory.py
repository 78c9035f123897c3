"""Memory numbers that are at least plausible."""

import os
from typing import NamedTuple

import pytest
import torch

from bespokefl.engines.memory import card_bytes, free_bytes, peak_bytes, share_card
from bespokefl.engines.steppers import Steppers

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_process_that_shares_its_card_has_its_part_only() -> None:
    device, processes = torch.device("cuda"), 64
    part = torch.cuda.get_device_properties(device).total_memory // processes
    assert free_bytes(device) > 2 * part  # else the card itself would be too full
    try:
        share_card(processes)
        assert free_bytes(device) <= part
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(part + 2**20, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_part_of_a_card_bounds_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert free_bytes(torch.device("cuda", 0)) == 750
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    assert free_bytes(torch.device("cuda", 0)) == 150  # a quarter of 1000, of which 100 are taken
    assert card_bytes(torch.device("cuda", 0)) == 250


class Kept(NamedTuple):
    """In the place of a captured graph, which needs a GPU."""

    nbytes: int


def steppers_that_keep(*sizes: int) -> Steppers:
    steppers = Steppers(CPU)
    steppers._captured = {f"graph {k}": Kept(size) for k, size in enumerate(sizes)}  # type: ignore[assignment, misc]
    return steppers


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_only_what_is_light_for_this_process_is_captured(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: part)
    for kept, light in (((), 100 * part), ((80 * part, 70 * part), 100 * part), ((80 * part, 90 * part), 80 * part)):
        steppers = steppers_that_keep(*(int(size) for size in kept))
        inputs = [torch.zeros(int(light) - 20, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)]
        assert steppers._fits(inputs)
        assert not steppers._fits([*inputs, torch.zeros(1, dtype=torch.uint8)])
