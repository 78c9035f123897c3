"""Every client's scores in every evaluated round, in evaluations.jsonl: appended while a run goes on.

Its first line (round 0) says who the clients are; each other line holds the scores of a round, as arrays over clients:
those of the personal models by split, and those of other models by the model's name.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bespokefl.evaluation.metrics import SAMPLE_METRICS
from bespokefl.results.files import Columns, Line

if TYPE_CHECKING:  # reading results needs no torch
    from bespokefl.evaluation.scoring import Evaluation

EVALUATIONS = "evaluations.jsonl"

# Columns of clients.csv that are scores in the selected round, and whose model they belong to.
SELECTED = {
    "accuracy": "personal",
    "loss": "personal",
    "global_accuracy": "global",
    "s_accuracy": "personal",
    "g_accuracy": "personal",
    **dict.fromkeys(SAMPLE_METRICS, "personal"),
}


OTHER_MODELS = ("global", "before_agg")  # scored on the test split where that was asked for
CROSSED = {
    "s_acc": "s_",
    "g_acc": "g_",
}  # personal models on others' test data, likewise: what their metrics begin with


class Series(NamedTuple):
    """One metric of all clients in one round."""

    round: int
    metric: str
    split: str
    model: str
    values: npt.NDArray[np.float64]  # by client; NaN where there is no number


class EvaluationLog:
    """Flushed line by line, and cut back to a checkpoint's round when a run is resumed.

    Nothing is computed from it, so rounds that it lacks (of a run that an older version began) are no error.
    """

    def __init__(self, path: Path, clients: Mapping[str, Iterable[Any]], keep: int = 0) -> None:
        end = _end_of_round(path, keep)
        self._file = path.open("ab")
        self._file.truncate(end)
        if end == 0:
            self._write({"round": 0, "clients": {name: _plain(values) for name, values in clients.items()}})

    def append(self, round_: int, scores: "Mapping[str, Evaluation | None]") -> None:
        """Scores of the personal models by split, and of other models by their name; None for what was not scored."""
        columns = {
            split: {
                "accuracy": _plain(found.accuracy),
                "loss": _plain(found.loss),
                **{name: _plain(values) for name, values in found.further.items()},
            }
            for split, found in scores.items()
            if found is not None
        }
        self._write({"round": round_, **columns})

    def _write(self, line: Line) -> None:
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines have reached the disk: a checkpoint stands for the rounds before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_clients(path: Path) -> dict[str, list[Any]]:
    """Who the clients are, by column; empty where the file does not say."""
    first = next(_lines(path), None)
    return first[0].get("clients", {}) if first else {}


def read_series(path: Path) -> Iterator[Series]:
    """All scores; a last line that was cut off is left out."""
    kinds = {split: (split, "personal", "") for split in ("test", "val", "train")}
    kinds |= {name: ("test", name, "") for name in OTHER_MODELS}
    kinds |= {name: ("test", "personal", begin) for name, begin in CROSSED.items()}
    for line, _ in _lines(path):
        for key, (split, model, begin) in kinds.items():
            for metric, values in line.get(key, {}).items():
                yield Series(line["round"], begin + metric, split, model, np.array(values, dtype=np.float64))


def all_series(path: Path, clients: Columns | None, selected_round: int | None) -> list[Series]:
    """What evaluations.jsonl holds, and what clients.csv knows beyond it; metrics that nobody has are left out."""
    found = list(read_series(path))
    if clients is not None and selected_round is not None:
        known = {series[:-1] for series in found}
        for metric, model in SELECTED.items():
            if metric in clients and (selected_round, metric, "test", model) not in known:
                found.append(Series(selected_round, metric, "test", model, clients[metric].astype(np.float64)))
    return sorted((series for series in found if not np.isnan(series.values).all()), key=lambda series: series[:-1])


def what_is_lost(path: Path, rounds: Iterable[Line]) -> list[str]:
    """A sentence where rounds that were evaluated have no whole line here; clients' past scores are nowhere else."""
    evaluated = {line["round"] for line in rounds if line.get("mean") is not None}
    if not (lost := sorted(evaluated - {line["round"] for line, _ in _lines(path)})):
        return []
    shown = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return [f"{path.name} has lost the scores of round{'s' if len(lost) > 1 else ''} {shown}"]


def _lines(path: Path) -> Iterator[tuple[Line, int]]:
    """The whole lines, and where each of them ends."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for text in file:
            end += len(text)
            try:
                line = json.loads(text) if text.endswith(b"\n") else None
            except ValueError:
                return
            if not isinstance(line, dict) or "round" not in line:
                return
            yield line, end


def _end_of_round(path: Path, last: int) -> int:
    end = 0
    for line, after in _lines(path):
        if line["round"] > last:
            break
        end = after
    return end


def _plain(values: Iterable[Any]) -> list[Any]:
    """For JSON; a number that is not finite becomes null."""
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in plain]
