"""NumPy archives: a user's own (`npz`), and the datasets that come as one (`usps`, `organamnist`)."""

import lzma
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bespokefl.data.checks import MOST_CLASSES
from bespokefl.data.dataset import Dataset
from bespokefl.data.headers import MOST_GB, check_size
from bespokefl.data.inputs import InputKind, stored_as
from bespokefl.data.options import NoOptions
from bespokefl.data.sources.base import DIGITS, FilesMissing, Source, find, folders, train_test
from bespokefl.errors import InputError

Arrays = dict[str, npt.NDArray[Any]]
POOLED, SPLIT = ("x", "y"), ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("is_test", "domain", "classes", "domains")
ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)


def read_npz(path: Path, *required: str, max_gb: float = MOST_GB) -> Arrays:
    """All arrays of an archive; pickled objects, and more than so many GB, are refused before anything is unpacked."""
    try:
        check_size(path, max_gb, f"set data.max_gb = {2 * max_gb:g}, say, if the machine has room for them")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise InputError(
            f"{path} cannot be read as a .npz of plain arrays ({error}); write it with numpy.savez, without objects."
        ) from None
    absent = [key for key in required if key not in arrays]
    if absent:
        raise InputError(f"{path} lacks {', '.join(absent)}; it holds {', '.join(arrays) or 'nothing'}.")
    return arrays


@dataclass(frozen=True)
class NpzOptions:
    """How arrays are read."""

    inputs: InputKind | None = None  # what x is; None: by its dtype and shape, whole numbers by the model
    max_gb: float = MOST_GB  # of arrays that are read; told by the file's headers before anything is


def as_inputs(x: npt.NDArray[Any], where: str, inputs: InputKind | None = None) -> npt.NDArray[Any]:
    """uint8, float32 or int64 (tokens); what is not said to be numbers or tokens may be images.

    Images come as (n, C, H, W), also from (n, H, W) and, with 1 or 3 channels, (n, H, W, C).
    """
    kind: InputKind | None = "image" if inputs is None and x.dtype == np.uint8 and x.ndim >= 3 else inputs
    x = stored_as(x, kind, where)
    x = x.astype(np.float32) if x.dtype.kind == "f" else x
    if inputs in ("numbers", "tokens") or x.dtype == np.int64:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def dataset_of(
    name: str,
    path: Path,
    classes: tuple[str, ...] | None = None,
    said: InputKind | None = None,
    max_gb: float = MOST_GB,
) -> Dataset:
    """The dataset in an archive with the keys documented for the source `npz`."""
    arrays = read_npz(path, max_gb=max_gb)
    keys = next((keys for keys in (SPLIT, POOLED) if set(keys) <= set(arrays)), None)
    allowed = set(keys or ()) | set(OPTIONAL if keys == POOLED else OPTIONAL[2:3])
    if keys is None or not set(arrays) <= allowed:
        raise InputError(
            f"{path} holds the keys {', '.join(sorted(arrays))}; allowed: {', '.join(SPLIT)} (and classes), "
            f"or {', '.join(POOLED)} (and {', '.join(OPTIONAL)})."
        )
    labels = [_labels(arrays[key], f"{path}: {key}") for key in keys[1::2]]
    inputs = [as_inputs(arrays[key], f"{path}: {key}", said) for key in keys[::2]]
    if "classes" in arrays:
        classes = _strings(arrays["classes"], f"{path}: classes")
    elif classes is None:
        _check_few(labels, path)
        classes = tuple(str(label) for label in range(1 + max(int(y.max(initial=0)) for y in labels)))
    if keys == SPLIT:
        _check_pairs(path, inputs, labels)
        return replace(train_test(name, np.concatenate(inputs), labels[0], labels[1], classes), inputs=said)
    domain = _whole_numbers(arrays["domain"], f"{path}: domain") if "domain" in arrays else None
    if "domains" in arrays:
        domains = _strings(arrays["domains"], f"{path}: domains")
    else:
        domains = () if domain is None else tuple(str(d) for d in range(1 + int(domain.max(initial=0))))
    is_test = _truths(arrays["is_test"], f"{path}: is_test") if "is_test" in arrays else None
    return Dataset(name, inputs[0], labels[0], classes, is_test, domain, domains, said)


def _check_few(labels: list[npt.NDArray[Any]], path: Path) -> None:
    """Labels such as 0 and 2,000,000 would make a model with two million outputs."""
    highest = max(int(y.max(initial=0)) for y in labels)
    if highest >= MOST_CLASSES:
        raise InputError(
            f"{path}: y holds the label {highest}; number the classes from 0 (to {MOST_CLASSES - 1} at most), or name "
            "them all in the array classes."
        )


def _check_pairs(path: Path, inputs: list[npt.NDArray[Any]], labels: list[npt.NDArray[Any]]) -> None:
    train, test = inputs
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise InputError(
            f"{path}: x_train has samples of shape {train.shape[1:]} and dtype {train.dtype}, x_test of "
            f"{test.shape[1:]} and {test.dtype}; both must agree."
        )
    for x, y, split in zip(inputs, labels, ("train", "test"), strict=True):
        if y.shape not in ((len(x),), (len(x), *x.shape[2:])):
            raise InputError(
                f"{path}: x_{split} has {len(x)} rows but y_{split} has shape {y.shape}; one label a row, or of images "
                "one a pixel."
            )


def _whole_numbers(values: npt.NDArray[Any], where: str) -> npt.NDArray[np.int64]:
    if values.dtype.kind not in "biu":
        raise InputError(f"{where} has dtype {values.dtype}; allowed: whole numbers from 0.")
    return values.astype(np.int64)


def _labels(values: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """One int64 per row; masks (rows, height, width) as uint8."""
    whole = _whole_numbers(values, where)
    if whole.ndim != 3:
        return whole
    if whole.size and (whole.min() < 0 or whole.max() > 255):
        raise InputError(f"{where} holds labels from {whole.min()} to {whole.max()}; masks have classes 0 to 255.")
    return whole.astype(np.uint8)


def _truths(values: npt.NDArray[Any], where: str) -> npt.NDArray[np.bool_]:
    """Words are no truths: of "train" and "test" both would count as true."""
    allowed = "allowed: true or false (or 1 or 0), one per row of x."
    if values.dtype.kind not in "biuf":
        raise InputError(f"{where} has dtype {values.dtype}; {allowed}")
    if (strange := values[(values != 0) & (values != 1)]).size:
        raise InputError(f"{where} holds {strange.flat[0]}; {allowed}")
    return values.astype(np.bool_)


def _strings(values: npt.NDArray[Any], where: str) -> tuple[str, ...]:
    if values.ndim != 1:
        raise InputError(f"{where} has shape {values.shape}; allowed: a list of names, one for each.")
    return tuple(str(value) for value in values.tolist())


def _load_npz(root: Path | None, options: NpzOptions) -> Dataset:
    if root is None or not root.is_file():
        seen = "not set" if root is None else f"{str(root)!r}, a folder"
        raise FilesMissing(f"data.root is {seen}; it must be the .npz file")
    return dataset_of(root.stem, root, said=options.inputs, max_gb=options.max_gb)


def load_usps(root: Path | None, options: NoOptions) -> Dataset:
    """USPS from usps.npz."""
    return dataset_of("usps", find(folders(root, "usps"), "usps.npz"), DIGITS)


def _load_organamnist(root: Path | None, options: NoOptions) -> Dataset:
    return dataset_of("organamnist", find(folders(root, "organamnist"), "organamnist_6k.npz"), ORGANS)


SOURCES = (
    Source(
        "npz",
        "your own arrays in a .npz file",
        "one .npz file (data.root is the file itself) with x, y (and is_test, domain, classes, domains), "
        "or x_train, y_train, x_test, y_test (and classes)",
        _load_npz,
        NpzOptions,
    ),
    Source("usps", "9,298 handwritten digits, 16x16 grey", "usps.npz (x_train, y_train, x_test, y_test)", load_usps),
    Source(
        "organamnist",
        "OrganAMNIST, abdominal CT, 28x28 grey, 11 organs, subset of 6,000",
        "organamnist_6k.npz (x_train, y_train, x_test, y_test)",
        _load_organamnist,
    ),
)
