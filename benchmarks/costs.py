"""What a method costs beside FedAvg: time, memory, traffic and gradient passes, all methods in one run.

    python benchmarks/costs.py
    python benchmarks/costs.py --methods fedavg,pgfed,lg-mix --model lenet5 --clients 10

The questions are those of LG-Mix's tables 8 and 9 (time and memory against FedAvg), asked of every registered method. A
method has a process of its own, so that its peak of memory is its own; processes take turns, every other time in
reverse order. Columns:

* s, time: the median of a round (vectorized engine), and the same over FedAvg's. The first rounds, in which programs
  are traced, do not count. S-FedPG's time depends on how long its line search takes on these (random) data.
* MiB, memory: the peak of the process above what it held with the data loaded and everything imported, and the same
  over FedAvg's. It is the simulation's: all clients of the round are in it, and the server.
* down, up: numbers sent per client in the last round, in units of the model's size n.
* kept: numbers that a client keeps between rounds, in n (FedAvg's own 1 is the model it was last scored with).
* passes: gradient passes of a client per local step of FedAvg, counted in the second round. A pass for a part of the
  model counts as one; PLGU-GHN's two through its hypernetwork are the server's and do not count.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bespokefl import models
from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.core import InputError, Pass, Task
from bespokefl.core.trees import numel
from bespokefl.engines import Sequential, Vectorized, pick_device
from bespokefl.engines.memory import peak_bytes
from bespokefl.errors import unknown_name
from bespokefl.experiments.bench import BATCH, CLASSES, GPU_STEPS, SETTINGS, synthetic
from bespokefl.federation import Federation

YARDSTICK = "fedavg"
PAPERS = ("plgu-lf", "plgu-grep", "plgu-ghn", "pgfed", "pgfedmo", "fedpg", "s-fedpg", "lg-mix")
DEFAULT = (YARDSTICK, "local", "fedprox", "ditto", *PAPERS)
EPOCHS = 5
TRAINING: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "local_epochs": EPOCHS, "batch_size": BATCH}
WARM_UP = 2  # PGFed's second round runs another program than its first


class Race(NamedTuple):
    """What all methods do."""

    model: str
    clients: int
    samples: int  # per client
    rounds: int  # of a turn
    device: str
    counts_passes: bool  # on a CPU, client by client: minutes for large models


class Costs(NamedTuple):
    method: str
    seconds: float  # of a round, median over the turns
    time: float  # over FedAvg's
    memory_mib: float  # peak above an idle process
    memory: float  # over FedAvg's
    down: float  # in units of n
    up: float
    kept: float
    passes: float  # per local step


class CountingTask(Task):
    """Counts gradient passes; only the sequential engine runs Python at every one."""

    passes = 0

    def grad(self, *args: Any, **options: Any) -> Pass:
        self.passes += 1
        return super().grad(*args, **options)


def measure(methods: Sequence[str], race: Race, repeats: int) -> list[Costs]:
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    for name in methods:
        lines[name], theirs = context.Pipe()
        context.Process(target=_compete, args=(name, race, theirs), daemon=True).start()
        theirs.close()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(1 + repeats):
        for name in methods if turn % 2 == 0 else reversed(methods):
            seconds[name].append(_ask(lines[name], name, WARM_UP if turn == 0 else race.rounds))
    ends = {name: _ask(lines[name], name, None) for name in methods}
    median = {name: statistics.median(turns[1:]) for name, turns in seconds.items()}
    least = ends[YARDSTICK]["memory"]
    return [
        Costs(
            name,
            median[name],
            median[name] / median[YARDSTICK],
            end["memory"] / 2**20,
            end["memory"] / least,
            *(end[k] for k in ("down", "up", "kept", "passes")),
        )
        for name, end in ends.items()
    ]


def _ask(line: Connection, name: str, rounds: int | None) -> Any:
    line.send(rounds)
    answer = line.recv()
    if isinstance(answer, Exception):
        raise SystemExit(f"{name}: {answer}")
    return answer


def _compete(name: str, race: Race, line: Connection) -> None:
    """A method's process: for a number, the mean seconds of so many rounds; for None, all else."""
    try:
        algorithm = build_algorithm(name, TRAINING)
        federation, idle = _prepare(algorithm, race)
        while (rounds := line.recv()) is not None:
            records = [federation.round() for _ in range(rounds)]
            line.send(statistics.fmean(r.seconds for r in records))
        memory = peak_bytes(federation.engine.device) - idle
        n = numel(federation.task.initial)
        sent = 4 * n * race.clients
        kept = numel(federation.site.states.initial) / n
        line.send(
            {
                "memory": memory,
                "down": records[-1].bytes_down / sent,
                "up": records[-1].bytes_up / sent,
                "kept": kept,
                "passes": _passes(algorithm, race) if race.counts_passes else float("nan"),
            }
        )
    except EOFError:  # nobody asks any more: another method has failed
        return
    except Exception as error:
        line.send(error)


def _prepare(algorithm: Algorithm, race: Race) -> tuple[Federation, int]:
    """A federation before its first round, and the peak of memory before there was one."""
    device = torch.device(race.device)
    data = synthetic(SETTINGS[race.model].shape, race.clients, race.samples, ragged=False)
    data = replace(data, x=data.x.to(device))
    tiny = synthetic((2,), 2, 2, ragged=False)
    Federation(torch.nn.Linear(2, CLASSES), tiny, build_algorithm(YARDSTICK), engine=Vectorized(device)).round()
    idle = peak_bytes(device)  # with all that tracing a program imports
    return Federation(Task(_module(race.model)), data, algorithm, engine=Vectorized(device)), idle


def _passes(algorithm: Algorithm, race: Race) -> float:
    """Gradient passes per client and local step of FedAvg, in the second round of two clients."""
    data = synthetic(SETTINGS[race.model].shape, 2, race.samples, ragged=False)
    task = CountingTask(_module(race.model))
    federation = Federation(task, data, algorithm, engine=Sequential())
    federation.round()
    before = task.passes
    federation.round()
    return (task.passes - before) / (2 * EPOCHS * -(-race.samples // BATCH))


def _module(model: str) -> torch.nn.Module:
    setting = SETTINGS[model]
    torch.manual_seed(0)
    return models.build(setting.model, setting.shape, CLASSES, **setting.options)


def _table(title: str, costs: Sequence[Costs]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "s", "time", "MiB", "memory", "down", "up", "kept", "passes"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for c in costs:
        table.add_row(
            c.method,
            f"{c.seconds:.3f}",
            f"{c.time:.2f}",
            f"{c.memory_mib:,.0f}",
            f"{c.memory:.2f}",
            *(f"{v:.2f}" for v in (c.down, c.up, c.kept, c.passes)),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Time, memory, traffic and gradient passes of methods beside FedAvg's")
    parser.add_argument("--methods", default=",".join(DEFAULT), help="names with commas; fedavg is always measured")
    parser.add_argument("--model", default="mlp", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a turn")
    parser.add_argument("--clients", type=int, default=20, help="all of them in every round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each method")
    parser.add_argument("--no-passes", action="store_true", help="do not count gradient passes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    try:
        device = pick_device(given.device)
        methods = list(dict.fromkeys([YARDSTICK, *given.methods.split(",")]))
        for name in methods:
            if name not in ALGORITHMS:
                raise unknown_name("method", name, ALGORITHMS)
    except InputError as error:
        parser.error(str(error))
    if min(given.rounds, given.clients, given.repeats) < 1:
        parser.error("--rounds, --clients and --repeats are each at least 1")
    steps = SETTINGS[given.model].cpu_steps if device.type == "cpu" else GPU_STEPS
    samples = max(1, steps // EPOCHS) * BATCH
    race = Race(given.model, given.clients, samples, given.rounds, str(device), not given.no_passes)
    costs = measure(methods, race, given.repeats)
    if given.json:
        print(json.dumps({"torch": torch.__version__, **race._asdict(), "methods": [c._asdict() for c in costs]}))
        return
    title = (
        f"{given.model}, {given.clients} clients x {samples} samples, {EPOCHS} epochs of batch {BATCH}\n"
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads; median of {given.repeats} turns"
    )
    Console().print(_table(title, costs))


if __name__ == "__main__":
    main()
