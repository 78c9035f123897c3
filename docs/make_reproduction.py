"""Fill the tables and pictures of docs/reproduction.md from the runs beside it: `python docs/make_reproduction.py`.

The prose of the page is written by hand. What stands between `<!-- KIND EXPERIMENT SETTING -->` and `<!-- end -->` is
made here, from the compact forms of finished runs in docs/reproduction/ and the papers' numbers in experiments/.
To take the runs of a setting into the collection (beside those that it holds), or the trials of `bespoke tune`:

    python docs/make_reproduction.py --collect FOLDER EXPERIMENT SETTING "the command" "the hardware, the date"
    python docs/make_reproduction.py --collect-trials FOLDER EXPERIMENT SETTING "the command" "the hardware, the date"
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np

from bespokefl.config import Part
from bespokefl.config_file import read_parts
from bespokefl.reproduce.cells import paper_numbers
from bespokefl.reproduce.digest import RunDigest, digest_runs, figure, read_digest, write_digest
from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.views import View

DOCS = Path(__file__).resolve().parent
PAGE, COLLECTION, IMAGES = DOCS / "reproduction.md", DOCS / "reproduction", DOCS / "images"
EXPERIMENTS = DOCS.parent / "experiments"
COMMAND = "python docs/make_reproduction.py"

WHOLE = "-"  # the setting of an experiment that has none

BLOCK = re.compile(r"(<!-- (?P<kind>\w+) (?P<experiment>\S+) (?P<setting>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

COLUMNS = {  # of a table, beside the paper's: heading, and what it shows of a run
    "ours, last round": "personal:mean@last",
    "std over clients": "personal:std@last",
    "lowest 5 %": "personal:worst5@last",
    "before averaging": "before_agg:mean@last",
    "its lowest 5 %": "before_agg:worst5@last",
    "global model": "global:mean@last",
}
LIKE_FEDAVG = {  # methods that are compared with FedAvg client by client
    "pgfed-table1": ("pgfed", "pgfedmo"),
    "plgu-table2": ("plgu-lf", "plgu-grep-epoch", "ditto"),
    "plgu-rounds": ("plgu-lf", "plgu-grep-epoch", "ditto"),
}
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


class Table(NamedTuple):
    """The runs of one setting, and what the paper has for it."""

    about: dict[str, Any]  # how the runs were made
    runs: dict[str, list[RunDigest]]  # by label, in the order of the experiment; a run for each seed
    paper: dict[str, dict[str, float]]  # its numbers by measure and label, in percent


def read_table(experiment: str, setting: str) -> Table:
    about, runs = read_digest(stored(experiment, setting))
    part = read_part(experiment, setting)
    labels = [choice.label for choice in part.experiment.algorithms]
    by_label = {label: [run for run in runs if run["label"] == label] for label in labels}
    present = {label: seeds for label, seeds in by_label.items() if seeds}
    return Table(about, present, paper_numbers(part.experiment.paper))


def read_part(experiment: str, setting: str) -> Part:
    name = "" if setting == WHOLE else setting
    return next(part for part in read_parts(EXPERIMENTS / f"{experiment}.toml") if part.name == name)


def stored(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{named(experiment, setting)}.json"


def trials_of(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{named(experiment, setting)}-trials.json"


def named(experiment: str, setting: str) -> str:
    return experiment if setting == WHOLE else f"{experiment}-{setting}"


def percent(seeds: Sequence[RunDigest], name: str) -> float | None:
    """A measure's or a view's figure, the mean over seeds."""
    found = [_percent(run, name) for run in seeds]
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


def _percent(run: RunDigest, name: str) -> float | None:
    view = View.named(name)
    if view is None:
        return run["measures"][name]
    value = figure(run, view)
    return None if value is None else 100 * value


class Lines(NamedTuple):
    """A picture with the rounds from left to right, and a line for each method or client."""

    words: str
    y: str  # what is up
    rows: Callable[[Table], list[dict[str, Any]]]  # of round, value, line and, for several panels, panel


def accuracy_by_round(found: Table) -> list[dict[str, Any]]:
    return [
        {"round": at, "value": 100 * fmean(run["models"]["personal"]["mean"][k] for run in seeds), "line": label}
        for label, seeds in found.runs.items()
        for k, at in enumerate(seeds[0]["models"]["personal"]["rounds"])
    ]


def lambda_by_round(found: Table) -> list[dict[str, Any]]:
    """Of the first seed."""
    rows = []
    for label, (first, *_) in found.runs.items():
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


# blocks of the page -----------------------------------------------------------------------------------


def numbers(experiment: str, setting: str) -> str:
    """The paper's number, ours in the paper's way and in the honest one, and the models that it is not scored by.

    Of several seeds the mean, ± their standard deviation.
    """
    found = read_table(experiment, setting)
    rows = []
    for label, seeds in found.runs.items():
        ours, paper = percent(seeds, "personal:mean@best_test"), found.paper["mean"].get(label)
        difference = "" if paper is None or ours is None else f"{ours - paper:+.2f}"
        about = [label, str(len(seeds)), rate(seeds), "" if paper is None else shown(paper)]
        beside = [spread(seeds, name) for name in COLUMNS.values()]
        rows.append([*about, spread(seeds, "personal:mean@best_test"), difference, *beside])
    return table(["method", "seeds", "lr", "paper", "ours, best test round", "difference", *COLUMNS], rows)


def measured(experiment: str, setting: str) -> str:
    """Every measure of the paper's table that its runs kept, with the paper's numbers; seeds as mean ± std."""
    found, names = read_table(experiment, setting), read_part(experiment, setting).experiment.paper.metrics
    stored = [run["measures"].keys() for seeds in found.runs.values() for run in seeds]
    known = [(name, found.paper.get(name, {})) for name in names if all(name in measures for measures in stored)]
    alike = len({len(seeds) for seeds in found.runs.values()}) == 1  # else each row says how many it has
    headings = ["method", "lr"] if alike else ["method", "seeds", "lr"]
    for name, paper in known:
        heading = re.sub(r",? %$", "", measure(name).heading)
        heading += of_share(found, experiment, setting) if name.startswith("s_acc") else ""
        headings += [f"{heading}, paper", f"{heading}, ours"] if paper else [heading]
    rows = []
    for label, seeds in found.runs.items():
        cells = [label, rate(seeds)] if alike else [label, str(len(seeds)), rate(seeds)]
        for name, paper in known:
            cells += [shown(paper[label]) if label in paper else ""] if paper else []
            cells.append(with_spread([run["measures"][name] for run in seeds]))
        rows.append(cells)
    return table(headings, rows)


def of_share(found: Table, experiment: str, setting: str) -> str:
    """Said of an S-accuracy whose runs met another share of the clients than the experiment has now."""
    now = read_part(experiment, setting).experiment.eval.s_fraction
    met = {run["config"]["eval"]["s_fraction"] for seeds in found.runs.values() for run in seeds}
    return "" if met == {now} else f" (ours with c = {', '.join(map(str, sorted(met)))}, not {now})"


def spread(seeds: Sequence[RunDigest], name: str) -> str:
    return with_spread([_percent(run, name) for run in seeds])


def with_spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < max(1, len(values)):
        return "-"
    return shown(fmean(known)) + (f" ±{pstdev(known):.2f}" if len(known) > 1 else "")


def rate(seeds: Sequence[RunDigest]) -> str:
    config = seeds[0]["config"]
    return f"{config['algorithm'].get('lr', config['train']['lr']):g}"


def made(experiment: str, setting: str) -> str:
    """How the runs were made."""
    found = read_table(experiment, setting)
    seconds = {label: sum(run["figures"]["train_seconds"] for run in runs) for label, runs in found.runs.items()}
    slowest = max(seconds, key=lambda label: seconds[label])
    seeds = sorted({run["seed"] for runs in found.runs.values() for run in runs})
    rounds = sorted({run["figures"]["rounds"] for runs in found.runs.values() for run in runs})
    what = f"{'Seed' if len(seeds) == 1 else 'Seeds'} {joined(seeds)}, {joined(rounds)} rounds"
    return (
        f"`{found.about['command']}`; {found.about['hardware']}. {what}. The runs "
        f"trained for {sum(seconds.values()):.0f} s in all, several at a time; {slowest} the longest, "
        f"{seconds[slowest]:.0f} s."
    )


def joined(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def picture(kind: str, experiment: str, setting: str) -> str:
    return f"![{WORDS[kind]}](images/{image(kind, experiment, setting)})"


def image(kind: str, experiment: str, setting: str) -> str:
    suffix = "" if kind in MAIN_PICTURES else f"-{kind}"
    return f"{named(experiment, setting)}{suffix}.svg"


def rates(experiment: str, setting: str) -> str:
    """What validation samples said of every learning rate."""
    found = json.loads(trials_of(experiment, setting).read_text(encoding="utf-8"))
    tried = sorted({trial["parameters"]["train.lr"] for trials in found["methods"].values() for trial in trials})[::-1]
    rows = []
    for label, trials in found["methods"].items():
        by_rate = {trial["parameters"]["train.lr"]: trial["mean"] for trial in trials}
        best = max(by_rate, key=lambda rate: by_rate[rate] or 0.0)
        cells = [shown(None if by_rate[rate] is None else 100 * by_rate[rate]) for rate in tried]
        rows.append([label, *(f"**{c}**" if rate == best else c for rate, c in zip(tried, cells, strict=True))])
    made_by = f"`{found['about']['command']}`; {found['about']['hardware']}."
    return table(["method", *(f"lr {rate:g}" for rate in tried)], rows) + f"\n\n{made_by}"


def alike(experiment: str, setting: str) -> str:
    """Clients one by one, each method by what a client holds before the server averages, in the last round."""
    from scipy.stats import wilcoxon

    runs = read_table(experiment, setting).runs

    def held(label: str) -> dict[int, Any]:
        return {
            run["seed"]: np.array(run["models"]["before_agg"]["clients"]["last"], dtype=float) for run in runs[label]
        }

    lines, fedavg = [], held("fedavg")
    for label in LIKE_FEDAVG[experiment]:
        gain = np.concatenate([own - fedavg[seed] for seed, own in held(label).items()])
        better, worse, equal = (int(n) for n in ((gain > 0).sum(), (gain < 0).sum(), (gain == 0).sum()))
        lines.append(
            f"* {label} against fedavg, both before averaging: {100 * gain.mean():+.2f} points on average, {better} "
            f"clients better, {worse} worse, {equal} equal; Wilcoxon p = {wilcoxon(gain).pvalue:.2g}"
        )
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[str, str], str]] = {
    "alike": alike,
    "numbers": numbers,
    "made": made,
    "measured": measured,
    "rates": rates,
    **{kind: partial(picture, kind) for kind in WORDS},
}


def filled(text: str) -> str:
    """The page with all its blocks made anew."""
    return BLOCK.sub(lambda b: b[1] + BLOCKS[b["kind"]](b["experiment"], b["setting"]) + "\n" + b[BLOCK.groups], text)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


# pictures ---------------------------------------------------------------------------------------------


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
    for label, seeds in found.runs.items():
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
        for label, seeds in found.runs.items()
        for name, look in picture.ours.items()
        if (value := percent(seeds, name)) is not None
    ]
    at_hand = {name: look for name, look in picture.paper.items() if name in found.paper}
    papers = [
        {"method": label, "accuracy": value, "scored": look.name}
        for name, look in at_hand.items()
        for label, value in found.paper[name].items()
        if label in found.runs
    ]
    names, colours, shapes = zip(*picture.ours.values(), *at_hand.values(), strict=True)
    y = {"field": "method", "type": "nominal", "sort": list(found.runs), "title": None}
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


# collecting -------------------------------------------------------------------------------------------


def collect(folder: str, experiment: str, setting: str, command: str, hardware: str) -> None:
    """A run takes the place of an earlier one of the same method and seed."""
    path = stored(experiment, setting)
    before = read_digest(path)[1] if path.exists() else []
    new = digest_runs(Path(folder), read_part(experiment, setting).experiment.paper.metrics)
    runs = {(run["label"], run["seed"]): run for run in [*before, *new]}
    write_digest(path, [runs[key] for key in sorted(runs)], {"command": command, "hardware": hardware})


def collect_trials(folder: str, experiment: str, setting: str, command: str, hardware: str) -> None:
    part = read_part(experiment, setting)
    found = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("**/tuning/*.json")}
    labels = [choice.label for choice in part.experiment.algorithms if choice.label in found]
    content = {
        "about": {"command": command, "hardware": hardware},
        "methods": {label: found[label]["trials"] for label in labels},
    }
    trials_of(experiment, setting).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = ("FOLDER", "EXPERIMENT", "SETTING", "COMMAND", "HARDWARE")
    parser.add_argument("--collect", nargs=5, metavar=what)
    parser.add_argument("--collect-trials", nargs=5, metavar=what)
    given = parser.parse_args()
    COLLECTION.mkdir(exist_ok=True)
    if given.collect:
        collect(*given.collect)
    if given.collect_trials:
        collect_trials(*given.collect_trials)
    text = PAGE.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["kind"] in WORDS:
            draw(block["kind"], block["experiment"], block["setting"])
    PAGE.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
