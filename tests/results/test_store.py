"""Results as data, from folders in every state that a run can leave them in."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from bespokefl.errors import InputError
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.results import answers, store
from bespokefl.results.evaluations import EvaluationLog, read_clients, read_series
from bespokefl.results.files import RoundLog, write_atomically, write_csv, write_json

NAMES = ["north", "south", "7"]
WHO = {"name": NAMES, "n_train": np.array([10, 20, 30]), "n_test": np.array([4, 5, 0]), "n_val": np.array([1, 2, 3])}
ROUNDS = 3
nan = float("nan")


def scores(round_: int, split: str) -> Evaluation:
    """Client 2 has no test data."""
    shift = 0.01 * round_ + (0.001 if split == "val" else 0)
    accuracy = np.array([0.1, 1 / 3, nan if split == "test" else 0.5]) + shift
    return Evaluation(np.arange(3), np.array([4, 5, 0]), accuracy, 1 - accuracy)


def make_run(folder: Path, *, rounds: int = ROUNDS, finished: bool = True, evaluated: bool = True) -> Path:
    """What a run writes, in the order in which it does."""
    config = '[algorithm]\nname = "fedavg"\n[train]\nrounds = 3\nlr = 0.25\n'
    write_atomically(folder / "config.toml", config)
    log = RoundLog(folder / "rounds.jsonl")
    evaluations = EvaluationLog(folder / "evaluations.jsonl", WHO)
    for number in range(1, rounds + 1):
        evaluations.append(number, {"test": scores(number, "test"), "val": scores(number, "val")})
        mean = float(np.nanmean(scores(number, "test").accuracy))
        line = {
            "round": number,
            "mean": mean,
            "val_mean": None,
            "bytes_up": 2**40,
            "clients": [0, 2],
            "failed": {"2": "x"},
        }
        log.append(line)
    log.close()
    evaluations.close()
    if not evaluated:
        (folder / "evaluations.jsonl").unlink()
    if finished:
        last = scores(rounds, "test")
        columns = {"client": range(3), "n_train": WHO["n_train"], "n_test": WHO["n_test"], "accuracy": last.accuracy}
        columns |= {"loss": last.loss, "global_accuracy": [0.5, 0.6, nan], "s_accuracy": [nan] * 3}
        write_csv(folder / "clients.csv", columns | {"rounds_asked": [3, 0, 3], "name": NAMES})
        if evaluated:
            store.write_results(folder, "fedavg", rounds)
        write_json(folder / "summary.json", {"mean": 0.5, "selected_round": rounds, "bytes_total": 2**41})
    return folder


def rows(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with store.connect(folder) as connection:
        return store.ask(connection, sql).rows


def expected(rounds: int, *, finished: bool = True) -> set[tuple[Any, ...]]:
    """(round, client, metric, split, model, value) without missing values."""
    found = [
        (number, client, metric, split, "personal", value)
        for number in range(1, rounds + 1)
        for split in ("test", "val")
        for metric in ("accuracy", "loss")
        for client, value in enumerate(getattr(scores(number, split), metric).tolist())
    ]
    if finished:
        found += [
            (rounds, 0, "global_accuracy", "test", "global", 0.5),
            (rounds, 1, "global_accuracy", "test", "global", 0.6),
        ]
    return {row for row in found if row[-1] == row[-1]}


MEASURED = "SELECT round, client, metric, split, model, value FROM results WHERE value IS NOT NULL"


def test_a_finished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine" / "seed-4")
    found = rows(tmp_path, MEASURED)
    assert len(found) == len(set(found)) and set(found) == expected(ROUNDS)  # to the last bit
    assert rows(tmp_path, "SELECT DISTINCT run, label, algorithm, seed FROM results") == [
        ("mine/seed-4", "mine", "fedavg", 4)
    ]
    assert rows(tmp_path, "SELECT count(*) FROM results WHERE value IS NULL") == [(2 * ROUNDS + 1,)]  # client 2
    assert rows(tmp_path, "SELECT count(*) FROM results WHERE metric = 's_accuracy'") == [(0,)]  # nobody has one
    assert rows(tmp_path, "SELECT client, name, n_train, n_test, rounds_asked FROM clients ORDER BY client") == [
        (0, "north", 10, 4, 3),
        (1, "south", 20, 5, 0),
        (2, "7", 30, 0, 3),
    ]
    query = "SELECT state, rounds_done, rounds, mean, selected_round, bytes_total, worst5, folder FROM runs"
    assert rows(tmp_path, query) == [("finished", 3, 3, 0.5, 3, 2**41, None, str(folder.resolve()))]
    assert rows(tmp_path, "SELECT (config ->> '$.train.lr')::DOUBLE FROM runs") == [(0.25,)]
    assert rows(tmp_path, "SELECT round, bytes_up, clients, failed ->> '$.2', val_mean FROM rounds ORDER BY round") == [
        (number, 2**40, [0, 2], "x", None) for number in (1, 2, 3)
    ]


def test_the_file_stands_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine" / "seed-4")
    with duckdb.connect() as plain:
        found = plain.execute("SELECT * FROM read_parquet(?) LIMIT 1", [str(folder / "results.parquet")]).fetchnumpy()
    columns = {"label": "mine", "algorithm": "fedavg", "seed": 4, "round": 1, "client": 0, "metric": "accuracy"}
    columns |= {"value": scores(1, "test").accuracy[0], "split": "test", "model": "personal"}
    assert {name: values[0] for name, values in found.items()} == columns


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name / "x" / "seed-0") / "results.parquet" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert not list(first.parent.glob(".*"))


@pytest.mark.parametrize("rest", ["", '{"round": 3, "test": {"accur', '{"round": 3', "\n", "null\n"])
def test_a_run_that_goes_on_or_died(tmp_path: Path, rest: str) -> None:
    folder = make_run(tmp_path / "mine" / "seed-0", rounds=2, finished=False)
    for name in ("evaluations.jsonl", "rounds.jsonl"):
        with (folder / name).open("a") as file:
            file.write(rest)
    assert set(rows(tmp_path, MEASURED)) == expected(2, finished=False)
    assert rows(tmp_path, "SELECT state, rounds_done, rounds, mean, error FROM runs") == [
        ("unfinished", 2, 3, None, None)
    ]
    assert rows(tmp_path, "SELECT name, n_train, n_val, rounds_asked FROM clients WHERE client = 1") == [
        ("south", 20, 2, None)
    ]
    (folder / "error.txt").write_text("why")
    assert rows(tmp_path, "SELECT state, error FROM runs") == [("failed", "why")]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    write_atomically(tmp_path / "mine" / "seed-0" / "config.toml", "")
    assert rows(tmp_path, "SELECT run, state, rounds_done, algorithm FROM runs") == [
        ("mine/seed-0", "unfinished", 0, None)
    ]
    for view in ("results", "rounds", "clients"):
        assert rows(tmp_path, f"SELECT * FROM {view}") == []


def test_a_run_of_an_older_version(tmp_path: Path) -> None:
    make_run(tmp_path / "old" / "seed-0", evaluated=False)
    make_run(tmp_path / "older" / "seed-0", rounds=2, evaluated=False, finished=False)
    selected = {row for row in expected(ROUNDS) if row[0] == ROUNDS and row[3] == "test"}
    assert set(rows(tmp_path, MEASURED)) == selected
    assert rows(tmp_path, "SELECT label, count(mean), count(*) FROM rounds GROUP BY ALL ORDER BY ALL") == [
        ("old", 3, 3),
        ("older", 2, 2),
    ]
    assert rows(tmp_path, "SELECT name FROM clients ORDER BY client") == [(name,) for name in NAMES]


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_without_a_whole_parquet_file(tmp_path: Path, damage: str) -> None:
    path = make_run(tmp_path / "mine" / "seed-0") / "results.parquet"
    whole = store.frame(tmp_path)
    if damage == "missing":  # a run on a machine without duckdb
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    again = store.frame(tmp_path)
    assert whole.keys() == again.keys() and len(whole["value"]) == 12 * ROUNDS + 3
    for name, values in whole.items():
        np.testing.assert_array_equal(values, again[name])


def test_folders_above_and_below(tmp_path: Path) -> None:
    odd = tmp_path / "it's [a] *?"
    make_run(odd / "demo" / "mine" / "seed-0")
    shutil.copytree(odd / "demo" / "mine", odd / "demo" / "renamed")
    make_run(odd / "demo" / "tuning" / "mine" / "seed-0")  # a trial
    make_run(odd / "demo" / "mine" / "seed-of-something", finished=False)
    names = "SELECT DISTINCT run, label FROM results ORDER BY run"
    assert rows(odd, names) == [("demo/mine/seed-0", "mine"), ("demo/renamed/seed-0", "renamed")]
    assert rows(odd / "demo", names) == [("mine/seed-0", "mine"), ("renamed/seed-0", "renamed")]
    for below in (odd / "demo" / "mine", odd / "demo" / "mine" / "seed-0"):
        assert rows(below, names) == [("mine/seed-0", "mine")]
    make_run(tmp_path / "tuning" / "seed-0")  # a method of that name
    assert rows(tmp_path / "tuning", names) == [("tuning/seed-0", "tuning")]


def test_a_thousand_runs(tmp_path: Path) -> None:
    """In every state; they are read in about a second."""
    templates = [
        make_run(tmp_path / "templates" / "whole" / "seed-0"),
        make_run(tmp_path / "templates" / "part" / "seed-0", rounds=2, finished=False),
        make_run(tmp_path / "templates" / "old" / "seed-0", evaluated=False),
    ]
    for number in range(1000):
        kind = templates[min(number % 10, 2) if number % 10 < 3 else 0]
        shutil.copytree(kind, tmp_path / "out" / f"{kind.parent.name}-{number // 10}" / f"seed-{number % 10}")
    with store.connect(tmp_path / "out") as connection:
        query = "SELECT state, count(*) FROM runs GROUP BY ALL ORDER BY ALL"
        assert store.ask(connection, query).rows == [("finished", 900), ("unfinished", 100)]
        query = (
            "SELECT split_part(label, '-', 1), count(DISTINCT run), count(value) FROM results GROUP BY ALL ORDER BY ALL"
        )
        assert store.ask(connection, query).rows == [
            ("old", 100, 100 * 6),
            ("part", 100, 100 * 2 * 10),
            ("whole", 800, 800 * (3 * 10 + 2)),
        ]


def test_frame(tmp_path: Path) -> None:
    make_run(tmp_path / "mine" / "seed-0")
    everything = store.frame(str(tmp_path))
    assert list(everything) == [
        "run",
        "label",
        "algorithm",
        "seed",
        "round",
        "client",
        "metric",
        "value",
        "split",
        "model",
    ]
    assert everything["round"].dtype.kind == "i" and np.isnan(everything["value"]).sum() == 2 * ROUNDS + 1
    assert (np.diff(everything["round"]) >= 0).all()
    found = store.frame(tmp_path, "SELECT * FROM (VALUES (1, 'a', NULL, 1.5), (NULL, NULL, NULL, NULL)) t(i, s, n, f)")
    np.testing.assert_array_equal(found["i"], [1, nan])
    np.testing.assert_array_equal(found["f"], [1.5, nan])
    assert found["s"].tolist() == ["a", None]
    assert not any(isinstance(values, np.ma.MaskedArray) for values in found.values())


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT nothing FROM runs", "nothing"),
        ("SELECT * FROM nowhere", "nowhere"),
        ("SELECT CAST(label AS INTEGER) FROM runs", "mine"),
        ("", "one statement"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("DROP TABLE runs", "only reads"),
        ("INSERT INTO rounds SELECT * FROM rounds RETURNING *", "only reads"),
        ("COPY runs TO 'stolen.csv'", "only reads"),
        ("EXPORT DATABASE 'stolen'", "only reads"),
        ("ATTACH 'other.db'", "only reads"),
        ("INSTALL httpfs", "only reads"),
        ("SET enable_external_access = true", "only reads"),
        ("EXPLAIN ANALYZE DELETE FROM runs", "only reads"),
        ("SELECT * FROM read_text('secret.txt')", "disabled by configuration"),
        ("SELECT * FROM 'secret.csv'", "secret.csv"),
        ("SELECT * FROM glob('*')", "disabled by configuration"),
    ],
)
def test_queries_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, said: str) -> None:
    make_run(tmp_path / "mine" / "seed-0")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.csv").write_text("a\n1\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with store.connect(tmp_path) as connection:
        for attempt in (lambda: store.ask(connection, sql), lambda: store.frame(tmp_path, sql)):
            with pytest.raises(InputError) as error:
                attempt()
            assert said in str(error.value)
        assert store.ask(connection, "SELECT count(*) FROM runs").rows == [(1,)]
    assert sorted(tmp_path.rglob("*")) == before


def test_variables_of_the_program_are_no_tables(tmp_path: Path) -> None:
    make_run(tmp_path / "mine" / "seed-0")
    arrays = {"a": np.arange(3)}
    with pytest.raises(InputError, match="arrays does not exist"):
        store.frame(tmp_path, "SELECT * FROM arrays")
    assert arrays


def test_answers(tmp_path: Path) -> None:
    make_run(tmp_path / "mine" / "seed-0")
    sql = """
        SELECT 1 / 3 AS a, 'x,"y" [b]' AS a, NULL AS n, 'inf'::DOUBLE AS i, 1.5::DECIMAL(3, 1) AS d,
            [1, 'nan'::DOUBLE] AS l"""
    with store.connect(tmp_path) as connection:
        answer = store.ask(connection, sql)
        some = store.ask(connection, "SELECT * FROM range(5)", most=3)
        exactly = store.ask(connection, "SELECT * FROM range(3)", most=3)
    assert json.loads(answers.to_json(answer)) == [
        {"a": 1 / 3, "a_1": 'x,"y" [b]', "n": None, "i": None, "d": 1.5, "l": [1, None]}
    ]
    answers.write_csv(answer, tmp_path / "new" / "a.csv")
    with (tmp_path / "new" / "a.csv").open(newline="") as file:
        header, row = csv.reader(file)
    assert header == ["a", "a_1", "n", "i", "d", "l"] and float(row[0]) == 1 / 3 and row[1:3] == ['x,"y" [b]', ""]
    assert (len(some.rows), some.complete, len(exactly.rows), exactly.complete) == (3, False, 3, True)
    assert json.loads(answers.to_json(some._replace(rows=[]))) == []


def test_the_log_is_cut_back_to_the_rounds_that_count(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("undisturbed", "resumed")]
    for path in paths:
        log = EvaluationLog(path, WHO)
        for number in (1, 2, 3):
            log.append(number, {"test": scores(number, "test"), "val": None})
            assert len(path.read_text().splitlines()) == 1 + number  # each line is flushed as it is written
        log.close()
    with paths[1].open("a") as file:
        file.write('{"round": 4, "te')
    again = EvaluationLog(paths[1], WHO, keep=1)
    for number in (2, 3):
        again.append(number, {"test": scores(number, "test"), "val": None})
    again.close()
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_clients(paths[1])["n_train"] == [10, 20, 30]
    assert [series.round for series in read_series(paths[1])] == [1, 1, 2, 2, 3, 3]


def test_a_log_that_an_older_version_did_not_begin(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "e.jsonl", WHO, keep=5)
    log.append(6, {"test": scores(6, "test"), "val": None})
    log.close()
    assert [series.round for series in read_series(tmp_path / "e.jsonl")] == [6, 6]


def test_without_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "mine" / "seed-0")
    (folder / "results.parquet").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    store.write_results(folder, "fedavg", ROUNDS)
    assert not (folder / "results.parquet").exists()
    with pytest.raises(InputError, match="pip install duckdb"):
        store.connect(tmp_path)


def test_what_is_loaded_when() -> None:
    """Runs start without duckdb, and questions are answered without torch."""
    code = (
        "import sys, bespokefl.results.store; assert 'torch' not in sys.modules; import bespokefl.experiments.one_run; "
    )
    subprocess.run([sys.executable, "-c", code + "assert 'duckdb' not in sys.modules"], check=True)


def test_no_runs(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="holds no runs"):
            store.connect(folder)
