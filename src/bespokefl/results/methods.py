"""Runs by method: what their clients score, and what these gain over a baseline."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bespokefl.evaluation.metrics import individual_gain
from bespokefl.results.files import StoredRun

BASELINE = "local"
Scores = npt.NDArray[np.float64]  # fractions, by client


def by_method(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Finished runs by label, the best mean first."""
    methods: dict[str, list[StoredRun]] = {}
    means: dict[str, list[float]] = {}
    for run in runs:
        if run.summary is not None:
            methods.setdefault(run.label, []).append(run)
            means.setdefault(run.label, []).append(run.summary["mean"])
    return {label: methods[label] for label in sorted(methods, key=lambda label: -float(np.mean(means[label])))}


def metric(run: StoredRun) -> str:
    """What a run's mean is of; runs of older versions have no other than the accuracy."""
    return str((run.summary or {}).get("metric", "accuracy"))


def scores(run: StoredRun) -> Scores:
    """What a finished run is compared by; NaN for clients without test data and for those that attacked."""
    assert run.clients is not None
    found: Scores = run.clients[metric(run)].astype(np.float64)
    if "malicious" not in run.clients:
        return found
    return np.where(run.clients["malicious"].astype(np.float64) > 0, np.nan, found)


def baseline_runs(runs: Sequence[StoredRun], algorithm: str = BASELINE) -> dict[int, StoredRun]:
    """By seed, the runs that others are compared with; of several with this algorithm those labelled by its name."""
    chosen: dict[int, StoredRun] = {}
    for run in runs:
        same = run.summary is not None and run.summary["algorithm"] == algorithm
        if same and (run.seed not in chosen or run.label == algorithm):
            chosen[run.seed] = run
    return chosen


def gains(runs: Sequence[StoredRun], baseline: Mapping[int, StoredRun]) -> dict[int, Scores]:
    """Each client's gain in percentage points, by seed; seeds whose clients are not the baseline's are left out."""
    found = {}
    for run in runs:
        if run.seed in baseline:
            own, other = scores(run), scores(baseline[run.seed])
            if own.shape == other.shape and not np.isnan(own - other).all():
                found[run.seed] = individual_gain(own, other).per_client
    return found
