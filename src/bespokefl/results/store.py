"""Results as data: one row per (run, round, client, metric), to be asked in SQL.

A finished run has them in results.parquet; of any other run they are read from what it has written so far, and of a run
of an older version from clients.csv, which knows the selected round only. duckdb does the work. It is imported where it
is needed: without it runs go on as ever, and leave no results.parquet.
"""

import importlib.util
import itertools
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bespokefl.errors import InputError
from bespokefl.evaluation.metrics import SAMPLE_METRICS
from bespokefl.results import files
from bespokefl.results.evaluations import EVALUATIONS, Series, all_series, read_clients
from bespokefl.results.summary import LEFT_OUT

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

RESULTS = "results.parquet"
TRIALS = "tuning"  # the folder of unfinished trials, which are no results

IDENTITY = {"run": "VARCHAR", "label": "VARCHAR", "algorithm": "VARCHAR", "seed": "BIGINT"}
RUNS = {
    **IDENTITY,
    "state": "VARCHAR",
    "rounds_done": "INTEGER",
    **dict.fromkeys(("rounds", "selected_round", "n_clients", "clients_without_test", "clients_failed"), "INTEGER"),
    "clients_untrained": "INTEGER",
    "metric": "VARCHAR",
    **dict.fromkeys(("mean", "std", "worst5", "top5", "gm_acc", "l_acc", "s_acc", "g_acc"), "DOUBLE"),
    **dict.fromkeys(SAMPLE_METRICS, "DOUBLE"),
    **dict.fromkeys((name + LEFT_OUT for name in SAMPLE_METRICS), "INTEGER"),
    "target": "DOUBLE",
    "rounds_to_target": "INTEGER",
    **dict.fromkeys(("train_seconds", "waste", "s_fraction"), "DOUBLE"),
    **dict.fromkeys(("bytes_total", "peak_memory_bytes"), "BIGINT"),
    **dict.fromkeys(("selection", "model", "scored", "attack", "engine", "device", "version"), "VARCHAR"),
    "error": "VARCHAR",
    "config": "JSON",
    "folder": "VARCHAR",
}
ROUNDS = {
    **IDENTITY,
    "round": "INTEGER",
    **dict.fromkeys(("mean", "std", "worst5", "top5", "loss", "val_mean", "seconds", "waste"), "DOUBLE"),
    **dict.fromkeys(("bytes_down", "bytes_up"), "BIGINT"),
    "clients": "INTEGER[]",
    "failed": "JSON",
}
CLIENTS = {
    **IDENTITY,
    "client": "INTEGER",
    "name": "VARCHAR",
    **dict.fromkeys(("n_train", "n_test", "n_val", "rounds_asked", "rounds_failed", "malicious"), "INTEGER"),
}
EVERYTHING = "SELECT * FROM results ORDER BY run, round, split, model, metric, client"

# What there is, for a first look.
OVERVIEW = {
    "methods": r"""
        SELECT regexp_replace(run, '/seed-\d+$', '') AS method, algorithm, count(*) AS runs,
            count(*) FILTER (state = 'finished') AS finished, count(*) FILTER (state = 'failed') AS failed,
            min(rounds_done) AS rounds_done, max(rounds) AS rounds,
            max((SELECT count(*) FROM clients WHERE clients.run = runs.run)) AS clients, avg(mean) AS mean
        FROM runs GROUP BY ALL ORDER BY ALL""",
    "metrics": """
        SELECT metric, split, model, count(DISTINCT run) AS runs, min(round) AS first_round, max(round) AS last_round,
            count(*) AS "values"
        FROM results GROUP BY ALL ORDER BY ALL""",
    "views": """
        SELECT table_name AS "view", string_agg(column_name, ', ' ORDER BY column_index) AS columns
        FROM duckdb_columns() WHERE table_name IN ('results', 'runs', 'rounds', 'clients')
        GROUP BY ALL ORDER BY ALL""",
}

UNPACKED = "SELECT s.*, c.client, c.value FROM cells c JOIN series s USING (number)"


class Answer(NamedTuple):
    """Rows of a query."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    complete: bool  # False where there are more rows than were asked for


# writing ---------------------------------------------------------------------------------------------
def write_results(folder: Path, algorithm: str, selected_round: int) -> None:
    """results.parquet of a run whose other results are written; it stands alone, for any program that reads parquet."""
    if importlib.util.find_spec("duckdb") is None:
        return
    import duckdb

    series = all_series(folder / EVALUATIONS, files.read_csv(folder / files.CLIENTS), selected_round)
    temporary = folder / f".{RESULTS}.unfinished"
    # one thread: the same rows must give the same bytes
    with duckdb.connect(config={"threads": 1}) as connection:
        _load_series(connection, [("", one) for one in series])
        run: dict[str, str | int] = {"label": folder.parent.name, "algorithm": algorithm, "seed": _seed(folder)}
        constants = ", ".join(f"{_quoted(value)} AS {key}" for key, value in run.items())
        connection.execute(
            f"COPY (SELECT {constants}, round, client, metric, value, split, model FROM ({UNPACKED}) "
            f"ORDER BY number, client) TO {_quoted(str(temporary))} (FORMAT parquet, COMPRESSION zstd)"
        )
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / RESULTS)


def is_damaged(folder: Path) -> bool:
    """Whether results.parquet is there but not whole: such a file begins and ends with the format's mark."""
    path, mark = folder / RESULTS, b"PAR1"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begins = file.read(len(mark)) == mark
        file.seek(-min(len(mark), path.stat().st_size), os.SEEK_END)
        return not (begins and file.read() == mark)


# asking ----------------------------------------------------------------------------------------------
def frame(folder: Path | str, sql: str | None = None) -> files.Columns:
    """The rows of a query by column, as arrays; without a query, all of ``results``.

    A missing number is NaN (so integers with missing ones become floats), any other missing value None.
    ``pandas.DataFrame(frame(...))`` and ``polars.DataFrame(frame(...))`` take it as it is.
    """
    with connect(Path(folder)) as connection, _told():
        found: dict[str, Any] = _execute(connection, EVERYTHING if sql is None else sql).fetchnumpy()
    return {name: _filled(values) for name, values in found.items()}


def ask(connection: "DuckDBPyConnection", sql: str, most: int | None = None) -> Answer:
    """The rows of a query that only reads; ``most`` of them."""
    with _told():
        result = _execute(connection, sql)
        rows = result.fetchall() if most is None else result.fetchmany(most + 1)
    names = _different(column[0] for column in result.description or ())
    return Answer(names, rows[:most], most is None or len(rows) <= most)


def connect(folder: Path) -> "DuckDBPyConnection":
    """A database in memory with the views `results`, `runs`, `rounds` and `clients` of all runs below a folder.

    Its queries can reach the runs' results.parquet and no other file. Any duckdb call works on it: ``.sql(...).df()``.
    """
    if importlib.util.find_spec("duckdb") is None:
        raise InputError("asking for results needs the package duckdb: pip install duckdb")
    import duckdb

    runs = [_read_run(path, folder) for path in sorted(_run_folders(folder))]
    if not runs:
        raise InputError(f"{folder} holds no runs; give the folder that was --out of `bespoke run`, or one above it.")
    connection = duckdb.connect()
    _load(connection, "runs", RUNS, [run.facts for run in runs])
    _load(connection, "rounds", ROUNDS, [run.identity | line for run in runs for line in run.rounds])
    _load(connection, "clients", CLIENTS, [run.identity | client for run in runs for client in run.clients])
    _load_series(connection, [(run.facts["run"], series) for run in runs for series in run.series])
    packed = [str(run.parquet) for run in runs if run.parquet is not None]
    _create_results(connection, packed)
    connection.execute(f"SET allowed_paths = {_quoted_list(packed)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


@contextmanager
def _told() -> Iterator[None]:
    """What duckdb says about a query is for whoever wrote it."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise InputError(f"the query failed: {error}") from None


def _execute(connection: "DuckDBPyConnection", sql: str) -> "DuckDBPyConnection":
    import duckdb

    statements = connection.extract_statements(sql)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise InputError("the query must be one statement that only reads: SELECT, FROM, DESCRIBE or SUMMARIZE.")
    return connection.execute(statements[0])


def _different(names: Iterable[str]) -> list[str]:
    """Columns of one name are told apart as in `frame`: a, a_1, a_2."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{count}" for count in itertools.count(1))
        found.append(next(other for other in itertools.chain([name], others) if other not in found))
    return found


def _filled(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not isinstance(values, np.ma.MaskedArray):
        return values
    numbers = values.dtype.kind in "iuf"
    missing = np.ma.getmaskarray(values)
    filled = np.asarray(values.data).astype(np.float64 if numbers else object)
    filled[missing] = np.nan if numbers else None
    return filled


# reading ---------------------------------------------------------------------------------------------
class _Run(NamedTuple):
    facts: dict[str, Any]  # its row of `runs`
    rounds: list[files.Line]
    clients: list[dict[str, Any]]
    parquet: Path | None  # else its results are in ``series``
    series: list[Series]

    @property
    def identity(self) -> dict[str, Any]:
        return {key: self.facts[key] for key in IDENTITY}


def _run_folders(folder: Path) -> Iterator[Path]:
    for place, inside, names in os.walk(folder.resolve()):
        here = Path(place)
        if files.CONFIG in names and here.name.removeprefix("seed-").isdecimal():
            yield here
            inside.clear()
        elif here.name == TRIALS and not any(name.startswith("seed-") for name in inside):
            inside.clear()


def _read_run(path: Path, root: Path) -> _Run:
    config, summary = _read_document(path / files.CONFIG), _read_document(path / files.SUMMARY)
    parts = path.relative_to(root.resolve()).parts
    rounds = [_round(line) for line in files.read_rounds(path / files.ROUNDS)]
    error = path / files.ERROR
    reason = error.read_text(encoding="utf-8", errors="replace") if error.is_file() else None
    facts = {
        **summary,
        "run": "/".join(parts if len(parts) > 1 else path.parts[-2:]),
        "label": path.parent.name,
        "algorithm": config.get("algorithm", {}).get("name"),
        "seed": _seed(path),
        "state": "finished" if summary else "failed" if reason else "unfinished",
        "rounds_done": len(rounds),
        "rounds": config.get("train", {}).get("rounds"),
        "error": reason,
        "config": json.dumps(config, default=str),
        "folder": str(path),
    }
    table = files.read_csv(path / files.CLIENTS, texts=["name"]) if (path / files.CLIENTS).is_file() else None
    packed = path / RESULTS if summary and _is_parquet(path / RESULTS) else None
    series = [] if packed else all_series(path / EVALUATIONS, table, summary.get("selected_round"))
    who: Mapping[str, Iterable[Any]] = read_clients(path / EVALUATIONS) if table is None else table
    clients = [dict(zip(who, row, strict=True)) for row in zip(*who.values(), strict=True)]
    numbered = [{"client": number, **client} for number, client in enumerate(clients)]
    return _Run(facts, rounds, numbered, packed, series)


def _read_document(path: Path) -> dict[str, Any]:
    """A TOML or JSON file; empty where there is none, or none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _round(line: files.Line) -> files.Line:
    return line | {"failed": json.dumps(line.get("failed", {}))}


def _is_parquet(path: Path) -> bool:
    """Whether the file is there from its first byte to its last: a copy may have been cut off."""
    if not path.is_file() or path.stat().st_size < 8:
        return False
    with path.open("rb") as file:
        first = file.read(4)
        file.seek(-4, os.SEEK_END)
        return first == file.read() == b"PAR1"


def _seed(folder: Path) -> int:
    return int(folder.name.removeprefix("seed-"))


# into duckdb -----------------------------------------------------------------------------------------
def _create_results(connection: "DuckDBPyConnection", packed: Sequence[str]) -> None:
    columns = f"{', '.join(f'r.{name}' for name in IDENTITY)}, v.round, v.client, v.metric, v.value, v.split, v.model"
    parts = [f"SELECT {columns} FROM ({UNPACKED}) v JOIN runs r USING (run)"]
    if packed:  # names and seeds are those of the folder, which may have been renamed
        files_ = f"read_parquet({_quoted_list(packed)}, filename = true)"
        parts.append(f"SELECT {columns} FROM {files_} v JOIN runs r ON v.filename = r.folder || '{os.sep}{RESULTS}'")
    connection.execute(f"CREATE VIEW results AS {' UNION ALL '.join(parts)}")


def _load_series(connection: "DuckDBPyConnection", found: Sequence[tuple[str, Series]]) -> None:
    """Series, each with its run, as two tables: what a series is, and its value for each client."""
    types = {"run": "VARCHAR", "round": "INTEGER", "metric": "VARCHAR", "split": "VARCHAR", "model": "VARCHAR"}
    rows = [{"run": run, **series._asdict(), "number": number} for number, (run, series) in enumerate(found)]
    _load(connection, "series", {"number": "INTEGER", **types}, rows)
    sizes = [len(series.values) for _, series in found]
    cells = {
        "number": np.repeat(np.arange(len(found), dtype=np.int32), sizes),
        "client": np.concatenate([np.arange(0), *map(np.arange, sizes)]),
        "value": np.concatenate([np.zeros(0), *(series.values for _, series in found)]),
    }
    _copy(connection, "cells", {"number": "INTEGER", "client": "INTEGER", "value": "DOUBLE"}, cells)


def _load(
    connection: "DuckDBPyConnection", name: str, types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """A table of these columns; what a row does not have is NULL."""
    columns = {column: _array([row.get(column) for row in rows], kind) for column, kind in types.items()}
    _copy(connection, name, types, columns)


def _copy(connection: "DuckDBPyConnection", name: str, types: Mapping[str, str], columns: files.Columns) -> None:
    cast = ", ".join(f'"{column}"::{kind} AS "{column}"' for column, kind in types.items())
    connection.register("arriving", columns)
    connection.execute(f"CREATE TABLE {name} AS SELECT {cast} FROM arriving")
    connection.unregister("arriving")


def _array(values: Sequence[Any], kind: str) -> npt.NDArray[Any]:
    if kind in ("INTEGER", "BIGINT", "DOUBLE"):  # duckdb takes NaN for NULL
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _quoted(value: str | int) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else f"{value}::BIGINT"


def _quoted_list(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"
