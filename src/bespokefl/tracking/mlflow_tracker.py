"""MLflow: a run of its own for every run, in a database beside the results unless another place is named."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from bespokefl import __version__
from bespokefl.results import files
from bespokefl.tracking.base import EVERY_ROUND, State, TrackedRun, TrackSettings, final_figures

DATABASE, ARTIFACTS, IDENTITY = "mlflow.db", "mlartifacts", "mlflow.json"
SENT = (files.CONFIG, files.SUMMARY, files.CLIENTS, files.NEW_CLIENTS, files.ERROR)
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
LONGEST_VALUE = 500  # characters of a parameter that every store takes


def make(settings: TrackSettings, out: Path) -> "MLflow":
    place = settings.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    out = out.absolute()
    return MLflow(place or f"sqlite:///{out / DATABASE}", settings.experiment or out.name, None if place else out)


class MLflow:
    """The run's id is kept in its folder, so that a resumed run goes on with the same one."""

    name = "mlflow"

    def __init__(self, uri: str, experiment: str, local: Path | None) -> None:
        """``local`` is where files go with the database beside the results; another store has a place of its own."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would send what is used to MLflow's makers
        self._uri, self._experiment, self._local = uri, experiment, local
        self._run: TrackedRun | None = None
        self._id = ""
        self._ended = False

    def open(self, run: TrackedRun) -> int:
        with _quiet():
            self._run, self._ended = run, False
            known = self._known(run.folder / IDENTITY)
            if known is None:
                self._id = self._create(run)
                return 0
            self._id = known.info.run_id
            self._ended = known.info.status == STATUS["finished"]
            if not self._ended:
                self._client.update_run(self._id, status="RUNNING")
            steps = [metric.step for metric in self._client.get_metric_history(self._id, EVERY_ROUND)]
            return max(steps, default=0)

    def log(self, round_: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        with _quiet():
            self._client.log_batch(self._id, [Metric(name, value, now, round_) for name, value in figures.items()])

    def close(self, state: State, summary: dict[str, Any] | None) -> None:
        if self._ended or self._run is None:
            return
        with _quiet():
            if summary is not None:
                self.log(summary["rounds"], final_figures(summary))
            for path in (self._run.folder / name for name in SENT):
                if path.is_file():
                    self._client.log_artifact(self._id, str(path))
            self._client.set_terminated(self._id, STATUS[state])

    def report(self, path: Path) -> None:
        """A run named `report` has the experiment's report; a newer one takes its place."""
        with _quiet():
            experiment = self._experiment_id()
            found = self._client.search_runs([experiment], "tags.mlflow.runName = 'report'", max_results=1)
            run = found[0] if found else self._client.create_run(experiment, run_name="report")
            self._client.log_artifact(run.info.run_id, str(path))
            self._client.set_terminated(run.info.run_id, STATUS["finished"])

    # details -----------------------------------------------------------------------------------------
    @cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def _known(self, path: Path) -> Any:
        """The MLflow run that this one was before; None if there is none, or it is gone."""
        if not path.is_file() or (identity := files.read_json(path)).get("uri") != self._uri:
            return None
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(identity["run_id"])
        except MlflowException:
            return None
        return found if found.info.lifecycle_stage == "active" else None

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        tags = {"algorithm": run.algorithm, "label": run.label, "seed": str(run.seed), "bespokefl": __version__}
        made = self._client.create_run(self._experiment_id(), run_name=run.name, tags=tags)
        params = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in _flat(run.document)]
        for first in range(0, len(params), 100):  # as many as MLflow takes at once
            self._client.log_batch(made.info.run_id, params=params[first : first + 100])
        files.write_json(run.folder / IDENTITY, {"uri": self._uri, "run_id": made.info.run_id})
        return str(made.info.run_id)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None if self._local is None else (self._local / ARTIFACTS).as_uri()
        return str(self._client.create_experiment(self._experiment, artifact_location=artifacts))


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what MLflow and its database say about themselves."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
