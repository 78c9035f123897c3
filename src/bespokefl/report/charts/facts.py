"""What methods show of themselves: PGFed's A, LG-Mix's lambda, PLGU-LF's layers, FedPG's step and gamma, and more."""

import altair as alt

from bespokefl.report.facts import Regression, Shown
from bespokefl.report.panels import HEIGHT, Chart, Panel, ink, named, signed_axis
from bespokefl.report.tables import Column, Table

MAP = 640  # pixels of a matrix
EXPLAINED = {
    ("pgfed", "A"): "Row i: the weights that client i gives to the others' risks.",
    ("pgfedmo", "A"): "Row i: the weights that client i gives to the others' risks.",
    ("fedfomo", "P"): "Row i: what client i thinks of its own and of the others' models.",
    ("lg-mix", "lambda"): "The share of a client's own update in the mixture; the rest is the global update.",
    ("lg-mix", "layers: |w - u| / |u|"): "How far a layer of the personal model is from the global one.",
    ("plgu-lf", "scores"): "How far a layer of the personal model is from the global one; the highest stay personal.",
    ("apfl", "alpha"): "The share of the local model in the mixture.",
    ("fedpg", "step"): "The step size of the global model.",
    ("s-fedpg", "step"): "The step size that the line search accepted.",
}


def fact_tables(shown: Shown) -> dict[str, Table]:
    tables = {_table(shown): shown.table}
    if shown.means is not None:
        tables[f"{_table(shown)}-means"] = shown.means
    return tables


def fact_panels(shown: Shown, algorithm: str) -> list[Panel]:
    said = EXPLAINED.get((algorithm, shown.name), "")
    return {"matrix": _matrix, "clients": _clients, "layers": _layers, "number": _number}[shown.kind](shown, said)


def _table(shown: Shown) -> str:
    return f"fact-{shown.method}-{shown.name}"


def _panel(
    shown: Shown,
    suffix: str,
    title: str,
    note: str,
    chart: Chart,
    columns: list[Column],
    data: str = "",
    tall: bool = False,
) -> Panel:
    note = f"{note} Seed {shown.seed}.".strip()
    if shown.left_out:
        note += f" The first clients only; {shown.left_out} more are not drawn."
    return Panel(
        f"{_table(shown)}{suffix}",
        f"{shown.method}: {title}",
        note,
        chart,
        data or _table(shown),
        columns,
        tall=tall,
        method=shown.method,
    )


def _number(shown: Shown, said: str) -> list[Panel]:
    chart = (
        named(_table(shown))
        .mark_line(point=True, color=ink("good"))
        .encode(
            x=_round(),
            y=alt.Y("value:Q", title=shown.name, scale=alt.Scale(zero=False)),
            tooltip=["round:Q", "value:Q"],
        )
        .properties(height=HEIGHT)
    )
    columns = [Column("round", "round"), Column("value", shown.name, 5)]
    return [_panel(shown, "", f"{shown.name} by round", said, chart, columns)]


def _clients(shown: Shown, said: str) -> list[Panel]:
    base = named(_table(shown)).transform_filter("isValid(datum.value)")
    y = alt.Y("value:Q", title=shown.name, scale=alt.Scale(zero=False))
    tips = ["client:Q", "round:Q", alt.Tooltip("value:Q", title=shown.name, format=".4f")]
    lines = base.mark_line(strokeWidth=1, opacity=0.35, color=ink("good")).encode(x=_round(), y=y, detail="client:N")
    catch = base.mark_point(opacity=0, filled=True, size=40).encode(x=_round(), y=y, tooltip=tips)
    mean = (
        named(_table(shown))
        .transform_filter("datum.client == 0 && isValid(datum.mean)")
        .mark_line(strokeWidth=3, color=ink("bad"), strokeDash=[8, 3])
        .encode(x=_round(), y="mean:Q")
    )
    columns = [
        Column("round", "round"),
        Column("client", "client"),
        Column("value", shown.name, 4),
        Column("mean", "mean of the clients", 4),
    ]
    note = f"{said} A thin line is a client, the dashed one the mean of the clients.".strip()
    chart = alt.layer(lines, mean, catch).properties(height=HEIGHT)
    return [_panel(shown, "", f"{shown.name} of every client by round", note, chart, columns)]


def _layers(shown: Shown, said: str) -> list[Panel]:
    layers = max(shown.table["layer"])
    chart = (
        named(_table(shown))
        .mark_rect()
        .encode(
            x=alt.X("round:O", title="round", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("name:N", title="layer", sort=alt.SortField("layer"), axis=alt.Axis(labelOverlap=True)),
            color=alt.Color(
                "mean:Q",
                title=shown.name,
                scale=alt.Scale(range="heatmap", zero=False),
                legend=alt.Legend(orient="top"),
            ),
            tooltip=[
                alt.Tooltip("name:N", title="layer"),
                "round:O",
                alt.Tooltip("mean:Q", title="mean of the clients", format=".4g"),
                alt.Tooltip("low:Q", title="lowest client", format=".4g"),
                alt.Tooltip("high:Q", title="highest client", format=".4g"),
            ],
        )
        .properties(height=max(110, min(520, 26 * layers)))
    )
    columns = [
        Column("round", "round"),
        Column("name", "layer"),
        Column("mean", "mean of the clients", 5),
        Column("low", "lowest client", 5),
        Column("high", "highest client", 5),
    ]
    note = f"{said} Mean of the clients; layer 1 is the one next to the input.".strip()
    name = shown.name.removeprefix("layers: ")
    return [_panel(shown, "", f"{name} per layer and round", note, chart, columns)]


def _matrix(shown: Shown, said: str) -> list[Panel]:
    first, last = shown.rounds
    most = max((abs(value) for value in shown.table["change"] if value is not None), default=0.0) or 1.0
    chart = (
        named(_table(shown))
        .mark_rect()
        .encode(
            x=alt.X("j:O", title="client j", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("i:O", title="client i", axis=alt.Axis(labelOverlap=True)),
            color=alt.Color(
                "change:Q",
                title="change",
                scale=alt.Scale(range="diverging", domain=[-most, most], interpolate="rgb"),
                legend=alt.Legend(orient="top", format="+.2~g"),
            ),
            tooltip=["i:O", "j:O", alt.Tooltip("change:Q", format="+.4g")],
        )
        .properties(height=MAP)
    )
    columns = [Column("i", "client i"), Column("j", "client j"), Column("change", "change", 5)]
    title = f"change of {shown.name} from round {first} to {last}"
    panels = [
        _panel(
            shown,
            "",
            title,
            f"{said} Blue has grown, orange has shrunk.".strip(),
            chart,
            columns,
            tall=shown.means is not None,
        )
    ]
    if shown.means is not None:
        panels += [_means(shown, side) for side in ("row", "column")]
    return panels


SIDES = {
    "row": "how much the weights that a client gives have changed on average",
    "column": "how much the weight that a client is given has changed on average",
}


def _means(shown: Shown, side: str) -> Panel:
    data = f"{_table(shown)}-means"
    line = (shown.lines or {}).get(side)
    base = named(data)
    x = alt.X("n:Q", title="train samples of the client, n", scale=alt.Scale(zero=False, padding=10))
    y = alt.Y(
        f"{side}:Q",
        title=f"{side} mean of the change",
        axis=signed_axis(format=".2~g"),
        scale=alt.Scale(zero=False, padding=10),
    )
    tips = [
        "client:Q",
        alt.Tooltip("n:Q", title="train samples"),
        alt.Tooltip(f"{side}:Q", title=f"{side} mean", format="+.4g"),
    ]
    dots = base.mark_point(filled=True, size=60, opacity=0.75, color=ink("good")).encode(x=x, y=y, tooltip=tips)
    layers = [dots]
    if line is not None and shown.means is not None:
        ends = [{"n": n, side: line.intercept + line.slope * n} for n in (min(shown.means["n"]), max(shown.means["n"]))]
        fitted = alt.Chart(alt.InlineData(ends)).mark_line(color=ink("bad"), strokeWidth=2.2).encode(x=x, y=y)
        layers.append(fitted)
    columns = [Column("client", "client"), Column("n", "train samples"), Column(side, f"{side} mean", 5)]
    note = f"Does it go with the amount of data? Here: {SIDES[side]}. {_said(line)}"
    chart = alt.layer(*layers).properties(height=HEIGHT)
    return _panel(shown, f"-{side}s", f"{side} means of the change against n", note, chart, columns, data)


def _said(line: Regression | None) -> str:
    if line is None:
        return "All clients have the same number of samples, so there is no line."
    return f"Least squares: slope {line.slope:+.3g} per sample, r = {line.r:.2f}."


def gamma_panel(sweep: Table) -> Panel:
    base = named("gamma")
    x = alt.X("gamma:Q", title="gamma")
    y = alt.Y("value:Q", title="accuracy, %", scale=alt.Scale(zero=False))
    style = {
        "color": alt.Color(
            "quantity:N",
            title=None,
            scale=alt.Scale(range=[ink("bad"), ink("good")]),
            legend=alt.Legend(orient="top", labelLimit=220, direction="vertical"),
        ),
        "strokeDash": alt.StrokeDash(
            "algorithm:N", title=None, legend=alt.Legend(orient="top") if len(set(sweep["algorithm"])) > 1 else None
        ),
    }
    tips = [
        "algorithm:N",
        "gamma:Q",
        "quantity:N",
        alt.Tooltip("value:Q", format=".2f"),
        alt.Tooltip("low:Q", title="lowest run", format=".2f"),
        alt.Tooltip("high:Q", title="highest run", format=".2f"),
    ]
    spread = base.mark_rule(opacity=0.6).encode(
        x=x, y=alt.Y("low:Q", title="accuracy, %"), y2="high", color=style["color"]
    )
    line = base.mark_line(point=alt.OverlayMarkDef(size=55)).encode(x=x, y=y, tooltip=tips, **style)
    columns = [
        Column("algorithm", "algorithm"),
        Column("gamma", "gamma", 3),
        Column("quantity", "quantity"),
        Column("value", "accuracy, %", 2),
        Column("low", "lowest run", 2),
        Column("high", "highest run", 2),
        Column("runs", "runs"),
    ]
    note = (
        "gamma is the share of its own conflict with others that a personal model may cause: more of it personalises, "
        "and generalises less."
    )
    return Panel(
        "gamma",
        "FedPG: own data and everybody's, by gamma",
        note,
        alt.layer(spread, line).properties(height=HEIGHT),
        "gamma",
        columns,
    )


def _round() -> alt.X:
    return alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False))
