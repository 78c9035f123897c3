"""docs/reproduction.md says what its runs say."""

import re
from statistics import fmean

import pytest
from docs.make_reproduction import (
    BLOCK,
    CHARTS,
    COLLECTION,
    COMMAND,
    IMAGES,
    LINES,
    PAGE,
    Table,
    filled,
    line_plot,
    percent,
    read_table,
    tick_plot,
)


def test_the_page_is_what_the_runs_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), f"docs/reproduction.md is not up to date; run: {COMMAND}"
    assert len(list(BLOCK.finditer(text))) >= 4


def test_its_pictures_exist_and_its_runs_are_small() -> None:
    for name in re.findall(r"\]\(images/([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (IMAGES / name).is_file(), name
    assert sum(path.stat().st_size for path in COLLECTION.iterdir()) < 5e6


def test_the_models_that_methods_are_scored_by_are_among_those_measured() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    fedavg = found.runs["fedavg"]
    assert percent(fedavg, "personal:mean@last") == percent(fedavg, "global:mean@last")  # as the paper scores it
    for label in ("local", "pgfed", "pgfedmo", "fedfomo"):  # what a client trained is what it is scored by
        assert percent(found.runs[label], "personal:mean@last") == percent(found.runs[label], "before_agg:mean@last")
    assert percent(found.runs["local"], "global:mean@last") is None


def test_curves_are_means_over_seeds() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    rows = LINES["curves"].rows(found)
    last = {row["line"]: row["value"] for row in rows if row["round"] == 300}
    assert last.keys() == found.runs.keys()
    for label, value in last.items():
        assert value == pytest.approx(percent(found.runs[label], "personal:mean@last"), abs=1e-3)


def test_lambdas_are_drawn_by_client_and_method() -> None:
    course = {"clients": [[None, 0.5], [0.25, 0.75]], "rounds": [1, 2]}
    run = {"names": ["MNIST", "SVHN"], "facts": {"lambda": course}}
    table = Table({}, {"fedavg": [{}], "lg-mix": [run, {}]}, {})  # type: ignore[list-item]
    rows = LINES["lambdas"].rows(table)
    assert [(row["round"], row["line"], row["value"]) for row in rows] == [
        (1, "SVHN", 0.5),
        (2, "MNIST", 0.25),
        (2, "SVHN", 0.75),
    ]
    assert line_plot(LINES["lambdas"], table)["encoding"]["facet"]["sort"] == ["lg-mix"]


def test_the_papers_dots_are_those_at_hand() -> None:
    def kinds(found: Table) -> list[str]:
        return list(CHARTS["tradeoff"](found)["layer"][1]["encoding"]["color"]["scale"]["domain"])

    found = read_table("fedpg-supp-table1", "cifar10-p10")
    ours = kinds(found._replace(paper={}))
    assert len(ours) == 3 and kinds(found) == [*ours, "the paper's G", "the paper's L"]


def test_every_client_has_its_tick_and_what_it_holds_where_the_global_model_is_scored() -> None:
    chart = tick_plot(found := read_table("plgu-table2", "cifar10-c10"))
    by_row: dict[str, list[float]] = {}
    for tick in chart["data"]["values"]:
        by_row.setdefault(tick["method"], []).append(tick["accuracy"])
    assert by_row.keys() - found.runs.keys() == {"fedavg, before averaging", "fedsam, before averaging"}
    assert {len(ticks) for ticks in by_row.values()} == {300}  # of three seeds
    for label, view in (("plgu-lf", "personal:mean@last"), ("fedavg", "global:mean@last")):
        assert fmean(by_row[label]) == pytest.approx(percent(found.runs[label], view), abs=1e-3)
    held = percent(found.runs["fedavg"], "before_agg:mean@last")
    assert fmean(by_row["fedavg, before averaging"]) == pytest.approx(held, abs=1e-3)
