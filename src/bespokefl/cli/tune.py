"""`bespoke tune`."""

from pathlib import Path
from typing import Annotated

import typer

from bespokefl.cli.common import (
    DEMO,
    FAILED,
    Device,
    EngineName,
    ExperimentFile,
    Out,
    Resume,
    SeedOption,
    Settings,
    given_settings,
    guarded,
    say_error,
)
from bespokefl.progress import make_console


@guarded
def tune(
    experiment: ExperimentFile = None,
    settings: Settings = None,
    out: Out = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Trials of each method. Same as --set tune.trials=N.")
    ] = None,
    engine: EngineName = None,
    device: Device = None,
    resume: Resume = False,
    seed: SeedOption = None,
) -> None:
    """Choose every method's hyper-parameters by validation accuracy."""
    from bespokefl.experiments.reading import read_experiment
    from bespokefl.progress import make_reporter
    from bespokefl.tuning import tune as tune_experiment
    from bespokefl.tuning.table import rich_table

    path = experiment or DEMO
    read = read_experiment(path, given_settings(settings, engine, device, seed, {"tune.trials": trials}))
    reporter = make_reporter(make_console(stderr=True), lines_per_run=1)
    tuning = tune_experiment(read, out or Path("runs") / path.stem, resume=resume, reporter=reporter)
    make_console().print(rich_table(tuning))
    typer.echo(f"Tuned experiment: {tuning.file}")
    failed = [method.label for method in tuning.methods if method.failed]
    for label in failed:
        say_error(f"every trial of {label} failed; the reasons are in {tuning.file.parent / 'tuning' / label}.json")
    if failed:
        raise typer.Exit(FAILED)
