"""`bespoke run` and `bespoke reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    guarded,
    make_console,
    read_experiment_file,
    say_error,
)

if TYPE_CHECKING:
    from bespokefl.config import Experiment
    from bespokefl.results.files import StoredRun


@guarded
def run(
    experiment: ExperimentFile = None,
    settings: Settings = None,
    out: Out = None,
    engine: EngineName = None,
    device: Device = None,
    resume: Resume = False,
    seed: SeedOption = None,
) -> None:
    """Run the algorithms of an experiment, and compare them."""
    path = experiment or DEMO
    folder = out or Path("runs") / path.stem
    _run(read_experiment_file(path, settings, engine, device, seed), folder, resume)


@guarded
def reproduce(
    name: Annotated[str, typer.Argument(help="A name of `bespoke list experiments`.")],
    settings: Settings = None,
    out: Out = None,
    engine: EngineName = None,
    device: Device = None,
    resume: Resume = False,
    seed: SeedOption = None,
) -> None:
    """Run an experiment of a paper, and print its table beside the paper's."""
    from bespokefl.catalogue import experiment_file
    from bespokefl.results.table import paper_table

    chosen = read_experiment_file(experiment_file(name), settings, engine, device, seed)
    failed, runs = _run(chosen, out or Path("runs") / name, resume, exit_on_failure=False)
    make_console().print(paper_table(runs, chosen.paper))
    if failed:
        raise typer.Exit(FAILED)


def _run(
    experiment: "Experiment", out: Path, resume: bool, *, exit_on_failure: bool = True
) -> tuple[bool, "list[StoredRun]"]:
    """Run, print the table, and say where the files are; whether something failed, and this experiment's runs."""
    from bespokefl.experiment import run_experiment
    from bespokefl.progress import make_reporter
    from bespokefl.results.files import read_runs
    from bespokefl.results.report import publish
    from bespokefl.results.table import rich_table

    outcome = run_experiment(experiment, out, resume=resume, reporter=make_reporter(make_console(stderr=True)))
    runs = [run for run in read_runs(out) if run.folder in outcome.finished]
    if runs:
        make_console().print(rich_table(runs))
    typer.echo(f"Report: {publish(out)}")
    typer.echo(f"Files:  {out}")
    for folder in outcome.failed:
        say_error(f"{folder.parent.name}, {folder.name} failed; the reason is in {folder / 'error.txt'}")
    if outcome.failed and exit_on_failure:
        raise typer.Exit(FAILED)
    return bool(outcome.failed), runs
