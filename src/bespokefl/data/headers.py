"""How large NumPy files are when they are read, by their headers: a small one may claim or unpack to terabytes."""

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from bespokefl.errors import InputError

MOST_GB = 2.0


def check_size(path: Path, most: float = MOST_GB, remedy: str = "take fewer samples, or a narrower dtype") -> None:
    """Refuses a .npy or .npz file whose arrays take more than so many GB; one that cannot be read raises ValueError."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            sizes = {}
            for member in archive.namelist():
                with archive.open(member) as file:
                    sizes[member.removesuffix(".npy")] = _bytes(file)
    else:
        with path.open("rb") as file:
            sizes = {path.name: _bytes(file)}
    total = sum(sizes.values())
    if total > most * 1e9:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"{path} holds {total / 1e9:.3g} GB of arrays, most of it in {largest}; at most {most:g} GB are read: "
            f"{remedy}."
        )


def _bytes(file: IO[bytes]) -> int:
    version = np.lib.format.read_magic(file)
    shape, _, dtype = _READERS.get(version, np.lib.format.read_array_header_2_0)(file)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape of {shape}")
    numbers: int = math.prod(shape)
    return numbers * int(dtype.itemsize)


_READERS: dict[tuple[int, int], Any] = {(1, 0): np.lib.format.read_array_header_1_0}
