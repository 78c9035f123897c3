"""`bespoke predict`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from bespokefl.cli.common import guarded
from bespokefl.progress import make_console

if TYPE_CHECKING:
    from bespokefl.products.predict import Prediction

LISTED = 3  # classes of a row


@guarded
def predict(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A silo's folder, or a run's with output.personal = true.")
    ],
    inputs: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images, or arrays (.npy, .npz with x).")],
    client: Annotated[
        int | None, typer.Option("--client", metavar="I", help="Whose model, if the folder has several.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="A run in the silo's folder; the newest unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: all probabilities.")] = False,
    device: Annotated[str, typer.Option("--device", metavar="D", help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Ask a personal model for the class of new samples."""
    from bespokefl.flower.silo.kept_model import load_kept_model
    from bespokefl.products.predict import load_personal_model
    from bespokefl.results.files import CONFIG

    of_run = (folder / CONFIG).is_file()
    model = load_personal_model(folder, client, device) if of_run else load_kept_model(folder, client, run, device)
    found = model.predict(inputs)
    if as_json:
        typer.echo(json.dumps({"model": str(model.path), "predictions": [one.as_json() for one in found]}, indent=1))
        return
    make_console().print(_table(found))
    typer.echo(f"Model: {model.path}")


def _table(found: "list[Prediction]") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("input", overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    table.add_column("then")
    one_folder = len({Path(one.source).parent for one in found}) == 1  # then it is known to whoever asked
    for one in found:
        source = escape(Path(one.source).name if one_folder else one.source)
        ranked = sorted(one.probabilities.items(), key=lambda item: -item[1])[1:LISTED]
        others = ", ".join(f"{name} {100 * value:.1f} %" for name, value in ranked)
        table.add_row(source, escape(one.label), f"{100 * one.probability:.1f} %", escape(others))
    return table
