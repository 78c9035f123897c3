"""Are several runs quicker at once than one after another? Seeds of a method on one engine, in turns.

    python benchmarks/together.py
    python benchmarks/together.py --model fedavg-cnn --clients 25 --steps 40 --methods fedavg,pgfed

Both ways live in one process and take turns: a round of every run alone, then a round of all of them together. Printed:
the median seconds of a round of all runs, and their ratio.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from bespokefl import models
from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import Task
from bespokefl.engines import Engine, Vectorized, pick_device
from bespokefl.engines.together import SharedEngine
from bespokefl.experiments.bench import BATCH, CLASSES, SETTINGS, now, synthetic
from bespokefl.federation import Federation

WARM_UP = 3  # rounds: tracing, capturing


def main(
    model: Annotated[str, typer.Option(help="One of `bespoke bench`.")] = "mlp",
    methods: Annotated[str, typer.Option(help="Names, by commas.")] = "fedavg,pgfed",
    runs: Annotated[int, typer.Option(help="Seeds that go at once.")] = 3,
    clients: Annotated[int, typer.Option(help="Of a round.")] = 10,
    steps: Annotated[int, typer.Option(help="Of a client.")] = 40,
    rounds: Annotated[int, typer.Option(help="To take the median of.")] = 10,
    device: str = "auto",
) -> None:
    """Rounds of several runs at once against one after another."""
    if model not in SETTINGS:
        raise typer.BadParameter(f"{model} is none of {', '.join(SETTINGS)}")
    for method in methods.split(","):
        if method not in ALGORITHMS:
            raise typer.BadParameter(f"{method} is no method; `bespoke list algorithms` names them")
    chosen, console = pick_device(device), Console()
    table = Table(title=f"{model}, {runs} runs of {clients} clients x {steps} steps; s a round of all, {chosen}")
    for heading in ("", "one by one", "together", "ratio"):
        table.add_column(heading, justify="right")
    for method in methods.split(","):
        alone, joined = measure(model, method, runs, clients, steps, rounds, chosen)
        table.add_row(method, f"{alone:.4f}", f"{joined:.4f}", f"{alone / joined:.2f} x")
    console.print(table)


def measure(
    model: str, method: str, runs: int, clients: int, steps: int, rounds: int, device: torch.device
) -> tuple[float, float]:
    """Median seconds of a round of all runs: one after another, and together."""
    setting = SETTINGS[model]
    together = SharedEngine(Vectorized(device), runs)
    torch.manual_seed(0)
    task = Task(models.build(setting.model, setting.shape, CLASSES, **setting.options))

    def federation(engine: Engine, seed: int) -> Federation:
        data = synthetic(setting.shape, clients, steps * BATCH, ragged=False, seed=seed)
        algorithm = build_algorithm(method, {"lr": 0.01, "momentum": 0.9, "local_epochs": 1, "batch_size": BATCH})
        return Federation(task, data, algorithm, engine=engine, seed=seed)

    engine = Vectorized(device)
    alone = [federation(engine, seed) for seed in range(runs)]
    joined = [federation(seat, seed) for seed, seat in enumerate(together.seats)]
    seconds: tuple[list[float], list[float]] = ([], [])
    with ThreadPoolExecutor(runs) as threads:
        for _ in range(WARM_UP + rounds):
            start = now(device)
            for one in alone:
                one.round()
            middle = now(device)
            list(threads.map(Federation.round, joined))
            seconds[0].append(middle - start)
            seconds[1].append(now(device) - middle)
    return statistics.median(seconds[0][WARM_UP:]), statistics.median(seconds[1][WARM_UP:])


if __name__ == "__main__":
    typer.run(main)
