"""Speed as a ratio in one run: our engines against a plain PyTorch loop over the clients, doing the same passes.

The plain loop is what one would write without any federated code: textbook networks, eager float32,
``torch.optim.SGD``, one client after another with torch's own threads. Contenders take turns, so that a busy machine
slows all of them alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bespokefl import models
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized, pick_device
from bespokefl.engines.memory import peak_bytes
from bespokefl.errors import InputError, unknown_name
from bespokefl.federation import Federation
from bespokefl.program import plan_phases
from bespokefl.task import Task

BATCH = 50
CLASSES = 10
LR, MOMENTUM = 0.01, 0.9


class Setting(NamedTuple):
    model: str
    options: dict[str, object]
    shape: tuple[int, ...]
    textbook: Callable[[], nn.Module]


def _textbook_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


SETTINGS = {
    "linear": Setting("linear", {}, (64,), lambda: nn.Linear(64, CLASSES)),
    "mlp": Setting(
        "mlp", {"hidden": [200]}, (784,), lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    ),
    "fedavg-cnn": Setting("fedavg-cnn", {}, (3, 32, 32), _textbook_cnn),
}


CONTENDERS = ("sequential", "vectorized", "vectorized bf16")


class Contender(NamedTuple):
    name: str
    round: Callable[[], float]  # one round of local training; returns computed / useful samples


class Measured(NamedTuple):
    name: str
    seconds: float  # median of a round
    ratio: float  # plain loop's median over this one's
    samples_per_second: float
    waste: float
    peak_bytes: int


def main(
    which: Sequence[str] = tuple(SETTINGS),
    *,
    device: str = "auto",
    clients: int = 25,
    steps: int | None = None,
    ragged: bool = False,
    repeats: int = 5,
    compile: bool | str = "auto",
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
    steps = steps or (40 if chosen.type == "cuda" else 8)
    console.print(
        f"{clients} clients x {steps} steps x batch {BATCH}{', ragged' if ragged else ''} on {_hardware(chosen)}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; median of {repeats} rounds, contenders in turn"
    )
    results = {}
    for name in which:
        data = synthetic(SETTINGS[name].shape, clients, steps * BATCH, ragged=ragged)
        field = [_contender(c, SETTINGS[name], data, chosen, compile) for c in ("plain loop", *contenders)]
        results[name] = measure(field, samples=int(data.sizes("train").sum()), repeats=repeats, device=chosen)
        console.print(_table(name, results[name]))
    return results


def synthetic(shape: tuple[int, ...], clients: int, per_client: int, *, ragged: bool, seed: int = 0) -> FederatedData:
    """Random samples: speed does not depend on what is in them."""
    rng = np.random.default_rng(seed)
    sizes = np.full(clients, per_client)
    if ragged:  # ten classes, each spread over the clients by Dirichlet(0.3)
        share = rng.dirichlet(np.full(clients, 0.3), size=CLASSES).mean(0)
        sizes = np.maximum(1, (share * per_client * clients).astype(np.int64))
    ends = np.cumsum(sizes)
    x = torch.from_numpy(rng.standard_normal((int(ends[-1]), *shape), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, int(ends[-1])))
    train = tuple(np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True))
    none = tuple(np.arange(0) for _ in sizes)
    names = tuple(str(i) for i in range(clients))
    return FederatedData(x, y, {"train": train, "val": none, "test": none}, tuple("0123456789"), names, {})


def _contender(
    name: str, setting: Setting, data: FederatedData, device: torch.device, compile: bool | str
) -> Contender:
    if name == "plain loop":
        return Contender(name, _plain_loop(setting.textbook(), data, device))
    torch.manual_seed(0)
    task = Task(models.build(setting.model, setting.shape, CLASSES, **setting.options), bf16=name.endswith("bf16"))
    engine = Sequential(device) if name == "sequential" else Vectorized(device, compile=compile)
    algorithm = FedAvg(lr=LR, momentum=MOMENTUM, local_epochs=1, batch_size=BATCH, personal="global")
    federation = Federation(task, data, algorithm, engine=engine)
    federation.expect(10**6)  # a long run, where compiling pays on a GPU
    return Contender(name, lambda: federation.round().waste)


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


def measure(contenders: Sequence[Contender], *, samples: int, repeats: int, device: torch.device) -> list[Measured]:
    """Medians of rounds taken in turn; the first contender is what the others are compared with."""
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    waste: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for turn in range(repeats + 2):  # two to warm up: tracing, compiling, caches
        for c in contenders:
            gc.collect()
            _reset_peak(device)
            start = _now(device)
            waste[c.name] = c.round()
            if turn >= 2:
                seconds[c.name].append(_now(device) - start)
                peaks[c.name] = max(peaks.get(c.name, 0), _peak(device))
    median = {name: statistics.median(s) for name, s in seconds.items()}
    base = median[contenders[0].name]
    return [Measured(n, m, base / m, samples / m, waste[n], peaks[n]) for n, m in median.items()]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: lets VmHWM start anew
            Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cpu":
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return peak_bytes(device)


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
