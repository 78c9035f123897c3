"""The peak memory of a run is of that run alone, or it is not measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bespokefl.engines.peak import PeakMemory
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import LineReporter

CPU, MIB = torch.device("cpu"), 2**20
on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def peak_of(megabytes: int, device: torch.device = CPU) -> int | None:
    with PeakMemory() as memory:
        block = torch.ones(megabytes * MIB, dtype=torch.uint8, device=device)
        del block
        return memory.bytes(device)


@on_linux
def test_a_small_run_after_a_large_one_has_a_small_peak() -> None:
    held = torch.ones(100 * MIB, dtype=torch.uint8)  # what the process has anyway is of neither
    for megabytes in (20, 300, 20, 300, 60):
        found = peak_of(megabytes)
        assert found is not None and 0.9 * megabytes < found / MIB < megabytes + 15, megabytes
    assert held.sum() == held.numel()


@on_a_gpu
def test_the_same_on_a_gpu() -> None:
    device = torch.device("cuda")
    held = torch.ones(100 * MIB, dtype=torch.uint8, device=device)
    assert [peak_of(n, device) for n in (20, 300, 20)] == [20 * MIB, 300 * MIB, 20 * MIB]
    assert held.numel()


def test_of_two_at_the_same_time_neither_has_a_number() -> None:
    with PeakMemory() as first:
        with PeakMemory() as second:
            assert first.bytes(CPU) is None and second.bytes(CPU) is None
        assert first.bytes(CPU) is None  # it cannot tell which part was its own
    with PeakMemory() as third:
        assert third.bytes(CPU) is None or Path("/proc/self/clear_refs").exists()


def peaks(out: Path, **document: Any) -> dict[str, int | None]:
    experiment = parse_experiment(
        {"data": {"clients": 4, "max_samples": 200}, "train": {"rounds": 2, "local_epochs": 1}} | document
    )
    outcome = run_experiment(experiment, out, resume=False, reporter=LineReporter(Console(quiet=True)))
    assert not outcome.failed
    found = {f"{folder.parent.name}/{folder.name}": folder / "summary.json" for folder in outcome.finished}
    return {name: json.loads(path.read_text())["peak_memory_bytes"] for name, path in found.items()}


@on_linux
def test_a_run_does_not_inherit_the_peak_of_the_one_before(tmp_path: Path) -> None:
    large = peaks(tmp_path / "a", algorithms=["fedavg"], model={"name": "mlp", "hidden": [2000, 2000]})
    small = peaks(tmp_path / "b", algorithms=["fedavg"], model={"name": "linear"})
    was, now = large["fedavg/seed-0"], small["fedavg/seed-0"]
    assert was is not None and now is not None
    assert was > 4 * 2000 * 2000 * 4 > 5 * now  # four clients' models at once, four bytes a number


def test_runs_that_share_a_process_have_none(tmp_path: Path) -> None:
    found = peaks(tmp_path, algorithms=["fedavg"], model={"name": "linear"}, seeds=[0, 1], engine={"together": 2})
    assert found == {"fedavg/seed-0": None, "fedavg/seed-1": None}
