"""Fill the tables and pictures of docs/reproduction.md from the runs beside it: `python docs/make_reproduction.py`.

The prose of the page is written by hand; what stands between `<!-- NAME -->` and `<!-- end -->` is made here from the
compact forms of the runs in docs/reproduction/. To take finished runs into the collection:

    python docs/make_reproduction.py --collect runs/pgfed-table1/cifar10-100 NAME "bespoke reproduce ..." "one H200, ..."
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bespokefl.reproduce.digest import RunDigest, digest_runs, figure, read_digest, write_digest
from bespokefl.reproduce.views import View

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reproduction.md"
RUNS = DOCS / "reproduction"
COMMAND = "python docs/make_reproduction.py"

BLOCK = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs=4, metavar=("FOLDER", "NAME", "COMMAND", "HARDWARE"))
    given = parser.parse_args()
    if given.collect:
        folder, name, command, hardware = given.collect
        RUNS.mkdir(exist_ok=True)
        write_digest(RUNS / f"{name}.json", digest_runs(Path(folder)), {"command": command, "hardware": hardware})
    draw_pictures()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """The page with all its blocks made anew."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found["name"]]() + "\n" + found[3], text)


# numbers ----------------------------------------------------------------------------------------------


def runs(name: str) -> dict[str, list[RunDigest]]:
    """By label, a run for each seed."""
    by_label: dict[str, list[RunDigest]] = {}
    for run in read_digest(RUNS / f"{name}.json")[1]:
        by_label.setdefault(run["label"], []).append(run)
    return by_label


def percent(seeds: Sequence[RunDigest], name: str) -> float | None:
    """A view's figure in percent, the mean over seeds."""
    view = View.named(name)
    assert view is not None, name
    found = [figure(run, view) for run in seeds]
    known = [value for value in found if value is not None]
    return 100 * fmean(known) if known and len(known) == len(found) else None


def shown(value: float | None, decimals: int = 2) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


# PGFed, table 1 ---------------------------------------------------------------------------------------

PGFED = "pgfed-table1-cifar10-100"
PAPER = {"local": 67.39, "fedavg": 63.19, "fedrep": 72.30, "pgfed": 78.56, "pgfedmo": 78.74}
ORDER = (
    "local fedavg feddyn pfedme fedfomo apfl fedrep lg-fedavg fedper per-fedavg fedrod fedbabu pgfed pgfedmo".split()
)


def pgfed_table() -> str:
    """The paper's number, ours in the paper's way and in the honest one, and the models that methods are not scored by."""
    found = runs(PGFED)
    rows = []
    for label in ORDER:
        seeds = found[label]
        ours, paper = percent(seeds, "personal:mean@best_test"), PAPER.get(label)
        rows.append(
            [
                label,
                f"{learning_rate(seeds):g}",
                "" if paper is None else f"{paper:.2f}",
                shown(ours),
                "" if paper is None or ours is None else f"{ours - paper:+.2f}",
                *(
                    shown(percent(seeds, name))
                    for name in (
                        "personal:mean@last",
                        "personal:std@last",
                        "personal:worst5@last",
                        "before_agg:mean@last",
                        "before_agg:worst5@last",
                        "global:mean@last",
                    )
                ),
            ]
        )
    return table(
        [
            "method",
            "lr",
            "paper",
            "ours, best test round",
            "difference",
            "ours, last round",
            "std over clients",
            "lowest 5 %",
            "before averaging",
            "its lowest 5 %",
            "global model",
        ],
        rows,
    )


def learning_rate(seeds: Sequence[RunDigest]) -> float:
    rate: float = seeds[0]["config"]["algorithm"]["lr"]
    return rate


def pgfed_about() -> str:
    about, kept = read_digest(RUNS / f"{PGFED}.json")
    seconds = {label: sum(run["figures"]["train_seconds"] for run in seeds) for label, seeds in runs(PGFED).items()}
    slowest = max(seconds, key=lambda label: seconds[label])
    seeds = sorted({run["seed"] for run in kept})
    return (
        f"`{about['command']}`; {about['hardware']}. Seeds: {', '.join(map(str, seeds))}. Training took "
        f"{sum(seconds.values()):.0f} s summed over the runs, some of which went side by side; {slowest} the most, "
        f"{seconds[slowest]:.0f} s."
    )


BLOCKS: dict[str, Callable[[], str]] = {"pgfed-table": pgfed_table, "pgfed-about": pgfed_about}


# pictures ---------------------------------------------------------------------------------------------

SCORED = {"global:mean@last": "global model", "personal:mean@last": "the method's own", "before_agg:mean@last": "before averaging"}


def draw_pictures() -> None:
    (DOCS / "images" / "pgfed-table1.svg").write_text(svg(pgfed_picture()), encoding="utf-8")


def pgfed_picture() -> dict[str, Any]:
    found = runs(PGFED)
    dots = [
        {"method": label, "accuracy": value, "scored": text}
        for label in ORDER
        for name, text in SCORED.items()
        if (value := percent(found[label], name)) is not None
    ]
    papers = [{"method": label, "accuracy": value, "scored": "paper (best test round)"} for label, value in PAPER.items()]
    return dot_plot(dots + papers, ORDER, "mean client accuracy in the last round, %")


def dot_plot(values: list[dict[str, Any]], order: Sequence[str], title: str) -> dict[str, Any]:
    kinds = list(dict.fromkeys(value["scored"] for value in values))
    colours = {"global model": "#5b6670", "the method's own": "#0072B2", "before averaging": "#D55E00"}
    shapes = {"global model": "square", "the method's own": "circle", "before averaging": "triangle-up"}
    mark = {
        "scale": {
            "domain": kinds,
            "range": [colours.get(kind, "#1d2329") for kind in kinds],
        },
        "title": None,
        "legend": {"orient": "top", "symbolSize": 90},
    }
    y = {"field": "method", "type": "nominal", "sort": list(order), "title": None}
    x = {"field": "accuracy", "type": "quantitative", "title": title, "scale": {"zero": False}}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": values},
        "width": 640,
        "height": {"step": 24},
        "config": {"font": "Liberation Sans, Arial, sans-serif", "view": {"stroke": None}, "axis": {"gridColor": "#e3e7eb"}},
        "layer": [
            {
                "mark": {"type": "rule", "color": "#c5ccd3", "strokeWidth": 2},
                "encoding": {
                    "y": y,
                    "x": {**x, "aggregate": "min"},
                    "x2": {"field": "accuracy", "aggregate": "max"},
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 95, "opacity": 1},
                "encoding": {
                    "y": y,
                    "x": x,
                    "color": {"field": "scored", "type": "nominal", **mark},
                    "shape": {
                        "field": "scored",
                        "type": "nominal",
                        "scale": {"domain": kinds, "range": [shapes.get(kind, "stroke") for kind in kinds]},
                        "title": None,
                    },
                    "tooltip": [{"field": "accuracy", "format": ".2f"}],
                },
            },
        ],
    }


def svg(spec: dict[str, Any]) -> str:
    import vl_convert

    drawn: str = vl_convert.vegalite_to_svg(spec)
    return drawn


def numbers_on_the_page(text: str) -> Iterator[str]:
    for found in BLOCK.finditer(text):
        yield found["name"]


if __name__ == "__main__":
    main()
