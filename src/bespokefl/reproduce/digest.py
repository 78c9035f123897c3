"""Finished runs in a compact form, to be kept beside the pages that quote them: small enough to commit, complete enough
that every figure, of every scored model and of both rounds, can be worked out again.
"""

import fnmatch
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from bespokefl.evaluation.metrics import individual_gain, summarise
from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.views import ROUNDS, View, chosen_round, curves
from bespokefl.results.evaluations import EVALUATIONS
from bespokefl.results.facts import read_facts
from bespokefl.results.files import CONFIG, StoredRun, read_runs
from bespokefl.results.methods import BASELINE

DIGITS = 5  # of an accuracy: a client has at most some thousand test samples


class Scored(TypedDict):
    """One kind of model of all clients."""

    rounds: list[int]  # that were evaluated
    mean: list[float]  # over clients, in each of them
    clients: dict[str, list[float | None]]  # by the rule that takes a round: every client's accuracy in it


class Course(TypedDict):
    """What a method shows of its clients' state, a number each."""

    rounds: list[int]
    clients: list[list[float | None]]  # by round


class Made(TypedDict):
    """How a run was made."""

    command: str
    hardware: str  # and the date


class RunDigest(TypedDict):
    label: str
    algorithm: str
    seed: int
    config: dict[str, Any]  # without where data lay and how the engine worked
    models: dict[str, Scored]
    measures: dict[str, float | None]  # of the paper's table, in its units (percent)
    figures: dict[str, Any]  # of summary.json: what was measured beside accuracies
    made: Made
    superseded: NotRequired[dict[str, str]]  # by pattern of measures: why they are no longer what they are called
    names: NotRequired[list[str]]  # of the clients, and
    facts: NotRequired[dict[str, Course]]  # their facts, where clients are few enough to be looked at one by one


KEPT = ("rounds", "selected_round", "train_seconds", "bytes_total", "peak_memory_bytes", "waste", "device", "version")
LEFT_OUT = ("engine", "checkpoint", "output", "seeds")
FEW_CLIENTS = 20
OF_ACCURACIES = {  # measures that follow from what is kept of every run
    **{name: f"personal:{name}@selected" for name in ("mean", "std", "worst5", "top5")},
    **{f"gm_{name}": f"global:{name}@selected" for name in ("mean", "worst5", "top5")},
}


def digest_runs(
    folder: Path, metrics: Sequence[str], made: Made, elsewhere: Mapping[str, Path] | None = None
) -> list[RunDigest]:
    """Of all finished runs of a setting, by label, then seed; with the given measures of each.

    ``elsewhere`` has the folders of other settings that hold the runs of some methods.
    """
    runs = [*read_runs(folder)] if folder.is_dir() else []
    for label, other in (elsewhere or {}).items():
        runs += [run for run in read_runs(other) if run.label == label]
    finished = [run for run in runs if run.summary is not None]
    local = {run.seed: run for run in finished if run.label == BASELINE}
    return [_digest(run, local.get(run.seed), metrics, made) for run in finished]


def _digest(run: StoredRun, local: StoredRun | None, metrics: Sequence[str], made: Made) -> RunDigest:
    summary = run.summary or {}
    config = tomllib.loads((run.folder / CONFIG).read_text(encoding="utf-8"))
    config["data"].pop("root", None)
    selected = summary.get("selected_round", 0)
    digest = RunDigest(
        label=run.label,
        algorithm=summary["algorithm"],
        seed=run.seed,
        config={name: section for name, section in config.items() if name not in LEFT_OUT},
        models={model: _scored(curve, selected) for model, curve in curves(run.folder / EVALUATIONS).items()},
        measures={name: _rounded(measure(name).value(run, local)) for name in metrics},
        figures={key: summary.get(key) for key in KEPT},
        made=made,
    )
    names = [str(name) for name in (run.clients or {}).get("name", ())]
    if 0 < len(names) <= FEW_CLIENTS:
        digest["names"], digest["facts"] = names, _courses(run.folder, len(names))
    return digest


def _courses(folder: Path, clients: int) -> dict[str, Course]:
    found = {name: fact for name, fact in read_facts(folder).items() if fact.values.shape[1:] == (clients,)}
    return {
        name: Course(
            rounds=[int(r) for r in fact.rounds],
            clients=[[_short(float(v)) for v in row] for row in fact.values],
        )
        for name, fact in found.items()
    }


def _scored(curve: Mapping[int, npt.NDArray[np.float64]], selected: int) -> Scored:
    rounds = sorted(curve)
    chosen = {rule: curve[chosen_round(curve, rule, selected)] for rule in ROUNDS}
    return Scored(
        rounds=rounds,
        mean=[round(float(np.nanmean(curve[r])), DIGITS) for r in rounds],
        clients={rule: [_short(v) for v in values.tolist()] for rule, values in chosen.items()},
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS - 2)


def _short(value: float) -> float | None:
    return None if value != value else round(value, DIGITS)


def figure(run: RunDigest, view: View) -> float | None:
    """The same number as `View.of` gives for the run's folder; None where the run has no such model."""
    if view.model not in run["models"]:
        return None
    values = run["models"][view.model]["clients"][view.round]
    return summarise(np.array(values, dtype=np.float64))[view.figure]


def measured(run: RunDigest, name: str, local: RunDigest | None = None) -> float | None:
    """A measure or a view's figure in the units of tables; what was not asked for at the time, from the accuracies."""
    if run["measures"].get(name) is not None:
        return run["measures"][name]
    if view := View.named(OF_ACCURACIES.get(name, name)):
        value = figure(run, view)
        return None if value is None else 100 * value
    if name in ("gain", "gain_std") and local is not None:
        gain = individual_gain(_selected(run), _selected(local))
        return gain.mean if name == "gain" else gain.std
    return None


def _selected(run: RunDigest) -> npt.NDArray[np.float64]:
    return np.array(run["models"]["personal"]["clients"]["selected"], dtype=np.float64)


def superseded(run: RunDigest, name: str) -> str | None:
    """Why a measure of this run is of older settings; None where it stands."""
    reasons = run.get("superseded", {})
    return next((reason for pattern, reason in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)


def write_digest(path: Path, runs: Sequence[RunDigest]) -> None:
    """One run a line, so that a change of one is seen as such."""
    lines = ",\n".join(json.dumps(run, sort_keys=True, allow_nan=False) for run in runs)
    path.write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def read_digest(path: Path) -> list[RunDigest]:
    """The runs of a file; one that holds ``runs_of`` names another, whose runs are also its own."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "runs_of" in content:
        return read_digest(path.with_name(f"{content['runs_of']}.json"))
    runs: list[RunDigest] = content["runs"]
    return runs
