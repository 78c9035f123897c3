"""Image sheets: many equal square tiles in one image file, row by row, the last row padded; labels in a .npz beside it.

The datasets that come so: SVHN, MNIST-M, Office-Caltech10, and CIFAR-10 as one of its two formats.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources.base import (
    DIGITS,
    Pixels,
    Source,
    channels_first,
    concatenated_domains,
    find,
    folders,
    read_image,
    train_test,
)
from bespokefl.data.sources.npz import read_npz
from bespokefl.errors import InputError

OFFICE_DOMAINS = ("amazon", "caltech", "dslr", "webcam")


def read_sheets(sheets: Sequence[tuple[Path, int]], tile: int, columns: int) -> Pixels:
    """The tiles of several (file, number of tiles) as one array (n, 3, tile, tile); one decoded sheet at a time."""
    x = np.empty((sum(count for _, count in sheets), 3, tile, tile), dtype=np.uint8)
    start = 0
    for path, count in sheets:
        pixels = channels_first(read_image(path, "RGB"))
        rows = -(-count // columns)
        if pixels.shape != (3, rows * tile, columns * tile):
            raise InputError(
                f"{path} is {pixels.shape[2]}x{pixels.shape[1]} pixels; {count} labels need {columns * tile}x"
                f"{rows * tile} ({columns} tiles of {tile} pixels a row)."
            )
        tiles = pixels.reshape(3, rows, tile, columns, tile).transpose(1, 3, 0, 2, 4)
        x[start : start + count] = tiles.reshape(rows * columns, 3, tile, tile)[:count]
        start += count
    return x


def read_cifar10_sheets(places: Sequence[Path]) -> Dataset:
    """CIFAR-10 as five train sheets and one test sheet."""
    labels = read_npz(find(places, "cifar10_labels.npz"), "y_train", "y_test", "classes")
    fifths = np.array_split(labels["y_train"], 5)
    sheets = [(find(places, f"cifar10_train_{i}.webp"), len(part)) for i, part in enumerate(fifths)]
    sheets.append((find(places, "cifar10_test.webp"), len(labels["y_test"])))
    classes = tuple(str(name) for name in labels["classes"])
    return train_test("cifar10", read_sheets(sheets, 32, 100), labels["y_train"], labels["y_test"], classes)


def _load_digit_sheets(name: str, root: Path | None) -> Dataset:
    places = folders(root, name)
    labels = read_npz(find(places, "digits_labels.npz"), f"{name}_train", f"{name}_test")
    y_train, y_test = labels[f"{name}_train"], labels[f"{name}_test"]
    sheets = [(find(places, f"{name}_train.jpg"), len(y_train)), (find(places, f"{name}_test.jpg"), len(y_test))]
    return train_test(name, read_sheets(sheets, 32, 100), y_train, y_test, DIGITS)


def load_svhn(root: Path | None, options: NoOptions) -> Dataset:
    """SVHN, a subset of 9,298 crops."""
    return _load_digit_sheets("svhn", root)


def load_mnistm(root: Path | None, options: NoOptions) -> Dataset:
    """MNIST-M, a subset of 6,500."""
    return _load_digit_sheets("mnistm", root)


def _load_office_caltech10(root: Path | None, options: NoOptions) -> Dataset:
    places = folders(root, "office-caltech10")
    labels = read_npz(find(places, "office_caltech10_labels.npz"), "classes", *OFFICE_DOMAINS)
    parts = {}
    for domain in OFFICE_DOMAINS:
        sheet = find(places, f"office_caltech10_{domain}.jpg")
        parts[domain] = (read_sheets([(sheet, len(labels[domain]))], 64, 40), labels[domain].astype(np.int64))
    return concatenated_domains("office-caltech10", parts, tuple(str(name) for name in labels["classes"]))


SOURCES = (
    Source(
        "svhn",
        "street-view house numbers, 32x32 colour, subset of 9,298",
        "svhn_train.jpg, svhn_test.jpg, digits_labels.npz",
        load_svhn,
    ),
    Source(
        "mnistm",
        "MNIST-M, digits on photographs, 32x32 colour, subset of 6,500",
        "mnistm_train.jpg, mnistm_test.jpg, digits_labels.npz",
        load_mnistm,
    ),
    Source(
        "office-caltech10",
        "objects in 4 domains, 64x64 colour, 10 classes, 2,533 images",
        "office_caltech10_{amazon,caltech,dslr,webcam}.jpg, office_caltech10_labels.npz",
        _load_office_caltech10,
    ),
)
