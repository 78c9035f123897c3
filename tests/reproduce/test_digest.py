"""Figures by model and round, and runs in their compact form."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bespokefl.errors import InputError
from bespokefl.evaluation.metrics import summarise
from bespokefl.experiments.reading import read_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.progress import make_reporter
from bespokefl.reproduce import digest
from bespokefl.reproduce.digest import Made, digest_runs, figure, measured, read_digest, superseded, write_digest
from bespokefl.reproduce.measures import check, measure
from bespokefl.reproduce.views import FIGURES, MODELS, ROUNDS, View, chosen_round
from bespokefl.results.facts import read_facts
from bespokefl.results.files import read_runs

EXPERIMENT = """
algorithms = ["fedper", "lg-mix", {name = "fedavg", personal = "global"}]
[data]
clients = 5
max_samples = 250
[model]
name = "mlp"
[train]
rounds = 3
local_epochs = 1
[eval]
also = ["global", "before_agg"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    file = out / "e.toml"
    file.write_text(EXPERIMENT)
    console = Console(file=io.StringIO())
    run_experiment(read_experiment(file), out / "o", resume=False, reporter=make_reporter(console))
    return out / "o"


MADE = Made(command="bespoke run", hardware="two cores, today")


def every_view() -> list[View]:
    return [View(model, figure, rule) for model in MODELS for figure in FIGURES for rule in ROUNDS]  # type: ignore[arg-type]


def test_the_figure_of_a_view_is_that_of_the_evaluated_round(folder: Path) -> None:
    run = folder / "fedavg/seed-0"
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()][1:]
    means = [np.mean(line["before_agg"]["accuracy"]) for line in lines]
    best = lines[int(np.argmax(means))]["before_agg"]["accuracy"]
    assert View("before_agg", "mean", "last").of(run) == pytest.approx(means[-1], abs=0)
    assert View("before_agg", "worst5", "best_test").of(run) == min(best)  # one of five clients is the lowest 5 %
    assert View("personal", "std", "last").of(run) == pytest.approx(np.std(lines[-1]["test"]["accuracy"]), abs=1e-15)
    assert View("global", "mean", "last").of(folder / "fedper/seed-0") is None


def test_the_first_of_equally_good_rounds_is_taken() -> None:
    curve = {2: np.array([0.1, 0.3]), 4: np.array([0.4, 0.4]), 6: np.array([0.5, 0.3])}
    assert [chosen_round(curve, rule, 5) for rule in ("best_test", "selected", "last")] == [4, 5, 6]


def test_views_are_measures_of_a_table(folder: Path) -> None:
    check(["mean", "before_agg:worst5@last", "global:std@best_test"])
    run = next(run for run in read_runs(folder) if run.label == "fedavg")
    found = measure("global:mean@last").value(run, None)
    assert found == pytest.approx(100 * summarise(run.clients["accuracy"])["mean"])  # type: ignore[index]
    assert not measure("personal:std@last").higher_is_better
    with pytest.raises(InputError, match="MODEL:FIGURE@ROUND"):
        check(["personal:median@last"])


def test_the_compact_form_gives_the_same_figures(folder: Path, tmp_path: Path) -> None:
    write_digest(tmp_path / "d.json", digest_runs(folder, ["worst5", "gm_acc"], MADE))
    runs = read_digest(tmp_path / "d.json")
    assert all(run["made"] == {"command": "bespoke run", "hardware": "two cores, today"} for run in runs)
    assert [run["label"] for run in runs] == ["fedavg", "fedper", "lg-mix"]
    for run in runs:
        for view in every_view():
            whole = view.of(folder / run["label"] / "seed-0")
            assert figure(run, view) == (None if whole is None else pytest.approx(whole, abs=1e-5))
    assert "root" not in runs[0]["config"]["data"] and runs[0]["config"]["algorithm"]["personal"] == "global"
    assert runs[0]["figures"]["rounds"] == 3
    for run in runs:
        whole = json.loads((folder / run["label"] / "seed-0/summary.json").read_text())
        assert run["measures"]["worst5"] == pytest.approx(100 * whole["worst5"], abs=1e-3)
        assert (run["measures"]["gm_acc"] is None) == (run["label"] == "fedper")


def test_few_clients_are_named_and_their_facts_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedavg, _, lg_mix = digest_runs(folder, [], MADE)
    assert fedavg["names"] == ["0", "1", "2", "3", "4"] and fedavg["facts"] == {}
    assert set(lg_mix["facts"]) == {"lambda"}  # a number for each client; distances have one for each layer
    course, whole = lg_mix["facts"]["lambda"], read_facts(folder / "lg-mix/seed-0")["lambda"]
    assert course["rounds"] == whole.rounds.tolist()
    np.testing.assert_allclose(np.array(course["clients"], float), whole.values, atol=1e-5, equal_nan=True)
    monkeypatch.setattr(digest, "FEW_CLIENTS", 4)
    assert "facts" not in digest_runs(folder, [], MADE)[2]


def test_measures_that_were_not_asked_for_follow_from_the_accuracies(folder: Path) -> None:
    stored = next(run for run in read_runs(folder) if run.label == "fedper")
    fedavg, fedper, _ = digest_runs(folder, [], MADE)
    assert fedper["measures"] == {}
    for name in ("mean", "std", "worst5", "top5"):
        assert measured(fedper, name) == pytest.approx(measure(name).value(stored, None), abs=2e-3)
    local = next(run for run in read_runs(folder) if run.label == "fedavg")  # any other run in the place of Local's
    for name in ("gain", "gain_std"):
        assert measured(fedper, name, fedavg) == pytest.approx(measure(name).value(stored, local), abs=2e-3)
        assert measured(fedper, name) is None
    assert measured(fedper, "gm_mean") is None and measured(fedper, "g_acc") is None
    for name in ("gm_mean", "gm_worst5", "gm_top5"):
        assert measured(fedavg, name) == pytest.approx(measure(name).value(local, None), abs=2e-3)


def test_measures_of_older_settings_are_known(folder: Path) -> None:
    run = digest_runs(folder, [], MADE)[0]
    assert superseded(run, "mean") is None
    run["superseded"] = {"s_acc*": "a tenth of the others"}
    assert superseded(run, "s_acc_std") == "a tenth of the others" and superseded(run, "mean") is None
    run["superseded"] = {"*": "another rate"}
    assert superseded(run, "mean") == superseded(run, "personal:mean@last") == "another rate"


def test_two_items_can_share_runs(folder: Path, tmp_path: Path) -> None:
    write_digest(tmp_path / "one.json", digest_runs(folder, ["mean"], MADE))
    (tmp_path / "two.json").write_text('{"runs_of": "one"}')
    assert read_digest(tmp_path / "two.json") == read_digest(tmp_path / "one.json")
