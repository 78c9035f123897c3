"""Fixtures of the data tests."""

import os
from pathlib import Path

import numpy as np
import pytest

from bespokefl.data import Dataset


@pytest.fixture(scope="session")
def pack() -> str:
    """The folder of the real data packs: BESPOKE_DATA, or shared/data beside the checkout."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("BESPOKE_DATA", beside))
    if not (folder / "digits_labels.npz").is_file():
        pytest.skip("no real data packs; set BESPOKE_DATA to their folder")
    return str(folder)


@pytest.fixture
def make_dataset():
    """A dataset of one feature (the row number) with the given labels."""

    def make(y, classes: int, **fields) -> Dataset:
        labels = np.asarray(y, dtype=np.int64)
        x = np.arange(len(labels), dtype=np.float32)[:, None]
        return Dataset("toy", x, labels, tuple(str(k) for k in range(classes)), **fields)

    return make
