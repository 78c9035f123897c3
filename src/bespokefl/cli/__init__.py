"""The command line.

Exit codes: 0 done, 1 failed while running, 2 the input is wrong, 3 diverged, 130 stopped by the user.
"""

import sys
import warnings
from typing import Annotated

import typer

from bespokefl import __version__
from bespokefl.cli import adapt, catalogue, federation, predict, reproduce, results, run, tune

app = typer.Typer(
    name="bespoke",
    help="Personalised federated learning in which no client is left behind.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `bespoke` command."""
    sys.path.insert(0, "")  # a model or an algorithm of the user's own may lie in the current directory
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bespokefl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Personalised federated learning in which no client is left behind."""


COMMANDS = (
    run.run,
    tune.tune,
    reproduce.reproduce,
    results.report,
    results.results,
    results.export,
    adapt.adapt,
    predict.predict,
    federation.federate,
    federation.server,
    federation.node,
    federation.certs,
)
for command in COMMANDS:
    app.command()(command)
app.command(name="list")(catalogue.list_)
app.command()(catalogue.bench)
