"""The rows of a query, for people and for other programs."""

import csv
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from bespokefl.plain import printable, quoted
from bespokefl.results.files import write_atomically
from bespokefl.results.store import Answer

MOST_ROWS = 200  # that are shown to people
DASH = "-"


def rich_table(answer: Answer) -> Table:
    note = None if answer.complete else f"The first {len(answer.rows)} rows; --csv FILE writes all."
    table = Table(caption=note, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(answer.columns):
        numbers = any(_is_number(row[place]) for row in answer.rows)
        table.add_column(escape(name), justify="right" if numbers else "left", overflow="fold")
    for row in answer.rows:
        table.add_row(*(escape(_shown(value)) for value in row))
    return table


def write_csv(answer: Answer, path: Path) -> None:
    """Numbers with all their digits; NULL is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([quoted(value) if isinstance(value, str) else value for value in row] for row in answer.rows)
    write_atomically(path, text.getvalue())


def to_json(answer: Answer) -> str:
    """A list of objects, a line each; a number that is not finite becomes null."""
    rows = (_finite(dict(zip(answer.columns, row, strict=True))) for row in answer.rows)
    return "[" + ",\n ".join(json.dumps(row, default=_plain, allow_nan=False) for row in rows) + "]"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if value is None:
        return DASH
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else str(value)
