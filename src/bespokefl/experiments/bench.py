"""Speed as a ratio in one run: our engines against a plain PyTorch loop over the clients, doing the same passes.

The plain loop is what one would write without any federated code: textbook networks, eager float32,
``torch.optim.SGD``, one client after another with torch's own threads. Every contender has a process of its own, so
that none gains from another's settings (our engine tunes the memory allocator) and peak memory is its own; they take
turns, so that a busy machine slows all of them alike.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn

from bespokefl import models
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core.program import plan_phases
from bespokefl.core.task import Task
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized, pick_device
from bespokefl.engines.memory import peak_bytes
from bespokefl.errors import InputError, unknown_name
from bespokefl.federation import Federation

BATCH = 50
CLASSES = 10
LR, MOMENTUM = 0.01, 0.9
GPU_STEPS = 40


class Setting(NamedTuple):
    model: str
    options: dict[str, object]
    shape: tuple[int, ...]
    textbook: Callable[[], nn.Module]
    cpu_steps: int  # of a client in a round: a CPU needs 20 ms for one of the CNN


def _textbook_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


def _as_shipped(model: str, shape: tuple[int, ...], cpu_steps: int, **options: object) -> Setting:
    """The plain loop gets our own network, faster order of pooling included."""
    return Setting(model, options, shape, lambda: models.build(model, shape, CLASSES, **options), cpu_steps)


DEFAULT = ("linear", "mlp", "fedavg-cnn")
SETTINGS = {
    "linear": Setting("linear", {}, (64,), lambda: nn.Linear(64, CLASSES), 40),
    "mlp": Setting(
        "mlp",
        {"hidden": [200]},
        (784,),
        lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES)),
        40,
    ),
    "fedavg-cnn": Setting("fedavg-cnn", {}, (3, 32, 32), _textbook_cnn, 4),
    "lenet5": _as_shipped("lenet5", (3, 32, 32), 8),
    "fedpg-cnn": _as_shipped("fedpg-cnn", (3, 32, 32), 2),
    "digit-model": _as_shipped("digit-model", (3, 28, 28), 4),
    "pfedhn-target": _as_shipped("pfedhn-target", (3, 32, 32), 8),
    "resnet18": _as_shipped("resnet18", (3, 32, 32), 1),
    "resnet18-batchnorm": _as_shipped("resnet18", (3, 32, 32), 1, norm="batch"),
}


CONTENDERS = ("sequential", "vectorized", "vectorized bf16")


class Race(NamedTuple):
    """What all contenders do."""

    model: str
    clients: int
    samples: int  # per client, on average
    ragged: bool
    device: str
    compile: bool


class Turn(NamedTuple):
    seconds: float
    waste: float  # computed / useful samples
    peak_bytes: int


class Measured(NamedTuple):
    name: str
    seconds: float  # median of a round
    ratio: float  # plain loop's median over this one's
    samples_per_second: float
    waste: float
    peak_bytes: int


def main(
    which: Sequence[str] = DEFAULT,
    *,
    device: str = "auto",
    clients: int = 25,
    steps: int | None = None,
    ragged: bool = False,
    repeats: int = 5,
    compile: bool = False,
    contenders: Sequence[str] = CONTENDERS,
) -> dict[str, list[Measured]]:
    """Measures and prints; ``ragged`` draws client sizes like a Dirichlet(0.3) partition of the same total.

    ``contenders`` are measured beside the plain loop.
    """
    chosen, console = pick_device(device), Console()
    for name in which:
        if name not in SETTINGS:
            raise unknown_name("model", name, SETTINGS)
    for name in contenders:
        if name not in CONTENDERS:
            raise unknown_name("contender", name, CONTENDERS)
    if min(clients, repeats, steps or 1) < 1:
        raise InputError(f"clients = {clients}, steps = {steps}, repeats = {repeats}: each is at least 1")
    console.print(
        f"{_hardware(chosen)}; torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"batch {BATCH}{', clients of uneven size' if ragged else ''}; median of {repeats} rounds, contenders in turn"
    )
    results = {}
    for name in which:
        each = steps or (SETTINGS[name].cpu_steps if chosen.type == "cpu" else GPU_STEPS)
        race = Race(name, clients, each * BATCH, ragged, str(chosen), compile)
        results[name] = measure(race, ("plain loop", *contenders), repeats)
        console.print(_table(f"{name}, {clients} clients x {each} steps", results[name]))
    return results


def synthetic(shape: tuple[int, ...], clients: int, per_client: int, *, ragged: bool, seed: int = 0) -> FederatedData:
    """Random samples: speed does not depend on what is in them."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(clients, per_client, ragged=ragged)
    ends = np.cumsum(sizes)
    x = torch.from_numpy(rng.standard_normal((int(ends[-1]), *shape), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, int(ends[-1])))
    train = tuple(np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True))
    none = tuple(np.arange(0) for _ in sizes)
    names = tuple(str(i) for i in range(clients))
    return FederatedData(x, y, {"train": train, "val": none, "test": none}, tuple("0123456789"), names, {})


def _sizes(clients: int, per_client: int, *, ragged: bool) -> NDArray[np.int64]:
    """Samples of each client: all alike, or ten classes spread over the clients by Dirichlet(0.3)."""
    if not ragged:
        return np.full(clients, per_client)
    share = np.random.default_rng(1).dirichlet(np.full(clients, 0.3), size=CLASSES).mean(0)
    sizes: NDArray[np.int64] = np.maximum(1, (share * per_client * clients).astype(np.int64))
    return sizes


def _compete(contender: str, race: Race, line: Connection) -> None:
    """A contender's process: one round for every message, until None comes."""
    setting, device = SETTINGS[race.model], torch.device(race.device)
    data = synthetic(setting.shape, race.clients, race.samples, ragged=race.ragged)
    one_round = _rounds_of(contender, setting, data, device, race.compile)
    while line.recv() is not None:
        start = now(device)
        waste = one_round()
        line.send(Turn(now(device) - start, waste, peak_bytes(device)))


def _rounds_of(
    contender: str, setting: Setting, data: FederatedData, device: torch.device, compile: bool
) -> Callable[[], float]:
    """A function that does one round and returns computed / useful samples."""
    if contender == "plain loop":
        return _plain_loop(setting.textbook(), data, device)
    torch.manual_seed(0)
    module = models.build(setting.model, setting.shape, CLASSES, **setting.options)
    engine = Sequential(device) if contender == "sequential" else Vectorized(device, compile=compile)
    algorithm = FedAvg(lr=LR, momentum=MOMENTUM, local_epochs=1, batch_size=BATCH, personal="global")
    federation = Federation(Task(module, bf16=contender.endswith("bf16")), data, algorithm, engine=engine)
    return lambda: federation.round().waste


def _plain_loop(module: nn.Module, data: FederatedData, device: torch.device) -> Callable[[], float]:
    module = module.to(device)
    x, y = data.x.to(device), data.y.to(device)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    criterion, everyone = nn.CrossEntropyLoss(), np.arange(data.clients)
    program = FedAvg(local_epochs=1, batch_size=BATCH).train
    (plans,) = plan_phases(program, data.splits, everyone, 0, 0)
    batches = [[torch.as_tensor(rows, device=device) for rows in client] for client in plans]

    def one_round() -> float:
        for client in batches:
            module.load_state_dict(start)
            optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
            for rows in client:
                optimiser.zero_grad()
                criterion(module(x[rows]), y[rows]).backward()
                optimiser.step()
        return 1.0

    return one_round


def measure(race: Race, contenders: Sequence[str], repeats: int) -> list[Measured]:
    """Medians of rounds taken in turn; the first contender is what the others are compared with."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    for name in contenders:
        lines[name], theirs = context.Pipe()
        context.Process(target=_compete, args=(name, race, theirs), daemon=True).start()
        theirs.close()
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for _ in range(2 + repeats):  # two to warm up: tracing, compiling, caches
        for name, line in lines.items():
            line.send("round")
            turns[name].append(line.recv())
    for line in lines.values():
        line.send(None)
    samples = int(_sizes(race.clients, race.samples, ragged=race.ragged).sum())
    median = {name: statistics.median(t.seconds for t in all_of[2:]) for name, all_of in turns.items()}
    base = median[contenders[0]]
    return [
        Measured(name, m, base / m, samples / m, turns[name][-1].waste, turns[name][-1].peak_bytes)
        for name, m in median.items()
    ]


def now(device: torch.device) -> float:
    """Seconds, when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} (CPU)"
    return "CPU"


def _table(name: str, measured: Sequence[Measured]) -> Table:
    table = Table(title=name, title_justify="left")
    for heading in ("", "s a round", "x plain loop", "samples/s", "computed/useful", "peak MiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for m in measured:
        table.add_row(
            m.name,
            f"{m.seconds:.4f}",
            f"{m.ratio:.2f}",
            f"{m.samples_per_second:,.0f}",
            f"{m.waste:.3f}",
            f"{m.peak_bytes / 2**20:,.0f}",
        )
    return table
