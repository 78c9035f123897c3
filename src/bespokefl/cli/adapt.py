"""`bespoke adapt`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bespokefl.cli.common import guarded
from bespokefl.progress import make_console

if TYPE_CHECKING:
    from bespokefl.evaluation.scoring import Evaluation
    from bespokefl.products.adapt import Adapted

MOST_LINES = 21  # of the printed curve


@guarded
def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, such as runs/demo/ditto/seed-0.")],
    data: Annotated[
        Path,
        typer.Option("--data", metavar="PATH", help="The new client's samples: a .npz file, or a folder of images."),
    ],
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", min=1, help="Epochs of its own training.")] = 20,
    lr: Annotated[
        float | None, typer.Option("--lr", metavar="X", help="Step size; as in the run unless given.")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option("--momentum", metavar="X", help="Of SGD; as in the run unless given.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", min=1, help="Samples of a step; as in the run unless given."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--start", metavar="HOW", help="method: the method's own way; global: plain SGD from the global model."
        ),
    ] = "method",
    opt_state: Annotated[
        str,
        typer.Option("--opt-state", metavar="HOW", help="reset: a fresh optimiser in every epoch; keep: one for all."),
    ] = "reset",
    test: Annotated[
        float | None,
        typer.Option("--test", metavar="F", help="Fraction of the samples to test on, if none are marked."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The .safetensors file to write, or its folder.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the model as ONNX, too.")] = False,
    device: Annotated[str | None, typer.Option("--device", metavar="D", help="auto, cpu, cuda, ...")] = None,
) -> None:
    """Give a client that never took part a model of its own, from a finished run."""
    from bespokefl.federation.new_clients import Joining
    from bespokefl.products.adapt import adapt as adapt_model

    joining = Joining.checked(
        epochs=epochs, start=start, opt_state=opt_state, lr=lr, momentum=momentum, batch_size=batch_size
    )
    columns = (TextColumn("epoch"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = make_console(stderr=True)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("", total=epochs)

        def tell(epoch: int, train: "Evaluation", test: "Evaluation") -> None:
            progress.update(task, completed=epoch, description=f"train loss {train.loss[0]:.3f}")

        adapted = adapt_model(folder, data, joining, test=test, out=out, onnx=onnx, device=device, on_epoch=tell)
    if adapted.note:
        typer.echo(f"warning: {adapted.note}", err=True)
    make_console().print(_curve(adapted))
    typer.echo(f"What was done: {adapted.how}.")
    if adapted.accuracy[-1] is None:
        typer.echo("There were no test rows; --test 0.25 holds some out.")
    for path in adapted.files:
        typer.echo(path)


def _curve(adapted: "Adapted") -> Table:
    tested = adapted.accuracy[-1] is not None
    table = Table(box=None, pad_edge=False)
    for name in ("epoch", "train loss", "train %", "test %")[: 4 if tested else 3]:
        table.add_column(name, justify="right")
    epochs = len(adapted.train_loss) - 1
    every = -(-epochs // (MOST_LINES - 1))
    for epoch in [*range(0, epochs, every), epochs]:
        accuracies = adapted.train_accuracy[epoch], adapted.accuracy[epoch]
        shown = [_percent(value) for value in accuracies[: 2 if tested else 1]]
        loss = adapted.train_loss[epoch]
        table.add_row(str(epoch), "-" if loss is None else f"{loss:.4f}", *shown)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
