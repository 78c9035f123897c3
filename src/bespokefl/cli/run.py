"""`bespoke run`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bespokefl.cli.common import (
    DEMO,
    DebugClient,
    Device,
    EngineName,
    ExperimentFile,
    Out,
    Resume,
    SeedOption,
    Settings,
    Track,
    given_settings,
    guarded,
    leave,
    say_failures,
    say_report,
)
from bespokefl.progress import make_console

if TYPE_CHECKING:
    from bespokefl.experiments.running import Outcome
    from bespokefl.experiments.schema import Experiment


@guarded
def run(
    experiment: ExperimentFile = None,
    settings: Settings = None,
    out: Out = None,
    engine: EngineName = None,
    device: Device = None,
    resume: Resume = False,
    seed: SeedOption = None,
    track: Track = None,
    debug_client: DebugClient = None,
) -> None:
    """Run the algorithms of an experiment's file (without one, a demonstration), and compare them."""
    from bespokefl.experiments.reading import read_parts

    path = experiment or DEMO
    folder = out or Path("runs") / path.stem
    outcomes = []
    if debug_client is not None:
        engine = engine or "debug"
    given = given_settings(
        settings, engine, device, seed, {"track.to": track or None, "engine.debug_client": debug_client}
    )
    for part in read_parts(path, given):
        if part.name:
            typer.echo(f"{part.name}: {part.title}".rstrip(": "))
        outcomes.append(_run(part.experiment, folder / part.name, resume))
    leave(*outcomes)


def _run(experiment: "Experiment", out: Path, resume: bool) -> "Outcome":
    """Run, print the table, and say where the files are."""
    from bespokefl.experiments.running import run_experiment
    from bespokefl.progress import LineReporter, make_reporter

    console = make_console(stderr=True)
    debugging = experiment.engine.name == "debug"  # a moving bar would write over the debugger's prompt
    reporter = LineReporter(console) if debugging else make_reporter(console)
    outcome = run_experiment(experiment, out, resume=resume, reporter=reporter)
    show_outcome(outcome, out)
    return outcome


def show_outcome(outcome: "Outcome", out: Path) -> None:
    """The table, the report and the files of a run, and what went wrong."""
    from bespokefl.results.files import read_runs
    from bespokefl.results.table import rich_table

    runs = [run for run in read_runs(out) if run.folder in outcome.finished]
    if runs:
        make_console().print(rich_table(runs))
    report = say_report(out)
    if outcome.tracking is not None and report is not None:
        outcome.tracking.report(report)
    typer.echo(f"Files:  {out}")
    say_failures(outcome, out)
