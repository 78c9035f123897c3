"""What is bought with what: personal against general accuracy, and accuracy against its cost."""

import altair as alt

from bespokefl.report.panels import HEIGHT, Looks, Panel, Section, colour, ink, of_methods, percent_tip
from bespokefl.report.tables import Column, Table
from bespokefl.report.theme import NAMES


def personal_and_general(methods: Table) -> Section:
    known = any(value is not None for value in methods["g_acc"])
    text = (
        "A personal model that is fitted to its client alone fails on other clients' data. To the right: better on the "
        "client's own data (L-accuracy). Up: better on all clients' data together (G-accuracy)."
    )
    if not known:
        return Section(
            "general", "Personal and general", "G-accuracy was not measured; `eval.cross = true` measures it."
        )
    return Section(
        "general",
        "Personal and general",
        text,
        [
            _scatter(
                "personal-and-general",
                "Own data against everybody's",
                ("l_acc", "L-accuracy (own data), %"),
                ("g_acc", "G-accuracy (all clients' data), %"),
                wide=True,
            )
        ],
    )


def cost(looks: Looks) -> Section:
    mean = ("mean", f"mean {looks.metric}, %")
    what = looks.metric.capitalize()
    panels = [
        _scatter("score-and-bytes", f"{what} and traffic", ("megabytes", "sent in all, MB"), mean, zero_x=True),
        _scatter("score-and-seconds", f"{what} and time", ("seconds", "training, seconds"), mean, zero_x=True),
    ]
    return Section(
        "cost",
        "What it costs",
        "Up and to the left is better: more for less. Traffic is what clients receive and send in the whole "
        "run, time is training without evaluation.",
        panels,
    )


def _scatter(
    id_: str, title: str, x: tuple[str, str], y: tuple[str, str], *, zero_x: bool = False, wide: bool = False
) -> Panel:
    base = of_methods("methods").transform_filter(f"isValid(datum.{x[0]}) && isValid(datum.{y[0]})")
    base = base.transform_calculate(
        **{
            f"{name}_{end}": f"datum.{name} {sign} (datum.{name}_sd || 0)"
            for name in (x[0], y[0])
            for end, sign in (("lo", "-"), ("hi", "+"))
        }
    )
    x_axis = alt.X(f"{x[0]}:Q", title=x[1], scale=alt.Scale(zero=True) if zero_x else alt.Scale(zero=False, padding=14))
    y_axis = alt.Y(f"{y[0]}:Q", title=y[1], scale=alt.Scale(zero=False, padding=14))
    tips = [
        alt.Tooltip("method:N"),
        *(tip for name, axis in (x, y) for tip in (percent_tip(name, axis), percent_tip(f"{name}_sd", "± over seeds"))),
    ]
    grey, picked = base.transform_filter("!datum.is_picked"), base.transform_filter("datum.is_picked")
    across = picked.mark_rule(opacity=0.6).encode(
        x=alt.X(f"{x[0]}_lo:Q", title=x[1]), x2=f"{x[0]}_hi", y=y_axis, color=colour()
    )
    along = picked.mark_rule(opacity=0.6).encode(
        x=x_axis, y=alt.Y(f"{y[0]}_lo:Q", title=y[1]), y2=f"{y[0]}_hi", color=colour()
    )
    others = grey.mark_circle(size=55, opacity=0.6).encode(x=x_axis, y=y_axis, color=colour(), tooltip=tips)
    dots = picked.mark_point(filled=True, size=95, opacity=0.95).encode(
        x=x_axis, y=y_axis, color=colour(), shape=alt.Shape("shape:N", scale=None), tooltip=tips
    )
    names = picked.mark_text(color=ink("ink")).encode(x=x_axis, y=y_axis, text="method:N").properties(name=NAMES)
    return Panel(
        id_,
        title,
        "Crosses reach one standard deviation over seeds to each side.",
        alt.layer(others, across, along, dots, names).properties(height=HEIGHT + 60),
        "methods",
        [
            Column("method", "method"),
            *(c for name, axis in (x, y) for c in (Column(name, axis, 2), Column(f"{name}_sd", "± over seeds", 2))),
        ],
        wide=wide,
        legend=True,
    )
