"""The paper's numbers and ours, cell by cell."""

import math

import pytest

from bespokefl.experiments.schema import Contradiction, PaperSection
from bespokefl.reproduce.block import cells_text, outside_text, rows, sentences
from bespokefl.reproduce.cells import Column, by_seed, numbers_printed, paper_columns
from bespokefl.reproduce.comparison import Comparison, SettingResult
from bespokefl.reproduce.tables import footnotes, markdown

OURS = {"a": {0: 80.0, 1: 81.0}, "b": {0: 70.0, 1: 71.0}, "c": {0: 10.0, 1: 11.0}, "own": {0: 99.0, 1: 99.0}}


def paper(**keys: object) -> PaperSection:
    numbers = {"mean": {"a": 0.79, "b": 0.6, "own": 0.5}}
    return PaperSection.model_validate(
        {"unit": "fraction", "numbers": numbers, "added": ["own"], "lost": ["mean/c"]} | keys
    )


def columns(section: PaperSection, setting: str = "") -> tuple[Column, ...]:
    return paper_columns(setting, section, ["a", "b", "c", "own"], lambda label, metric: OURS[label])


def comparison(*settings: tuple[Column, ...], small: bool = False, left_out: int = 0) -> Comparison:
    results = [SettingResult(found[0].setting, "", found, "", (), 2) for found in settings]
    return Comparison("item", paper(), tuple(results), small, left_out)


def test_lost_cells_and_added_rows_do_not_count() -> None:
    (column,) = columns(paper())
    a, b, c, own = column.cells
    assert (a.paper, b.paper, c.paper) == (pytest.approx(79), pytest.approx(60), None)
    assert c.lost and not a.lost and not own.in_paper
    assert (column.tally.cells, column.tally.printed) == (2, 2) == (numbers_printed(paper()), 2)
    assert "| c | 10.50 ±0.50 | lost | - |" in markdown(comparison((column,)))


def test_only_spreads_over_seeds_are_spreads() -> None:
    spreads = {"mean": {"a": 0.02, "b": 0.001}}
    over_seeds, over_clients = (
        columns(paper(spreads=spreads))[0],
        columns(paper(spreads=spreads, spread_of="clients"))[0],
    )
    assert [cell.paper_spread for cell in over_seeds.cells[:2]] == [pytest.approx(2), pytest.approx(0.1)]
    assert [cell.paper_spread for cell in over_clients.cells[:2]] == [None, None]
    assert outside_text(over_seeds.tally) == "1 of 2"  # 1.5 is within 0.5 + 2, 10.5 is not within 0.5 + 0.1
    assert outside_text(over_clients.tally) == "2 of 2 (ours only)"


def test_a_measure_counts_where_every_run_has_it() -> None:
    assert by_seed([(0, 1.0), (2, 2.0)]) == {0: 1.0, 2: 2.0}
    assert by_seed([(0, 1.0), (2, None)]) == by_seed([(0, 1.0), (1, math.nan)]) == by_seed([]) == {}


def test_footnotes_are_those_of_each_setting() -> None:
    def noted(setting: str, says: str) -> tuple[Column, ...]:
        note = Contradiction(where=f"{setting}/a/mean", says=says)
        return columns(paper(contradictions=[note]), setting)

    found = comparison(noted("one", "it is 78 elsewhere."), noted("two", "it is 77 elsewhere."))
    assert footnotes(found) == ["[1] In the paper: it is 78 elsewhere.", "[2] In the paper: it is 77 elsewhere."]
    marks = [found.marks(setting.columns[0].cells[0]) for setting in found.settings]
    assert marks == [[1], [2]]


def test_the_block_sums_over_settings_and_counts_what_was_left_out() -> None:
    found = comparison(columns(paper(), "one"), columns(paper(), "two"), left_out=3)
    assert [row[:2] for row in rows(found)] == [["one/mean", "2 of 2"], ["two/mean", "2 of 2"], ["all", "4 of 7"]]
    assert found.tally.verdict.answer == "cannot tell" and "3 of the paper's 7 numbers" in sentences(found)[0]
    whole = comparison(columns(paper(), "one"), columns(paper(), "two"))
    assert sentences(whole)[0].startswith("Verdict: holds; all 2 pairs")


def test_a_small_set_up_is_compared_by_the_columns_that_it_has() -> None:
    none = paper_columns("two", paper(), ["a", "b"], lambda label, metric: {})
    found = comparison(columns(paper(), "one"), none, small=True, left_out=3)
    assert [row[0] for row in rows(found)] == ["one/mean", "all"] and cells_text(found.tally) == "2 of 2"
    assert found.tally.verdict.answer == "holds"
    assert "difference" not in markdown(found).replace("no difference to the paper's numbers", "")


def test_pairs_the_other_way_round_are_listed_with_their_column() -> None:
    turned = columns(paper(numbers={"mean": {"a": 0.6, "b": 0.79}}), "two")
    said = sentences(comparison(columns(paper(), "one"), turned))
    assert said[0].startswith("Verdict: does not hold; 1 of 2 pairs")
    assert said[-1] == (
        "The other way round in ours: b over a in two/mean (paper +19.00, ours -10.00, standard error 0.00, 2 seeds)."
    )
