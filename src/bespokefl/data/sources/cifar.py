"""CIFAR-10 and CIFAR-100 in the official binary format; CIFAR-10 also as image sheets."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources.base import FilesMissing, Pixels, Source, find, folders, train_test
from bespokefl.data.sources.sheets import read_cifar10_sheets
from bespokefl.errors import InputError

CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_IMAGE_BYTES = 3 * 32 * 32


def read_binary(files: Sequence[Path], label_bytes: int) -> tuple[Pixels, Pixels]:
    """Images (n, 3, 32, 32) and labels of records `label bytes, image`; the last label byte is the (fine) class."""
    records = []
    for path in files:
        content = np.fromfile(path, dtype=np.uint8)
        if len(content) == 0 or len(content) % (label_bytes + _IMAGE_BYTES):
            raise InputError(
                f"{path} has {len(content)} bytes, which is no multiple of a record's {label_bytes + _IMAGE_BYTES}; "
                "use the official binary version."
            )
        records.append(content.reshape(-1, label_bytes + _IMAGE_BYTES))
    x = np.concatenate([part[:, label_bytes:] for part in records]).reshape(-1, 3, 32, 32)
    return x, np.concatenate([part[:, label_bytes - 1] for part in records])


def _refuse_pickles(places: Sequence[Path], names: Sequence[str], wanted: str) -> None:
    """Called when the binary files are missing: say so if only the pickled version is there."""
    for place in places:
        if any((place / name).exists() for name in names):
            raise FilesMissing(
                f"{place} holds the 'python version', which is pickled and can run code when read, so it is not "
                f"loaded; fetch {wanted}"
            )


def _load_cifar10(root: Path | None, options: NoOptions) -> Dataset:
    places = folders(root, "cifar-10-batches-bin", "cifar10")
    try:
        return read_cifar10_sheets(places)
    except FilesMissing:
        pass
    try:
        train = [find(places, f"data_batch_{batch}.bin") for batch in range(1, 6)]
        test = [find(places, "test_batch.bin")]
    except FilesMissing:
        _refuse_pickles(places, ("data_batch_1", "cifar-10-batches-py"), "the binary version (data_batch_1.bin ...)")
        raise
    return _from_binary("cifar10", train, test, 1, CLASSES10)


def _load_cifar100(root: Path | None, options: NoOptions) -> Dataset:
    places = folders(root, "cifar-100-binary", "cifar100")
    try:
        train, test = [find(places, "train.bin")], [find(places, "test.bin")]
    except FilesMissing:
        _refuse_pickles(places, ("meta", "cifar-100-python"), "the binary version (train.bin, test.bin)")
        raise
    names = train[0].with_name("fine_label_names.txt")
    classes = tuple(names.read_text().split()) if names.is_file() else tuple(str(label) for label in range(100))
    return _from_binary("cifar100", train, test, 2, classes)


def _from_binary(
    name: str, train: Sequence[Path], test: Sequence[Path], label_bytes: int, classes: tuple[str, ...]
) -> Dataset:
    (x_train, y_train), (x_test, y_test) = read_binary(train, label_bytes), read_binary(test, label_bytes)
    return train_test(name, np.concatenate([x_train, x_test]), y_train, y_test, classes)


SOURCES = (
    Source(
        "cifar10",
        "60,000 photographs, 32x32 colour, 10 classes",
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the official binary version, in data.root or its "
        "folder cifar-10-batches-bin), or cifar10_train_0.webp to cifar10_train_4.webp, cifar10_test.webp and "
        "cifar10_labels.npz",
        _load_cifar10,
    ),
    Source(
        "cifar100",
        "60,000 photographs, 32x32 colour, 100 classes",
        "train.bin and test.bin (the official binary version, in data.root or its folder cifar-100-binary)",
        _load_cifar100,
    ),
)
