"""The learning rates and rounds of `--scale small`, chosen on its own data: writes src/bespokefl/reproduce/small/tuned.

    python benchmarks/small_rates.py                                  # all set-ups; what is done is not done again
    python benchmarks/small_rates.py digits-labels --methods plgu-lf  # one method anew, say after a change to it

For each set-up FedAvg is tuned over LONG rounds, and its curve on the validation samples says how many rounds the
set-up has (`rounds_until_flat`) and what target rounds are counted to. Then `bespoke tune` tries the same rates for
every method of the experiments that use the set-up, with that number of rounds. Test samples take no part.
"""

import argparse
import contextlib
import datetime
import math
import multiprocessing
import os
import platform
import shutil
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import experiment_document, parse_experiment, read_parts
from bespokefl.experiments.schema import AlgorithmChoice, Document, Experiment
from bespokefl.experiments.small_scale import chosen_set_up, read_set_up, set_ups
from bespokefl.progress import make_reporter
from bespokefl.results.files import write_atomically
from bespokefl.results.tomlfile import dumps
from bespokefl.tuning import Tuning, tune

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS, SMALL = ROOT / "experiments", ROOT / "src/bespokefl/reproduce/small"
LONG = {"digits-dirichlet": 120, "digits-labels": 200, "digits-pathological": 200, "masks": 60}
LONG_OTHERWISE = 100
NOT_OF_A_PAPER = ("digits-", "leaderboard-")
WINDOW, FLAT = 10, 0.01  # rounds, and how much higher later ones may be
OF_FEDAVG = 0.95  # the target, as a share of what FedAvg reaches


def rounds_until_flat(curve: Sequence[float]) -> int:
    """The first multiple of ten after which no ten rounds are on average more than one point above the ten until it."""
    means = np.asarray(curve).reshape(-1, WINDOW).mean(axis=1)
    flat = [k for k in range(len(means)) if means[k:].max() - means[k] <= FLAT]
    return WINDOW * (flat[0] + 1)


def methods_of(name: str) -> dict[str, AlgorithmChoice]:
    """The methods of all experiments that use the set-up, as the first that has one writes it; `as_in` is the first."""
    first = as_in(name)[0]
    found: dict[str, AlgorithmChoice] = {}
    for file in sorted(EXPERIMENTS.glob("*.toml"), key=lambda path: (path.stem != first, path.stem)):
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        if file.stem.startswith(NOT_OF_A_PAPER):
            continue
        entries = {entry["name"]: entry for entry in document.get("setting", [])}
        for part in read_parts(file, scale="small"):
            small = [document.get("small", {}), entries.get(part.name, {}).get("small", {})]
            merged = {"data": {"partition": part.experiment.data.partition}}
            if chosen_set_up(merged, small).name == name:
                for choice in part.experiment.algorithms:
                    hyper = {key: value for key, value in choice.hyper.items() if key != "lr"}
                    found.setdefault(choice.name, choice.model_copy(update={"label": choice.name, "hyper": hyper}))
    return found


def as_in(name: str) -> tuple[str, str]:
    """The experiment and the setting whose data, participation and local training the methods are tuned with."""
    item, _, setting = tuning_of(name)["as_in"].partition("/")
    return item, setting


def tuning_of(name: str) -> Document:
    table: Document = tomllib.loads((SMALL / f"{name}.toml").read_text(encoding="utf-8"))["tuning"]
    return table


def tuned(name: str, choices: Sequence[AlgorithmChoice], rounds: int, out: Path, jobs: int) -> dict[str, Tuning]:
    """Every method with each rate of the set-up's grid, in a process of its own; by label."""
    item, setting = as_in(name)
    [part] = [part for part in read_parts(EXPERIMENTS / f"{item}.toml", scale="small") if part.name in ("", setting)]
    document = experiment_document(part.experiment)
    document.pop("paper", None)
    document["train"] |= {"rounds": rounds}
    document["eval"] = {"every": 1, "cross": False}
    document["tune"] = {"grid": {"train.lr": tuning_of(name)["grid"]}, "seeds": tuning_of(name)["seeds"]}
    entries = [{"name": choice.name, "label": choice.label, **choice.hyper} for choice in choices]
    each = [(document | {"algorithms": [entry]}, out / entry["label"]) for entry in entries]
    if jobs == 1:
        found = [_tune(*one) for one in each]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(_tune, *zip(*each, strict=True)))
    return {tuning.methods[0].label: tuning for tuning in found}


def _tune(document: Document, out: Path) -> Tuning:
    torch.set_num_threads(1)
    experiment = parse_experiment(document)
    used = tuple(_used(experiment, choice) for choice in experiment.algorithms)
    reporter = make_reporter(Console(stderr=True))
    return tune(replace(experiment, algorithms=used), out, resume=True, reporter=reporter)


def _used(experiment: Experiment, choice: AlgorithmChoice) -> AlgorithmChoice:
    """Without what acts only in the experiment that the choice is from, as its momentum does."""
    for key in choice.hyper:
        less = choice.model_copy(update={"hyper": {k: v for k, v in choice.hyper.items() if k != key}})
        with contextlib.suppress(InputError):  # another key does not act either
            if key in resolve.make_algorithm(experiment, less).unused():
                choice = less
    return choice


def choose(name: str, out: Path, again: Sequence[str], jobs: int) -> None:
    """Write the file of a set-up; with ``again``, tune these methods anew and keep the rest of it."""
    choices, file = methods_of(name), SMALL / "tuned" / f"{name}.toml"
    if again:
        before = tomllib.loads(file.read_text(encoding="utf-8"))
        for label in again:
            shutil.rmtree(out / label, ignore_errors=True)
        wanted = [choices[label] for label in again if label in choices]
    else:
        before = length(name, out / "long", jobs)
        wanted = list(choices.values())
    found = tuned(name, wanted, before["train"]["rounds"], out, jobs)
    best = {label: tuning.methods[0].best for label, tuning in found.items()}
    if failed := [label for label, trial in best.items() if trial is None]:
        raise SystemExit(f"{name}: every trial failed of {', '.join(failed)}; the reasons are below {out}")
    rates = before.get("rates", {}) | {m: trial.parameters["train.lr"] for m, trial in best.items() if trial}
    values = before.get("validation", {}) | {m: round(trial.value or 0.0, 4) for m, trial in best.items() if trial}
    how = f"the best of {tuning_of(name)['grid']} by {next(iter(found.values())).criterion}"
    commands = [*before["why"].get("commands", []), _command(name, again)]
    result = {
        "target": before["target"],
        "why": before["why"] | {"rates": how, "commands": commands},
        "train": {"rounds": before["train"]["rounds"], "lr": rates["fedavg"]},
        "rates": dict(sorted(rates.items())),
        "validation": dict(sorted(values.items())),
    }
    head = f"# Written by benchmarks/small_rates.py: the rounds and the rates of the small set-up {name}.\n"
    write_atomically(file, head + dumps(result))
    read_set_up.cache_clear()


def length(name: str, out: Path, jobs: int) -> Document:
    """The set-up's rounds and target, from FedAvg over LONG rounds."""
    long = LONG.get(name, LONG_OTHERWISE)
    fedavg = AlgorithmChoice(name="fedavg", label="fedavg", hyper={"personal": "global"})
    best = tuned(name, [fedavg], long, out, jobs)["fedavg"].methods[0].best
    assert best is not None
    curve = np.array([value for _, value in best.curve]).reshape(-1, long).mean(axis=0)  # over seeds
    rounds = rounds_until_flat(curve.tolist())
    means = curve.reshape(-1, WINDOW).mean(axis=1)
    level = float(means[rounds // WINDOW - 1])
    why = (
        f"FedAvg's global model (lr {best.parameters['train.lr']}) has {100 * level:.1f} % on validation samples in "
        f"the {WINDOW} rounds until {rounds}; no {WINDOW} rounds until {long} have more than {100 * means.max():.1f} %"
    )
    reached = f"{100 * OF_FEDAVG:g} % of the {100 * level:.1f} % that FedAvg's global model reaches there"
    target = math.floor(100 * OF_FEDAVG * level) / 100
    return {"target": target, "why": {"rounds": why, "target": reached}, "train": {"rounds": rounds}}


def _command(name: str, again: Sequence[str]) -> str:
    options = f" --methods {','.join(again)}" if again else ""
    machine = f"{os.cpu_count()} cores of {_processor()}, PyTorch {'.'.join(torch.__version__.split('.')[:2])}"
    return f"python benchmarks/small_rates.py {name}{options} ({datetime.date.today().isoformat()}, {machine})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set_ups", nargs="*", metavar="SET-UP", help=f"some of {', '.join(set_ups())}; none: all")
    parser.add_argument("--methods", default="", help="tune these again, and keep the rounds and the others' rates")
    parser.add_argument("--out", type=Path, default=Path("runs/small-rates"), help="where the trials go")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time")
    given = parser.parse_args(arguments)
    for name in given.set_ups or set_ups():
        choose(name, given.out / name, [label for label in given.methods.split(",") if label], given.jobs)
        print(SMALL / "tuned" / f"{name}.toml")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
