"""docs/reproduction.md says what its runs say."""

import itertools
import json
import re
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from docs import stored_runs
from docs.make_reproduction import BLOCK, COMMAND, PAGE, filled, items
from docs.reproduction_items import item_names, items_table, read_item
from docs.reproduction_pictures import CHARTS, IMAGES, LINES, line_plot, tick_plot
from docs.stored_runs import COLLECTION, EXPERIMENTS, Table, collect, percent, read_part, read_table, supersede
from scipy.stats import kendalltau, ttest_rel
from typer.testing import CliRunner

from bespokefl.cli import app
from bespokefl.errors import InputError
from bespokefl.reproduce.digest import Made, read_digest, superseded

PAPERS = Path(stored_runs.__file__).parents[1] / "src/bespokefl/reproduce/papers"


def test_the_page_is_what_the_runs_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), f"docs/reproduction.md is not up to date; run: {COMMAND}"
    assert len(list(BLOCK.finditer(text))) >= 4


def test_it_starts_with_all_items() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = next(BLOCK.finditer(text))
    assert first["kind"] == "items" and items("-", "-") in first[0]
    every = {path.stem for path in EXPERIMENTS.glob("*.toml")}
    others = {name for name in every if name.startswith(("digits-", "leaderboard-"))}
    others |= {name for name in every if name.endswith(("-choices", "-rounds", "-exact", "-gamma"))}
    assert set(item_names()) == every - others
    for name in item_names():
        assert f"[{name}](../experiments/{name}.toml)" in first[0]
    assert sorted(item_names()) != item_names() and len(items_table()) == len(item_names())


def test_its_pictures_exist_and_its_runs_are_small() -> None:
    for name in re.findall(r"\]\(images/([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (IMAGES / name).is_file(), name
    assert sum(path.stat().st_size for path in COLLECTION.iterdir()) < 5e6


# the first table, by another computation ---------------------------------------------------------------


def cells_by_hand(item: str, table: str) -> list[dict[str, tuple[float, float | None, dict[int, float]]]]:
    """By column and method: the paper's number and spread from its own file, ours by seed from the stored runs."""
    paper = tomllib.loads((PAPERS / f"{item.split('-')[0]}.toml").read_text())[table]
    columns = []
    for setting, rows in paper.items():
        if not isinstance(rows, dict):
            continue
        file = COLLECTION / f"{item}-{setting}.json"
        runs = json.loads(file.read_text())["runs"] if file.exists() else []
        counted_now = read_table(item, setting).counted
        counts = {(run["label"], run["seed"]) for own in counted_now.values() for run in own}
        for metric in paper["metrics"]:
            column = {}
            for method, row in rows.items():
                number, spread = row[metric] if isinstance(row[metric], list) else (row[metric], None)
                own = [r for r in runs if r["label"] == method and (method, r["seed"]) in counts]
                counted = [r for r in own if "*" not in r.get("superseded", {})]
                column[method] = (number, spread, {r["seed"]: r["measures"][metric] for r in counted})
            columns.append(column)
    return columns


def test_the_first_table_s_numbers_follow_from_the_runs() -> None:
    columns = cells_by_hand("pgfed-table1", "table1")
    printed = sum(len(column) for column in columns)
    both = [{m: cell for m, cell in column.items() if cell[2]} for column in columns]
    assert sum(map(len, both)) >= 8  # there are runs
    row = dict(zip(ROW, items_table(["pgfed-table1"])[0], strict=True))
    assert row["cells"] == f"{sum(map(len, both))} of {printed}"
    gaps = [abs(np.mean(list(ours.values())) - paper) for column in both for paper, _, ours in column.values()]
    assert row["mean"] == f"{np.mean(gaps):.2f} points"
    run = [column for column in both if column]
    if len(run) == 1:
        (cells,) = ([(cell[0], np.mean(list(cell[2].values()))) for cell in column.values()] for column in run)
        assert row["tau"] == f"{kendalltau(*zip(*cells, strict=True)).statistic:+.2f}"
    several = [cell for column in run for cell in column.values() if len(cell[2]) > 1]
    outside = sum(abs(np.mean(list(o.values())) - p) > np.std(list(o.values())) + s for p, s, o in several)
    assert row["outside"] == f"{outside} of {len(several)}"
    counts = {"same": 0, "other": 0, "open": 0}
    for (p, s, a), (q, t, b) in (pair for column in run for pair in itertools.combinations(column.values(), 2)):
        if abs(p - q) > s + t:
            first, second = np.transpose([(a[n], b[n]) for n in a.keys() & b.keys()])
            gain = (first - second) * np.sign(p - q)
            beyond = len(gain) > 1 and ttest_rel(first, second).pvalue < 0.04550026
            counts[("same" if gain.mean() > 0 else "other") if beyond else "open"] += 1
    assert row["pairs"] == "{same} / {other} / {open}".format(**counts)
    clear = not counts["open"] and row["cells"] == f"{printed} of {printed}"
    answer = "does not hold" if counts["other"] else "holds" if clear else "cannot tell"
    assert row["verdict"].split(" (")[0] == answer


ROW = ("item", "cells", "mean", "outside", "tau", "pairs", "rounds", "seeds", "verdict", "otherwise")


def test_rounds_and_seeds_are_those_of_the_runs_that_count() -> None:
    for name in ("pgfed-table1", "fedpg-supp-table1"):
        rounds, seeds = set(), set()
        for part in stored_runs.parts(name):
            path = COLLECTION / f"{name}-{part.name}.json"
            by_label: dict[str, set[int]] = {}
            for run in read_digest(path) if path.exists() else []:
                own = read_table(name, part.name).counted.get(run["label"], [])
                if run["seed"] in {other["seed"] for other in own} and "*" not in run.get("superseded", {}):
                    by_label.setdefault(run["label"], set()).add(run["seed"])
                    rounds.add(f"{run['figures']['rounds']} of {part.experiment.train.rounds}")
            seeds |= {str(len(own)) for own in by_label.values()}
        row = dict(zip(ROW, items_table([name])[0], strict=True))
        degrees = "/".join(str(int(count) - 1) for count in sorted(seeds))
        assert set(row["rounds"].split(", ")) == rounds and row["seeds"] == f"{'/'.join(sorted(seeds))} ({degrees})"


def test_items_without_runs_are_not_run() -> None:
    row = dict(zip(ROW, items_table(["pgfed-figure3"])[0], strict=True))
    assert row["verdict"] == "not run" and not read_item("pgfed-figure3").current


def test_no_sentence_concludes_more_than_the_table() -> None:
    prose = BLOCK.sub("", PAGE.read_text(encoding="utf-8"))
    for phrase in ("is left of", "ordering holds", "confirmed", "in part", "reproduces", "beats"):
        assert phrase not in prose, phrase


# runs of older settings --------------------------------------------------------------------------------


def test_runs_that_are_known_to_be_wrong_are_shown_marked_and_count_in_nothing() -> None:
    text, seen = PAGE.read_text(encoding="utf-8"), 0
    for block in BLOCK.finditer(text):
        if block["kind"] not in ("numbers", "measured"):
            continue
        found = read_table(block["experiment"], block["setting"])
        for label, runs in found.runs.items():
            for metric in found.part.experiment.paper.metrics:
                wrong = {run["seed"]: superseded(run, metric) for run in runs if superseded(run, metric)}
                assert not wrong.keys() & found.current(label, metric).keys()
                if len(wrong) == len(runs) and found.value(runs[0], metric) is not None and block["kind"] == "measured":
                    seen += 1
                    (line,) = (
                        line for line in block[0].splitlines() if line.startswith((f"| {label} |", f"| {label} <"))
                    )
                    assert "<sup>" in line and f"Not counted: {wrong[runs[0]['seed']]}." in block[0]
    assert seen > 10


def test_a_column_s_s_accuracies_can_be_marked_alone() -> None:
    found = read_table("fedpg-supp-table1", "fmnist-p10")
    wrong = [run for run in found.runs["fedavg"] if superseded(run, "s_acc")]
    assert all(superseded(run, "l_acc") is None for run in wrong)
    assert len(found.current("fedavg", "l_acc")) == 3


def test_an_option_that_changes_nothing_makes_no_older_settings() -> None:
    found = read_table("lgmix-table1", "digits5")
    run = found.runs["fedrep"][0]
    assert run["config"]["train"]["local_epochs"] == 1  # FedRep has head_epochs and body_epochs
    assert "local_epochs" not in stored_runs.changes(found.part, run)
    assert "lr" in stored_runs.changes(found.part, {**run, "config": {**run["config"], "algorithm": {"lr": 0.7}}})


def test_an_option_that_a_model_got_since_makes_no_older_settings() -> None:
    found = read_table("fedpg-supp-table1", "fmnist-p10")
    run = found.runs["fedavg"][0]
    assert "norm" not in run["config"]["model"]  # of a perceptron: "none" by default
    assert "model.norm" not in stored_runs.set_up_changes(found.part, run)
    other = {**run, "config": {**run["config"], "model": {**run["config"]["model"], "norm": "batch"}}}
    assert stored_runs.set_up_changes(found.part, other)["model.norm"] == "batch (none)"


def test_of_runs_over_different_rounds_only_the_longest_count() -> None:
    found = read_table("plgu-table2", "cifar10-c10")
    every = [run for own in found.runs.values() for run in own]
    by_rounds = {(run["label"], run["seed"]): run["config"]["train"]["rounds"] for run in every}
    assert len(set(by_rounds.values())) == 2  # there are both
    counted = {(run["label"], run["seed"]) for own in found.counted.values() for run in own}
    assert {by_rounds[key] for key in counted} == {max(by_rounds.values())}
    shorter = next(run for run in found.runs["fedsam"])
    assert found.no_longer(shorter, "mean") == "fewer rounds" and not found.current("fedsam", "mean")
    assert found.current("fedavg", "mean").keys() == {0, 1}  # of seed 2 there are 40 rounds


TABLE = """
seeds = [0, 1]
algorithms = ["local", { name = "fedavg", lr = RATE }]
[data]
clients = 4
max_samples = 200
[model]
name = "linear"
[train]
rounds = 2
batch_size = BATCH
lr = 0.3
[paper]
metrics = ["mean"]
[[setting]]
name = "one"
paper.numbers.mean = { local = 90.0, fedavg = 60.0 }
[[setting]]
name = "two"
data.alpha = 0.7  # settings that are alike run once
paper.numbers.mean = { local = 80.0, fedavg = 70.0 }
"""
ALIKE = 'algorithms = ["local", { name = "fedavg", lr = 0.2 }]'


def test_runs_that_settings_have_in_common_are_taken_in_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local is the same in both settings and runs in the first; FedAvg runs in both, its gains are over that Local."""
    monkeypatch.setattr(stored_runs, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(stored_runs, "COLLECTION", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    table = TABLE.replace("RATE", "0.1").replace("BATCH", "10").replace("data.alpha = 0.7", ALIKE)
    (tmp_path / "experiments/pgfed-table78.toml").write_text(table.replace('["mean"]', '["mean", "gain"]'))
    result = CliRunner().invoke(app, ["reproduce", "pgfed-table78", "--out", "out", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out/two/local").exists()
    made = Made(command="bespoke reproduce pgfed-table78", hardware="two cores, today")
    assert collect(tmp_path / "out", "pgfed-table78", made) == ["one", "two"]
    one, two = (read_digest(tmp_path / f"pgfed-table78-{setting}.json") for setting in ("one", "two"))
    assert [(run["label"], run["seed"]) for run in two] == [("fedavg", 0), ("fedavg", 1), ("local", 0), ("local", 1)]
    assert two[2:] == one[2:] and two[:2] != one[:2]
    assert all(run["measures"]["gain"] is not None for run in two[:2])
    table_two = read_table("pgfed-table78", "two")
    assert sorted(table_two.current("local", "mean")) == [0, 1]


def test_a_folder_of_runs_becomes_a_row_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_runs, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(stored_runs, "COLLECTION", tmp_path)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "experiments/pgfed-table77.toml"
    file.parent.mkdir()

    def write(rate: float, batch: int) -> None:
        file.write_text(TABLE.replace("RATE", str(rate)).replace("BATCH", str(batch)))
        stored_runs.parts.cache_clear()
        stored_runs.read_table.cache_clear()

    def row() -> dict[str, str]:
        return dict(zip(ROW, items_table(["pgfed-table77"])[0], strict=True))

    def run(out: str, *more: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["reproduce", "pgfed-table77", "--out", out, "--jobs", "1", *more])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads((tmp_path / out / "comparison.json").read_text())["compared"]
        return found

    write(0.1, 10)
    assert row()["verdict"] == "not run" and row()["cells"] == "0 of 4"
    compared = run("first", "--only", "one")
    made = Made(command="bespoke reproduce pgfed-table77 --only one", hardware="two cores, today")
    assert collect(tmp_path / "first", "pgfed-table77", made) == ["one"]
    assert {run["seed"] for run in read_digest(tmp_path / "pgfed-table77-one.json")} == {0, 1}
    assert row()["cells"] == f"{compared['cells']} of {compared['cells_of_the_paper']}" == "2 of 4"
    assert row()["mean"] == f"{compared['mean_absolute_difference']['points']:.2f} points"
    assert (row()["rounds"], row()["seeds"], row()["verdict"]) == ("2 of 2", "2 (1)", compared["verdict"])

    write(0.2, 10)  # the experiment changes for one method: its runs are of older settings, and count no longer
    table = read_table("pgfed-table77", "one")
    assert table.current("fedavg", "mean") == {} and sorted(table.current("local", "mean")) == [0, 1]
    assert row()["cells"] == "1 of 4" and row()["otherwise"] == "left out: fedavg"
    write(0.2, 20)  # and for all: they count until there are others
    assert row()["cells"] == "2 of 4"
    assert row()["verdict"].endswith("(older settings)") and row()["otherwise"] == "`batch_size`, `lr`"
    run("second", "--only", "fedavg", "--seed", "0")
    assert collect(tmp_path / "second", "pgfed-table77", made) == ["one", "two"]
    table = read_table("pgfed-table77", "one")
    assert list(table.current("fedavg", "mean")) == [0]  # that of seed 1 counts no longer, nor do Local's
    assert table.current("local", "mean") == {}
    write(0.1, 10)
    before = (tmp_path / "pgfed-table77-one.json").read_text()
    file.write_text(file.read_text().replace("[data]", '[data]\nsource = "mnist"'))
    stored_runs.parts.cache_clear()
    with pytest.raises(InputError, match=r"data.source = 'digits', the experiment has 'mnist'"):
        collect(tmp_path / "first", "pgfed-table77", made)
    file.write_text(TABLE.replace("RATE", "0.1").replace("BATCH", "10").replace('"local"', '"fedper"'))
    stored_runs.parts.cache_clear()
    with pytest.raises(InputError, match="no such method, but fedper, fedavg"):
        collect(tmp_path / "first", "pgfed-table77", made)
    assert (tmp_path / "pgfed-table77-one.json").read_text() == before
    write(0.1, 10)

    supersede("pgfed-table77", "one", ["local"], "*", "another")
    assert read_table("pgfed-table77", "one").current("local", "mean") == {}
    assert "left out: local" in row()["otherwise"]
    stored_runs.parts.cache_clear()
    stored_runs.read_table.cache_clear()


# what is drawn -----------------------------------------------------------------------------------------


def test_the_models_that_methods_are_scored_by_are_among_those_measured() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    # FedAvg is scored by its global model, as in the paper
    assert percent(found, "fedavg", "personal:mean@last") == percent(found, "fedavg", "global:mean@last")
    for label in ("local", "pgfed", "pgfedmo", "fedfomo"):  # what a client trained is what it is scored by
        assert percent(found, label, "personal:mean@last") == percent(found, label, "before_agg:mean@last")
    assert percent(found, "local", "global:mean@last") is None


def test_curves_are_means_over_seeds() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    rows = LINES["curves"].rows(found)
    last = {row["line"]: row["value"] for row in rows if row["round"] == 300}
    assert last.keys() == found.runs.keys()
    for label, value in last.items():
        assert value == pytest.approx(percent(found, label, "personal:mean@last"), abs=1e-3)


def test_lambdas_are_drawn_by_client_and_method() -> None:
    course = {"clients": [[None, 0.5], [0.25, 0.75]], "rounds": [1, 2]}
    run = {"names": ["MNIST", "SVHN"], "facts": {"lambda": course}}
    runs = {"fedavg": [{}], "lg-mix": [run, {}]}
    table = Table(read_part("lgmix-table1", "digits5"), runs, runs)  # type: ignore[arg-type]
    rows = LINES["lambdas"].rows(table)
    assert [(row["round"], row["line"], row["value"]) for row in rows] == [
        (1, "SVHN", 0.5),
        (2, "MNIST", 0.25),
        (2, "SVHN", 0.75),
    ]
    assert line_plot(LINES["lambdas"], table)["encoding"]["facet"]["sort"] == ["lg-mix"]


def test_every_client_has_its_tick_and_what_it_holds_where_the_global_model_is_scored() -> None:
    chart = tick_plot(found := read_table("plgu-table2", "cifar10-c10"))
    by_row: dict[str, list[float]] = {}
    for tick in chart["data"]["values"]:
        by_row.setdefault(tick["method"], []).append(tick["accuracy"])
    assert by_row.keys() - found.counted.keys() == {"fedavg, before averaging"}
    for row, ticks in by_row.items():
        assert len(ticks) == 100 * len(found.counted[row.partition(",")[0]])  # of every seed
    for label, view in (("plgu-lf", "personal:mean@last"), ("fedavg", "global:mean@last")):
        assert fmean(by_row[label]) == pytest.approx(percent(found, label, view), abs=1e-3)
    held = percent(found, "fedavg", "before_agg:mean@last")
    assert fmean(by_row["fedavg, before averaging"]) == pytest.approx(held, abs=1e-3)


def test_the_papers_dots_are_its_numbers() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    values = CHARTS["picture"](found)["data"]["values"]
    dots = {one["method"]: one["accuracy"] for one in values if one["scored"].startswith("the paper's")}
    assert dots == found.paper["mean"]
