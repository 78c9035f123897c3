"""What the commands share: their options, messages, and exit codes."""

import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.markup import escape

from bespokefl.errors import BespokeError, InputError, no_room
from bespokefl.interrupts import STOPPED, Interrupted, begun
from bespokefl.plain import printable
from bespokefl.progress import make_console

if TYPE_CHECKING:  # imported where they are needed: torch takes seconds, and `bespoke --help` must not
    from bespokefl.experiments.overrides import Setting
    from bespokefl.experiments.running import Outcome

FAILED, WRONG_INPUT, DIVERGED = 1, 2, 3
DEMO = Path(__file__).parents[1] / "demo.toml"

P = ParamSpec("P")

ExperimentFile = Annotated[
    Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment; without one, a demonstration.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration, such as train.rounds=10."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the files go (default: runs/NAME).")]
EngineName = Annotated[str | None, typer.Option("--engine", metavar="E", help="Same as --set engine.name=E.")]
Device = Annotated[str | None, typer.Option("--device", metavar="D", help="Same as --set engine.device=D.")]
DebugClient = Annotated[
    int | None,
    typer.Option("--debug-client", metavar="I", help="Use the debug engine; breakpoints stop for this client only."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what --out holds; skip what is finished.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Also tell tensorboard or mlflow. Same as --set track.to=[NAME]."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Same as --set seeds=[N].")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """One clear message and an exit code for what a user can cause; no traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            begun()
            command(*args, **kwargs)
        except (BespokeError, OSError) as error:
            remedy = f"; make room, then go on with: {_resume_command()}" if no_room(error) else ""
            say_error(f"{error}{remedy}")
            raise typer.Exit(WRONG_INPUT if isinstance(error, InputError) else FAILED) from None
        except Interrupted as stopped:
            _say_stopped(str(stopped))
            raise typer.Exit(STOPPED) from None
        except KeyboardInterrupt:
            _say_stopped("at once")
            raise typer.Exit(STOPPED) from None

    return wrapped


def say_error(text: str) -> None:
    make_console(stderr=True).print(f"[bold red]error:[/] {escape(printable(text))}", soft_wrap=True, highlight=False)


def say_failures(outcome: "Outcome", out: Path) -> None:
    """A line for each run that failed or diverged."""
    for text in outcome.troubles(out):
        say_error(text)


def leave(*outcomes: "Outcome") -> None:
    """Ends the command with the exit code of what happened; none where all went well."""
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(FAILED)
    if any(outcome.diverged for outcome in outcomes):
        raise typer.Exit(DIVERGED)


def _say_stopped(when: str) -> None:
    """One line, however long, so that the command can be copied."""
    typer.echo(f"stopped {when}; continue with: {_resume_command()}", err=True)


def _resume_command() -> str:
    arguments = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
    return shlex.join(["bespoke", *arguments])


def given_settings(
    settings: Sequence[str] | None,
    engine: str | None,
    device: str | None,
    seed: int | None,
    more: Mapping[str, Any] | None = None,
) -> "list[Setting]":
    """What --set and its shortcuts say."""
    from bespokefl.experiments.reading import parse_setting

    given = [parse_setting(text) for text in settings or ()]
    seeds = None if seed is None else [seed]
    shortcuts: dict[str, Any] = {"engine.name": engine, "engine.device": device, "seeds": seeds, **(more or {})}
    return [*given, *((key, value) for key, value in shortcuts.items() if value is not None)]


def say_report(out: Path) -> Path | None:
    """Writes the report of an output folder and says where it is, or what it needs."""
    from bespokefl.report.publish import missing_packages, publish

    if missing := missing_packages():
        typer.echo(f"Report: needs `pip install {' '.join(missing)}`, then `bespoke report {out}`")
        return None
    report = publish(out)
    typer.echo(f"Report: {report}")
    return report
