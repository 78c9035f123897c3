"""Every client: accuracies of all methods, and what clients gain or lose against a reference."""

from typing import Any

import altair as alt

from bespokefl.report.gather import REFERENCES
from bespokefl.report.panels import (
    HEIGHT,
    STEP,
    Looks,
    Panel,
    Section,
    colour,
    ink,
    method_axis,
    method_lines,
    named,
    of_methods,
    percent_tip,
    signed_axis,
)
from bespokefl.report.tables import Column

WHO = (Column("method", "method"), Column("seed", "seed"), Column("client", "client"))
SIZES = (Column("n_train", "train samples"), Column("n_test", "test samples"), Column("rounds", "rounds taken part"))
SPREAD = "(datum.client * 0.618034 + datum.seed * 0.414214) % 1 - 0.5"  # even, without a random draw
CLIENT_TIPS = [
    alt.Tooltip("method:N"),
    alt.Tooltip("client:Q"),
    alt.Tooltip("seed:Q"),
]
SIZE_TIPS = [alt.Tooltip(f"{column.field}:Q", title=column.title) for column in SIZES]


def distribution(looks: Looks, clients: int) -> Section:
    return Section(
        "clients",
        "Every client",
        f"A mean hides who is left behind. Each dot is one client's {looks.metric} on its own test data.",
        [_strip(looks, clients), _share_below(looks)],
    )


def _strip(looks: Looks, clients: int) -> Panel:
    every = (
        of_methods("clients")
        .transform_calculate(spread=SPREAD)
        .encode(
            y=method_axis(looks),
            yOffset=alt.YOffset("spread:Q", scale=alt.Scale(domain=[-0.7, 0.7])),
            x=alt.X("score:Q", title=f"test {looks.metric} of a client, %", scale=alt.Scale(zero=False, nice=True)),
            color=colour(),
            tooltip=[*CLIENT_TIPS, percent_tip("score", looks.axis), *SIZE_TIPS],
        )
    )
    size = max(10, min(44, 3000 // max(clients, 1)))
    dots = every.transform_filter("datum.rounds !== 0").mark_circle(size=size, opacity=0.5)
    rings = every.transform_filter("datum.rounds === 0").mark_point(size=size, strokeWidth=1.2, opacity=0.8)
    figures = of_methods("methods")
    where = method_axis(looks)
    tips = [
        alt.Tooltip("method:N"),
        percent_tip("mean", "mean, %"),
        percent_tip("worst5", "worst 5 %, %"),
        percent_tip("top5", "top 5 %, %"),
        percent_tip("std", "std over clients"),
    ]
    mean = figures.mark_tick(thickness=3, size=STEP - 6, color=ink("ink"), opacity=1).encode(
        y=where, x="mean:Q", tooltip=tips
    )
    worst = figures.mark_point(
        shape="triangle-left", size=75, filled=True, fill=ink("paper"), stroke=ink("ink"), strokeWidth=1.6, opacity=1
    ).encode(y=where, x="worst5:Q", tooltip=tips)
    return Panel(
        "score-of-clients",
        f"{looks.metric.capitalize()} of every client",
        "Bar: mean of the clients. Triangle: mean of the worst 5 %. Dots: clients, spread within their row so that "
        "equal ones do not hide each other; rings: clients that never took part.",
        alt.layer(dots, rings, mean, worst).properties(height=STEP * len(looks.labels)),
        "clients",
        [*WHO, Column("score", looks.axis, 2), *SIZES],
        wide=True,
        step=STEP,
    )


def _share_below(looks: Looks) -> Panel:
    chart = (
        of_methods("clients")
        .transform_window(share="cume_dist()", sort=[alt.SortField("score")], groupby=["method"], frame=[None, None])
        .transform_calculate(percent="100 * datum.share")
        .encode(
            x=alt.X("score:Q", title=looks.axis, scale=alt.Scale(zero=False)),
            y=alt.Y("percent:Q", title="clients at or below, %"),
            tooltip=[*CLIENT_TIPS, percent_tip("score", looks.axis), percent_tip("percent", "at or below, %", 0)],
        )
    )
    return Panel(
        "share-of-clients",
        "How many clients stay how low",
        "The lower a line on the left, the fewer clients are left behind; it reaches 100 % at the best client.",
        method_lines(chart, interpolate="step-after").properties(height=HEIGHT),
        "clients",
        [*WHO, Column("score", looks.axis, 2)],
        legend=True,
        wide=True,
    )


# gains -----------------------------------------------------------------------------------------------


def gain(looks: Looks, clients: int) -> Section:
    if not looks.references:
        return Section(
            "gain",
            "Who gains, who is harmed",
            "Gains need a reference: add `local` (each client trains alone) to the algorithms. There is no finished "
            "run of Local here, nor one of FedAvg.",
        )
    alone = "alone (Local)" if "local" in looks.references else "with FedAvg"
    text = (
        f"Each client's {looks.metric} minus what the same client reaches {alone}, in percentage points. Left of zero "
        "it does worse than that."
    )
    if "local" not in looks.references:
        text += (
            " Local is not among the finished runs, so FedAvg is the reference; add `local` to the algorithms to see "
            "who is harmed by taking part."
        )
    columns = [Column(f"over_{name}", f"gain over {REFERENCES[name]}", 2) for name in looks.references]
    return Section(
        "gain",
        "Who gains, who is harmed",
        text,
        [_gain_strip(looks, clients, columns), _sorted_gains(looks, columns), _histogram(looks)],
        controls=["reference", "focus"],
    )


def _signed(chart: alt.Chart) -> alt.Chart:
    return (
        chart.transform_filter("isValid(datum[reference])")
        .transform_calculate(gain="datum[reference]")
        .transform_calculate(
            verdict="datum.gain < 0 ? 'harmed' : datum.gain > 0 ? 'gains' : 'the same'",
            is_harmed="datum.gain < 0 ? 1 : 0",
            sign_colour="datum.gain < 0 ? bad : datum.gain > 0 ? good : muted",
        )
    )


def _gain_tips(looks: Looks) -> list[Any]:
    return [
        *CLIENT_TIPS,
        alt.Tooltip("gain:Q", title="gain, points", format="+.2f"),
        alt.Tooltip("verdict:N"),
        percent_tip("score", looks.axis),
        *SIZE_TIPS,
    ]


def _gain_strip(looks: Looks, clients: int, columns: list[Column]) -> Panel:
    base = _signed(of_methods("clients"))
    zero = alt.Chart(alt.InlineData([{"zero": 0}])).mark_rule(color=ink("soft"), strokeWidth=1.2).encode(x="zero:Q")
    dots = (
        base.transform_calculate(spread=SPREAD)
        .mark_point(filled=True, opacity=0.65, size=max(12, min(46, 3400 // max(clients, 1))))
        .encode(
            y=method_axis(looks),
            yOffset=alt.YOffset("spread:Q", scale=alt.Scale(domain=[-0.7, 0.7])),
            x=alt.X("gain:Q", title="gain over the reference, percentage points", axis=signed_axis()),
            color=alt.Color("sign_colour:N", scale=None),
            shape=alt.Shape(
                "verdict:N",
                scale=alt.Scale(domain=["harmed", "gains", "the same"], range=["triangle-down", "circle", "square"]),
                legend=None,
            ),
            tooltip=_gain_tips(looks),
        )
    )
    counts = (
        base.transform_aggregate(harmed="sum(is_harmed)", of="count()", groupby=["method"])
        .transform_calculate(label="datum.harmed > 0 ? '▼ ' + datum.harmed + ' of ' + datum.of : ''")
        .mark_text(align="left", dx=8, color=ink("bad"), fontWeight=600)
        .encode(y=method_axis(looks), x=alt.value("width"), text="label:N")
    )
    return Panel(
        "gain-of-clients",
        "Gain of every client",
        "Blue dots gain, orange triangles are harmed; ▼ counts the harmed clients, over all seeds.",
        alt.layer(zero, dots, counts).properties(height=STEP * len(looks.labels)),
        "clients",
        [*WHO, *columns, Column("score", looks.axis, 2), *SIZES],
        wide=True,
        step=STEP,
    )


def _sorted_gains(looks: Looks, columns: list[Column]) -> Panel:
    base = (
        _signed(named("clients").transform_filter("datum.method == focus"))
        .transform_window(
            place="row_number()",
            sort=[alt.SortField("gain", order="descending"), alt.SortField("client")],
            frame=[None, None],
        )
        .encode(
            x=alt.X("place:O", axis=None),
            y=alt.Y("gain:Q", title="gain, percentage points", axis=signed_axis()),
            color=alt.Color("sign_colour:N", scale=None),
            tooltip=_gain_tips(looks),
        )
    )
    same = base.transform_filter("datum.gain == 0").mark_point(shape="square", filled=True, size=14, opacity=1)
    chart = alt.layer(base.mark_bar(minBandSize=1, binSpacing=0), same).properties(height=HEIGHT)
    return Panel(
        "sorted-gains",
        "Client by client, sorted",
        "One bar a client of the method chosen above; bars below zero are harmed clients, grey squares do as well as "
        "the reference.",
        chart,
        "clients",
        [*WHO, *columns, Column("score", looks.axis, 2), *SIZES],
        focus=True,
    )


def _histogram(looks: Looks) -> Panel:
    chart = (
        named("clients")
        .transform_filter("datum.method == focus")
        .transform_bin("from", field="score", bin=alt.Bin(step=5, extent=[0, 100]))
        .transform_aggregate(clients="count()", groupby=["from", "from_end"])
        .mark_bar(color=ink("good"), binSpacing=1)
        .encode(
            x=alt.X("from:Q", bin="binned", title=f"{looks.metric} of a client, %", axis=alt.Axis(tickMinStep=5)),
            x2="from_end",
            y=alt.Y("clients:Q", title="clients", axis=alt.Axis(tickMinStep=1)),
            tooltip=[alt.Tooltip("from:Q", title="from, %"), alt.Tooltip("from_end:Q", title="to, %"), "clients:Q"],
        )
        .properties(height=HEIGHT)
    )
    return Panel(
        "histogram",
        f"Clients by {looks.metric}",
        f"How many clients of the method chosen above have which {looks.metric}, in steps of 5 points; all seeds.",
        chart,
        "clients",
        [*WHO, Column("score", looks.axis, 2)],
        focus=True,
    )
