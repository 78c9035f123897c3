"""scikit-learn's bundled digits: the default data, no files needed."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources.base import DIGITS, Source


def _load(root: Path | None, options: NoOptions) -> Dataset:
    bunch = load_digits()
    return Dataset("digits", (bunch.images[:, None] / 16).astype(np.float32), bunch.target.astype(np.int64), DIGITS)


SOURCE = Source("digits", "1,797 handwritten digits, 8x8 grey, bundled with scikit-learn", "", _load)
