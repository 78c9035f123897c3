"""A run as its newest checkpoint has it."""

from dataclasses import dataclass
from pathlib import Path

from bespokefl.errors import InputError
from bespokefl.experiments import checkpoint, resolve
from bespokefl.experiments.callbacks.checkpoints import restore
from bespokefl.experiments.reading import read_experiment
from bespokefl.experiments.schema import AlgorithmChoice, Experiment
from bespokefl.federation import Federation
from bespokefl.results import files


@dataclass(frozen=True)
class RestoredRun:
    """A run of an experiment, brought back from its folder."""

    folder: Path
    experiment: Experiment
    choice: AlgorithmChoice
    seed: int
    federation: Federation


def load_run(folder: Path | str, device: str | None = None) -> RestoredRun:
    """A run as its newest checkpoint has it: its experiment, and its federation with all models and states.

    ``folder`` is a run's, or one that holds exactly one run; ``device`` replaces that of the run.

    >>> run = bfl.load_run("runs/small/ditto/seed-0")
    >>> run.federation.rounds_done
    2
    """
    run = single_run(Path(folder))
    experiment = read_experiment(run / files.CONFIG, [] if device is None else [("engine.device", device)])
    (choice,), (seed,) = experiment.algorithms, experiment.seeds
    stored = checkpoint.load_newest(run / files.CHECKPOINT)
    if stored is None:
        raise InputError(f"{run} has no checkpoint yet; let the run go on with `bespoke run ... --resume`.")
    data = resolve.load_data(experiment, seed)
    federation = resolve.make_federation(experiment, resolve.make_resources(experiment, choice, data), seed, data)
    restore(federation, stored)
    return RestoredRun(run, experiment, choice, seed, federation)


def single_run(folder: Path) -> Path:
    """The folder itself, or that of the only run in it."""
    if (folder / files.CONFIG).is_file():
        return folder
    runs = sorted(config.parent for config in folder.glob(f"**/seed-*/{files.CONFIG}"))
    if len(runs) != 1:
        found = ", ".join(str(run.relative_to(folder)) for run in runs) or "none"
        raise InputError(f"{folder} must be a run's folder, such as DIR/fedavg/seed-0; runs found in it: {found}.")
    return runs[0]
