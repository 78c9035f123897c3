"""Output folders for the tests of the report, written with the project's own writers: no training is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bespokefl.evaluation.metrics import summarise
from bespokefl.results.facts import write_facts
from bespokefl.results.files import write_atomically, write_csv, write_json

CLIENTS, ROUNDS = 6, 3


def accuracies(label: str, seed: int, clients: int = CLIENTS) -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng([len(label), ord(label[-1]), seed])
    return rng.integers(8, 21, clients) / 20


def write_run(
    out: Path,
    label: str,
    seed: int = 0,
    *,
    algorithm: str = "",
    accuracy: Sequence[float] | None = None,
    config: str = "",
    g_acc: float | None = 0.5,
    clients: int = CLIENTS,
    rounds: int = ROUNDS,
    more: dict[str, Any] | None = None,
) -> Path:
    """A finished run; its curve reaches the final mean in equal steps."""
    folder = out / label / f"seed-{seed}"
    values = accuracies(label, seed, clients) if accuracy is None else np.array(accuracy)
    malicious = np.asarray((more or {}).get("malicious", np.zeros(len(values))))
    figures = summarise(np.where(malicious > 0, np.nan, values))
    name = algorithm or label
    write_atomically(folder / "config.toml", config or f'[algorithm]\nname = "{name}"\n[data]\nsource = "digits"\n')
    lines = [
        f'{{"round": {r}, "mean": {figures["mean"] * r / rounds}, "worst5": {figures["worst5"] * r / rounds}}}\n'
        for r in range(1, rounds + 1)
    ]
    write_atomically(folder / "rounds.jsonl", "".join(lines))
    columns = {
        "client": range(len(values)),
        "n_train": 10 * np.arange(1, len(values) + 1),
        "n_test": np.full(len(values), 20),
        "accuracy": values,
        "name": [f"site {k}" for k in range(len(values))],
    }
    write_csv(folder / "clients.csv", columns | (more or {}))
    summary = {
        "algorithm": name,
        "rounds": rounds,
        **{key: figures[key] for key in ("mean", "std", "worst5", "top5")},
        "l_acc": figures["mean"],
        "g_acc": g_acc,
        "s_acc": g_acc,
        "gm_acc": None,
        "bytes_total": 1_000_000 * len(label),
        "train_seconds": 1.5 * len(label),
        "selection": "last",
        "scored": f"personal models of all {len(values)} clients, round {rounds}, test split",
        "model": "own",
        "s_fraction": 0.1,
    }
    write_json(folder / "summary.json", summary)
    return folder


def write_labels(out: Path, seed: int = 0, clients: int = CLIENTS) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Train counts of three labels; the test counts are 1 each."""
    train = np.random.default_rng(seed).integers(0, 9, (clients, 3))
    labels = ["0", "1", "other"]
    columns: dict[str, Any] = {"client": range(clients), "name": [f"site {k}" for k in range(clients)]}
    columns |= {f"label {name}": train[:, k] + 1 for k, name in enumerate(labels)}
    columns |= {f"train {name}": train[:, k] for k, name in enumerate(labels)}
    columns |= {f"val {name}": np.zeros(clients, dtype=int) for name in labels}
    columns |= {f"test {name}": np.ones(clients, dtype=int) for name in labels}
    write_csv(out / f"partition-seed-{seed}.csv", columns)
    return train


def write_comparison(out: Path, seeds: Sequence[int] = (0, 1)) -> Path:
    """Local, FedAvg, PGFed with facts, and two runs of FedPG with different gamma."""
    for seed in seeds:
        for label in ("local", "fedavg", "pgfed"):
            write_run(out, label, seed)
        for gamma in (0.0, 0.5):
            config = f'[algorithm]\nname = "fedpg"\ngamma = {gamma}\n'
            write_run(out, f"fedpg-{gamma:g}", seed, algorithm="fedpg", config=config, g_acc=0.6 - gamma / 5)
        write_labels(out, seed)
    rng = np.random.default_rng(0)
    for round_ in (1, 3):
        facts = {
            "A": rng.normal(size=(CLIENTS, CLIENTS)),
            "lambda": rng.uniform(size=CLIENTS),
            "scores": rng.uniform(size=(CLIENTS, 2)),
            "step": np.array(0.1 * round_),
            "still": np.array(0.25),
        }
        write_facts(out / "pgfed" / f"seed-{seeds[0]}", round_, facts)
    return out
