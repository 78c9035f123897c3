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
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from bespokefl.config_file import read_parts
from bespokefl.reproduce.comparison import paper_numbers
from bespokefl.reproduce.digest import RunDigest, digest_runs, figure, read_digest, write_digest
from bespokefl.reproduce.views import View

DOCS = Path(__file__).resolve().parent
PAGE, COLLECTION, IMAGES = DOCS / "reproduction.md", DOCS / "reproduction", DOCS / "images"
EXPERIMENTS = DOCS.parent / "experiments"
COMMAND = "python docs/make_reproduction.py"

BLOCK = re.compile(r"(<!-- (?P<kind>\w+) (?P<experiment>\S+) (?P<setting>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

COLUMNS = {  # of a table, beside the paper's: heading, and what it shows of a run
    "ours, last round": "personal:mean@last",
    "std over clients": "personal:std@last",
    "lowest 5 %": "personal:worst5@last",
    "before averaging": "before_agg:mean@last",
    "its lowest 5 %": "before_agg:worst5@last",
    "global model": "global:mean@last",
}
DOTS = {  # of a picture: what is shown, with its colour and shape
    "global:mean@last": ("global model", "#5b6670", "square"),
    "personal:mean@last": ("the model that the method is scored by", "#0072B2", "circle"),
    "before_agg:mean@last": ("before averaging", "#D55E00", "triangle-up"),
}
PAPERS_DOT = ("the paper's number (best test round)", "#1d2329", "diamond")


class Table(NamedTuple):
    """The runs of one setting, and what the paper has for it."""

    about: dict[str, Any]  # how the runs were made
    runs: dict[str, list[RunDigest]]  # by label, in the order of the experiment; a run for each seed
    paper: dict[str, float]  # mean accuracies in percent


def read_table(experiment: str, setting: str) -> Table:
    about, runs = read_digest(stored(experiment, setting))
    part = next(part for part in read_parts(EXPERIMENTS / f"{experiment}.toml") if part.name == setting)
    labels = [choice.label for choice in part.experiment.algorithms]
    by_label = {label: [run for run in runs if run["label"] == label] for label in labels}
    present = {label: seeds for label, seeds in by_label.items() if seeds}
    return Table(about, present, paper_numbers(part.experiment.paper).get("mean", {}))


def stored(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{experiment}-{setting}.json"


def trials_of(experiment: str, setting: str) -> Path:
    return COLLECTION / f"{experiment}-{setting}-trials.json"


def percent(seeds: Sequence[RunDigest], name: str) -> float | None:
    """A view's figure, the mean over seeds."""
    view = View.named(name)
    assert view is not None, name
    found = [figure(run, view) for run in seeds]
    known = [value for value in found if value is not None]
    return 100 * fmean(known) if known and len(known) == len(found) else None


# blocks of the page -----------------------------------------------------------------------------------


def numbers(experiment: str, setting: str) -> str:
    """The paper's number, ours in the paper's way and in the honest one, and the models that it is not scored by."""
    found = read_table(experiment, setting)
    rows = []
    for label, seeds in found.runs.items():
        ours, paper = percent(seeds, "personal:mean@best_test"), found.paper.get(label)
        difference = "" if paper is None or ours is None else f"{ours - paper:+.2f}"
        config = seeds[0]["config"]
        rate = f"{config['algorithm'].get('lr', config['train']['lr']):g}"
        beside = [shown(percent(seeds, name)) for name in COLUMNS.values()]
        rows.append([label, rate, "" if paper is None else shown(paper), shown(ours), difference, *beside])
    return table(["method", "lr", "paper", "ours, best test round", "difference", *COLUMNS], rows)


def made(experiment: str, setting: str) -> str:
    """How the runs were made."""
    found = read_table(experiment, setting)
    seconds = {label: sum(run["figures"]["train_seconds"] for run in runs) for label, runs in found.runs.items()}
    slowest = max(seconds, key=lambda label: seconds[label])
    seeds = sorted({run["seed"] for runs in found.runs.values() for run in runs})
    return (
        f"`{found.about['command']}`; {found.about['hardware']}. "
        f"{'Seed' if len(seeds) == 1 else 'Seeds'} {', '.join(map(str, seeds))}. The runs trained for "
        f"{sum(seconds.values()):.0f} s in all, several at a time; {slowest} the longest, {seconds[slowest]:.0f} s."
    )


def picture(experiment: str, setting: str) -> str:
    return f"![Accuracies by the model that is scored](images/{experiment}-{setting}.svg)"


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

    def held(label: str) -> Any:
        return np.array([run["models"]["before_agg"]["clients"]["last"] for run in runs[label]], dtype=float).ravel()

    lines = []
    for label in ("pgfed", "pgfedmo"):
        gain = held(label) - held("fedavg")
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
    "picture": picture,
    "rates": rates,
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


def draw(experiment: str, setting: str) -> None:
    import vl_convert

    found = read_table(experiment, setting)
    values = [
        {"method": label, "accuracy": value, "scored": DOTS[name][0]}
        for label, seeds in found.runs.items()
        for name in DOTS
        if (value := percent(seeds, name)) is not None
    ]
    values += [{"method": k, "accuracy": v, "scored": PAPERS_DOT[0]} for k, v in found.paper.items() if k in found.runs]
    drawn = vl_convert.vegalite_to_svg(dot_plot(values, list(found.runs)))
    (IMAGES / f"{experiment}-{setting}.svg").write_text(drawn, encoding="utf-8")


def dot_plot(values: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    names, colours, shapes = zip(*DOTS.values(), PAPERS_DOT, strict=True)
    y = {"field": "method", "type": "nominal", "sort": order, "title": None}
    title = "mean accuracy over clients, last round, %"
    x = {"field": "accuracy", "type": "quantitative", "title": title, "scale": {"zero": False}}

    def by_kind(values: Sequence[str]) -> dict[str, Any]:
        legend = {"orient": "top", "symbolSize": 90, "columns": 2, "labelLimit": 400}
        scale = {"domain": names, "range": values}
        return {"field": "scored", "type": "nominal", "scale": scale, "title": None, "legend": legend}

    ours = [{"filter": {"not": {"field": "scored", "equal": PAPERS_DOT[0]}}}]
    span = {"y": y, "x": {**x, "aggregate": "min"}, "x2": {"field": "accuracy", "aggregate": "max"}}
    dots = {"y": y, "x": x, "color": by_kind(colours), "shape": by_kind(shapes)}
    font = "Liberation Sans, Arial, Helvetica, sans-serif"
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": values},
        "width": 640,
        "height": {"step": 24},
        "background": "white",
        "config": {"font": font, "view": {"stroke": None}, "axis": {"gridColor": "#e3e7eb", "labelFontSize": 12}},
        "layer": [
            {"transform": ours, "mark": {"type": "rule", "color": "#c5ccd3", "strokeWidth": 2}, "encoding": span},
            {"mark": {"type": "point", "filled": True, "size": 95, "opacity": 1, "strokeWidth": 3}, "encoding": dots},
        ],
    }


# collecting -------------------------------------------------------------------------------------------


def collect(folder: str, experiment: str, setting: str, command: str, hardware: str) -> None:
    """A run takes the place of an earlier one of the same method and seed."""
    path = stored(experiment, setting)
    before = read_digest(path)[1] if path.exists() else []
    runs = {(run["label"], run["seed"]): run for run in [*before, *digest_runs(Path(folder))]}
    write_digest(path, [runs[key] for key in sorted(runs)], {"command": command, "hardware": hardware})


def collect_trials(folder: str, experiment: str, setting: str, command: str, hardware: str) -> None:
    part = next(part for part in read_parts(EXPERIMENTS / f"{experiment}.toml") if part.name == setting)
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
        if block["kind"] == "picture":
            draw(block["experiment"], block["setting"])
    PAGE.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
