"""Does a round cost more in a larger federation? 25 clients of 100 against 25 of 10,000, the same data per client.

    python benchmarks/growth.py

Both federations live in one process and take turns. Printed: the median time of a round, its ratio, and the memory that
client states hold (only clients that took part have any).
"""

import statistics

import torch
from rich.console import Console
from rich.table import Table

from bespokefl import models
from bespokefl.algorithms.ditto import Ditto
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Task
from bespokefl.core.trees import nbytes
from bespokefl.experiments.bench import synthetic
from bespokefl.federation import Federation

SIZES = (100, 10_000)
PER_CLIENT, ROUNDS, WARM_UP = 100, 30, 5


def main() -> None:
    console = Console()
    table = Table(title=f"25 clients a round, {PER_CLIENT} samples each, mlp 64-200-10; median of {ROUNDS} rounds")
    for heading in ("", *(f"{n:,} clients, ms" for n in SIZES), "ratio", *(f"{n:,}: states, MiB" for n in SIZES)):
        table.add_column(heading, justify="right")
    data = {n: synthetic((64,), n, PER_CLIENT, ragged=False) for n in SIZES}
    for algorithm in (FedAvg(lr=0.01, batch_size=50), Ditto(lr=0.01, batch_size=50)):
        federations = {}
        for n in SIZES:
            torch.manual_seed(0)
            task = Task(models.build("mlp", (64,), 10, hidden=[200]))
            federations[n] = Federation(task, data[n], algorithm, clients_per_round=25)
        seconds: dict[int, list[float]] = {n: [] for n in SIZES}
        asked: dict[int, set[int]] = {n: set() for n in SIZES}
        for _ in range(WARM_UP + ROUNDS):
            for n, federation in federations.items():
                record = federation.round()
                seconds[n].append(record.seconds)
                asked[n].update(record.clients.tolist())
        median = {n: statistics.median(s[WARM_UP:]) for n, s in seconds.items()}
        states = {n: nbytes(f.site.states.rows()) / 2**20 for n, f in federations.items()}
        for n, federation in federations.items():
            assert set(federation.site.states.clients) == asked[n], "only clients that took part hold state"
        table.add_row(
            algorithm.name,
            *(f"{1e3 * median[n]:.1f}" for n in SIZES),
            f"{median[SIZES[1]] / median[SIZES[0]]:.2f}",
            *(f"{states[n]:.1f}" for n in SIZES),
        )
    console.print(table)


if __name__ == "__main__":
    main()
