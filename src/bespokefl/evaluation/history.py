"""What a history offers to people: its rows as a data frame, its table in a notebook, its course as a chart.

Altair and narwhals are imported only when they are asked for.
"""

import html
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bespokefl.errors import InputError

if TYPE_CHECKING:
    import altair as alt

Row = dict[str, Any]
FRAMES = ("pandas", "polars")
FIGURES = {"mean": "mean", "worst5": "worst 5 %"}  # what the chart shows of each round
SIZE = {"width": 480, "height": 280}  # of the chart


class Shown(ABC):
    """Rows that a notebook shows as a table, and that become a data frame or a chart."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """One row per round and client: the primary result, of which all else is a view."""

    @abstractmethod
    def table(self) -> list[Row]:
        """The figures that people compare."""

    @abstractmethod
    def _course(self) -> list[Row]:
        """What the chart shows: method, seed, round, mean, worst5 and loss, a row per evaluated round."""

    @abstractmethod
    def _cells(self) -> tuple[list[str], list[list[str]], str]:
        """The table as people read it: its headings, its rows, and a line below."""

    def frame(self, what: Literal["rows", "table"] = "rows", package: Literal["pandas", "polars"] | None = None) -> Any:
        """The rows, or the table, as a data frame of pandas or polars, whichever is installed (pandas if both are)."""
        if what not in ("rows", "table"):
            raise InputError(f"what = {what!r}: it is one of rows, table.")
        return data_frame(self.rows() if what == "rows" else self.table(), package)

    def plot(self) -> "alt.LayerChart | alt.FacetChart":
        """An Altair chart of the mean and the worst 5 % of the clients over the rounds, a colour for each method."""
        return course_chart(self._course())

    def __repr__(self) -> str:
        headings, cells, below = self._cells()
        return "\n".join(part for part in (plain_table(headings, cells), below) if part)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        headings, cells, below = self._cells()
        return html_table(headings, cells, below)


def data_frame(rows: Sequence[Mapping[str, Any]], package: str | None = None) -> Any:
    """Rows as a data frame of pandas or polars; what a row does not have is missing."""
    if package is not None and package not in FRAMES:
        raise InputError(f"package = {package!r}: it is one of {', '.join(FRAMES)}, or absent.")
    wanted = FRAMES if package is None else (package,)
    there = next((name for name in wanted if importlib.util.find_spec(name) is not None), None)
    if there is None:
        raise InputError(f"a data frame needs the package {' or '.join(wanted)}: pip install {wanted[0]}")
    import narwhals

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return narwhals.from_dict(columns, backend=there).to_native()  # type: ignore[arg-type]


def plain_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them; the first is text, the others are numbers."""
    widths = [max(len(row[place]) for row in [headings, *cells]) for place in range(len(headings))]
    lines = [
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in [headings, *cells])
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(headings: Sequence[str], cells: Sequence[Sequence[str]], below: str = "") -> str:
    """A table for a notebook."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    note = f"<caption style='caption-side:bottom;text-align:left'>{html.escape(below)}</caption>" if below else ""
    return f"<table>{note}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def percent(value: float | None, decimals: int = 1) -> str:
    """A fraction as a percentage; a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{decimals}f}"


def course_chart(rows: Iterable[Mapping[str, Any]]) -> "alt.LayerChart | alt.FacetChart":
    """The mean and the worst 5 % over rounds by method, averaged over seeds; the loss where there is no such figure."""
    import altair as alt

    known = [row for row in rows if any(_known(row.get(key)) for key in (*FIGURES, "loss"))]
    if not known:
        raise InputError("there is nothing to plot: no round was evaluated.")
    scored = any(_known(row.get("mean")) for row in known)
    shown, factor = (FIGURES, 100) if scored else ({"loss": "mean loss"}, 1)
    values = [
        {"method": row["method"], "round": row["round"], "figure": name, "value": factor * row[key]}
        for row in known
        for key, name in shown.items()
        if _known(row.get(key))
    ]
    title = f"{known[0].get('metric', 'accuracy')}, %" if scored else "loss"
    base = alt.Chart(alt.Data(values=values)).encode(  # type: ignore[no-untyped-call]
        x=alt.X("round:Q", axis=alt.Axis(tickMinStep=1, grid=False)),
        y=alt.Y("mean(value):Q", title=title, scale=alt.Scale(zero=False)),
        color=alt.Color("method:N"),
        strokeDash=alt.StrokeDash("figure:N", title=None, sort=list(shown.values())),
    )
    tips = [alt.Tooltip("method:N"), alt.Tooltip("round:Q"), alt.Tooltip("figure:N")]
    points = base.mark_point(opacity=0, size=90).encode(tooltip=[*tips, alt.Tooltip("mean(value):Q", format=".2f")])
    return alt.layer(base.mark_line(), points).properties(**SIZE)


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
