"""The loss around models: is the minimum that a method found flat or sharp?"""

from typing import Literal

import altair as alt

from bespokefl.report.panels import Panel, named
from bespokefl.report.surface import Surface
from bespokefl.report.tables import Column

LEVELS = 14  # bands of colour, whose borders are the contour lines
HEIGHT = 330


def surface_table(surface: Surface) -> str:
    return f"surface-{surface.method}-{surface.name}"


def surface_panel(surface: Surface) -> Panel:
    low, high = surface.range
    kind: Literal["log", "linear"] = "log" if low > 0 and high > 10 * low else "linear"
    chart = (
        named(surface_table(surface))
        .mark_rect()
        .encode(
            x=alt.X("a:O", title="first direction", axis=alt.Axis(labelOverlap=True, labelAngle=0, format=".2~g")),
            y=alt.Y(
                "b:O", title="second direction", sort="descending", axis=alt.Axis(labelOverlap=True, format=".2~g")
            ),
            color=alt.Color(
                "level:Q",
                title="loss",
                scale=alt.Scale(range="heatmap", type=kind, domain=[low, high]),
                legend=alt.Legend(orient="bottom", direction="horizontal"),
            ),
            tooltip=[
                alt.Tooltip("a:Q", title="first", format=".3~g"),
                alt.Tooltip("b:Q", title="second", format=".3~g"),
                alt.Tooltip("loss:Q", format=".4g"),
            ],
        )
        .transform_calculate(level=_banded(low, high, kind))
        .properties(height=HEIGHT)
    )
    whose = "the global model" if surface.name == "global" else f"the {surface.name} client's model"
    client = f" (client {surface.client})" if surface.client is not None else ""
    when = f", round {surface.round}" if surface.round is not None else ""
    return Panel(
        surface_table(surface),
        f"{surface.method}: loss around {whose}{client}",
        f"Two directions through the model, which is at (0, 0). The same colours in all maps of this run. "
        f"Seed {surface.seed}{when}.",
        chart,
        surface_table(surface),
        [Column("a", "first direction", 4), Column("b", "second direction", 4), Column("loss", "loss", 5)],
    )


def _banded(low: float, high: float, kind: str) -> str:
    """The loss, rounded to the middle of its band."""
    if high <= low:
        return "datum.loss"
    if kind == "log":
        share = f"(log(datum.loss) - log({low!r})) / (log({high!r}) - log({low!r}))"
        return f"{low!r} * pow({high / low!r}, (min({LEVELS - 1}, floor({LEVELS} * {share})) + 0.5) / {LEVELS})"
    share = f"(datum.loss - {low!r}) / {high - low!r}"
    return f"{low!r} + {high - low!r} * (min({LEVELS - 1}, floor({LEVELS} * {share})) + 0.5) / {LEVELS}"
