"""Settings and fixtures shared by all tests."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("bespoke", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("bespoke")

_MARK = "cifar10_labels.npz"  # a file by which the data pack is known


@pytest.fixture(scope="session")
def data_pack() -> Path:
    """The folder of the optional data pack: BESPOKE_DATA, or the `data` folder of a directory beside the repository."""
    if named := os.environ.get("BESPOKE_DATA"):
        if not (Path(named) / _MARK).is_file():
            pytest.fail(f"BESPOKE_DATA is {named!r}, where there is no {_MARK}")
        return Path(named)
    found = sorted(Path(__file__).resolve().parents[2].glob(f"*/data/{_MARK}"))
    if not found:
        pytest.skip("needs the data pack: set BESPOKE_DATA to its folder")
    return found[0].parent
