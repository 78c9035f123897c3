"""`bespoke reproduce`: a paper's table or figure, ours beside it."""

from pathlib import Path
from typing import Annotated

import typer

from bespokefl.cli.common import (
    WRONG_INPUT,
    Device,
    EngineName,
    Out,
    SeedOption,
    Settings,
    given_settings,
    guarded,
    leave,
    say_error,
    say_failures,
    say_report,
)
from bespokefl.progress import make_console


@guarded
def reproduce(
    name: Annotated[str, typer.Argument(help="A name of `bespoke list experiments`.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Settings or methods, or setting/method: 'cifar10-*/pgfed*'."),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", metavar="SCALE", help="paper, or small: the same set-up on embedded data.")
    ] = "paper",
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="The folder that holds the data sets.")
    ] = None,
    settings: Settings = None,
    out: Out = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Runs at a time (default: one per GPU, or core).")
    ] = None,
    engine: EngineName = None,
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Always: what --out holds of the same configuration is not run again.")
    ] = True,
    seed: SeedOption = None,
) -> None:
    """Run an experiment that `bespoke list experiments` names, and print ours beside the paper's numbers."""
    from bespokefl.reproduce import study
    from bespokefl.reproduce.tables import print_comparison

    given = given_settings(settings, engine, device, seed)
    request = study.request(name, out, given, only=only or (), scale=scale, data=data, jobs=jobs)
    comparison, outcome = study.reproduce(request, make_console(stderr=True))
    folder = request.out
    print_comparison(comparison, make_console())
    for setting in comparison.settings:
        if setting.scored and setting.has_runs:
            say_report(folder / setting.name)
    typer.echo(f"Comparison: {folder / 'comparison.md'}, {folder / 'comparison.json'}")
    say_failures(outcome, folder)
    without = [setting for setting in comparison.settings if setting.missing_data]
    for setting in without:
        say_error(f"{setting.name or name} was not run: {setting.missing_data}")
    leave(outcome)
    if without:
        raise typer.Exit(WRONG_INPUT)
