"""`bespoke list` and `bespoke bench`."""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from bespokefl.cli.common import guarded
from bespokefl.progress import make_console


@guarded
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="algorithms, optimizers, datasets, models, partitions, engines, experiments"
        ),
    ],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, with all it can be told.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List what there is of a kind: algorithms, optimizers, datasets, models, partitions, engines or experiments."""
    from bespokefl.experiments.listing import listing

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
    make_console().print(table)


def _print_algorithm(entry: dict[str, Any]) -> None:
    console = make_console()
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
    from bespokefl.experiments.bench import DEFAULT, main

    main(which or DEFAULT, device=device, clients=clients, steps=steps, ragged=ragged, repeats=repeats)
