"""CPU seconds of the same work under two source trees: whether a change made anything slower.

    git worktree add ../before SOME_COMMIT
    OMP_NUM_THREADS=1 python benchmarks/before_after.py ../before .
    OMP_NUM_THREADS=1 python benchmarks/before_after.py ../before . --jobs memory/pgfed --turns 40

Each tree does the work in a process of its own, with the tree first on its path. The two live side by side and take
turns of a few rounds, in the order A B, B A, A B and so on, after four rounds, in which programs are traced;
then come two new processes. Seconds are of user and system, of the process and all that it started. A line shows the
median of the ratios after / before of neighbours, and between which two of them that median lies with at least 95 %
confidence (by ranks).

* local: rounds of `bespoke run` on digits, 10 clients, every second one scored, with its files and checkpoints.
* memory: rounds of a federation of two silos whose messages become bytes and back in one process (tests/flower).
* loopback: rounds of `bespoke federate` with two nodes: server, SuperLink and nodes.
* command: `bespoke run` from its start to its end, 30 rounds; a turn is a process.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

WARM_UP = 4  # rounds in which programs are traced
PER_TURN = 2  # rounds; one of them is scored
EXPERIMENT = """
seeds = [0]
[data]
source = "digits"
clients = 10
partition = "dirichlet"
alpha = 0.3
min_samples = 50
[model]
name = "mlp"
hidden = [200]
[train]
local_epochs = 5
batch_size = 20
lr = 0.05
momentum = 0.9
participation = 1.0
[eval]
every = 2
"""
METHODS = ("fedavg", "pgfed")
ENGINES = ("vectorized", "sequential")
JOBS = [
    *(f"local/{method}/{engine}" for method in METHODS for engine in ENGINES),
    *(f"memory/{method}" for method in METHODS),
    *(f"loopback/{method}" for method in METHODS),
    *(f"command/{method}/{engine}" for method in METHODS for engine in ENGINES),
]


class Line(NamedTuple):
    """What a job took, under the two trees."""

    job: str
    before: list[float]  # CPU seconds of a turn
    after: list[float]

    @property
    def ratios(self) -> list[float]:
        return [after / before for before, after in zip(self.before, self.after, strict=True)]


class Turns:
    """A reporter that holds the run up where a turn ends, until the next is asked for."""

    def __init__(self, seconds: Callable[[], float], say: Callable[[float], None]) -> None:
        self.seconds, self.say = seconds, say
        self.began = 0.0

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        pass

    def round(self, line: Any) -> None:
        if line["round"] < WARM_UP or (line["round"] - WARM_UP) % PER_TURN:
            return
        self.say(self.seconds() - self.began)
        sys.stdin.readline()
        self.began = self.seconds()

    def finish(self, outcome: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


# in a process with one of the trees ----------------------------------------------------------------------
def work(job: str, turns: int) -> None:
    """Prints the CPU seconds of the start, and of each turn that a line asks for."""
    kind, method, *engine = job.split("/")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(seconds: float) -> None:
        print(seconds, file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if kind == "command":
            _bespoke_run(Path(folder), method, engine[0], 30)
            return
        rounds = WARM_UP + turns * PER_TURN
        seconds = _of_descendants if kind == "loopback" else time.process_time
        do = {"local": _bespoke_run, "memory": _memory, "loopback": _loopback}[kind]
        do(Path(folder), method, *engine, rounds, Turns(seconds, say))


def _bespoke_run(folder: Path, method: str, engine: str, rounds: int, turns: Turns | None = None) -> None:
    from bespokefl import cli, progress

    if turns is not None:
        progress.make_reporter = lambda console: turns
    options = ["--engine", engine, "--set", f"train.rounds={rounds}", "--out", str(folder / "out")]
    sys.argv = ["bespoke", "run", str(_file(folder, method)), *options]
    cli.main()


def _memory(folder: Path, method: str, rounds: int, turns: Turns) -> None:
    from tests.flower.memory import Memory, remote, shards

    from bespokefl.experiments.reading import read_experiment

    experiment = read_experiment(_file(folder, method), [("train.rounds", rounds)])
    half = experiment.data.clients // 2
    nodes = shards(folder, experiment, [list(range(half)), list(range(half, 2 * half))])
    federation = remote(experiment, Memory(nodes), folder)
    for number in range(1, rounds + 1):
        record = federation.round()
        if record.failed:
            raise SystemExit(f"clients failed: {record.failed}")
        if number % experiment.eval.every == 0:
            federation.evaluate()
        turns.round({"round": number})


def _loopback(folder: Path, method: str, rounds: int, turns: Turns) -> None:
    from bespokefl.flower.server.federate import federate

    federate(_file(folder, method), [f"train.rounds={rounds}"], 2, folder / "out", resume=False, reporter=turns)


def _file(folder: Path, method: str) -> Path:
    path = folder / "work.toml"
    path.write_text(f'algorithm = {{ name = "{method}" }}\n{EXPERIMENT}', encoding="utf-8")
    return path


def _of_descendants() -> float:
    """CPU seconds of this process and all below it (Linux)."""
    seconds: dict[int, float] = {}
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            seconds[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            below.setdefault(int(fields[1]), []).append(number)
    found, left = 0.0, [os.getpid()]
    while left:
        number = left.pop()
        found += seconds.get(number, 0.0)
        left += below.get(number, [])
    return found


# between the trees ---------------------------------------------------------------------------------------
class Worker:
    """A tree's process."""

    def __init__(self, tree: Path, job: str, turns: int) -> None:
        env = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
        command = [sys.executable, __file__, "--work", job, "--turns", str(turns)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (it goes with the worker)
        self.child = subprocess.Popen(
            command, env=env, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def answer(self) -> float:
        assert self.child.stdout is not None
        told = self.child.stdout.readline()
        if not told:
            self.errors.seek(0)
            raise SystemExit(f"a worker failed: {self.errors.read().decode()[-2000:]}")
        return float(told)

    def turn(self) -> float:
        assert self.child.stdin is not None
        print("go", file=self.child.stdin, flush=True)
        return self.answer()

    def end(self) -> float:
        """Lets it run to its end; the CPU seconds of it all."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        _, status, usage = os.wait4(self.child.pid, 0)
        self.child.returncode = os.waitstatus_to_exitcode(status)
        self.errors.seek(0)
        if self.child.returncode:
            raise SystemExit(f"a worker failed: {self.errors.read().decode()[-2000:]}")
        return usage.ru_utime + usage.ru_stime


def compared(trees: tuple[Path, Path], job: str, turns: int, processes: int) -> Line:
    line = Line(job, [], [])
    for _ in range(processes):
        if job.startswith("command"):
            _take_turns(line, turns, [lambda tree=tree: Worker(tree, job, 0).end() for tree in trees])
            continue
        workers = [Worker(tree, job, turns) for tree in trees]
        for worker in workers:
            worker.answer()
        _take_turns(line, turns, [worker.turn for worker in workers])
        for worker in workers:
            worker.end()
    return line


def _take_turns(line: Line, turns: int, sides: Sequence[Callable[[], float]]) -> None:
    for number in range(turns):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {side: sides[side]() for side in order}
        line.before.append(seconds[0])
        line.after.append(seconds[1])
        print(f"{line.job}: {seconds[0]:.2f} s, {seconds[1]:.2f} s, {line.ratios[-1]:.3f}", file=sys.stderr, flush=True)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the median lies with at least 95 % confidence; of fewer than six, all."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while (outside := outside + 2 * math.comb(n, rank) / 2**n) <= 0.05 and 2 * (rank + 1) < n:
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[n - rank]


def shown(lines: Sequence[Line]) -> Table:
    table = Table("job", "before (s)", "after (s)", "after / before", "95 %", "pairs", box=None)
    for line in lines:
        low, high = interval(line.ratios)
        seconds = (f"{statistics.median(side):.2f}" for side in (line.before, line.after))
        ratio = f"{statistics.median(line.ratios):.3f}"
        table.add_row(line.job, *seconds, ratio, f"{low:.3f} to {high:.3f}", str(len(line.before)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a source tree")
    parser.add_argument("after", type=Path, nargs="?", help="another one")
    parser.add_argument("--jobs", default=",".join(JOBS), help="with commas: " + ", ".join(JOBS))
    parser.add_argument("--turns", type=int, default=20, help="of each process")
    parser.add_argument("--processes", type=int, default=2, help="of each tree, one after another")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.turns)
        return
    jobs = given.jobs.split(",")
    if given.after is None or min(given.turns, given.processes) < 1 or set(jobs) - set(JOBS):
        parser.error(f"two source trees, one turn and process or more, and jobs of: {', '.join(JOBS)}")
    trees = given.before.resolve(), given.after.resolve()
    lines = [compared(trees, job, given.turns, given.processes) for job in jobs]
    Console(width=140).print(shown(lines))


if __name__ == "__main__":
    main()
