"""The loss around models: is the minimum that a method found flat or sharp?"""

from collections.abc import Sequence
from typing import Literal

import altair as alt

from bespokefl.report.panels import Panel, Section, named
from bespokefl.report.surface import Shown
from bespokefl.report.tables import Column

LEVELS = 14  # bands of colour, whose borders are the contour lines
HEIGHT = 200


def around_models(shown: Sequence[Shown]) -> Section:
    return Section(
        "surface",
        "The loss around the models",
        "Is what a method found flat or sharp? Each map goes through a model, in its middle, along two random "
        "directions as long as its filters. Light is a low loss, strong a high one, in the same colours for all maps "
        "of a method: a wide light middle is a flat minimum.",
        [surface_panel(one) for one in shown],
        small=True,
    )


def surface_table(surface: Shown) -> str:
    return f"surface-{surface.method}-{surface.name}"


def surface_panel(surface: Shown) -> Panel:
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
                legend=None,
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
    about = surface.about
    client, score = about.get("client"), about.get("score")
    whose = "global model" if client is None else f"{surface.name} client ({client})"
    reached = "" if score is None else f", {100 * score:.1f} % {about.get('metric', '')}"
    return Panel(
        surface_table(surface),
        f"{surface.method}: {whose}",
        f"{about.get('rows', '?')} samples of {about.get('data', 'test data')}{reached}. Seed {surface.seed}.",
        chart,
        surface_table(surface),
        [Column("a", "first direction", 4), Column("b", "second direction", 4), Column("loss", "loss", 5)],
        method=surface.method,
        figure_width=HEIGHT,
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
