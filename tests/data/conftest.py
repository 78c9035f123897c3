"""Fixtures of the data tests."""

from pathlib import Path

import numpy as np
import pytest

from bespokefl.data import Dataset


@pytest.fixture(scope="session")
def pack(data_pack: Path) -> str:
    """The data pack's folder as `load` takes it."""
    return str(data_pack)


@pytest.fixture
def make_dataset():
    """A dataset of one feature (the row number) with the given labels."""

    def make(y, classes: int, **fields) -> Dataset:
        labels = np.asarray(y, dtype=np.int64)
        x = np.arange(len(labels), dtype=np.float32)[:, None]
        return Dataset("toy", x, labels, tuple(str(k) for k in range(classes)), **fields)

    return make
