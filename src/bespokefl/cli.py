"""The command line. Exit codes: 0 done, 1 failed while running, 2 the input is wrong, 130 stopped by the user."""

import functools
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bespokefl import __version__
from bespokefl.errors import BespokeError, InputError
from bespokefl.interrupts import Interrupted

if TYPE_CHECKING:  # imported where they are needed: torch takes seconds, and `bespoke --help` must not
    from bespokefl.config import Experiment
    from bespokefl.results.files import StoredRun

FAILED, WRONG_INPUT, STOPPED = 1, 2, 130
NARROWEST_LOG = 120  # columns of a table that goes to a file

app = typer.Typer(
    name="bespoke",
    help="Personalised federated learning in which no client is left behind.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what --out holds; skip what is finished.")]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Same as --set seeds=[N].")]


def main() -> None:
    """The `bespoke` command."""
    sys.path.insert(0, "")  # a model or an algorithm of the user's own may lie in the current directory
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app()


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """One clear message and an exit code for what a user can cause; no traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BespokeError as error:
            _say_error(str(error))
            raise typer.Exit(WRONG_INPUT if isinstance(error, InputError) else FAILED) from None
        except OSError as error:
            _say_error(str(error))
            raise typer.Exit(FAILED) from None
        except Interrupted as stopped:
            _say_stopped(str(stopped))
            raise typer.Exit(STOPPED) from None
        except KeyboardInterrupt:
            _say_stopped("at once")
            raise typer.Exit(STOPPED) from None

    return wrapped


def _say_error(text: str) -> None:
    _console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True, highlight=False)


def _say_stopped(when: str) -> None:
    """One line, however long, so that the command can be copied."""
    typer.echo(f"stopped {when}; continue with: {_resume_command()}", err=True)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=NARROWEST_LOG)


def _resume_command() -> str:
    arguments = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
    return shlex.join(["bespoke", *arguments])


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


@app.command()
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
    path = experiment or Path(__file__).with_name("demo.toml")
    folder = out or Path("runs") / path.stem
    _run(_read(path, settings, engine, device, seed), folder, resume)


@app.command()
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
    from bespokefl.progress import make_reporter
    from bespokefl.tuning import tune as tune_experiment
    from bespokefl.tuning.table import rich_table

    path = experiment or Path(__file__).with_name("demo.toml")
    read = _read(path, settings, engine, device, seed, {"tune.trials": trials})
    reporter = make_reporter(_console(stderr=True), lines_per_run=1)
    tuning = tune_experiment(read, out or Path("runs") / path.stem, resume=resume, reporter=reporter)
    _console().print(rich_table(tuning))
    typer.echo(f"Tuned experiment: {tuning.file}")
    failed = [method.label for method in tuning.methods if method.failed]
    for label in failed:
        _say_error(f"every trial of {label} failed; the reasons are in {tuning.file.parent / 'tuning' / label}.json")
    if failed:
        raise typer.Exit(FAILED)


@app.command()
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

    chosen = _read(experiment_file(name), settings, engine, device, seed)
    failed, runs = _run(chosen, out or Path("runs") / name, resume, exit_on_failure=False)
    _console().print(paper_table(runs, chosen.paper))
    if failed:
        raise typer.Exit(FAILED)


@app.command()
@guarded
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What was --out of a run.")],
) -> None:
    """Write DIR/report.html, one file that needs nothing else."""
    from bespokefl.results.report import publish

    typer.echo(publish(folder))


@app.command()
@guarded
def results(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What was --out of a run, or a folder above or below.")],
    sql: Annotated[
        str | None, typer.Option("--sql", metavar="QUERY", help="About results, runs, rounds and clients.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write all rows to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: all rows, as objects.")] = False,
) -> None:
    """Ask for results, one per run, round, client and metric, in SQL; without a query, an overview."""
    from bespokefl.results import answers, store

    with store.connect(folder) as connection:
        if csv is None and not as_json:
            for query in store.OVERVIEW.values() if sql is None else [sql]:
                _console().print(answers.rich_table(store.ask(connection, query, answers.MOST_ROWS)))
            return
        answer = store.ask(connection, store.EVERYTHING if sql is None else sql)
    if csv is not None:
        answers.write_csv(answer, csv)
    if as_json:
        typer.echo(answers.to_json(answer))


@app.command()
@guarded
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, such as runs/demo/ditto/seed-0.")],
    client: Annotated[int, typer.Option("--client", metavar="I", help="Number of the client, from 0.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the network as ONNX, too.")] = False,
) -> None:
    """Write a client's personal model."""
    from bespokefl.export import export_model

    for path in export_model(folder, client, out, onnx=onnx):
        typer.echo(path)


@app.command(name="list")
@guarded
def list_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="algorithms, datasets, models, partitions, experiments")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, with all it can be told.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List what there is to choose from."""
    from bespokefl.catalogue import listing

    entries = listing(kind, name)
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
        return
    if name is not None and kind == "algorithms":
        _print_algorithm(entries[0])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "description", "options"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        chosen = ", ".join(f"{name}={_default(option)}" for name, option in entry["options"].items())
        table.add_row(entry["name"], escape(entry["description"]), escape(chosen))
    _console().print(table)


def _print_algorithm(entry: dict[str, Any]) -> None:
    console = _console()
    console.print(escape(entry["description"]), escape(entry["paper"]), sep="\n", highlight=False)
    for title, options in (("its own", entry["options"]), ("of local training", entry["training"])):
        table = Table(box=None, pad_edge=False)
        for column in (title, "default", "what it is", "allowed"):
            table.add_column(column, overflow="fold")
        for option in options.values():
            default = "nothing" if option["default"] is None else str(option["default"])
            allowed = option["allowed"] or option["type"]
            table.add_row(option["name"], default, escape(option["meaning"]), escape(allowed))
        console.print()
        console.print(table)


def _default(option: Any) -> Any:
    return option["default"] if isinstance(option, dict) else option


@app.command()
@guarded
def bench(
    which: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Models; linear, mlp, fedavg-cnn.")] = None,
    device: Annotated[str, typer.Option(metavar="D", help="auto, cpu, cuda, ...")] = "auto",
    clients: Annotated[int, typer.Option(metavar="N", help="Clients of a round.")] = 25,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Local steps of a client.")] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Clients of different sizes.")] = False,
    repeats: Annotated[int, typer.Option(metavar="N", help="Rounds of each contender.")] = 5,
) -> None:
    """Measure speed, as ratios in one run."""
    from bespokefl.bench import DEFAULT, main

    main(which or DEFAULT, device=device, clients=clients, steps=steps, ragged=ragged, repeats=repeats)


def _read(
    path: Path,
    settings: Sequence[str] | None,
    engine: str | None,
    device: str | None,
    seed: int | None,
    more: Mapping[str, Any] | None = None,
) -> "Experiment":
    from bespokefl.config_file import parse_setting, read_experiment

    given = [parse_setting(text) for text in settings or ()]
    seeds = None if seed is None else [seed]
    shortcuts: dict[str, Any] = {"engine.name": engine, "engine.device": device, "seeds": seeds, **(more or {})}
    return read_experiment(path, [*given, *((key, value) for key, value in shortcuts.items() if value is not None)])


def _run(
    experiment: "Experiment", out: Path, resume: bool, *, exit_on_failure: bool = True
) -> tuple[bool, "list[StoredRun]"]:
    """Run, print the table, and say where the files are; whether something failed, and this experiment's runs."""
    from bespokefl.experiment import run_experiment
    from bespokefl.progress import make_reporter
    from bespokefl.results.files import read_runs
    from bespokefl.results.report import publish
    from bespokefl.results.table import rich_table

    outcome = run_experiment(experiment, out, resume=resume, reporter=make_reporter(_console(stderr=True)))
    runs = [run for run in read_runs(out) if run.folder in outcome.finished]
    if runs:
        _console().print(rich_table(runs))
    typer.echo(f"Report: {publish(out)}")
    typer.echo(f"Files:  {out}")
    for folder in outcome.failed:
        _say_error(f"{folder.parent.name}, {folder.name} failed; the reason is in {folder / 'error.txt'}")
    if outcome.failed and exit_on_failure:
        raise typer.Exit(FAILED)
    return bool(outcome.failed), runs
