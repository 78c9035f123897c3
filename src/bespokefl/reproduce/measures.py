"""The figures that the papers' tables hold, read from a finished run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bespokefl.errors import InputError, unknown_name
from bespokefl.evaluation.metrics import individual_gain, summarise
from bespokefl.reproduce.views import View
from bespokefl.results.facts import read_facts
from bespokefl.results.files import StoredRun

Unit = Literal["percent", "points", "plain"]  # percent and points: a fraction times 100
Value = Callable[[StoredRun, StoredRun | None], float | None]  # (the run, Local's run of the same seed)
PER_CLIENT = "client:"  # "client:MNIST" is the accuracy of the client of that name, "client:A:dice" another score


@dataclass(frozen=True)
class Measure:
    """A column of a paper's table."""

    heading: str
    value: Value
    unit: Unit = "percent"
    higher_is_better: bool = True
    decimals: int = 2


def _of_summary(key: str, factor: float = 100.0) -> Value:
    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        found = (run.summary or {}).get(key)
        return None if found is None else factor * float(found)

    return value


def _of_clients(column: str, figure: Literal["mean", "std", "worst5", "top5"], factor: float = 100.0) -> Value:
    """Over the clients for which the column has a value."""

    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        values = (run.clients or {}).get(column)
        if values is None or not np.isfinite(np.asarray(values, dtype=np.float64)).any():
            return None
        return factor * summarise(values)[figure]

    return value


def _gain(figure: Literal["mean", "std"]) -> Value:
    def value(run: StoredRun, local: StoredRun | None) -> float | None:
        if local is None or local.clients is None or run.clients is None:
            return None
        gain = individual_gain(run.clients["accuracy"], local.clients["accuracy"])
        return gain.mean if figure == "mean" else gain.std

    return value


def _of_new_clients(key: Literal["best", "last"]) -> Value:
    """The mean accuracy of clients that joined after the training, in their best or last epoch."""

    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        found = (run.summary or {}).get("new_clients")
        return None if not found else 100 * float(found[key])

    return value


def _gain_over_global(figure: Literal["mean", "std"]) -> Value:
    """What clients gain by their own models over the global model of the same run and round."""

    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        clients = run.clients or {}
        if "global_accuracy" not in clients or not np.isfinite(clients["accuracy"] - clients["global_accuracy"]).any():
            return None
        gain = individual_gain(clients["accuracy"], clients["global_accuracy"])
        return gain.mean if figure == "mean" else gain.std

    return value


def _change_of_a(axis: Literal[0, 1]) -> Value:
    """Pearson's r of the mean change of A's columns (0) or rows (1) and the clients' train samples."""

    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        fact = read_facts(run.folder).get("A")
        if fact is None or run.clients is None:
            return None
        change = (fact.values[-1].astype(np.float64) - fact.values[0]).mean(axis=axis)
        n = np.asarray(run.clients["n_train"], dtype=np.float64)
        if len(change) != len(n) or not np.isfinite(change).all() or not np.ptp(change) or not np.ptp(n):
            return None
        return float(np.corrcoef(change, n)[0, 1])

    return value


def _seconds_per_round(run: StoredRun, _: StoredRun | None) -> float | None:
    summary = run.summary or {}
    return None if "train_seconds" not in summary else float(summary["train_seconds"]) / int(summary["rounds"])


def _hours(run: StoredRun, _: StoredRun | None) -> float | None:
    summary = run.summary or {}
    return None if "train_seconds" not in summary else float(summary["train_seconds"]) / 3600


def _binary(key: str, heading: str) -> dict[str, Measure]:
    """A score that a run has for each client, and its spread over clients."""
    return {
        key: Measure(f"{heading} %", _of_clients(key, "mean")),
        f"{key}_std": Measure(f"std of {heading} over clients", _of_clients(key, "std"), "points", False),
    }


MEASURES: dict[str, Measure] = {
    "mean": Measure("mean client accuracy %", _of_summary("mean")),
    "std": Measure("std over clients", _of_summary("std"), "points", higher_is_better=False),
    "worst5": Measure("lowest 5 % of the clients, %", _of_summary("worst5")),
    "top5": Measure("top 5 % of the clients, %", _of_summary("top5")),
    "l_acc": Measure("L-acc %", _of_summary("l_acc")),
    "s_acc": Measure("S-acc %", _of_summary("s_acc")),
    "g_acc": Measure("G-acc %", _of_summary("g_acc")),
    "gm_acc": Measure("global model, all test data, %", _of_summary("gm_acc")),
    "l_acc_std": Measure("std of L-acc over clients", _of_clients("accuracy", "std"), "points", False),
    "s_acc_std": Measure("std of S-acc over clients", _of_clients("s_accuracy", "std"), "points", False),
    "g_acc_std": Measure("std of G-acc over clients", _of_clients("g_accuracy", "std"), "points", False),
    "gm_mean": Measure("global model, mean over clients, %", _of_clients("global_accuracy", "mean")),
    "gm_worst5": Measure("global model, lowest 5 %, %", _of_clients("global_accuracy", "worst5")),
    "gm_top5": Measure("global model, top 5 %, %", _of_clients("global_accuracy", "top5")),
    "gain": Measure("mean individual gain over Local, points", _gain("mean"), "points"),
    "gain_std": Measure("std of the gain over clients", _gain("std"), "points", higher_is_better=False),
    "rounds_to_target": Measure("rounds to the target", _of_summary("rounds_to_target", 1), "plain", False, 0),
    "gain_over_global": Measure("mean gain over the run's global model, points", _gain_over_global("mean"), "points"),
    "gain_over_global_std": Measure("std of that gain over clients", _gain_over_global("std"), "points", False),
    "new_clients": Measure("new clients, best epoch, %", _of_new_clients("best")),
    "new_clients_last": Measure("new clients, last epoch, %", _of_new_clients("last")),
    "a_columns": Measure("r of the change of A's columns and n", _change_of_a(0), "plain"),
    "a_rows": Measure("r of the change of A's rows and n", _change_of_a(1), "plain", higher_is_better=False),
    **_binary("auc", "AUC"),
    **_binary("sensitivity", "sensitivity"),
    **_binary("specificity", "specificity"),
    **_binary("f1", "macro F1"),
    **_binary("dice", "Dice"),
    "hausdorff": Measure("Hausdorff distance, pixels", _of_clients("hausdorff", "mean", 1), "plain", False),
    "hausdorff_std": Measure("std of the distance", _of_clients("hausdorff", "std", 1), "plain", False),
    "seconds": Measure("seconds of training a round", _seconds_per_round, "plain", False),
    "hours": Measure("hours of training in all", _hours, "plain", False),
    "memory": Measure("peak memory, MB", _of_summary("peak_memory_bytes", 1e-6), "plain", False),
    "megabytes": Measure("MB sent", _of_summary("bytes_total", 1e-6), "plain", False),
}
OF_CLIENTS = ("auc", "sensitivity", "specificity", "f1", "dice", "hausdorff")  # scores that each client has


def measure(name: str) -> Measure:
    """The measure of that name; one client's accuracy for ``client:NAME``, any scored model's for a `View`'s name."""
    if name.startswith(PER_CLIENT):
        return _client_measure(name.removeprefix(PER_CLIENT))
    if view := View.named(name):
        unit: Unit = "points" if view.figure == "std" else "percent"
        return Measure(f"{view.heading}, %", _of_view(view), unit, higher_is_better=view.figure != "std")
    if name not in MEASURES:
        raise unknown_name(
            "paper.metrics", name, [*MEASURES, f"{PER_CLIENT}NAME", f"{PER_CLIENT}NAME:SCORE", "MODEL:FIGURE@ROUND"]
        )
    return MEASURES[name]


def _of_view(view: View) -> Value:
    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        found = view.of(run.folder)
        return None if found is None else 100 * found

    return value


def _client_measure(text: str) -> Measure:
    """``NAME`` is a client's accuracy, ``NAME:COLUMN`` another of its scores."""
    name, _, column = text.partition(":")
    if not column:
        return Measure(f"{name} %", _client(name, "accuracy", 100.0))
    if column not in OF_CLIENTS:
        raise unknown_name("paper.metrics", f"{PER_CLIENT}{text}", [f"{PER_CLIENT}{name}:{one}" for one in OF_CLIENTS])
    of_all = MEASURES[column]
    factor = 1.0 if of_all.unit == "plain" else 100.0
    return replace(of_all, heading=f"{name}, {of_all.heading}", value=_client(name, column, factor))


def _client(name: str, column: str, factor: float) -> Value:
    def value(run: StoredRun, _: StoredRun | None) -> float | None:
        clients: Mapping[str, Any] = run.clients or {}
        names = [str(other) for other in clients.get("name", ())]
        if name not in names or column not in clients:
            return None
        score = float(clients[column][names.index(name)])
        return factor * score if np.isfinite(score) else None

    return value


def in_table_units(name: str, number: float, unit: Literal["percent", "fraction"]) -> float:
    """A paper's number as our tables show it: accuracies in percent, the rest as printed."""
    return 100 * number if unit == "fraction" and measure(name).unit != "plain" else number


def check(names: list[str]) -> None:
    """Refuses names that are no measures, before anything runs."""
    for name in names:
        measure(name)
    if len(set(names)) != len(names):
        raise InputError(f"paper.metrics = {names!r}: each should stand there once.")
