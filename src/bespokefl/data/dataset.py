"""Pooled data before they are cut into clients."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bespokefl.core.rng import stream
from bespokefl.data.inputs import InputKind
from bespokefl.errors import InputError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One labelled dataset as a source delivers it; checked on construction."""

    name: str
    x: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | IntArray  # images (n, C, H, W), tables and tokens (n, ...)
    y: IntArray | Masks  # (n,) indices into classes; in segmentation (n, H, W) uint8, one for every pixel
    classes: tuple[str, ...]
    is_test: BoolArray | None = None  # rows of the official test split; None without one
    domain: IntArray | None = None  # (n,), indices into domains
    domains: tuple[str, ...] = ()
    inputs: InputKind | None = None  # what x was said to be
    note: str = ""  # what a reader of the results should know, e.g. which domains were not found

    def __post_init__(self) -> None:
        if self.x.dtype not in (np.uint8, np.float32, np.int64):
            allowed = "uint8 (pixels), int64 (tokens) or float32 (anything else)"
            raise self._wrong("x", f"has dtype {self.x.dtype}", allowed, "convert it")
        if self.x.ndim < 2 or 0 in self.x.shape:
            raise self._wrong(
                "x", f"has shape {self.x.shape}", "(n, C, H, W) or (n, features), none of them 0", "reshape it"
            )
        if self.x.dtype == np.float32 and not np.isfinite(self.x).all():
            row = int(np.flatnonzero(~np.isfinite(self.x.reshape(len(self.x), -1)).all(axis=1))[0])
            raise self._wrong(
                "x", f"holds NaN or infinity (first in row {row})", "finite numbers", "fill in or drop such rows"
            )
        if self.has_masks:
            self._check_masks()
        else:
            self._check_index("y", self.y, len(self.classes), "classes")
        if self.is_test is not None and (self.is_test.shape != (len(self.x),) or self.is_test.dtype != np.bool_):
            seen = f"has shape {self.is_test.shape} and dtype {self.is_test.dtype}"
            raise self._wrong("is_test", seen, f"one bool per row, ({len(self.x)},)", "mark the rows of the test split")
        if self.domain is not None:
            self._check_index("domain", self.domain, len(self.domains), "domains")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def has_masks(self) -> bool:
        """Whether every pixel has a label."""
        return self.y.ndim == 3

    @property
    def labels(self) -> IntArray:
        """One class per sample, of data without masks."""
        if self.has_masks:
            raise InputError(f"{self.name} has masks, and no label of a whole sample.")
        return self.y.astype(np.int64, copy=False)

    def _check_masks(self) -> None:
        expected = (len(self.x), *self.x.shape[2:])
        if self.x.ndim != 4 or self.y.shape != expected or self.y.dtype != np.uint8:
            seen = f"has shape {self.y.shape} and dtype {self.y.dtype} beside x of shape {self.x.shape}"
            raise self._wrong("y", seen, "masks (n, H, W) of uint8 for images (n, C, H, W)", "make them agree")
        if len(self.classes) < 2 or self.y.max() >= len(self.classes):
            seen = f"holds the label {self.y.max()}, with {len(self.classes)} classes named"
            raise self._wrong("y", seen, "0 (the background) to the last class", "name all classes, two or more")

    def _check_index(self, field: str, values: npt.NDArray[Any], count: int, names: str) -> None:
        if values.shape != (len(self.x),) or values.dtype != np.int64:
            seen = f"has shape {values.shape} and dtype {values.dtype}"
            raise self._wrong(field, seen, f"one int64 per row of x, ({len(self.x)},)", "give each row one value")
        if values.min() < 0 or values.max() >= count:
            seen = f"holds values from {values.min()} to {values.max()}"
            raise self._wrong(field, seen, f"0 to {count - 1}", f"number them from 0, or name all {names}")

    def _wrong(self, field: str, seen: str, allowed: str, remedy: str) -> InputError:
        return InputError(f"Dataset {self.name!r}: {field} {seen}; allowed: {allowed}. To do: {remedy}.")

    def take(self, rows: IntArray) -> "Dataset":
        """The same dataset with these rows only."""
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            is_test=None if self.is_test is None else self.is_test[rows],
            domain=None if self.domain is None else self.domain[rows],
        )

    def sample(self, count: int, seed: int) -> "Dataset":
        """At most `count` rows, drawn uniformly, in their stored order."""
        if count < 1:
            raise InputError(f"data.max_samples = {count}: must be at least 1; leave it out to use all samples.")
        if count >= len(self):
            return self
        return self.take(np.sort(stream(seed, "max_samples").choice(len(self), count, replace=False)))
