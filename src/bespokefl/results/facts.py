"""What algorithms show of their state (PGFed's A, LG-Mix's lambda), round by round: one small file per round.

Only the first and the last round are sure to be there: where all evaluated rounds would take more than `MOST_BYTES`,
evenly spaced ones are kept.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from bespokefl.results.files import write_atomically

FOLDER = "facts"
LAYERS = "layers"  # the metadata's entry
MOST_BYTES = 64 * 2**20  # of one run


class Fact(NamedTuple):
    rounds: npt.NDArray[np.int64]
    values: npt.NDArray[Any]  # one row per round


def is_kept(nth: int, of: int, size: int) -> bool:
    """Whether the nth (from 0) of ``of`` evaluated rounds is written, each taking ``size`` bytes."""
    stride = max(1, -(-of * size // MOST_BYTES))
    return nth % stride == 0 or nth == of - 1


def write_facts(
    run: Path, round_: int, facts: Mapping[str, npt.NDArray[Any]], layers: Sequence[str] | None = None
) -> None:
    """``layers`` are the names of the model's layers, for facts that have a column for each."""
    whole = {name: np.asarray(value, order="C") for name, value in facts.items()}
    about = None if layers is None else {LAYERS: json.dumps(list(layers))}
    write_atomically(run / FOLDER / f"{round_:06d}.safetensors", safetensors.numpy.save(whole, about))


def read_layers(run: Path) -> list[str]:
    """The names of the model's layers, in the order of facts that have a column for each; empty where none is kept."""
    for path in _files(run):
        try:
            with safetensors.safe_open(path, "np") as file:
                return list(json.loads((file.metadata() or {}).get(LAYERS, "[]")))
        except (safetensors.SafetensorError, OSError):
            continue
    return []


def read_facts(run: Path, damaged: list[str] | None = None) -> dict[str, Fact]:
    """By name, over the rounds that were kept; a damaged file costs its own round only, and joins ``damaged``."""
    found: dict[str, dict[int, npt.NDArray[Any]]] = {}
    for path in _files(run):
        try:
            arrays = safetensors.numpy.load_file(path)
        except (safetensors.SafetensorError, OSError):
            if damaged is not None:
                damaged.append(path.name)
            continue
        for name, value in arrays.items():
            found.setdefault(name, {})[int(path.stem)] = value
    return {name: _fact(by_round) for name, by_round in sorted(found.items())}


def _fact(by_round: Mapping[int, npt.NDArray[Any]]) -> Fact:
    """Rounds whose shape is not the last one's are from another run's files, and left out."""
    shape = by_round[max(by_round)].shape
    same = {round_: value for round_, value in by_round.items() if value.shape == shape}
    return Fact(np.array(list(same)), np.stack(list(same.values())))


def _files(run: Path) -> list[Path]:
    return sorted(path for path in (run / FOLDER).glob("*.safetensors") if path.stem.isdecimal())
