"""A chart with its words and its table, and what all charts share: colours, filters, expressions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from bespokefl.report.tables import Column, Table, rows
from bespokefl.report.theme import DASHES, FIGURE_FONT, INKS, LIGHT, SHAPES, vega_config

Chart = alt.Chart | alt.LayerChart | alt.FacetChart  # what alt.layer may give
STEP = 26  # pixels of a method's row
HEIGHT = 280


@dataclass(frozen=True)
class Panel:
    """A chart, and under it the table with its numbers."""

    id: str
    title: str
    note: str  # how to read it
    chart: Chart
    data: str  # the table of the page that stands under the chart
    columns: Sequence[Column]
    focus: bool = False  # only of the method that the reader looks at
    by_seed: bool = False  # only of the seed that the reader looks at
    legend: bool = False  # colours tell methods apart, and the chart itself does not name them
    wide: bool = False  # takes the whole row
    tall: bool = False  # takes two rows
    method: str = ""  # whose chart it is, if of one method
    step: int = 0  # pixels of each method that is shown, where every method has a row
    figure_width: int = 560


@dataclass(frozen=True)
class Section:
    """A heading and its charts; ``controls`` are choices that concern this section only."""

    id: str
    title: str
    text: str
    panels: Sequence[Panel] = ()
    controls: Sequence[str] = ()
    small: bool = False  # many small charts beside each other


@dataclass
class Looks:
    """Which methods there are and how they look at first; page.js changes it, figures keep it."""

    labels: Sequence[str]  # the best first
    picks: Sequence[str]  # those with a colour of their own
    references: Sequence[str] = ()
    focus: str = ""
    seed: int = 0
    metric: str = "accuracy"  # what clients are scored by, in words
    inks: Mapping[str, str] = field(default_factory=lambda: INKS["light"])

    @property
    def axis(self) -> str:
        return f"{self.metric}, %"

    def params(self) -> list[dict[str, Any]]:
        """Every chart has all of them, so that the page can set them without knowing the chart."""
        place = {label: number for number, label in enumerate(self.picks)}
        looks = {
            "colours": {label: LIGHT[place[label]] if label in place else self.inks["muted"] for label in self.labels},
            "dashes": {label: DASHES[place[label]] if label in place else [1, 0] for label in self.labels},
            "shapes": {label: SHAPES[place[label]] if label in place else "circle" for label in self.labels},
        }
        values = {
            "shown": list(self.labels),
            "picked": list(self.picks),
            **looks,
            **self.inks,
            "focus": self.focus,
            "seed": self.seed,
            "reference": f"over_{self.references[0]}" if self.references else "",
        }
        return [{"name": name, "value": value} for name, value in values.items()]


def named(table: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=table))


def of_methods(table: str) -> alt.Chart:
    """Rows of methods that are not filtered out, with their looks as fields."""
    return (
        named(table)
        .transform_filter("indexof(shown, datum.method) >= 0")
        .transform_calculate(
            colour="colours[datum.method]",
            dash="dashes[datum.method]",
            shape="shapes[datum.method]",
            is_picked="indexof(picked, datum.method) >= 0",
        )
    )


def colour() -> alt.Color:
    return alt.Color("colour:N", scale=None)


def ink(name: str) -> Any:
    return alt.expr(name)


def method_axis(looks: Looks) -> alt.Y:
    return alt.Y("method:N", sort=list(looks.labels), title=None, axis=alt.Axis(labelLimit=130, labelColor=ink("ink")))


def method_lines(chart: alt.Chart, **options: Any) -> Chart:
    """A line a method: those with a colour above the grey ones."""
    grey = chart.transform_filter("!datum.is_picked").mark_line(strokeWidth=0.9, opacity=0.55, **options)
    picked = chart.transform_filter("datum.is_picked").mark_line(strokeWidth=2.2, **options)
    return alt.layer(
        grey.encode(detail="method:N", color=colour()),
        picked.encode(detail="method:N", color=colour(), strokeDash=alt.StrokeDash("dash:N", scale=None)),
    )


def signed_axis(**options: Any) -> alt.Axis:
    return alt.Axis(labelExpr="datum.value > 0 ? '+' + datum.label : datum.label", **options)


def percent_tip(field_: str, title: str, digits: int = 2) -> alt.Tooltip:
    return alt.Tooltip(f"{field_}:Q", title=title, format=f".{digits}f")


# into Vega-Lite --------------------------------------------------------------------------------------


def page_spec(chart: Chart, looks: Looks) -> dict[str, Any]:
    """Without data, which the page holds once for all charts, and as wide as its place."""
    spec = _plain_spec(chart, looks)
    spec["width"] = "container"
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def figure_spec(panel: Panel, looks: Looks, tables: Mapping[str, Table]) -> dict[str, Any]:
    """With its data, for a file of its own."""
    chart = alt.layer(panel.chart, _key(looks)) if panel.legend else panel.chart
    return _with_data(chart.properties(width=panel.figure_width, title=panel.title), looks, tables)


def joined_spec(left: Panel, right: Sequence[Panel], looks: Looks, tables: Mapping[str, Table]) -> dict[str, Any]:
    """One panel, and others one above the other beside it; the rows of the left one name the colours."""
    height = max(left.chart.height, 460)
    beside = [
        panel.chart.properties(width=380, height=(height - 75 * (len(right) - 1)) // len(right), title=panel.title)
        for panel in right
    ]
    chart = alt.hconcat(left.chart.properties(width=470, height=height, title=left.title), alt.vconcat(*beside))
    return _with_data(chart, looks, tables)


def _with_data(chart: Chart | alt.HConcatChart, looks: Looks, tables: Mapping[str, Table]) -> dict[str, Any]:
    spec = _plain_spec(chart, looks)
    spec["config"] = vega_config("light", FIGURE_FONT) | {"background": "white"}
    if isinstance(chart, alt.HConcatChart):
        del spec["config"]["axisXQuantitative"]  # it asks for the width, which a part has under another name
    used = sorted(_tables_of(spec) & tables.keys())
    spec["datasets"] = spec.get("datasets", {}) | {name: rows(tables[name]) for name in used}
    return spec


def _key(looks: Looks) -> alt.Chart:
    """Draws nothing but a legend: in the page, charts leave that to HTML."""
    picks = list(looks.picks)
    colours = alt.Scale(domain=picks, range=list(LIGHT[: len(picks)]))
    dashes = alt.Scale(domain=picks, range=list(DASHES[: len(picks)]))
    legend = alt.Legend(
        title=None if len(picks) == len(looks.labels) else "others: grey",
        symbolType="stroke",
        symbolOpacity=1,
        symbolSize=260,
        symbolStrokeWidth=2,
    )
    drawn: alt.Chart = (
        alt.Chart(alt.InlineData([{"key": label} for label in picks]))
        .mark_line(opacity=1)
        .encode(
            x=alt.value(0),
            y=alt.value(0),
            color=alt.Color("key:N", scale=colours, legend=legend),
            strokeDash=alt.StrokeDash("key:N", scale=dashes, legend=legend),
        )
    )
    return drawn


def _plain_spec(chart: Chart | alt.HConcatChart, looks: Looks) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)
    spec.pop("$schema", None)
    spec.pop("usermeta", None)
    spec["params"] = [*looks.params(), *spec.get("params", [])]
    return spec


def _tables_of(spec: Any) -> set[str]:
    if isinstance(spec, Mapping):
        own = {spec["data"]["name"]} if isinstance(spec.get("data"), Mapping) and "name" in spec["data"] else set()
        return own.union(*(_tables_of(value) for value in spec.values()))
    return set().union(*(_tables_of(value) for value in spec)) if isinstance(spec, list) else set()
