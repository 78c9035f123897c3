"""MNIST and Fashion-MNIST: idx files, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources.base import DIGITS, FilesMissing, Pixels, Source, find, folders, train_test
from bespokefl.data.sources.npz import dataset_of
from bespokefl.errors import InputError

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
IDX_FILES = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte "
    "(or each with .gz)"
)


def read_idx(path: Path) -> Pixels:
    """An idx file of unsigned bytes: magic 0 0 8 d, then d big-endian sizes, then the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); fetch it again.") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise InputError(
            f"{path} is not an idx file of unsigned bytes (it starts with {content[:4].hex() or 'nothing'})."
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise InputError(f"{path} ends inside its header; fetch it again.")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", content[3], 4))
    if len(content) - start != int(np.prod(shape)):
        raise InputError(f"{path} should hold {shape} bytes after its header but has {len(content) - start}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_folder(name: str, places: list[Path], classes: tuple[str, ...]) -> Dataset:
    def part(stem: str) -> Pixels:
        return read_idx(find(places, stem, f"{stem}.gz"))

    y_train, y_test = part("train-labels-idx1-ubyte"), part("t10k-labels-idx1-ubyte")
    x = np.concatenate([part("train-images-idx3-ubyte"), part("t10k-images-idx3-ubyte")])
    return train_test(name, x[:, None], y_train, y_test, classes)


def load_mnist(root: Path | None, options: NoOptions) -> Dataset:
    """MNIST from idx files or mnist.npz."""
    places = folders(root, "mnist")
    try:
        return _read_folder("mnist", places, DIGITS)
    except FilesMissing:
        return dataset_of("mnist", find(places, "mnist.npz"), DIGITS)


def _load_fashion_mnist(root: Path | None, options: NoOptions) -> Dataset:
    return _read_folder("fashion-mnist", [*folders(root, "fashion-mnist"), DEBIAN_FASHION_MNIST], FASHION)


SOURCES = (
    Source(
        "mnist",
        "70,000 handwritten digits, 28x28 grey",
        f"{IDX_FILES}, or mnist.npz (x_train, y_train, x_test, y_test); in data.root or its folder mnist",
        load_mnist,
    ),
    Source(
        "fashion-mnist",
        "70,000 pieces of clothing, 28x28 grey",
        f"{IDX_FILES}, in data.root or its folder fashion-mnist; found by itself where Debian's package "
        f"dataset-fashion-mnist is installed ({DEBIAN_FASHION_MNIST})",
        _load_fashion_mnist,
    ),
)
