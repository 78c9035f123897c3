"""What the runs of a folder say about methods and clients, as tables. Accuracies are percentages from here on."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bespokefl.report.tables import Table, plain, stack
from bespokefl.results import methods
from bespokefl.results.files import CONFIG, Line, StoredRun
from bespokefl.results.table import MethodRow, method_rows

DIGITS_OF_GAIN = 6  # so that a gain of 5 points is no 4.9999999
MOST_ROUNDS = 200  # drawn of a curve; more are thinned evenly
REFERENCES = {"local": "Local", "fedavg": "FedAvg"}  # algorithms that clients' gains may be measured against


@dataclass(frozen=True)
class Problem:
    """A run of which something is missing."""

    run: str
    what: str
    detail: str = ""  # the error's text


@dataclass(frozen=True)
class Comparison:
    """The runs of one output folder."""

    folder: Path
    runs: Sequence[StoredRun]

    @cached_property
    def methods(self) -> dict[str, list[StoredRun]]:
        """Finished runs by label, the best mean first."""
        return methods.by_method(self.runs)

    @cached_property
    def rows(self) -> list[MethodRow]:
        return method_rows(self.runs)

    @property
    def metric(self) -> str:
        """What clients are scored by."""
        found = {methods.metric(run) for own in self.methods.values() for run in own}
        return "Dice" if found == {"dice"} else "accuracy" if found <= {"accuracy"} else "score"

    @property
    def labels(self) -> list[str]:
        return list(self.methods)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for own in self.methods.values() for run in own})

    @cached_property
    def references(self) -> dict[str, dict[int, StoredRun]]:
        """The runs that gains are measured against, by algorithm and seed, where there are any."""
        found = {algorithm: methods.baseline_runs(self.runs, algorithm) for algorithm in REFERENCES}
        return {algorithm: runs for algorithm, runs in found.items() if runs}

    @cached_property
    def configs(self) -> dict[Path, Mapping[str, Any]]:
        """By run folder; a run whose configuration cannot be read is left out."""
        found = {run.folder: _read_config(run.folder / CONFIG) for run in self.runs}
        return {folder: config for folder, config in found.items() if config is not None}

    @cached_property
    def malicious(self) -> dict[int, set[int]]:
        """Clients that attacked, by seed."""
        found: dict[int, set[int]] = {}
        for own in self.methods.values():
            for run in own:
                assert run.clients is not None
                if "malicious" in run.clients:
                    attackers = run.clients["client"][run.clients["malicious"].astype(np.float64) > 0]
                    found.setdefault(run.seed, set()).update(int(client) for client in attackers)
        return {seed: clients for seed, clients in found.items() if clients}

    @cached_property
    def problems(self) -> list[Problem]:
        found = []
        for run in self.runs:
            name = f"{run.label}, seed {run.seed}"
            if run.summary is None and not run.damage:
                state = "failed" if run.error else "not finished"
                done = f"{state} after {len(run.rounds)} rounds; it is in no table and no chart."
                found.append(Problem(name, done, (run.error or "").strip()))
            damage = list(run.damage)
            if run.folder not in self.configs:
                damage.append(f"{CONFIG} is missing or damaged")
            if damage:
                end = "; it is in no table and no chart." if run.summary is None else "; the rest is shown."
                found.append(Problem(name, "; ".join(damage) + end, (run.error or "").strip() if run.damage else ""))
        return found


def _read_config(path: Path) -> Mapping[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# tables ----------------------------------------------------------------------------------------------

FIGURES = ("mean", "worst5", "top5", "std", "gain", "harmed", "worse_off", "l_acc", "s_acc", "g_acc", "gm_acc")
COSTS = ("megabytes", "seconds", "gpu_megabytes")


def methods_table(comparison: Comparison) -> Table:
    """A row a method: every figure over seeds, and its standard deviation over seeds as <figure>_sd."""
    parts: Table = {"method": [], "rank": [], "seeds": [], "algorithm": []}
    for rank, row in enumerate(comparison.rows, start=1):
        summary = comparison.methods[row.label][0].summary
        parts["method"].append(row.label)
        parts["rank"].append(rank)
        parts["seeds"].append(row.seeds)
        parts["algorithm"].append(summary["algorithm"] if summary else None)
        for name in (*FIGURES, *COSTS):
            figure = getattr(row, name)
            parts.setdefault(name, []).append(None if figure is None else figure.mean)
            parts.setdefault(f"{name}_sd", []).append(None if figure is None else figure.std)
    return {name: plain(values) for name, values in parts.items()}


def clients_table(comparison: Comparison) -> Table:
    """A row for each method, seed and client that is scored, with its gains over the references."""
    parts = []
    for label, own in comparison.methods.items():
        gains = {name: methods.gains(own, runs) for name, runs in comparison.references.items()}
        for run in own:
            assert run.clients is not None
            score = methods.scores(run)
            scored = np.flatnonzero(~np.isnan(score))
            part: dict[str, Any] = {
                "method": [label] * len(scored),
                "seed": [run.seed] * len(scored),
                "client": run.clients["client"][scored],
                "score": 100 * score[scored],
                "n_train": run.clients["n_train"][scored],
                "n_test": run.clients["n_test"][scored],
                "rounds": _taken_part(run)[scored],
            }
            for name, by_seed in gains.items():
                gain = by_seed.get(run.seed, np.full(len(score), np.nan))
                part[f"over_{name}"] = gain[scored]
            parts.append({name: plain(values) for name, values in part.items()})
    return stack(parts)


def gains_over_global(comparison: Comparison) -> dict[str, list[float]]:
    """Of every client and seed, in percentage points, by method; without those whose clients use the global model."""
    found: dict[str, list[float]] = {}
    for label, own in comparison.methods.items():
        gains = [100 * (methods.scores(run) - _of_global_model(run)) for run in own]
        known = [float(gain) for gain in np.concatenate(gains).round(DIGITS_OF_GAIN) if not np.isnan(gain)]
        if any(known):
            found[label] = known
    return found


def _of_global_model(run: StoredRun) -> npt.NDArray[np.float64]:
    """What the run's own global model scores on each client's data; nan where there is none."""
    assert run.clients is not None
    unknown = np.full(len(run.clients["client"]), np.nan)
    return run.clients.get(f"global_{methods.metric(run)}", unknown).astype(np.float64)


def _taken_part(run: StoredRun) -> npt.NDArray[np.float64]:
    """In how many rounds each client did; nan where the file does not say."""
    assert run.clients is not None
    unknown = np.full(len(run.clients["client"]), np.nan)
    return run.clients.get("rounds_asked", unknown) - run.clients.get("rounds_failed", unknown)


def curves_table(comparison: Comparison) -> Table:
    """Mean and worst 5 % by round: over seeds, and the lowest and the highest seed where there are several."""
    parts = []
    for label, own in comparison.methods.items():
        figures = {key: [_curve(run.rounds, key) for run in own] for key in ("mean", "worst5")}
        common = sorted(set.intersection(*(set(curve) for curves in figures.values() for curve in curves)))
        kept = thinned(common)
        part: dict[str, Any] = {"method": [label] * len(kept), "round": kept}
        for key, curves in figures.items():
            values = np.array([[curve[round_] for round_ in kept] for curve in curves]).reshape(len(curves), len(kept))
            part[key] = values.mean(axis=0)
            part[f"{key}_low"] = values.min(axis=0) if len(curves) > 1 else [None] * len(kept)
            part[f"{key}_high"] = values.max(axis=0) if len(curves) > 1 else [None] * len(kept)
        parts.append({name: plain(values) for name, values in part.items()})
    return stack(parts)


def _curve(lines: Sequence[Line], key: str) -> dict[int, float]:
    """Evaluated rounds only; a line without its numbers says nothing."""
    return {
        line["round"]: 100 * line[key]
        for line in lines
        if isinstance(line.get("round"), int) and isinstance(line.get(key), int | float)
    }


def thinned(rounds: Sequence[int], most: int = MOST_ROUNDS) -> list[int]:
    """All rounds, or evenly spaced ones with the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))
    return [rounds[place] for place in places]


def gamma_table(comparison: Comparison) -> Table:
    """L- and G-accuracy by gamma, for algorithms that ran with several; empty where there is none."""
    found: dict[tuple[str, float], list[StoredRun]] = {}
    for own in comparison.methods.values():
        for run in own:
            algorithm = comparison.configs.get(run.folder, {}).get("algorithm", {})
            gamma = algorithm.get("gamma")
            if (
                run.summary is not None
                and isinstance(gamma, int | float)
                and None not in map(run.summary.get, ("l_acc", "g_acc"))
            ):
                found.setdefault((run.summary["algorithm"], float(gamma)), []).append(run)
    swept = {name for name, _ in found if len({gamma for other, gamma in found if other == name}) > 1}
    parts: Table = {}
    for (algorithm, gamma), own in sorted(found.items()):
        if algorithm not in swept:
            continue
        summaries = [run.summary for run in own if run.summary is not None]
        for key, name in (("l_acc", "L-accuracy, own data"), ("g_acc", "G-accuracy, all clients' data")):
            values = [100 * summary[key] for summary in summaries]
            row = {
                "algorithm": algorithm,
                "gamma": gamma,
                "quantity": name,
                "value": float(np.mean(values)),
                "low": min(values),
                "high": max(values),
                "runs": len(values),
            }
            for column, value in row.items():
                parts.setdefault(column, []).append(value)
    return {name: plain(values) for name, values in parts.items()}
