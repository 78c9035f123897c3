"""Every registered method on label-skewed data, each tuned with the same budget: the tables of docs/leaderboard.md.

    python benchmarks/leaderboard.py                       # all boards, one process per core
    python benchmarks/leaderboard.py --boards digits-labels --methods local,fedavg,ditto

A board is an experiment of experiments/leaderboard-*.toml. Each of its methods is tuned by `bespoke tune` (learning
rate by validation accuracy; test data take no part), then run by `bespoke run` with the value found, in processes of
its own. Stopped or failed methods go on where they were when the command is given again.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bespokefl.algorithms import ALGORITHMS
from bespokefl.experiments.listing import listing
from bespokefl.results.files import StoredRun, read_runs, write_atomically
from bespokefl.results.table import markdown_table

PREFIX = "leaderboard-"
FINE_TUNED = "fedavg-finetuned"  # FedAvg as it is best compared with, beside the registered methods


class Entry(NamedTuple):
    board: str
    method: str
    experiment: Path
    folder: Path

    def commands(self) -> list[list[str]]:
        chosen = ["engine.lanes=1", f"algorithm.name={self.method}"]  # one core each: methods run side by side
        if self.method == FINE_TUNED:
            chosen[1:] = ["algorithm.name=fedavg", f"algorithm.label={FINE_TUNED}", "algorithm.personal=finetune"]
        one = [part for setting in chosen for part in ("--set", setting)]
        bespoke = [sys.executable, "-m", "bespokefl"]
        return [
            [*bespoke, "tune", str(self.experiment), *one, "--out", str(self.folder), "--resume"],
            [*bespoke, "run", str(self.folder / "tuned.toml"), "--out", str(self.folder), "--resume"],
        ]


def compute(entry: Entry) -> str | None:
    """Tune and run one method; the last words of what failed, if something did."""
    entry.folder.mkdir(parents=True, exist_ok=True)
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    for command in entry.commands():
        done = subprocess.run(command, capture_output=True, text=True, env=one_core)
        if done.returncode:
            return f"{entry.board}, {entry.method}: {(done.stderr or done.stdout).strip()[-500:]}"
    return None


def page(boards: Sequence[str], entries: Sequence[Entry]) -> str:
    """The boards' tables in Markdown, with the learning rate that was found."""
    parts = []
    for board in boards:
        folders = [entry.folder for entry in entries if entry.board == board]
        runs = [run for folder in folders for run in read_runs(folder)]
        parts += [f"## {board}", "", markdown_table(runs), "", _rates(runs), ""]
    return "\n".join(parts)


def _rates(runs: Sequence[StoredRun]) -> str:
    found: dict[float, list[str]] = {}
    for run in runs:
        config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
        rate = float(config["algorithm"].get("lr", config["train"]["lr"]))
        if run.label not in found.setdefault(rate, []):
            found[rate].append(run.label)
    chosen = "; ".join(f"{rate:g} for {', '.join(labels)}" for rate, labels in sorted(found.items()))
    return f"Learning rates, by validation: {chosen}."


def main(arguments: Sequence[str] | None = None) -> int:
    known = {e["name"].removeprefix(PREFIX): Path(e["file"]) for e in listing("experiments") if PREFIX in e["name"]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"), help="where results go (and come from)")
    parser.add_argument("--boards", default=",".join(known), help=f"some of {', '.join(known)}")
    parser.add_argument("--methods", default=",".join([*ALGORITHMS, FINE_TUNED]), help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="methods at a time")
    given = parser.parse_args(arguments)
    boards, methods = given.boards.split(","), given.methods.split(",")
    for word, allowed in ((boards, known), (methods, [*ALGORITHMS, FINE_TUNED])):
        if unknown := [name for name in word if name not in allowed]:
            parser.error(f"{', '.join(unknown)}: known are {', '.join(allowed)}")
    entries = [Entry(b, m, known[b], given.out / b / m) for b in boards for m in methods]
    console, failures = Console(stderr=True), []
    columns = (TextColumn("methods tuned and run"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, ThreadPoolExecutor(given.jobs) as pool:
        task = bar.add_task("", total=len(entries))
        for failure in pool.map(compute, entries):
            bar.advance(task)
            if failure:
                failures.append(failure)
                bar.console.print(failure, markup=False, highlight=False)
    write_atomically(given.out / "leaderboard.md", page(boards, entries))
    print(given.out / "leaderboard.md")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
