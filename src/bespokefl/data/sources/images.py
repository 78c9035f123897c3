"""Folders of image files: a folder per class (`images`), or per domain and class (`domains`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from bespokefl.data.dataset import Dataset
from bespokefl.data.sources.base import FilesMissing, Pixels, Source, channels_first, read_image
from bespokefl.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


@dataclass(frozen=True)
class ImageOptions:
    """How image files are read."""

    size: Annotated[int, Field(ge=1)] | None = None  # side of the square to resize to (bilinear); None: as stored
    mode: Literal["RGB", "L"] = "RGB"  # colour or grey


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def _read_all(files: Sequence[Path], options: ImageOptions) -> Pixels:
    """All images as one uint8 array; without `size` they must share one size."""
    x: Pixels | None = None
    for row, path in enumerate(files):
        image = read_image(path, options.mode)
        if options.size is not None:
            image = image.resize((options.size, options.size), Image.Resampling.BILINEAR)
        pixels = channels_first(image)
        if x is None:
            x = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != x.shape[1:]:
            raise InputError(
                f"{path} is {pixels.shape[2]}x{pixels.shape[1]} pixels but {files[0]} is {x.shape[3]}x{x.shape[2]}: "
                "set data.size to resize all images to one square size."
            )
        x[row] = pixels
    assert x is not None  # callers pass at least one file
    return x


def _read_tree(name: str, groups: Sequence[Path], options: ImageOptions) -> tuple[Dataset, list[int]]:
    """The images of several folders of class folders, and how many each folder has."""
    classes = sorted({folder.name for group in groups for folder in _subfolders(group)})
    found = [
        [(path, classes.index(folder.name)) for folder in _subfolders(group) for path in _image_files(folder)]
        for group in groups
    ]
    for group, images in zip(groups, found, strict=True):
        if not images:
            raise FilesMissing(f"found no class folders with images ({', '.join(SUFFIXES)}) in {group}")
    files = [pair for images in found for pair in images]
    x = _read_all([path for path, _ in files], options)
    y = np.array([label for _, label in files], dtype=np.int64)
    return Dataset(name, x, y, tuple(classes)), [len(images) for images in found]


def _root_folder(root: Path | None) -> Path:
    if root is None or not root.is_dir():
        raise FilesMissing("data.root is not set" if root is None else f"data.root = {str(root)!r} is not a folder")
    return root


def _load_images(root: Path | None, options: ImageOptions) -> Dataset:
    folder = _root_folder(root)
    split = {path.name for path in _subfolders(folder)} == {"train", "test"}
    groups = [folder / "train", folder / "test"] if split else [folder]
    data, sizes = _read_tree(folder.name, groups, options)
    is_test = np.arange(len(data)) >= sizes[0] if split else None
    return Dataset(data.name, data.x, data.y, data.classes, is_test)


def _load_domains(root: Path | None, options: ImageOptions) -> Dataset:
    folder = _root_folder(root)
    groups = _subfolders(folder)
    if not groups:
        raise FilesMissing(f"found no domain folders in {folder}")
    data, sizes = _read_tree(folder.name, groups, options)
    domain = np.repeat(np.arange(len(groups), dtype=np.int64), sizes)
    return Dataset(
        data.name, data.x, data.y, data.classes, domain=domain, domains=tuple(group.name for group in groups)
    )


SOURCES = (
    Source(
        "images",
        "your own image files, a folder per class",
        "a folder of images per class, or train/ and test/ with a folder per class each",
        _load_images,
        ImageOptions,
    ),
    Source(
        "domains",
        "your own image files, a folder per domain (or client) and class",
        "a folder per domain, each with a folder of images per class",
        _load_domains,
        ImageOptions,
    ),
)
