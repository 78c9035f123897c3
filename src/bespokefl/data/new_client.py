"""The data of one client that comes later, brought to the form in which a run had those of its own clients."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespokefl.data.dataset import Dataset, IntArray
from bespokefl.data.federated import FederatedData
from bespokefl.data.inputs import kind_of
from bespokefl.data.normalisation import normalise_alike
from bespokefl.data.sources import load_dataset
from bespokefl.data.sources.npz import read_npz
from bespokefl.data.splits import Splits, split_client
from bespokefl.errors import InputError

OF_IMAGES = ("images", "domains")  # sources whose options say how image files are read


def load_new_client(path: Path, like: FederatedData, test: float | None = None, seed: int = 0) -> FederatedData:
    """One client from a .npz file or a folder of images, a folder per class, with the classes and scaling of ``like``.

    Test rows are those that the data mark as such (x_test and y_test, is_test, a folder test), or else the fraction
    ``test`` at random; without it there are none.
    """
    dataset, named = _read(path, like)
    if dataset.x.shape[1:] != like.input_shape:
        raise InputError(
            f"--data {path} has samples of the shape {dataset.x.shape[1:]}; those of this run have {like.input_shape}."
        )
    labels = _labels(dataset, named, like.classes, path)
    x = normalise_alike(dataset.x, like.record.get("normalize", "unit"), like.record.get("moments", {}))
    train, held = _split(dataset, labels, test, seed, path)
    splits: Splits = {"train": (train,), "val": (held[:0],), "test": (held,)}
    return FederatedData(x, torch.from_numpy(labels), splits, like.classes, (path.stem,), {}, inputs=like.inputs)


def out_of_range(new: FederatedData, like: FederatedData) -> str | None:
    """What to tell people about values that are nothing like the run's; None if they are, as tokens always are."""
    if not like.x.is_floating_point():
        return None
    low, high = float(like.x.min()), float(like.x.max())
    seen = float(new.x.min()), float(new.x.max())
    room = high - low
    if low - room <= seen[0] and seen[1] <= high + room:
        return None
    return (
        f"the new client's inputs lie between {seen[0]:.4g} and {seen[1]:.4g} after the run's normalisation, the run's "
        f"between {low:.4g} and {high:.4g}: are they in the same units? Pixels are uint8, 0 to 255, or as the run's."
    )


def _read(path: Path, like: FederatedData) -> tuple[Dataset, bool]:
    """The data, and whether their classes have names."""
    if path.is_dir():
        return load_dataset("images", str(path), **_image_options(like)), True
    if path.suffix != ".npz" or not path.is_file():
        raise InputError(
            f"--data {path}: should be a .npz file with x and y, or a folder of images, a folder per class."
        )
    return load_dataset("npz", str(path), inputs=kind_of(like)), "classes" in read_npz(path)


def _image_options(like: FederatedData) -> dict[str, Any]:
    source = like.record.get("source", {})
    if source.get("kind") in OF_IMAGES:
        return dict(source.get("options", {}))
    return {"mode": "L" if len(like.input_shape) == 3 and like.input_shape[0] == 1 else "RGB"}


def _labels(dataset: Dataset, named: bool, classes: tuple[str, ...], path: Path) -> IntArray:
    """The run's label of each row: by the classes' names, or by number where they have none."""
    number = {name: k for k, name in enumerate(classes)}
    met = sorted({int(label) for label in dataset.y})
    if named:
        places = {label: number.get(dataset.classes[label]) for label in met}
        unknown = [dataset.classes[label] for label, place in places.items() if place is None]
    else:
        places = {label: label if label < len(classes) else None for label in met}
        unknown = [str(label) for label, place in places.items() if place is None]
    if unknown:
        allowed = ", ".join(classes) if named else f"0 to {len(classes) - 1}"
        raise InputError(f"--data {path} has the classes {', '.join(unknown)}, which this run never had: {allowed}.")
    return np.array([places[int(label)] for label in dataset.y], dtype=np.int64)


def _split(dataset: Dataset, labels: IntArray, test: float | None, seed: int, path: Path) -> tuple[IntArray, IntArray]:
    rows = np.arange(len(dataset), dtype=np.int64)
    if dataset.is_test is not None and dataset.is_test.any():
        if test is not None:
            raise InputError(f"--test {test}: {path} marks test rows of its own; leave --test out to use them.")
        if dataset.is_test.all():
            raise InputError(f"--data {path} marks all rows as test rows; some must be there to train on.")
        return rows[~dataset.is_test], rows[dataset.is_test]
    if test is None:
        return rows, rows[:0]
    if not 0 < test < 1:
        raise InputError(f"--test {test}: the fraction must lie between 0 and 1, both excluded.")
    train, _, held = split_client(rows, 0, path.stem, test, 0.0, seed, labels)
    return train, held
