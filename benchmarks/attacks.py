"""Methods under attack, as in table 3 of FedPG's supplement: accuracies of honest clients, two labels each.

    python benchmarks/attacks.py                                                   # Fashion-MNIST: for a GPU
    python benchmarks/attacks.py --clients 20 --rounds 20 --samples 4000           # minutes on few cores
    python benchmarks/attacks.py --attacks none,A1 --methods fedavg,fedavg+median,fedpg

A tenth of the clients attacks; attacks and averages are those of docs/attacks.md. Each attack is an experiment of its
own below --out, and runs that are finished are not repeated when the command is given again. The tables are written to
OUT/attacks.md. Without Fashion-MNIST (--root, or the usual places) scikit-learn's digits are taken.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bespokefl.data import load
from bespokefl.errors import InputError
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import make_reporter
from bespokefl.results.files import StoredRun, read_runs, write_atomically

ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "A1": {"kind": "noise", "sigma": 1.0},
    "A2": {"kind": "scale", "factor": 100.0},
    "labels": {"kind": "labels"},
    "signs": {"kind": "signs"},
}
TITLES = {
    "none": "no attack, all clients are honest",
    "A1": "uploads are N(0, 1) noise",
    "A2": "updates are multiplied by 100",
    "labels": "train labels are flipped",
    "signs": "updates have the opposite sign",
}
METHODS: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "fedavg": {"name": "fedavg"},
    "fedavg+median": {"name": "fedavg", "aggregation": "median"},
    "fedavg+trimmed": {"name": "fedavg", "aggregation": "trimmed", "trim": 0.2},
    "fedavg+krum": {"name": "fedavg", "aggregation": "krum"},
    "fedavg+clip": {"name": "fedavg", "aggregation": "clip"},
    "ditto": {"name": "ditto"},
    "ditto+median": {"name": "ditto", "aggregation": "median"},
    "fedrep": {"name": "fedrep"},
    "fedrep+median": {"name": "fedrep", "aggregation": "median"},
    # Columns of the median length, which one upload cannot stretch (the supplement shows no harm by A2).
    "fedpg": {"name": "fedpg", "scale": "median"},
    "s-fedpg": {"name": "s-fedpg", "scale": "median"},
}
COLUMNS = {"L %": "l_acc", "S %": "s_acc", "G %": "g_acc", "global model %": "gm_acc"}


def document(given: argparse.Namespace, attack: str, source: dict[str, Any]) -> dict[str, Any]:
    data = {**source, "clients": given.clients, "partition": "pathological"}
    return {
        "seeds": list(range(given.seeds)),
        "algorithms": [{**METHODS[label], "label": label} for label in given.methods],
        "data": data | ({"max_samples": given.samples} if given.samples else {}),
        "model": {"name": "mlp", "hidden": [200, 200]},
        "train": {
            **{"rounds": given.rounds, "participation": given.participation, "lr": given.lr},
            **{"batch_size": 50, "local_epochs": 5, "momentum": 0.0, "weight_decay": 0.0},
        },
        "eval": {"every": given.rounds, "select": "last", "cross": True, "s_fraction": 0.1},
        "attack": {**ATTACKS[attack], "share": given.share} if ATTACKS[attack] else {},
        "engine": {"device": given.device},
    }


def find_source(name: str, root: str | None, note: Console) -> dict[str, Any]:
    """The wanted data, or digits where they are not installed."""
    source: dict[str, Any] = {"source": name} | ({"root": root} if root else {})
    try:
        load(**source, clients=10, max_samples=100)
    except InputError as missing:
        if name == "digits" or root:
            raise
        note.print(f"{missing}\nGoing on with scikit-learn's digits.", markup=False)
        return {"source": "digits"}
    return source


def page(out: Path, attacks: Sequence[str], methods: Sequence[str]) -> str:
    """A table for each attack, methods in their order."""
    parts: list[str] = []
    for attack in attacks:
        runs = read_runs(out / attack)
        who = next((run.summary["scored"].partition(", round")[0] for run in runs if run.summary), "")
        parts += [f"### {attack}: {TITLES[attack]}", "", f"Scored: {who}.", ""]
        parts += [f"| method | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
        parts += [_row(label, [run for run in runs if run.label == label]) for label in methods]
        parts.append("")
    return "\n".join(parts)


def _row(label: str, runs: Sequence[StoredRun]) -> str:
    if not runs or any(run.summary is None for run in runs):
        rounds = [len(run.rounds) for run in runs if run.error]
        cells = [f"failed in round {min(rounds) + 1}" if rounds else "not finished", *[""] * (len(COLUMNS) - 1)]
    else:
        cells = [_figure([run.summary[key] for run in runs if run.summary]) for key in COLUMNS.values()]
    return f"| {' | '.join([label, *cells])} |"


def _figure(values: Sequence[float | None]) -> str:
    present = [100 * value for value in values if value is not None]
    if not present:
        return "-"
    spread = f" ±{np.std(present):.1f}" if len(present) > 1 else ""
    return f"{np.mean(present):.1f}{spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"), help="where results go (and come from)")
    parser.add_argument("--source", default="fashion-mnist", help="see `bespoke list datasets`")
    parser.add_argument("--root", help="folder of the data")
    parser.add_argument("--attacks", type=_some_of(ATTACKS), default=list(ATTACKS), help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--methods", type=_some_of(METHODS), default=list(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--samples", type=int, help="of the data; default: all")
    parser.add_argument("--participation", type=float, default=1.0, help="share of the clients in a round")
    parser.add_argument("--share", type=float, default=0.1, help="share of the clients that are malicious")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    source = find_source(given.source, given.root, console)
    for attack in given.attacks:
        console.rule(f"{attack}: {TITLES[attack]}")
        experiment = parse_experiment(document(given, attack, source))
        run_experiment(experiment, given.out / attack, resume=True, reporter=make_reporter(console, lines_per_run=3))
    text = page(given.out, given.attacks, given.methods)
    write_atomically(given.out / "attacks.md", text)
    print(text)
    return 0


def _some_of(known: dict[str, dict[str, Any]]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return chosen

    return parse


if __name__ == "__main__":
    raise SystemExit(main())
