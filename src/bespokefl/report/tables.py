"""Tables by column, small enough to travel in the page: the charts and the tables under them read the same ones."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Table = dict[str, list[Any]]  # numbers, None or texts by column
DIGITS = 6  # significant ones of a number in the page


@dataclass(frozen=True)
class Column:
    """A column of the table that stands under a chart."""

    field: str
    title: str
    digits: int | None = None  # behind the point; None for texts and whole numbers


def plain(values: Iterable[Any]) -> list[Any]:
    """For JSON: what is not a finite number becomes None, whole numbers lose their point."""
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return value


def stack(parts: Iterable[Table]) -> Table:
    """One below the other; all have the same columns."""
    stacked: Table = {}
    for part in parts:
        for name, values in part.items():
            stacked.setdefault(name, []).extend(values)
    return stacked


def rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def packed(table: Table) -> dict[str, Any]:
    """Columns of texts as numbers of a list of different texts, which makes the page several times smaller."""
    return {name: _packed(values) for name, values in table.items()}


def _packed(values: list[Any]) -> list[Any] | Mapping[str, list[Any]]:
    if not values or not all(isinstance(value, str) for value in values):
        return values
    levels = {text: code for code, text in enumerate(dict.fromkeys(values))}
    return {"levels": list(levels), "codes": [levels[value] for value in values]}
