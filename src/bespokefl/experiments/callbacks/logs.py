"""The two logs of a run: a line a round in rounds.jsonl, and every score in evaluations.jsonl."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bespokefl.evaluation import metrics
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.results import files
from bespokefl.results.evaluations import EVALUATIONS, EvaluationLog, what_is_lost


class RoundLines(Callback):
    """rounds.jsonl; ``lines`` are those of all rounds so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / files.ROUNDS
        self._log: files.RoundLog | None = None

    @property
    def lines(self) -> list[files.Line]:
        return self._log.lines if self._log else []

    def total(self, key: str) -> Any:
        return sum(line[key] for line in self.lines)

    def on_start(self, run: Rounds) -> None:
        self._log = files.RoundLog(self._path, keep=run.done)

    def on_round(self, run: Rounds) -> None:
        assert self._log is not None
        self._log.append(_line(run))

    def flush(self) -> None:
        if self._log:
            self._log.sync()

    def close(self) -> None:
        if self._log:
            self._log.close()


def _line(run: Rounds) -> files.Line:
    """The round's line; figures are null in a round that is not evaluated."""
    record, test, val = run.newest, run.scores.get("test"), run.scores.get("val")
    figures: dict[str, Any] = dict.fromkeys(("mean", "std", "worst5", "top5", "loss"))
    if test is not None:
        summary = metrics.summarise(test.main)
        figures = {key: summary[key] for key in ("mean", "std", "worst5", "top5")}
        figures["loss"] = float(np.nanmean(test.loss))
    return {
        "round": record.round,
        **figures,
        "seconds": record.seconds,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "val_mean": None if val is None else metrics.summarise(val.main)["mean"],
        "waste": record.waste,
        "clients": [int(client) for client in record.clients],
        "failed": {str(client): reason for client, reason in record.failed.items()},
        **({"cut": {str(client): how for client, how in record.cut.items()}} if record.cut else {}),
    }


class EvaluationLines(Callback):
    """evaluations.jsonl: every client's scores in every evaluated round."""

    def __init__(
        self, folder: Path, clients: Mapping[str, Iterable[Any]], rounds: RoundLines, note: Callable[[str], None]
    ) -> None:
        self._folder, self._clients, self._rounds, self._note = folder, clients, rounds, note
        self._log: EvaluationLog | None = None

    def on_start(self, run: Rounds) -> None:
        path = self._folder / EVALUATIONS
        self._log = EvaluationLog(path, self._clients, keep=run.done)
        for lost in what_is_lost(path, self._rounds.lines):
            self._note(f"warning: {self._folder}: {lost}")

    def on_evaluation(self, run: Rounds) -> None:
        assert self._log is not None
        self._log.append(run.newest.round, {"test": None, "val": None, **run.scores})

    def flush(self) -> None:
        if self._log:
            self._log.sync()

    def close(self) -> None:
        if self._log:
            self._log.close()
