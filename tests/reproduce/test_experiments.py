"""The shipped experiments: all can be read, name what exists, and run at the small scale."""

import importlib
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from docs.make_reproduce import COMMAND, PAGE, filled
from typer.testing import CliRunner

from bespokefl.algorithms.pfedhn import HyperNetworked
from bespokefl.cli import app
from bespokefl.data import SOURCES
from bespokefl.experiments import resolve
from bespokefl.experiments.paper_numbers import read_paper
from bespokefl.experiments.reading import read_parts
from bespokefl.experiments.schema import Part
from bespokefl.experiments.small_scale import read_set_up, set_ups
from bespokefl.models import MODELS
from bespokefl.reproduce import measures
from bespokefl.reproduce.cells import paper_numbers
from bespokefl.tuning.space import read_spaces

ROOT = Path(__file__).resolve().parents[2]
PAPERS = {  # an item for each table and figure that shows results
    "plgu": [*(f"table{n}" for n in (1, 2, 3, 4)), *(f"figure{n}" for n in (1, 4, 5, 6, 7))],
    "pgfed": [*(f"table{n}" for n in (1, 2, 3, 4)), *(f"figure{n}" for n in (2, 3, 4))],
    "fedpg-supp": [*(f"table{n}" for n in (1, 2, 3)), *(f"figure{n}" for n in (1, 2))],
    "lgmix": [
        *(f"table{n}" for n in (1, 2, 3, 4, 6, 7, 8, 9, 10)),
        *(f"figure{n}" for n in ("2a", "2b", "2c", "3", "4")),
    ],
}
ITEMS = [f"{paper}-{place}" for paper, places in PAPERS.items() for place in places]
OTHERS = ["pgfed-supplement", "pgfed-choices", "pgfed-exact", "fedpg-choices", "fedpg-gamma", "plgu-rounds"]
NAMES = [*ITEMS, *OTHERS]
CALLED = {"plgu": "PLGU, ", "pgfed": "PGFed, ", "fedpg-supp": "FedPG, supplement ", "lgmix": "LG-Mix, "}  # in titles
every_experiment = pytest.mark.parametrize("name", NAMES)


def bespoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def parts(name: str, scale: str = "paper") -> tuple[Part, ...]:
    return read_parts(ROOT / "experiments" / f"{name}.toml", (), scale)  # type: ignore[arg-type]


def test_there_is_a_file_for_every_table_and_figure() -> None:
    shipped = {path.stem for path in (ROOT / "experiments").glob("*.toml")}
    assert {name for name in shipped if re.match("(plgu|pgfed|fedpg|lgmix)-", name)} == set(NAMES)


@every_experiment
def test_it_can_be_read_and_names_what_exists(name: str) -> None:
    for part in parts(name):
        experiment = part.experiment
        assert experiment.model.name in MODELS
        for choice in experiment.algorithms:
            resolve.make_algorithm(experiment, choice)
        assert read_spaces(experiment)
        measures.check(experiment.paper.metrics)
        assert experiment.paper.title and experiment.paper.source
        if SOURCES[experiment.data.source].files and experiment.data.source != "fashion-mnist":
            assert experiment.paper.data


@pytest.mark.parametrize("name", ["plgu-table2", "plgu-figure4", "plgu-figure6"])
def test_hypernetworks_that_are_compared_are_alike(name: str) -> None:
    """Of the same size, by the same steps: all that pFedHN and PLGU-GHN share but the visits."""
    shared = [field.name for field in fields(HyperNetworked)]
    compared = 0
    for part in parts(name):
        built = [resolve.make_algorithm(part.experiment, choice) for choice in part.experiment.algorithms]
        found = [algorithm for algorithm in built if isinstance(algorithm, HyperNetworked)]
        compared += len(found) == 2
        assert all(getattr(algorithm, key) == getattr(found[0], key) for algorithm in found for key in shared)
    assert compared


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_s_title_has_its_number(name: str) -> None:
    paper, _, place = name.rpartition("-")
    called = re.sub(r"(table|figure)(?=\d)", r"\1 ", place)
    assert re.match(rf"{CALLED[paper]}{called}\b", parts(name)[0].experiment.paper.title)


@every_experiment
def test_the_paper_s_numbers_are_of_methods_and_metrics_it_has(name: str) -> None:
    for part in parts(name):
        paper, labels = part.experiment.paper, {choice.label for choice in part.experiment.algorithms}
        assert all(place.rpartition("/")[0] in paper.metrics for place in paper.lost)
        for metric, numbers in paper_numbers(paper).items():
            assert metric in paper.metrics and numbers.keys() <= labels


@pytest.mark.parametrize("table", [1, 2, 3, 4])
def test_pgfed_s_tables_have_all_rows_and_numbers(table: int) -> None:
    found = parts(f"pgfed-table{table}")
    printed = {k: v for k, v in read_paper("pgfed")[f"table{table}"].items() if isinstance(v, dict)}
    assert {part.name for part in found} == printed.keys()
    for part in found:
        paper, own = part.experiment.paper, {choice.label for choice in part.experiment.algorithms}
        rows, metric = printed[part.name], {1: "mean", 2: "rounds_to_target", 3: "gain", 4: "gain"}[table]
        assert own - set(paper.added) == rows.keys()
        values = {label: row[metric] for label, row in rows.items()}
        assert paper.numbers[metric] == {k: v[0] if isinstance(v, list) else v for k, v in values.items()}
        if table != 2:
            assert paper.spreads[metric] == {k: v[1] for k, v in values.items()}
            assert paper.spread_of == ("seeds" if table == 1 else "clients")


@every_experiment
def test_a_row_without_a_number_of_the_paper_is_said_to_be_added(name: str) -> None:
    for part in (part for part in parts(name) if part.experiment.paper.numbers_from):
        paper = part.experiment.paper
        known = {label for numbers in paper.numbers.values() for label in numbers}
        for choice in part.experiment.algorithms:
            assert (choice.label in known) != (choice.label in paper.added), f"{part.name}/{choice.label}"


@every_experiment
def test_contradictions_and_notes_point_at_something(name: str) -> None:
    import fnmatch

    found = parts(name)
    cells = [
        "/".join(text for text in (part.name, choice.label, metric) if text)
        for part in found
        for choice in part.experiment.algorithms
        for metric in part.experiment.paper.metrics
    ]
    for part in found:
        for place in (place for note in part.experiment.paper.contradictions for place in note.places):
            assert fnmatch.filter(cells, place), place
    for data in found[0].experiment.paper.data:
        for pattern in data.settings:
            assert fnmatch.filter([part.name for part in found], pattern) or found[0].name == ""


@every_experiment
def test_the_small_scale_keeps_partition_methods_and_metrics(name: str) -> None:
    for full, small in zip(parts(name), parts(name, "small"), strict=True):
        assert not SOURCES[small.experiment.data.source].files
        assert small.experiment.data.partition == full.experiment.data.partition
        assert {c.name for c in small.experiment.algorithms} == {c.name for c in full.experiment.algorithms}
        assert small.experiment.paper == full.experiment.paper
        assert small.experiment.train.participation == full.experiment.train.participation


FEW = ("lgmix-figure2c",)  # which varies the number of clients itself


@every_experiment
def test_the_small_scale_means_something(name: str) -> None:
    for part in parts(name, "small"):
        one, set_up = part.experiment, read_set_up(part.set_up)
        data = resolve.load_data(one, 0)
        assert name in FEW or data.clients >= 20
        assert name in FEW or round(data.clients * one.train.participation) >= 5
        assert one.seeds == (0, 1, 2) and one.eval.every == 1
        assert set_up.rates is not None
        for choice in one.algorithms:
            assert resolve.make_algorithm(one, choice).lr == set_up.rates[choice.name], choice.label
        if one.eval.target is not None:
            assert one.eval.target == set_up.target and 0.2 < one.eval.target < 1


def test_rates_of_the_small_scale_say_where_they_are_from() -> None:
    for name in set_ups():
        own = ROOT / "src/bespokefl/reproduce/small"
        chosen = tomllib.loads((own / "tuned" / f"{name}.toml").read_text())
        tuning = tomllib.loads((own / f"{name}.toml").read_text())["tuning"]
        assert (
            set(chosen["rates"].values()) <= set(tuning["grid"])
            and chosen["rates"].keys() == chosen["validation"].keys()
        )
        assert str(tuning["grid"]) in chosen["why"]["rates"] and chosen["train"]["rounds"] % 10 == 0
        for command in chosen["why"]["commands"]:
            assert command.startswith(f"python benchmarks/small_rates.py {name}")


def test_every_method_of_a_small_set_up_can_be_tuned_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PGFed's experiments say what happens to momentum, which LG-Mix's have not."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    small_rates = importlib.import_module("small_rates")
    monkeypatch.setattr(
        small_rates, "tuning_of", lambda _: {"as_in": "lgmix-table1/digits5", "grid": [0.1], "seeds": [0]}
    )
    methods = small_rates.methods_of("digits-domains")
    assert methods["fedrod"].hyper["opt_state"] == "keep"
    tuned = small_rates.tuned("digits-domains", [methods["fedrod"]], 1, tmp_path, 1)
    assert tuned["fedrod"].methods[0].best.parameters == {"train.lr": 0.1}


def test_what_a_small_set_up_does_not_carry_is_not_compared() -> None:
    set_up = read_set_up("digits-domains")
    assert set_up.carries("mean") and set_up.carries("auc")
    assert not any(map(set_up.carries, ("client:MNIST", "client:A:dice", "memory", "seconds", "hours")))


@pytest.mark.parametrize(
    ("name", "only", "metrics"),
    [
        ("pgfed-table3", ["cifar10-50/local", "cifar10-50/fedavg"], {"gain", "gain_std"}),
        (
            "fedpg-gamma",
            ["*/gamma-0", "*/gamma-1"],
            {"l_acc", "s_acc", "g_acc", "gm_acc", "l_acc_std", "s_acc_std", "g_acc_std"},
        ),
        ("lgmix-table6", ["*/*-b32"], {"mean"}),
    ],
)
def test_small_runs_and_is_compared(name: str, only: list[str], metrics: set[str], tmp_path: Path) -> None:
    chosen = [word for pattern in only for word in ("--only", pattern)]
    result = bespoke(
        "reproduce", name, "--scale", "small", "--out", tmp_path, "--jobs", 1, "--set", "train.rounds=2", *chosen
    )
    assert result.exit_code == 0, result.output
    assert "SMALL SCALE" in result.output and "train.rounds = 2 instead of" in " ".join(result.output.split())
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["scale"] == "small"
    for setting in comparison["settings"]:
        measured = {c["metric"] for c in setting["columns"] if any(m["ours"] is not None for m in c["methods"])}
        assert measured == metrics
    assert (tmp_path / "comparison.md").read_text().startswith(f"# {parts(name)[0].experiment.paper.title}")


def test_missing_data_are_named(tmp_path: Path) -> None:
    result = bespoke("reproduce", "pgfed-supplement", "--out", tmp_path, "--data", tmp_path)
    assert result.exit_code == 2 and "Traceback" not in result.output
    message = " ".join(result.output.split())
    assert message.startswith("error: ")
    assert "officeHomeDataset" in message and "medmnist.com" in message


@pytest.mark.slow
@every_experiment
def test_all_of_it_at_the_small_scale(name: str, tmp_path: Path) -> None:
    result = bespoke("reproduce", name, "--scale", "small", "--out", tmp_path, "--jobs", 1, "--set", "train.rounds=2")
    assert result.exit_code == 0, result.output
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    for setting in comparison["settings"]:
        methods = [method for column in setting["columns"] for method in column["methods"]]
        assert any(method["ours"] is not None for method in methods), setting["name"]


def test_the_page_lists_every_experiment_as_its_file_has_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), f"docs/reproduce.md is not up to date; run: {COMMAND}"
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) >= set(NAMES)
    for metric in measures.MEASURES:
        assert f"`{metric}`" in text, metric
    [count] = re.findall(r"\[(\d+) experiments\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(count) == len(NAMES)
