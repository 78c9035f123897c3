"""What a source is, and the helpers that several of them share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from bespokefl.data.dataset import Dataset, IntArray
from bespokefl.data.options import NoOptions
from bespokefl.errors import InputError

Pixels = npt.NDArray[np.uint8]
DIGITS = tuple("0123456789")


class FilesMissing(InputError):
    """A dataset's files are not where the source looks."""


@dataclass(frozen=True)
class Source:
    """An entry of the registry."""

    name: str
    description: str
    files: str  # what to place at data.root; empty if nothing is needed
    load: Callable[[Path | None, Any], Dataset]  # (data.root, options)
    options: type[Any] = NoOptions


def folders(root: Path | None, *below: str) -> list[Path]:
    """The places to look: data.root and the named folders in it."""
    return [] if root is None else [root, *(root / name for name in below)]


def find(places: Iterable[Path], *names: str) -> Path:
    """The first file that exists, by place, then by name."""
    looked = list(places)
    for place in looked:
        for name in names:
            if (place / name).is_file():
                return place / name
    where = ", ".join(str(place) for place in looked) or "data.root, which is not set"
    raise FilesMissing(f"found no {' or '.join(names)} in {where}")


def train_test(
    name: str,
    x: npt.NDArray[Any],
    y_train: npt.NDArray[Any],
    y_test: npt.NDArray[Any],
    classes: tuple[str, ...],
) -> Dataset:
    """A dataset whose train rows come first and whose test rows follow."""
    y = np.concatenate([y_train, y_test])
    y = y if y.ndim == 3 else y.astype(np.int64)
    return Dataset(name, x, y, classes, is_test=np.arange(len(y)) >= len(y_train))


def read_image(path: Path, mode: str) -> Image.Image:
    """A decoded image in that mode (RGB, L)."""
    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except OSError as error:  # Pillow's UnidentifiedImageError is one
        raise InputError(f"{path} cannot be read as an image ({error}); replace or remove it.") from None


def channels_first(image: Image.Image) -> Pixels:
    """(C, H, W) pixels of an RGB or grey image."""
    pixels: Pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def resized_rgb(x: Pixels, size: int) -> Pixels:
    """Images (n, 1 or 3, H, W) as (n, 3, size, size): grey repeated, bilinear resizing."""
    if x.shape[1] == 1:
        x = np.repeat(x, 3, axis=1)
    if x.shape[2:] == (size, size):
        return x
    out = np.empty((len(x), 3, size, size), dtype=np.uint8)
    for row, pixels in enumerate(x):
        image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        out[row] = channels_first(image.resize((size, size), Image.Resampling.BILINEAR))
    return out


def concatenated_domains(
    name: str, parts: dict[str, tuple[Pixels, IntArray]], classes: tuple[str, ...], note: str = ""
) -> Dataset:
    """One dataset of several domains, in the order given."""
    domain = np.repeat(np.arange(len(parts), dtype=np.int64), [len(y) for _, y in parts.values()])
    x = np.concatenate([x for x, _ in parts.values()])
    y = np.concatenate([y for _, y in parts.values()]).astype(np.int64)
    return Dataset(name, x, y, classes, domain=domain, domains=tuple(parts), note=note)
