"""scikit-learn's bundled digits: the default data, no files needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from sklearn.datasets import load_digits

from bespokefl.core.rng import stream
from bespokefl.data.dataset import Dataset
from bespokefl.data.sources.base import DIGITS, Source

Images = npt.NDArray[np.float32]  # (n, 8, 8) from 0 to 1
STYLES = ("plain", "inverted", "turned", "blurred", "noisy", "faint")


@dataclass(frozen=True)
class DigitsOptions:
    """Other tasks made of the same digits."""

    domains: Annotated[int, Field(ge=1, le=len(STYLES))] | None = None  # equal parts, each seen in another style
    parity: bool = False  # two classes, even and odd, instead of ten


def _load(root: Path | None, options: DigitsOptions) -> Dataset:
    bunch = load_digits()
    images, y = (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)
    classes = DIGITS
    if options.parity:
        y, classes = y % 2, ("even", "odd")
    if options.domains is None:
        return Dataset("digits", images[:, None], y, classes)
    domain = stream(0, "digits-domain").permutation(len(y)) % options.domains
    for number, style in enumerate(STYLES[: options.domains]):
        images[domain == number] = _restyled(images[domain == number], style)
    names = STYLES[: options.domains]
    return Dataset("digits", images[:, None], y, classes, domain=domain.astype(np.int64), domains=names)


def _restyled(images: Images, style: str) -> Images:
    """The same digits with other features: what differs between domains is how a digit looks, not which there are."""
    if style == "inverted":
        return 1 - images
    if style == "turned":
        return np.ascontiguousarray(np.rot90(images, axes=(1, 2)))
    if style == "blurred":
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
        return np.asarray(windows.mean(axis=(3, 4)), dtype=np.float32)
    if style == "noisy":
        noise = stream(0, "digits-noise").normal(0, 0.3, images.shape)
        return np.asarray(np.clip(images + noise, 0, 1), dtype=np.float32)
    return images * np.float32(0.3) if style == "faint" else images


SOURCE = Source("digits", "1,797 handwritten digits, 8x8 grey, bundled with scikit-learn", "", _load, DigitsOptions)
