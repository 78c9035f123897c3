"""Seconds and bytes of a round between processes on one machine: ours, and the same work as a stock Flower app.

    python benchmarks/federation.py                    # FedAvg on digits, 3 nodes, both in turn
    python benchmarks/federation.py --large            # also one round of a model of 100 MB

Both have TLS and node authentication. The work is the same: 3 nodes, an MLP 64-200-10, 450 samples a node, two epochs
in batches of 20. The stock app (stock_flower/) is run by `flwr run` on `flower-superlink` and `flower-supernode`. A
round is timed from the end of the one before; the median is of all but the first, in which processes warm up. Neither
side scores models in these rounds.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bespokefl.flower.server.federate import federate
from bespokefl.flower.transport.certs import Certificates, make_certificates
from bespokefl.flower.transport.host import LOCAL, free_port
from bespokefl.progress import Line

NODES, SAMPLES = 3, 450
STOCK = Path(__file__).parent / "stock_flower"
EXPERIMENT = """
seeds = [0]
algorithm = { name = "fedavg" }
[data]
source = "digits"
clients = 3
partition = "iid"
test = 0.25
[model]
name = "mlp"
hidden = [200]
[train]
rounds = 12
local_epochs = 2
batch_size = 20
lr = 0.05
momentum = 0.9
participation = 1.0
[eval]
every = 1000
"""
LARGE = [4900, 5000]  # hidden layers of an MLP of 25 million numbers


class Timing(NamedTuple):
    """Of one side."""

    first: float  # seconds
    rounds: list[float]  # seconds of each further one
    bytes_round: int | None = None  # both directions, all nodes


class Clock:
    """A reporter that only notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self.ends.append(time.time())

    def round(self, line: Line) -> None:
        self.ends.append(time.time())

    def finish(self, outcome: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def ours(folder: Path, rounds: int, hidden: list[int]) -> Timing:
    path, clock = folder / "ours.toml", Clock()
    path.write_text(EXPERIMENT, encoding="utf-8")
    settings = [f"train.rounds={rounds + 1}", f"model.hidden={hidden}"]  # in the last one, models are scored
    federate(path, settings, NODES, folder / "ours", resume=False, reporter=clock)
    told = json.loads((folder / "ours/fedavg/seed-0/rounds.jsonl").read_text().splitlines()[0])
    first, *others = _differences(clock.ends)[:-1]
    return Timing(first, others, told["bytes_down"] + told["bytes_up"])


def stock(folder: Path, rounds: int, hidden: list[int]) -> Timing:
    names = [f"node-{number}" for number in range(NODES)]
    files, port, times = make_certificates(folder / "certs", ["localhost", LOCAL], names), free_port(), folder / "times"
    env = _environment(folder, files, port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(["flower-superlink", *_superlink(files, port)], env, folder / "superlink.log"))
        time.sleep(8)  # it says nowhere when it is ready
        for number, name in enumerate(names):
            subprocess.run(
                ["flwr", "supernode", "register", files.folder / f"{name}.pub", "bench"],
                env=env, check=True, capture_output=True,
            )  # fmt: skip
            command = [
                *("flower-supernode", "--superlink", f"{LOCAL}:{port}", "--root-certificates", str(files.ca)),
                *("--auth-supernode-private-key", str(files.node_key(name)), "--port", str(free_port())),
                *("--node-config", f"partition-id={number}"),
            ]
            stack.enter_context(_running(command, env, folder / f"{name}.log"))
        config = (
            f'rounds={rounds} nodes={NODES} samples={SAMPLES} times="{times}" hidden="{",".join(map(str, hidden))}"'
        )
        app = shutil.copytree(STOCK, folder / "app")
        subprocess.run(["flwr", "run", app, "bench", "--run-config", config], env=env, check=True, capture_output=True)
        deadline = time.monotonic() + 600
        while not times.exists() or len(times.read_text().splitlines()) <= rounds:
            if time.monotonic() > deadline:
                raise SystemExit(f"the stock app did not finish; its log is {folder / 'superlink.log'}")
            time.sleep(0.5)
    first, *others = _differences([float(line) for line in times.read_text().splitlines()])
    return Timing(first, others)


def _environment(folder: Path, files: Certificates, port: int) -> dict[str, str]:
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{LOCAL}:{port}"\n'
        f'root-certificates = "{files.ca}"\n',
        encoding="utf-8",
    )
    scripts = Path(sys.executable).parent
    return os.environ | {"FLWR_HOME": str(home), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}


def _superlink(files: Certificates, port: int) -> list[str]:
    return [
        *("--host", LOCAL, "--port", str(port), "--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.server)),
        *("--ssl-keyfile", str(files.server_key)),
    ]


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a SuperNode's own executor outlives it
            process.wait()


def _differences(ends: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="of ours")
    parser.add_argument("--stock-rounds", type=int, default=4, help="of the stock app; 0 leaves it out")
    parser.add_argument("--large", action="store_true", help="also a model of 100 MB")
    arguments = parser.parse_args()
    table = Table("work", "side", "rounds", "first (s)", "s/round", "least", "most", "MB/round", box=None)
    works = [("digits, MLP 64-200-10", [200], arguments.rounds, arguments.stock_rounds)]
    if arguments.large:
        works.append(("MLP of 100 MB", LARGE, 3, min(3, arguments.stock_rounds)))
    for name, hidden, our_rounds, stock_rounds in works:
        for side, measure, rounds in (("bespoke", ours, our_rounds), ("stock flwr run", stock, stock_rounds)):
            if rounds:
                with tempfile.TemporaryDirectory() as folder:
                    timing = measure(Path(folder), rounds, hidden)
                later = timing.rounds
                size = "-" if timing.bytes_round is None else f"{timing.bytes_round / 1e6:.2f}"
                figures = (timing.first, statistics.median(later), min(later), max(later))
                table.add_row(name, side, str(rounds), *(f"{figure:.2f}" for figure in figures), size)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
