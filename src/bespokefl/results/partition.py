"""partition-seed-<n>.csv: which client holds how many samples of which label, in which split."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bespokefl.results.files import read_csv, write_csv

if TYPE_CHECKING:  # reading results needs no torch
    from bespokefl.data import FederatedData

SPLITS = ("train", "val", "test")


class Partition(NamedTuple):
    """Counts by client and label; a file of an older version knows the totals only."""

    names: list[str]  # of the clients
    labels: list[str]
    total: npt.NDArray[np.int64]
    splits: dict[str, npt.NDArray[np.int64]]


def partition_file(out: Path, seed: int) -> Path:
    return out / f"partition-seed-{seed}.csv"


def write_partition(path: Path, data: "FederatedData") -> None:
    """Clients that are held out come last; data without a label per sample (regression, masks) have sizes only."""
    new = data.held_out
    data = data if new is None else data.together_with(new)
    columns: dict[str, Any] = {"client": range(data.clients), "name": data.client_names}
    columns |= {f"n_{split}": data.sizes(split) for split in SPLITS}
    if new is not None:
        columns["held_out"] = [int(client >= data.clients - new.clients) for client in range(data.clients)]
    if data.classes and data.y.ndim == 1:
        counts = {split: data.counts(split) for split in SPLITS}
        total = np.sum(list(counts.values()), axis=0)
        columns |= {f"label {name}": total[:, label] for label, name in enumerate(data.classes)}
        for split in SPLITS:
            columns |= {f"{split} {name}": counts[split][:, label] for label, name in enumerate(data.classes)}
    write_csv(path, columns)


def read_partition(path: Path) -> Partition:
    """ValueError where the file is damaged; no labels where there are none."""
    columns = read_csv(path, texts=("name",))
    if "client" not in columns:
        raise ValueError("no column client")
    names = columns.get("name", columns["client"])
    labels = [name.removeprefix("label ") for name in columns if name.startswith("label ")]
    known = [split for split in SPLITS if labels and f"{split} {labels[0]}" in columns]
    splits = {split: _counts(columns, split, labels) for split in known}
    return Partition([str(name) for name in names], labels, _counts(columns, "label", labels), splits)


def _counts(columns: dict[str, npt.NDArray[Any]], prefix: str, labels: list[str]) -> npt.NDArray[np.int64]:
    shape = (len(columns["client"]), len(labels))
    found = [columns[f"{prefix} {label}"] for label in labels]
    if any(counts.dtype.kind != "f" or np.isnan(counts).any() for counts in found):
        raise ValueError(f"a column '{prefix} ...' holds something that is not a number")
    return np.array(found, dtype=np.int64).reshape(shape[::-1]).T
