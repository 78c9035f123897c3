"""Tuning: what is chosen by what, that test samples take no part, and that nothing is done twice."""

import dataclasses
import json
import math
import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bespokefl.cli import app
from bespokefl.data import FederatedData, load
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import experiment_document, parse_experiment, read_experiment
from bespokefl.federation import Federation
from bespokefl.interrupts import Interrupted
from bespokefl.progress import LineReporter
from bespokefl.tuning import Tuning, tune
from bespokefl.tuning.space import Bounds, Choices, Range, Space, read_spaces
from bespokefl.tuning.table import budget_note, notes
from bespokefl.tuning.trials import Trial
from bespokefl.tuning.tuner import MethodResult
from bespokefl.tuning.validation import without_test_samples

SMALL = """
algorithms = ["local", {name = "fedprox", label = "prox"}]
[data]
clients = 6
max_samples = 400
[model]
name = "linear"
[train]
rounds = 2
local_epochs = 1
batch_size = 20
[engine]
name = "sequential"  # traces nothing: small runs are quick
"""
GRID = SMALL + "[tune.grid]\ntrain.lr = [0.00001, 0.3]\nalgorithm.mu = [0.0, 0.1, 10.0]\n"


def experiment(text: str = SMALL, **tables: dict[str, Any]) -> Any:
    document = tomllib.loads(text)
    return parse_experiment(document | {name: document.get(name, {}) | keys for name, keys in tables.items()})


def quick(out: Path, grid: dict[str, Any], resume: bool = False, **tune_keys: Any) -> Tuning:
    """One method, tuned in this process."""
    document = tomllib.loads(SMALL) | {"algorithms": ["fedavg"], "tune": {"grid": grid} | tune_keys}
    return tune(parse_experiment(document), out, resume=resume)


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def stored(out: Path, label: str) -> list[dict[str, Any]]:
    """The trials in a method's file without their times."""
    trials = json.loads((out / "tuning" / f"{label}.json").read_text())["trials"]
    return [{key: value for key, value in trial.items() if key != "seconds"} for trial in trials]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "small.toml").write_text(GRID)
    result = bespoke("tune", folder / "small.toml", "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder / "out", result.output


# what is chosen ----------------------------------------------------------------------------------------


def test_every_point_of_the_grid_is_tried_in_order(tuned: tuple[Path, str]) -> None:
    out, _ = tuned
    assert [trial["parameters"] for trial in stored(out, "local")] == [{"train.lr": 0.00001}, {"train.lr": 0.3}]
    points = [(lr, mu) for lr in (0.00001, 0.3) for mu in (0.0, 0.1, 10.0)]
    assert [tuple(trial["parameters"].values()) for trial in stored(out, "prox")] == points
    for label in ("local", "prox"):
        for trial in stored(out, label):
            assert trial["state"] == "complete" and trial["rounds"] == 2 and trial["reason"] is None
            assert trial["value"] == trial["mean"] == trial["curve"][-1][1] and 0 <= trial["worst5"] <= trial["mean"]
    assert {path.name for path in (out / "tuning").iterdir()} == {"local.json", "prox.json"}  # no run is left behind


def test_the_best_by_validation_is_written_and_shown(tuned: tuple[Path, str]) -> None:
    out, said = tuned
    document = tomllib.loads((out / "tuned.toml").read_text())
    assert "tune" not in document
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip().startswith(("local ", "prox "))}
    for entry in document["algorithms"]:
        best = max(stored(out, entry["label"]), key=lambda trial: trial["mean"])
        assert entry["lr"] == best["parameters"]["train.lr"] == 0.3
        assert entry.get("mu") == best["parameters"].get("algorithm.mu")
        assert f"{100 * best['mean']:.2f}" in rows[entry["label"]]
        assert "train.lr lies at the upper edge" in " ".join(said.split())
    text = " ".join(said.split())
    assert "20 % of each client's train samples" in text and "Test samples took no part" in text
    assert "different numbers of trials; tune.trials = 2 gives each the same" in text
    assert str(out / "tuned.toml") in said


def test_the_tuned_experiment_runs_with_the_chosen_values(tuned: tuple[Path, str], tmp_path: Path) -> None:
    result = bespoke("run", tuned[0] / "tuned.toml", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    config = tomllib.loads((tmp_path / "prox" / "seed-0" / "config.toml").read_text())
    chosen = max(stored(tuned[0], "prox"), key=lambda trial: trial["mean"])["parameters"]
    assert (config["algorithm"]["lr"], config["algorithm"]["mu"]) == tuple(chosen.values())
    assert config["data"]["val"] == 0.0  # what was held out for tuning is trained on again


def test_a_trial_is_a_plain_run_scored_on_what_was_held_out(tmp_path: Path) -> None:
    tuning = quick(tmp_path, {"train.lr": [0.2]}, seeds=[3, 5], rounds=3, metric="worst5", val=0.3)
    figures = []
    for seed in (3, 5):
        data = without_test_samples(load(clients=6, max_samples=400, seed=seed), 0.3, seed)
        setting = experiment(train={"lr": 0.2})
        task = resolve.make_task(setting, seed, data)
        algorithm = resolve.make_algorithm(setting, setting.algorithms[0].model_copy(update={"name": "fedavg"}))
        figures.append(Federation(task, data, algorithm, engine="sequential", seed=seed).run(3).summary())
    best = tuning.methods[0].best
    assert best is not None and best.rounds == 6
    assert best.value == best.worst5 == pytest.approx(np.mean([f["worst5"] for f in figures]), abs=1e-12)
    assert best.mean == pytest.approx(np.mean([f["mean"] for f in figures]), abs=1e-12)


def test_test_labels_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = resolve.load_data
    grid = {"train.lr": [0.01, 0.1, 1.0, 3.0]}
    quick(tmp_path / "true", grid)

    def scrambled(*arguments: Any) -> FederatedData:
        data = original(*arguments)
        rows = np.concatenate(data.splits["test"])
        y = data.y.clone()
        y[rows] = (y[rows] + 1) % len(data.classes)
        return dataclasses.replace(data, y=y)

    monkeypatch.setattr(resolve, "load_data", scrambled)
    quick(tmp_path / "scrambled", grid)
    assert stored(tmp_path / "true", "fedavg") == stored(tmp_path / "scrambled", "fedavg")
    assert (tmp_path / "true" / "tuned.toml").read_bytes() == (tmp_path / "scrambled" / "tuned.toml").read_bytes()


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_held_out_samples_are_train_samples(share: float) -> None:
    data = load(clients=10, max_samples=600, alpha=5.0)
    held = without_test_samples(data, share, seed=0)
    for client in range(10):
        train, kept, scored = data.splits["train"][client], held.splits["train"][client], held.splits["test"][client]
        assert sorted([*kept, *scored]) == sorted(train)
        assert len(scored) == math.floor(share * len(train) + 1e-9)
        for label in range(10):  # by class
            of_label = (data.y[train] == label).sum()
            assert abs((data.y[scored] == label).sum() - share * of_label) <= 1
    assert not held.sizes("val").any()
    used = np.concatenate([rows for split in held.splits.values() for rows in split])
    assert not set(used) & set(np.concatenate(data.splits["test"]))


def test_a_single_sample_is_trained_on_and_validation_samples_are_used_where_there_are_some() -> None:
    rng = np.random.default_rng(0)

    def client(n: int) -> dict[str, Any]:
        return {"train": (rng.normal(size=(n, 2)), np.arange(n) % 2), "test": (np.ones((3, 2)), np.ones(3, int))}

    held = without_test_samples(FederatedData.from_arrays([client(1), client(2)]), 0.2, 0)
    assert held.sizes("train").tolist() == [1, 1] and held.sizes("test").tolist() == [0, 1]
    with pytest.raises(InputError, match="single train sample"):
        without_test_samples(FederatedData.from_arrays([client(1), client(1)]), 0.2, 0)

    data = load(clients=5, val=0.3)
    held = without_test_samples(data, 0.2, 0)
    for split, taken in (("train", "train"), ("val", "val"), ("test", "val")):
        assert all(map(np.array_equal, held.splits[split], data.splits[taken]))


def test_validation_samples_of_the_experiment_choose_its_round_too(tmp_path: Path) -> None:
    """As `bespoke run` does: the best round counts where validation selects."""
    setting = experiment(data={"val": 0.2}, train={"rounds": 6}, tune={"grid": {"train.lr": [5.0, 20.0]}})
    tuning = tune(setting, tmp_path)
    assert "in the best of 6 rounds" in str(tuning.criterion) and "validation samples," in str(tuning.criterion)
    trials = [trial for method in tuning.methods for trial in method.trials]
    assert all(trial.value == max(value for _, value in trial.curve) for trial in trials)
    assert any(trial.value != trial.curve[-1][1] for trial in trials)


# the space ---------------------------------------------------------------------------------------------


def test_keys_go_to_the_methods_that_have_them() -> None:
    own = {"prox": {"train": {"lr": [0.5]}, "algorithm.mu": {"low": 1, "high": 3}}, "local": {"train.lr": []}}
    grid = {"train.lr": [0.1, 1], "algorithm.mu": [0.1], "train.local_epochs": {"low": 1, "high": 4}}
    spaces = read_spaces(experiment(tune={"grid": grid, "own": own}))
    assert list(spaces["local"].domains) == ["train.local_epochs"]
    assert list(spaces["prox"].domains) == ["train.lr", "algorithm.mu", "train.local_epochs"]
    mu, epochs = spaces["prox"].domains["algorithm.mu"], spaces["prox"].domains["train.local_epochs"]
    assert isinstance(mu, Range) and type(mu.low) is float  # a number with a fraction, however it is written
    assert isinstance(epochs, Range) and type(epochs.low) is int
    assert spaces["prox"].domains["train.lr"].examples == (0.5,)


def test_choosing_other_methods_drops_what_was_meant_for_the_file_s() -> None:
    document = tomllib.loads(GRID) | {"tune": {"grid": {"algorithm.mu": [1], "train.lr": [0.1]}, "own": {"prox": {}}}}
    spaces = read_spaces(parse_experiment(document, [("algorithms", ["local"])]))
    assert {label: list(space.domains) for label, space in spaces.items()} == {"local": ["train.lr"]}
    with pytest.raises(InputError, match=r"tune\.grid\.algorithm\.mu"):
        read_spaces(parse_experiment(document, [("algorithms", ["local"]), ("tune.grid.algorithm.mu", [1])]))


def test_a_method_s_own_value_gives_way(tmp_path: Path) -> None:
    """An entry's lr wins over [train]; a tuned one wins over both."""
    text = SMALL.replace('"local", ', '{name = "local", lr = 9.0}, ')
    tuning = tune(
        experiment(text, tune={"grid": {"train.lr": [0.1, 0.2]}, "own": {"prox": {"train.lr": []}}}), tmp_path
    )
    first, second = stored(tmp_path, "local")
    assert first["mean"] != second["mean"]
    assert tuning.experiment.algorithms[0].hyper["lr"] in (0.1, 0.2) and tuning.experiment.algorithms[1].hyper == {}
    assert list(notes(tuning.methods[1])) == ["nothing to tune"] and not (tmp_path / "tuning" / "prox.json").exists()


def test_budgets() -> None:
    lr = Choices("", (0.1, 0.2, 0.3), Bounds(0, None))
    mu = Range("", 0.0, 1.0, False, Bounds(0, None))
    grid, mixed = Space({"train.lr": lr, "algorithm.mu": lr}), Space({"train.lr": lr, "algorithm.mu": mu})
    assert [grid.budget(trials) for trials in (None, 4, 100)] == [9, 4, 9]
    assert [mixed.budget(trials) for trials in (None, 4, 100)] == [20, 4, 100]
    assert Space({}).budget(5) == 0
    some = grid.points(4, seed=0)
    assert some != grid.points(None, seed=0) and sorted(map(str, some)) == sorted(map(str, grid.points(None, 0)))


@pytest.mark.parametrize(
    ("domain", "value", "edge"),
    [
        (Choices("", (0.1, 0.3, 0.2), Bounds(0, None)), 0.1, "lower"),
        (Choices("", (0.1, 0.3, 0.2), Bounds(0, None)), 0.3, "upper"),
        (Choices("", (0.1, 0.3, 0.2), Bounds(0, None)), 0.2, None),
        (Choices("", (0.0, 0.5, 0.9), Bounds(0, None)), 0.0, None),  # there is nothing below 0
        (Choices("", (0.5,), Bounds(0, None)), 0.5, None),
        (Choices("", ("global", "finetune"), Bounds(None, None)), "global", None),
        (Choices("", (True, False), Bounds(None, None)), True, None),
        (Range("", 0.001, 1.0, True, Bounds(0, None)), 0.0012, "lower"),
        (Range("", 0.001, 1.0, True, Bounds(0, None)), 0.03, None),
        (Range("", 0.001, 1.0, False, Bounds(0, None)), 0.03, "lower"),
        (Range("", 0.001, 1.0, False, Bounds(0, None)), 0.97, "upper"),
        (Range("", 0.0, 1.0, False, Bounds(0, 1)), 0.99, None),
    ],
)
def test_edges(domain: Choices | Range, value: Any, edge: str | None) -> None:
    assert domain.edge(value) == edge
    best = Trial({"k": value}, "complete", 1.0, 1.0, 1.0, 1, 1.0, [])
    failed = dataclasses.replace(best, state="failed", value=None)
    said = list(notes(MethodResult("m", Space({"k": domain}), [best, failed])))
    assert said == ([f"k lies at the {edge} edge of its grid"] if edge else []) + ["1 failed"]


def test_ranges_are_sampled_within(tmp_path: Path) -> None:
    ranges = {"train.lr": {"low": 0.001, "high": 1, "log": True}, "train.local_epochs": {"low": 1, "high": 3}}
    tuning = quick(tmp_path, ranges | {"train.momentum": [0.0, 0.9]}, trials=12, rounds=1)
    trials = tuning.methods[0].trials
    assert len(trials) == 12 and budget_note(tuning) == "Every tuned method had 12 trials."
    assert len({trial.parameters["train.lr"] for trial in trials}) == 12
    assert all(0.001 <= trial.parameters["train.lr"] <= 1 for trial in trials)
    assert {trial.parameters["train.local_epochs"] for trial in trials} <= {1, 2, 3}
    assert {trial.parameters["train.momentum"] for trial in trials} == {0.0, 0.9}


# going on ----------------------------------------------------------------------------------------------


class Interrupting(LineReporter):
    """Counts the rounds, and sends Ctrl-C in one of them."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__(Console(quiet=True))
        self.rounds, self.after = 0, after

    def round(self, line: dict[str, Any]) -> None:
        self.rounds += 1
        if self.rounds == self.after:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "grid", [{"train.lr": [0.01, 0.1, 0.2, 0.3]}, {"train.lr": {"low": 0.01, "high": 1.0, "log": True}}]
)
def test_resuming_repeats_nothing_and_changes_nothing(tmp_path: Path, grid: dict[str, Any]) -> None:
    setting = experiment(train={"rounds": 3}, tune={"grid": grid, "trials": 4, "seeds": [0, 1], "prune": True})
    tune(setting, tmp_path / "undisturbed")
    out, rounds = tmp_path / "disturbed", 0
    for after, message in ((2, r"round 2 of local 1/4 .*seed 0"), (5, r"round 1 of local 2/4"), (30, r"of prox 3/4")):
        reporter = Interrupting(after)
        with pytest.raises(Interrupted, match=message):
            tune(setting, out, resume=True, reporter=reporter)
        rounds += reporter.rounds
    last = Interrupting()
    tune(setting, out, resume=True, reporter=last)
    for label in ("local", "prox"):
        assert stored(out, label) == stored(tmp_path / "undisturbed", label)
    assert (out / "tuned.toml").read_bytes() == (tmp_path / "undisturbed" / "tuned.toml").read_bytes()
    assert rounds + last.rounds == sum(trial["rounds"] for label in ("local", "prox") for trial in stored(out, label))


def test_an_extended_grid_adds_to_what_is_there(tmp_path: Path) -> None:
    quick(tmp_path, {"train.lr": [0.1, 0.2]})
    before = stored(tmp_path, "fedavg")
    tuning = quick(tmp_path, {"train.lr": [0.05, 0.2, 0.3]}, resume=True)
    assert stored(tmp_path, "fedavg")[:2] == before
    assert [trial["parameters"]["train.lr"] for trial in stored(tmp_path, "fedavg")] == [0.1, 0.2, 0.05, 0.3]
    assert [trial.parameters["train.lr"] for trial in tuning.methods[0].trials] == [0.2, 0.05, 0.3]


def test_what_another_configuration_left_is_refused(tmp_path: Path) -> None:
    quick(tmp_path, {"train.lr": [0.1]})
    with pytest.raises(InputError, match=r"fedavg\.json exists; add --resume"):
        quick(tmp_path, {"train.lr": [0.1]})
    with pytest.raises(InputError, match=r"train\.rounds was 2 and is now 5; tune\.metric was 'mean' and is now 'wor"):
        quick(tmp_path, {"train.lr": [0.1]}, resume=True, metric="worst5", rounds=5)
    (tmp_path / "tuning" / "fedavg.json").write_text("{")
    with pytest.raises(InputError, match=r"fedavg\.json cannot be read"):
        quick(tmp_path, {"train.lr": [0.1]}, resume=True)


def test_stopping_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(GRID)
    monkeypatch.setattr("bespokefl.progress.make_reporter", lambda *_, **__: Interrupting(3))
    monkeypatch.setattr(sys, "argv", ["bespoke", "tune", "small.toml"])
    result = bespoke("tune", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "stopped after round 1 of local 2/2 (lr 0.3), seed 0; continue with: bespoke tune small.toml --resume" in (
        result.output
    )
    again = bespoke("tune", tmp_path / "small.toml", "--out", tmp_path / "out", "--set", "algorithms=[local]")
    assert again.exit_code == 2 and "local.json exists; add --resume" in again.output
    (tmp_path / "out" / "tuning" / "local.json").rename(tmp_path / "out" / "tuning" / "local.json.away")
    again = bespoke("tune", tmp_path / "small.toml", "--out", tmp_path / "out", "--set", "algorithms=[local]")
    assert again.exit_code == 2 and "local exists; add --resume" in again.output  # the unfinished trial
    (tmp_path / "out" / "tuning" / "local.json.away").rename(tmp_path / "out" / "tuning" / "local.json")
    assert len(stored(tmp_path / "out", "local")) == 1 and not (tmp_path / "out" / "tuned.toml").exists()


# what can go wrong -------------------------------------------------------------------------------------


def test_a_diverging_trial_is_recorded_and_never_chosen(tmp_path: Path) -> None:
    tuning = quick(tmp_path, {"train.lr": [1e39, 0.1]})
    diverged, good = stored(tmp_path, "fedavg")
    assert diverged["state"] == "failed" and "usable answer" in diverged["reason"] and diverged["value"] is None
    assert good["state"] == "complete" and tuning.methods[0].best == tuning.methods[0].trials[1]
    assert tuning.experiment.algorithms[0].hyper == {"lr": 0.1}


def test_when_every_trial_fails_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL + "[tune.own]\nlocal.train.lr = [1e39]\nprox.train.lr = [0.1]\n")
    result = bespoke("tune", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "every trial of local failed" in said and "every trial failed; values as they were" in said
    document = tomllib.loads((tmp_path / "out" / "tuned.toml").read_text())
    assert document["algorithms"] == [
        {"name": "local", "label": "local"},
        {"name": "fedprox", "label": "prox", "lr": 0.1},
    ]


def test_hopeless_trials_end_early_if_asked(tmp_path: Path) -> None:
    grid = {"train.lr": [0.3, 0.2, 0.1, 1e-6]}
    pruned = quick(tmp_path / "pruned", grid, rounds=8, prune=True).methods[0]
    whole = quick(tmp_path / "whole", grid, rounds=8).methods[0]
    assert [trial.state for trial in pruned.trials] == ["complete"] * 3 + ["pruned"]
    assert [trial.rounds for trial in pruned.trials] == [8, 8, 8, 2]
    assert [trial.rounds for trial in whole.trials] == [8] * 4
    assert pruned.best is not None and whole.best is not None and pruned.best.parameters == whole.best.parameters
    assert "1 pruned" in list(notes(pruned))


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("[tune]\ncolour = 1", ["tune.colour = 1", "grid", "line 15"]),
        ("[tune]\nmetric = 'median'", ["tune.metric = 'median'", "'worst5'", "line 15"]),
        ("[tune]\nseeds = [1, 1]", ["tune.seeds = [1, 1]", "different", "line 15"]),
        ("[tune.grid]\ntrain.lrr = [1]", ["tune.grid.train.lrr = [1]", "Did you mean lr?", "line 15"]),
        ("[tune.grid]\ntrain.rounds = [1]", ["tune.grid.train.rounds = [1]", "local_epochs", "line 15"]),
        ("[tune]\ngrid = { 'algorithm.nu' = [1] }", ["tune.grid.algorithm.nu = [1]", "mu", "line 15"]),
        ("[tune]\ngrid = { lr = [1] }", ["tune.grid.lr = [1]", "train.KEY", "line 15"]),
        ("[tune]\ngrid = {}", ["tune.grid = {}", "nothing to tune", "line 15"]),
        ("[tune.grid]\n'train.lr' = [0.1, -1]", ["tune.grid.train.lr = [0.1, -1]", "algorithm.lr = -1", "line 15"]),
        ("[tune.grid]\ntrain.lr = ['big']", ["tune.grid.train.lr = ['big']", "a number", "line 15"]),
        ("[tune.grid]\ntrain.lr = [[1]]", ["tune.grid.train.lr = [[1]]", "not a number", "line 15"]),
        ("[tune.grid]\ntrain.lr = [1, 1.0]", ["tune.grid.train.lr = [1, 1.0]", "twice", "line 15"]),
        ("[tune.grid]\ntrain.lr = 0.1", ["tune.grid.train.lr = 0.1", "low = 0.001", "line 15"]),
        ("[tune.grid]\ntrain.lr = {low = 1}", ["tune.grid.train.lr", "high", "line 15"]),
        ("[tune.grid]\ntrain.lr = {low = 1, high = 0.5}", ["tune.grid.train.lr", "below high", "line 15"]),
        ("[tune.grid]\ntrain.lr = {low = 0, high = 1, log = true}", ["tune.grid.train.lr", "above 0", "line 15"]),
        ("[tune.own.fedprox]\ntrain.lr = [1]", ["tune.own.fedprox", "prox", "line 14"]),
        ("[tune.own.local]\nalgorithm.mu = [1]", ["tune.own.local.algorithm.mu = [1]", "local", "line 15"]),
    ],
)
def test_wrong_keys_are_met_before_any_file_is_written(tmp_path: Path, lines: str, parts: list[str]) -> None:
    (tmp_path / "exp.toml").write_text(SMALL + lines + "\n")
    result = bespoke("tune", tmp_path / "exp.toml", "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.output
    assert not (tmp_path / "out").exists()


def test_values_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    document = tomllib.loads(SMALL) | {"algorithms": ["plgu-lf"], "tune": {"grid": {"algorithm.D": [1, 9]}}}
    with pytest.raises(InputError, match=r"tune\.grid\.algorithm\.D holds 9: algorithm\.D = 9"):
        tune(parse_experiment(document), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "keys", [{"prune": True}, {"own": {"local": {"train.lr": {"low": 0.01, "high": 0.1}}}}], ids=["prune", "range"]
)
def test_ranges_and_pruning_need_optuna(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"needs the package optuna .* pip install 'bespokefl\[tune\]'"):
        tune(experiment(tune=keys), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_grid_is_tried_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    trials = quick(tmp_path, {"train.lr": [0.00001, 0.1, 0.3]}, trials=2).methods[0].trials
    assert len(trials) == 2 and all(trial.state == "complete" for trial in trials)


# files -------------------------------------------------------------------------------------------------


def test_an_experiment_as_a_document_reads_back_the_same(tmp_path: Path) -> None:
    text = GRID.replace("[data]\n", "[data]\nroot = 'somewhere'\nalpha = 0.7\n") + "[paper.accuracy]\nlocal = 50.0\n"
    (tmp_path / "exp.toml").write_text(text)
    before = read_experiment(tmp_path / "exp.toml")
    document = experiment_document(before)
    assert document["data"].pop("root") == str(Path("somewhere").absolute())
    after = parse_experiment(document)
    for field in ("seeds", "model", "train", "eval", "engine", "checkpoint", "output", "paper"):
        assert getattr(after, field) == getattr(before, field)
    assert after.data == before.data.model_copy(update={"root": None})
    assert [(c.name, c.label, c.hyper) for c in after.algorithms] == [
        (c.name, c.label, c.hyper) for c in before.algorithms
    ]


def test_the_page_s_example_is_an_experiment() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "tuning.md").read_text()
    examples = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert examples
    for text in examples:
        assert all(space.domains for space in read_spaces(parse_experiment(tomllib.loads(text))).values())
