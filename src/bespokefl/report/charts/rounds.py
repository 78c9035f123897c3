"""How the mean and the worst 5 % came about, round by round."""

import altair as alt

from bespokefl.report.panels import HEIGHT, Looks, Panel, Section, colour, method_lines, of_methods, percent_tip
from bespokefl.report.tables import Column


def convergence(looks: Looks, seeds: int) -> Section:
    band = f" The band reaches from the lowest to the highest of {seeds} seeds." if seeds > 1 else ""
    return Section(
        "rounds",
        "Round by round",
        f"Test {looks.metric} in every evaluated round." + band,
        [
            _curve("mean", "Mean of the clients", f"mean {looks.metric}, %", seeds),
            _curve("worst5", "Mean of the worst 5 %", f"{looks.metric} of the worst, %", seeds),
        ],
    )


def _curve(key: str, title: str, axis: str, seeds: int) -> Panel:
    base = of_methods("curves")
    x = alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y(f"{key}:Q", title=axis, scale=alt.Scale(zero=False))
    tips = [alt.Tooltip("method:N"), alt.Tooltip("round:Q"), percent_tip(key, axis)]
    if seeds > 1:
        tips += [percent_tip(f"{key}_low", "lowest seed"), percent_tip(f"{key}_high", "highest seed")]
    band = (
        base.transform_filter(f"datum.is_picked && isValid(datum.{key}_low)")
        .mark_area(opacity=0.1)
        .encode(x=x, y=alt.Y(f"{key}_low:Q", title=axis), y2=f"{key}_high", detail="method:N", color=colour())
    )
    lines = method_lines(base.encode(x=x, y=y, tooltip=tips))
    # Lines are thin: points that cannot be seen catch the pointer.
    catch = base.mark_point(opacity=0, size=90, filled=True).encode(x=x, y=y, tooltip=tips)
    ranges = [Column(f"{key}_low", "lowest seed", 2), Column(f"{key}_high", "highest seed", 2)] if seeds > 1 else []
    return Panel(
        f"rounds-{key}",
        title,
        "",
        alt.layer(*([band] if seeds > 1 else []), lines, catch).properties(height=HEIGHT),
        "curves",
        [Column("method", "method"), Column("round", "round"), Column(key, axis, 2), *ranges],
        legend=True,
    )
