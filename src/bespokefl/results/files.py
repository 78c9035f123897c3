"""The files of a run folder. Accuracies are fractions; floats are written so that reading gives back the same bits."""

import csv
import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bespokefl.errors import RunError
from bespokefl.plain import quoted, unquoted

CONFIG, ROUNDS, CLIENTS, SUMMARY = "config.toml", "rounds.jsonl", "clients.csv", "summary.json"
CHECKPOINT, PERSONAL, ERROR = "checkpoint", "personal", "error.txt"
NEW_CLIENTS = "new_clients.csv"

# All that may differ between two runs of one configuration on one machine (or a run and its resumption).
TIMED_KEYS = frozenset({"seconds", "train_seconds", "peak_memory_bytes"})

T = TypeVar("T")
Line = dict[str, Any]  # a round as rounds.jsonl holds it
Columns = dict[str, npt.NDArray[Any]]  # a table by column


def write_atomically(path: Path, content: str | bytes) -> None:
    """The whole file or none of it: written under a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk is not to be filled by what nobody can use
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps({k: _or_null(v) for k, v in content.items()}, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_csv(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    """A table by column; NaN becomes an empty cell. A text that a spreadsheet would compute gets a ' before it."""
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
    return {name: _texts(cells) if name in texts else _column(cells) for name, cells in columns.items()}


def _column(cells: Sequence[str]) -> npt.NDArray[Any]:
    try:
        return np.array([float(cell) if cell else math.nan for cell in cells])
    except ValueError:
        return _texts(cells)


def _texts(cells: Sequence[str]) -> npt.NDArray[Any]:
    return np.array([unquoted(cell) for cell in cells])


def _cell(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return quoted(value) if isinstance(value, str) else str(value)


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
    """What a run folder holds; ``summary`` and ``clients`` are None while it is unfinished, or where one is damaged."""

    folder: Path
    label: str
    seed: int
    rounds: list[Line]
    summary: dict[str, Any] | None
    clients: Columns | None
    error: str | None
    damage: tuple[str, ...] = ()  # what cannot be read, a sentence for each file


# What every reader of a finished run relies on.
_NUMBERS = ("mean", "std", "worst5", "top5", "bytes_total", "train_seconds")
_TEXTS = ("algorithm", "selection", "scored", "model")
_OPTIONAL_NUMBERS = ("gm_acc", "s_acc", "g_acc", "peak_memory_bytes", "clients_untrained")
_OPTIONAL_TEXTS = ("note",)
_CLIENT_COLUMNS = ("client", "n_train", "n_test", "accuracy")
_OPTIONAL_CLIENT_COLUMNS = ("rounds_asked", "rounds_failed", "malicious")


def read_runs(out: Path) -> list[StoredRun]:
    """The runs below an output folder, by label, then seed."""
    folders = {path.parent for name in (CONFIG, ROUNDS, SUMMARY) for path in out.glob(f"*/seed-*/{name}")}
    runs = [read_run(folder) for folder in folders if folder.name.removeprefix("seed-").isdecimal()]
    return sorted(runs, key=lambda run: (run.label, run.seed))


def read_run(folder: Path) -> StoredRun:
    """A damaged file costs what it holds, never the other runs."""
    damage: list[str] = []
    finished = (folder / SUMMARY).is_file()
    summary = _unless_damaged(damage, folder / SUMMARY, _read_summary) if finished else None
    clients = _unless_damaged(damage, folder / CLIENTS, _read_client_table) if finished else None
    whole = summary is not None and clients is not None
    rounds = _unless_damaged(damage, folder / ROUNDS, read_rounds) or []
    if summary is not None and len(rounds) < summary.get("rounds", 0):
        damage.append(f"{ROUNDS} is damaged: only its first {len(rounds)} of {summary['rounds']} rounds can be read")
    return StoredRun(
        folder=folder,
        label=folder.parent.name,
        seed=int(folder.name.removeprefix("seed-")),
        rounds=rounds,
        summary=summary if whole else None,
        clients=clients if whole else None,
        error=_unless_damaged(damage, folder / ERROR, _text) if (folder / ERROR).is_file() else None,
        damage=tuple(damage),
    )


def _unless_damaged(damage: list[str], path: Path, read: Callable[[Path], T]) -> T | None:
    try:
        return read(path)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        damage.append(f"{path.name} is damaged ({reason[:160] or type(error).__name__})")
        return None


def _read_summary(path: Path) -> dict[str, Any]:
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise ValueError("not an object")
    for names, kinds in (
        (_NUMBERS, (int, float)),
        (_OPTIONAL_NUMBERS, (int, float, type(None))),
        (_OPTIONAL_TEXTS, (str, type(None))),
        (_TEXTS, (str,)),
        (("rounds",), (int,)),
    ):
        for name in names:
            if not isinstance(summary.get(name), kinds):
                raise ValueError(f"{name} is {summary.get(name, 'missing')!r}")
    return summary


def _read_client_table(path: Path) -> Columns:
    clients = read_csv(path, texts=("name",))
    for name in _CLIENT_COLUMNS:
        if name not in clients:
            raise ValueError(f"no column {name}")
    for name in (*_CLIENT_COLUMNS, *_OPTIONAL_CLIENT_COLUMNS):
        if name in clients and clients[name].dtype.kind != "f":
            raise ValueError(f"column {name} holds something that is not a number")
    if np.isnan(clients["accuracy"]).all():
        raise ValueError("no client has an accuracy")
    return clients


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
