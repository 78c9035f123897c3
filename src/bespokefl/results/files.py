"""The files of a run folder. Accuracies are fractions; floats are written so that reading gives back the same bits."""

import csv
import io
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bespokefl.errors import RunError

CONFIG, ROUNDS, CLIENTS, SUMMARY = "config.toml", "rounds.jsonl", "clients.csv", "summary.json"
CHECKPOINT, PERSONAL, ERROR = "checkpoint", "personal", "error.txt"
NEW_CLIENTS = "new_clients.csv"

# All that may differ between two runs of one configuration on one machine (or a run and its resumption).
TIMED_KEYS = frozenset({"seconds", "train_seconds", "peak_memory_bytes"})

Line = dict[str, Any]  # a round as rounds.jsonl holds it
Columns = dict[str, npt.NDArray[Any]]  # a table by column


def write_atomically(path: Path, content: str | bytes) -> None:
    """The whole file or none of it: written under a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps({k: _or_null(v) for k, v in content.items()}, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_csv(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    """A table by column; NaN becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_cell(value) for value in row])
    write_atomically(path, text.getvalue())


def read_csv(path: Path, texts: Collection[str] = ()) -> Columns:
    """A table by column: numbers as floats (an empty cell is NaN), ``texts`` and columns with other text as strings."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    columns = {name: [row[place] for row in rows] for place, name in enumerate(header)}
    return {name: np.array(cells) if name in texts else _column(cells) for name, cells in columns.items()}


def _column(cells: Sequence[str]) -> npt.NDArray[Any]:
    try:
        return np.array([float(cell) if cell else math.nan for cell in cells])
    except ValueError:
        return np.array(cells)


def _cell(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RoundLog:
    """rounds.jsonl: appended and flushed line by line, cut back to a checkpoint's round when a run is resumed."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.lines = read_rounds(path)[:keep]
        if len(self.lines) < keep:
            raise RunError(
                f"{path} holds {len(self.lines)} whole rounds, but the checkpoint beside it was made after {keep}; "
                f"remove the folder {path.parent} to start this run afresh."
            )
        write_atomically(path, "".join(_dump(line) for line in self.lines))
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        clean = {key: _or_null(value) for key, value in line.items()}
        self.lines.append(clean)
        self._file.write(_dump(clean))
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines have reached the disk, as a checkpoint relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def total(self, key: str) -> Any:
        return sum(line[key] for line in self.lines)


def _dump(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def read_rounds(path: Path) -> list[Line]:
    """The whole lines of rounds.jsonl; a last line that was cut off is left out."""
    lines: list[Line] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                line = json.loads(text) if text.endswith("\n") else None
            except ValueError:
                break
            if not isinstance(line, dict):
                break
            lines.append(line)
    return lines


@dataclass(frozen=True)
class StoredRun:
    """What a run folder holds; ``summary`` and ``clients`` are None while it is unfinished."""

    folder: Path
    label: str
    seed: int
    rounds: list[Line]
    summary: dict[str, Any] | None
    clients: Columns | None
    error: str | None


def read_runs(out: Path) -> list[StoredRun]:
    """The runs below an output folder, by label, then seed."""
    folders = [config.parent for config in out.glob(f"*/seed-*/{CONFIG}")]
    runs = [_read_run(folder) for folder in folders if folder.name.removeprefix("seed-").isdecimal()]
    return sorted(runs, key=lambda run: (run.label, run.seed))


def _read_run(folder: Path) -> StoredRun:
    finished = (folder / SUMMARY).is_file()
    error = folder / ERROR
    return StoredRun(
        folder=folder,
        label=folder.parent.name,
        seed=int(folder.name.removeprefix("seed-")),
        rounds=read_rounds(folder / ROUNDS),
        summary=read_json(folder / SUMMARY) if finished else None,
        clients=read_csv(folder / CLIENTS) if finished else None,
        error=error.read_text(encoding="utf-8") if error.is_file() else None,
    )
