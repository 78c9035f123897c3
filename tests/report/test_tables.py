"""The numbers of the report, against what the files hold and against scipy."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import linregress
from tests.report.folders import CLIENTS, accuracies, write_comparison, write_labels, write_run

from bespokefl.report.charts.personalisation import Bars, common_bars
from bespokefl.report.content import gather_content
from bespokefl.report.facts import regression, shown_facts
from bespokefl.report.gather import (
    Comparison,
    clients_table,
    curves_table,
    gains_over_global,
    gamma_table,
    methods_table,
    thinned,
)
from bespokefl.report.labels import labels_table
from bespokefl.report.tables import packed, plain, rows
from bespokefl.results.facts import read_facts
from bespokefl.results.files import read_runs


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = write_comparison(tmp_path_factory.mktemp("tables") / "out")
    return Comparison(out, read_runs(out))


def test_every_client_with_its_gains(comparison: Comparison) -> None:
    found = rows(clients_table(comparison))
    assert len(found) == 5 * 2 * CLIENTS
    for row in found:
        own, client = accuracies(row["method"], row["seed"]), row["client"]
        assert row["score"] == pytest.approx(100 * own[client], rel=1e-5)
        assert row["n_train"] == 10 * (client + 1)
        for reference in ("local", "fedavg"):
            gain = 100 * (own[client] - accuracies(reference, row["seed"])[client])
            assert row[f"over_{reference}"] == pytest.approx(gain, rel=1e-5, abs=1e-9)


def test_every_client_with_the_rounds_it_took_part_in(tmp_path: Path) -> None:
    counted = {"rounds_asked": np.arange(CLIENTS) + 1, "rounds_failed": np.full(CLIENTS, 1)}
    write_run(tmp_path, "fedavg", more=counted)
    write_run(tmp_path, "local")  # a file from before they were counted
    taken = {(row["method"], row["client"]): row["rounds"] for row in rows(clients_table(_read(tmp_path)))}
    assert [taken["fedavg", k] for k in range(CLIENTS)] == list(range(CLIENTS))
    assert {taken["local", k] for k in range(CLIENTS)} == {None}


def test_every_client_with_its_gain_over_the_runs_global_model(tmp_path: Path) -> None:
    own, of_global = [0.9, 0.5, 0.25], [0.6, 0.55, 0.25]
    write_run(tmp_path, "pgfed", accuracy=own, more={"global_accuracy": np.array(of_global)})
    write_run(tmp_path, "local", accuracy=own)
    assert gains_over_global(_read(tmp_path)) == {"pgfed": [30, -5, 0]}


def test_the_gains_over_the_global_model_are_drawn_of_methods_that_have_both(tmp_path: Path) -> None:
    """Bars of one width and range for all, so that zero is an edge and every client is in one."""
    gains = {"pgfed": [0.3, -0.05, 0.02], "ditto": [0.11, 0.14, 0.0]}
    for label, gain in gains.items():
        more = {"global_accuracy": np.full(3, 0.5)}
        write_run(tmp_path, label, accuracy=list(0.5 + np.array(gain)), more=more)
    write_run(tmp_path, "fedavg", accuracy=[0.6, 0.7, 0.8], more={"global_accuracy": np.array([0.6, 0.7, 0.8])})
    write_run(tmp_path, "local", accuracy=[0.6, 0.7, 0.8])
    content = gather_content(_read(tmp_path))
    section = next(section for section in content.sections if section.id == "over-global")
    assert sorted(panel.method for panel in section.panels) == ["ditto", "pgfed"]
    assert common_bars([30, -5, 2, 11, 14, 0]) == Bars(step=2, low=-6, high=32)
    assert common_bars([0.1, 0.2]) == Bars(step=0.5, low=-0.5, high=0.5)
    assert common_bars([-40.0, 80.0]) == Bars(step=10, low=-40, high=90)
    assert content.tables["over-global-pgfed"] == {"from": [-6, 2, 30], "to": [-4, 4, 32], "clients": [1, 1, 1]}
    assert content.tables["over-global-ditto"] == {"from": [0, 10, 14], "to": [2, 12, 16], "clients": [1, 1, 1]}
    bare = tmp_path / "bare"
    write_run(bare, "local", accuracy=[0.6, 0.7])
    assert "over-global" not in {section.id for section in gather_content(_read(bare)).sections}


def _read(out: Path) -> Comparison:
    return Comparison(out, read_runs(out))


def test_methods_over_seeds(comparison: Comparison) -> None:
    table = {row["method"]: row for row in rows(methods_table(comparison))}
    means = [100 * accuracies("pgfed", seed).mean() for seed in (0, 1)]
    assert table["pgfed"]["mean"] == pytest.approx(np.mean(means), rel=1e-5)
    assert table["pgfed"]["mean_sd"] == pytest.approx(np.std(means), rel=1e-4, abs=1e-9)
    harmed = [(accuracies("pgfed", s) < accuracies("local", s)).sum() for s in (0, 1)]
    assert table["pgfed"]["harmed"] == pytest.approx(np.mean(harmed))
    assert table["local"]["gain"] is None and table["local"]["megabytes"] == 5
    ranked = [row["mean"] for row in table.values()]
    assert ranked == sorted(ranked, reverse=True)


def test_curves_with_their_band(comparison: Comparison) -> None:
    by_round = {row["round"]: row for row in rows(curves_table(comparison)) if row["method"] == "fedavg"}
    final = [100 * accuracies("fedavg", seed).mean() for seed in (0, 1)]
    assert list(by_round) == [1, 2, 3]
    assert by_round[2]["mean"] == pytest.approx(np.mean(final) * 2 / 3, rel=1e-5)
    assert (by_round[3]["mean_low"], by_round[3]["mean_high"]) == pytest.approx((min(final), max(final)), rel=1e-5)


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    kept = thinned(range(1, 3001), 200)
    assert len(kept) == 200 and (kept[0], kept[-1]) == (1, 3000)
    assert max(np.diff(kept)) <= 16 and thinned([3, 5]) == [3, 5]


def test_gamma_sweep_only_where_gamma_differs(comparison: Comparison, tmp_path: Path) -> None:
    found = {(row["gamma"], row["quantity"][0]): row for row in rows(gamma_table(comparison))}
    assert found[0.5, "G"]["value"] == pytest.approx(50) and found[0, "G"]["value"] == pytest.approx(60)
    final = [100 * accuracies("fedpg-0.5", seed).mean() for seed in (0, 1)]
    assert found[0.5, "L"]["value"] == pytest.approx(np.mean(final), rel=1e-5)
    assert (found[0.5, "L"]["low"], found[0.5, "L"]["runs"]) == (pytest.approx(min(final), rel=1e-5), 2)
    write_run(tmp_path, "fedpg", config='[algorithm]\nname = "fedpg"\ngamma = 0.5\n')
    assert gamma_table(Comparison(tmp_path, read_runs(tmp_path))) == {}


@pytest.mark.parametrize("seed", range(5))
def test_regression_is_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(20, 400, 30), rng.normal(size=30)
    line, reference = regression(x, y), linregress(x, y)
    assert line is not None
    assert (line.slope, line.intercept, line.r) == pytest.approx(
        (reference.slope, reference.intercept, reference.rvalue), rel=1e-10
    )


def test_no_line_through_equal_sizes() -> None:
    assert regression([5, 5, 5], [1, 2, 3]) is None
    flat = regression([1, 2, 3], [4, 4, 4])
    assert flat is not None and flat.slope == 0 and math.isnan(flat.r)


def test_the_change_of_a_matrix_and_its_means(comparison: Comparison) -> None:
    shown = {fact.name: fact for fact in shown_facts(comparison)[0]}
    values = read_facts(comparison.folder / "pgfed" / "seed-0")["A"].values
    change = values[-1] - values[0]
    matrix = shown["A"]
    assert matrix.kind == "matrix" and matrix.rounds == (1, 3)
    for cell in rows(matrix.table):
        assert cell["change"] == pytest.approx(change[cell["i"], cell["j"]], rel=1e-5)
    n = 10 * np.arange(1, CLIENTS + 1)
    assert matrix.means is not None and matrix.lines is not None
    np.testing.assert_allclose(matrix.means["row"], change.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(matrix.means["column"], change.mean(axis=0), rtol=1e-5)
    for side, axis in (("row", 1), ("column", 0)):
        reference = linregress(n, change.mean(axis=axis))
        assert matrix.lines[side].slope == pytest.approx(reference.slope)
        assert matrix.lines[side].r == pytest.approx(reference.rvalue)


def test_facts_by_shape(comparison: Comparison) -> None:
    shown = {fact.name: fact for fact in shown_facts(comparison)[0]}
    kinds = {name: fact.kind for name, fact in shown.items()}
    assert kinds == {"A": "matrix", "lambda": "clients", "scores": "layers", "step": "number", "still": "constant"}
    facts = read_facts(comparison.folder / "pgfed" / "seed-0")
    for row in rows(shown["scores"].table):
        of_layer = facts["scores"].values[[1, 3].index(row["round"]), :, row["layer"] - 1]
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(
            (of_layer.mean(), of_layer.min(), of_layer.max()), rel=1e-5
        )
    assert shown["lambda"].table["mean"][0] == pytest.approx(facts["lambda"].values[0].mean(), rel=1e-5)


def test_labels_of_every_client(tmp_path: Path) -> None:
    train = write_labels(tmp_path, 3)
    write_run(tmp_path, "local", 3, more={"malicious": [0, 1, 0, 0, 0, 0]})
    found, problems = labels_table(Comparison(tmp_path, read_runs(tmp_path)))
    assert problems == [] and len(rows(found)) == 3 * CLIENTS
    for row in rows(found):
        assert row["train"] == train[row["client"], ["0", "1", "other"].index(row["label"])]
        assert (row["samples"], row["test"], row["seed"]) == (row["train"] + 1, 1, 3)
        assert row["name"] == f"{row['client']} site {row['client']}" + " (attacks)" * (row["client"] == 1)


def test_a_partition_file_of_an_older_version(tmp_path: Path) -> None:
    (tmp_path / "partition-seed-0.csv").write_text("client,name,n_train,label a,label b\n0,0,3,4,0\n1,1,2,0,2\n")
    found, _ = labels_table(Comparison(tmp_path, []))
    assert [(row["client"], row["label"], row["samples"], row["train"]) for row in rows(found)] == [
        (0, "a", 4, None),
        (1, "b", 2, None),
    ]


def test_numbers_travel_short_and_texts_once() -> None:
    assert plain([1 / 3, 2.0, float("nan"), np.float64(1234567.0), np.int64(4), "a", None]) == [
        0.333333,
        2,
        None,
        1234570,
        4,
        "a",
        None,
    ]
    table = {"method": ["b", "a", "b"], "value": [1, 2, 3]}
    assert packed(table) == {"method": {"levels": ["b", "a"], "codes": [0, 1, 0]}, "value": [1, 2, 3]}
