"""`bespoke report`, `bespoke results` and `bespoke export`: what a finished run gives."""

from pathlib import Path
from typing import Annotated

import typer

from bespokefl.cli.common import guarded
from bespokefl.progress import make_console


@guarded
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What was --out of a run.")],
    figures: Annotated[
        bool, typer.Option("--figures", help="Write every chart as SVG and PNG to DIR/figures, too.")
    ] = False,
) -> None:
    """Write DIR/report.html, one interactive file that needs nothing else."""
    from bespokefl.report.publish import FIGURES, publish

    typer.echo(publish(folder, figures=figures))
    if figures:
        typer.echo(folder / FIGURES)


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
                make_console().print(answers.rich_table(store.ask(connection, query, answers.MOST_ROWS)))
            return
        answer = store.ask(connection, store.EVERYTHING if sql is None else sql)
    if csv is not None:
        answers.write_csv(answer, csv)
    if as_json:
        typer.echo(answers.to_json(answer))


@guarded
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, such as runs/demo/ditto/seed-0.")],
    client: Annotated[int, typer.Option("--client", metavar="I", help="Number of the client, from 0.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the model as ONNX, too.")] = False,
) -> None:
    """Write a client's personal model."""
    from bespokefl.products.export import export_model

    for written in export_model(folder, client, out, onnx=onnx):
        typer.echo(written.path)
        typer.echo(f"  {written.checked}", err=True)
