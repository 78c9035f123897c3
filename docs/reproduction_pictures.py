"""The pictures of docs/reproduction.md: what is drawn of a setting's runs, as Vega-Lite charts."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from docs.stored_runs import DOCS, Table, named, percent, read_table

IMAGES = DOCS / "images"
DOT = {"type": "point", "filled": True, "size": 95, "opacity": 1, "strokeWidth": 3}
STYLE: dict[str, Any] = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": 640,
    "background": "white",
    "config": {
        "font": "Liberation Sans, Arial, Helvetica, sans-serif",
        "view": {"stroke": None},
        "axis": {"gridColor": "#e3e7eb", "labelFontSize": 12},
    },
}


class Look(NamedTuple):
    """Of a kind of dots."""

    name: str
    colour: str
    shape: str


class Dots(NamedTuple):
    """A picture with a row for each method, and on it a dot for each of some figures."""

    words: str  # for those who do not see it
    title: str
    ours: dict[str, Look]  # by figure: a measure or a view
    paper: dict[str, Look]  # by measure


MAIN_PICTURES = ("picture", "tradeoff")  # a setting has one of them, its file the setting's name
GREY, BLUE, RED, BLACK = "#5b6670", "#0072B2", "#D55E00", "#1d2329"
PICTURES = {
    "picture": Dots(
        "Accuracies by the model that is scored",
        "mean accuracy over clients, last round, %",
        {
            "global:mean@last": Look("global model", GREY, "square"),
            "personal:mean@last": Look("the model that the method is scored by", BLUE, "circle"),
            "before_agg:mean@last": Look("before averaging", RED, "triangle-up"),
        },
        {"mean": Look("the paper's number (best test round)", BLACK, "diamond")},
    ),
    "tradeoff": Dots(
        "Accuracy on a client's own test data and on all clients'",
        "accuracy, mean over clients, %",
        {
            "gm_acc": Look("global model on all clients' test data", GREY, "square"),
            "g_acc": Look("personal models on all clients' test data (G)", BLUE, "circle"),
            "l_acc": Look("personal models on their own (L)", RED, "triangle-up"),
        },
        {"g_acc": Look("the paper's G", "#66b2e0", "diamond"), "l_acc": Look("the paper's L", "#f0a070", "diamond")},
    ),
    "tails": Dots(
        "The lowest 5 % of clients, the mean and the top 5 %",
        "accuracy of the model that the method is scored by, last round, %",
        {
            "personal:worst5@last": Look("lowest 5 % of clients", RED, "triangle-down"),
            "personal:mean@last": Look("mean", BLUE, "circle"),
            "personal:top5@last": Look("top 5 %", GREY, "triangle-up"),
        },
        {},
    ),
}


class Lines(NamedTuple):
    """A picture with the rounds from left to right, and a line for each method or client."""

    words: str
    y: str  # what is up
    rows: Callable[[Table], list[dict[str, Any]]]  # of round, value, line and, for several panels, panel


def accuracy_by_round(found: Table) -> list[dict[str, Any]]:
    return [
        {"round": at, "value": 100 * fmean(run["models"]["personal"]["mean"][k] for run in seeds), "line": label}
        for label, seeds in found.counted.items()
        for k, at in enumerate(seeds[0]["models"]["personal"]["rounds"])
    ]


def lambda_by_round(found: Table) -> list[dict[str, Any]]:
    """Of the first seed."""
    rows = []
    for label, (first, *_) in found.counted.items():
        course = first.get("facts", {}).get("lambda", {"rounds": [], "clients": []})
        for at, values in zip(course["rounds"], course["clients"], strict=True):
            rows += [
                {"round": at, "value": value, "line": name, "panel": label}
                for name, value in zip(first["names"], values, strict=True)
                if value is not None
            ]
    return rows


LINES = {
    "curves": Lines("Accuracy by round", "mean accuracy over clients, %", accuracy_by_round),
    "lambdas": Lines("lambda by round", "lambda", lambda_by_round),
}
WORDS = {kind: look.words for kind, look in [*PICTURES.items(), *LINES.items()]} | {
    "clients": "Every client's accuracy"
}


def picture(kind: str, experiment: str, setting: str) -> str:
    return f"![{WORDS[kind]}](images/{image(kind, experiment, setting)})"


def image(kind: str, experiment: str, setting: str) -> str:
    suffix = "" if kind in MAIN_PICTURES else f"-{kind}"
    return f"{named(experiment, setting)}{suffix}.svg"


def draw(kind: str, experiment: str, setting: str) -> None:
    import vl_convert

    chart = CHARTS[kind](read_table(experiment, setting))
    path = IMAGES / image(kind, experiment, setting)
    path.write_text(vl_convert.vegalite_to_svg(chart), encoding="utf-8")


def line_plot(picture: Lines, found: Table) -> dict[str, Any]:
    rows = picture.rows(found)
    panels, lines = (list(dict.fromkeys(row[key] for row in rows if key in row)) for key in ("panel", "line"))
    encoding: dict[str, Any] = {
        "x": {"field": "round", "type": "quantitative"},
        "y": {"field": "value", "type": "quantitative", "title": picture.y, "scale": {"zero": False}},
        "color": {
            "field": "line",
            "type": "nominal",
            "title": None,
            "sort": lines,
            "scale": {"scheme": "tableau20" if len(lines) > 10 else "tableau10"},
        },
    }
    if panels:
        encoding["facet"] = {"field": "panel", "type": "nominal", "title": None, "sort": panels, "columns": 2}
    size = {"width": 290, "height": 170} if panels else {"height": 320}
    return {**STYLE, "data": {"values": rows}, "mark": {"type": "line"}, "encoding": encoding, **size}


def tick_plot(found: Table) -> dict[str, Any]:
    """A tick for each client of all seeds, and the mean; where the global model is scored, what clients hold before."""
    rows = []
    for label, seeds in found.counted.items():
        first, models = seeds[0]["models"], {label: "personal"}
        if first["personal"]["clients"] == first.get("global", {}).get("clients"):
            models[f"{label}, before averaging"] = "before_agg"
        for line, model in models.items():
            values = [value for run in seeds for value in run["models"][model]["clients"]["last"]]
            rows += [{"method": line, "accuracy": 100 * value} for value in values if value is not None]
    y = {"field": "method", "type": "nominal", "sort": list(dict.fromkeys(r["method"] for r in rows)), "title": None}
    x = {"field": "accuracy", "type": "quantitative", "title": "accuracy of a client's model, last round, %"}
    layers = [
        {"mark": {"type": "tick", "opacity": 0.45, "color": BLUE, "size": 18}, "encoding": {"y": y, "x": x}},
        {
            "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 95, "color": RED, "opacity": 1},
            "encoding": {"y": y, "x": {**x, "aggregate": "mean"}},
        },
    ]
    return {**STYLE, "data": {"values": rows}, "height": {"step": 26}, "layer": layers}


def dot_plot(picture: Dots, found: Table) -> dict[str, Any]:
    ours = [
        {"method": label, "accuracy": value, "scored": look.name}
        for label in found.counted
        for name, look in picture.ours.items()
        if (value := percent(found, label, name)) is not None
    ]
    at_hand = {name: look for name, look in picture.paper.items() if name in found.paper}
    papers = [
        {"method": label, "accuracy": value, "scored": look.name}
        for name, look in at_hand.items()
        for label, value in found.paper[name].items()
        if label in found.counted
    ]
    names, colours, shapes = zip(*picture.ours.values(), *at_hand.values(), strict=True)
    y = {"field": "method", "type": "nominal", "sort": list(found.counted), "title": None}
    x = {"field": "accuracy", "type": "quantitative", "title": picture.title, "scale": {"zero": False}}

    def by_kind(values: Sequence[str]) -> dict[str, Any]:
        legend = {"orient": "top", "symbolSize": 90, "columns": 2, "labelLimit": 400}
        scale = {"domain": names, "range": values}
        return {"field": "scored", "type": "nominal", "scale": scale, "title": None, "legend": legend}

    span = {"y": y, "x": {**x, "aggregate": "min"}, "x2": {"field": "accuracy", "aggregate": "max"}}
    dots = {"y": y, "x": x, "color": by_kind(colours), "shape": by_kind(shapes)}
    rule = {"type": "rule", "color": "#c5ccd3", "strokeWidth": 2}
    layers = [{"data": {"values": ours}, "mark": rule, "encoding": span}, {"mark": DOT, "encoding": dots}]
    return {**STYLE, "data": {"values": [*ours, *papers]}, "height": {"step": 24}, "layer": layers}


CHARTS: dict[str, Callable[[Table], dict[str, Any]]] = {
    **{kind: partial(dot_plot, dots) for kind, dots in PICTURES.items()},
    **{kind: partial(line_plot, lines) for kind, lines in LINES.items()},
    "clients": tick_plot,
}
