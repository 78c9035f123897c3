"""Fill the tables and pictures of docs/reproduction.md from the runs beside it: `python -m docs.make_reproduction`.

What stands between `<!-- KIND EXPERIMENT SETTING -->` and `<!-- end -->` is made here, from the compact forms of
finished runs in docs/reproduction/ and the papers' numbers. To take in the output folder of `bespoke reproduce`:

    python -m docs.make_reproduction --collect FOLDER EXPERIMENT "the command" "the hardware, the date"
    python -m docs.make_reproduction --collect-trials FOLDER EXPERIMENT SETTING "the command" "the hardware, the date"
    python -m docs.make_reproduction --supersede EXPERIMENT SETTING LABEL,LABEL MEASURES "the reason"

The first replaces earlier runs of the same method and seed, in all settings that the folder has; the second takes
trials of `bespoke tune`; the third marks runs as of older settings, in the measures of a pattern (`*` for all).
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from docs.reproduction_items import HEADINGS, items_table
from docs.reproduction_pictures import WORDS, draw, picture
from docs.stored_runs import (
    COLLECTION,
    DOCS,
    Table,
    changes,
    collect,
    collect_trials,
    read_table,
    set_up_changes,
    supersede,
    trials_of,
    with_spread,
)

from bespokefl.errors import InputError
from bespokefl.reproduce.digest import Made, RunDigest, figure
from bespokefl.reproduce.measures import measure
from bespokefl.reproduce.ordering import standard_errors
from bespokefl.reproduce.views import View

PAGE = DOCS / "reproduction.md"
COMMAND = "python -m docs.make_reproduction"

BLOCK = re.compile(r"(<!-- (?P<kind>\w+) (?P<experiment>\S+) (?P<setting>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

COLUMNS = {  # of a table, beside the paper's: heading, and what it shows of a run
    "ours, last round": "personal:mean@last",
    "std over clients": "personal:std@last",
    "lowest 5 %": "personal:worst5@last",
    "before averaging": "before_agg:mean@last",
    "its lowest 5 %": "before_agg:worst5@last",
    "global model": "global:mean@last",
}
BEST = "personal:mean@best_test"  # as PGFed's paper reports
LIKE_FEDAVG = {  # methods that are compared with FedAvg by what clients hold before the server averages
    "pgfed-table1": ("pgfed", "pgfedmo"),
    "plgu-table2": ("plgu-lf", "plgu-grep-epoch", "ditto"),
    "plgu-rounds": ("plgu-lf", "plgu-grep-epoch", "ditto"),
}


class Footnotes:
    """The reasons why cells of a table count in no comparison, numbered as they come."""

    def __init__(self, found: Table) -> None:
        self._found = found
        self._reasons: list[str] = []

    def mark(self, runs: Sequence[RunDigest], metric: str) -> str:
        reasons = [self._found.no_longer(run, metric) for run in runs]
        if None in reasons or not reasons:
            return ""
        reason = str(reasons[0])
        if reason not in self._reasons:
            self._reasons.append(reason)
        return f" <sup>{self._reasons.index(reason) + 1}</sup>"

    def below(self) -> str:
        lines = [f"<sup>{mark}</sup> Not counted: {reason}." for mark, reason in enumerate(self._reasons, 1)]
        return "\n\n" + "<br>\n".join(lines) if lines else ""


# blocks of the page -----------------------------------------------------------------------------------


def items(_experiment: str, _setting: str) -> str:
    """All items of the papers."""
    return table(HEADINGS, items_table())


def numbers(experiment: str, setting: str) -> str:
    """The paper's number, ours in the paper's way and in the honest one, and the models that it is not scored by.

    Of several seeds the mean, ± their standard deviation.
    """
    found = read_table(experiment, setting)
    notes, rows = Footnotes(found), []
    for label in found.runs:
        seeds = shown_runs(found, label, BEST)
        ours, paper = with_spread([found.value(run, BEST) for run in seeds]), found.paper["mean"].get(label)
        values = [value for run in seeds if (value := found.value(run, BEST)) is not None]
        difference = "" if paper is None or len(values) < len(seeds) else f"{fmean(values) - paper:+.2f}"
        about = [label + notes.mark(seeds, BEST), str(len(seeds)), rate(seeds), papers(found, label, "mean")]
        beside = [with_spread([found.value(run, name) for run in seeds]) for name in COLUMNS.values()]
        rows.append([*about, ours, difference, *beside])
    return (
        table(["method", "seeds", "lr", "paper", "ours, best test round", "difference", *COLUMNS], rows) + notes.below()
    )


def measured(experiment: str, setting: str) -> str:
    """Every measure of the paper's table: the paper's numbers where it prints some, ours as mean ± std over seeds."""
    found = read_table(experiment, setting)
    names = [
        name
        for name in found.part.experiment.paper.metrics
        if any(found.value(run, name) is not None for runs in found.runs.values() for run in runs)
    ]
    known = {name: found.paper.get(name, {}) for name in names}
    alike = len({len(seeds) for seeds in found.runs.values()}) == 1  # else each row says how many it has
    headings = ["method", "lr"] if alike else ["method", "seeds", "lr"]
    for name in names:
        heading = re.sub(r",? %$", "", measure(name).heading)
        headings += [f"{heading}, paper", "ours", "difference"] if known[name] else [heading]
    notes, rows = Footnotes(found), []
    for label, runs in found.runs.items():
        whole = notes.mark(runs, "every")  # of all measures
        cells = [label + whole, rate(runs)] if alike else [label + whole, str(len(runs)), rate(runs)]
        for name in names:
            seeds = shown_runs(found, label, name)
            values = [found.value(run, name) for run in seeds]
            ours = with_spread(values) + ("" if whole else notes.mark(seeds, name))
            if not known[name]:
                cells.append(ours)
                continue
            paper = known[name].get(label)
            sure = [value for value in values if value is not None]
            difference = "" if paper is None or len(sure) < len(values) else f"{fmean(sure) - paper:+.2f}"
            cells += [papers(found, label, name), ours, difference]
        rows.append(cells)
    return table(headings, rows) + notes.below()


def shown_runs(found: Table, label: str, metric: str) -> list[RunDigest]:
    """The runs that stand; where there are none, the older ones."""
    runs = found.runs[label]
    return [run for run in runs if found.no_longer(run, metric) is None] or runs


def papers(found: Table, label: str, metric: str) -> str:
    """The paper's number, with its spread over seeds."""
    paper = found.part.experiment.paper
    if f"{metric}/{label}" in paper.lost:
        return "lost"
    number, deviation = found.paper.get(metric, {}).get(label), found.paper_spreads.get(metric, {}).get(label)
    if number is None:
        return ""
    return shown(number) + ("" if deviation is None else f" ±{deviation:.2f}")


def rate(seeds: Sequence[RunDigest]) -> str:
    config = seeds[0]["config"]
    return f"{config['algorithm'].get('lr', config['train']['lr']):g}"


def made(experiment: str, setting: str) -> str:
    """How the runs were made, and where their set-up differs from the experiment's."""
    found = read_table(experiment, setting)
    runs = _shown(found)
    by_command: dict[tuple[str, str], list[RunDigest]] = {}
    for run in runs:
        by_command.setdefault((run["made"]["command"], run["made"]["hardware"]), []).append(run)
    lines = []
    for (command, hardware), own in by_command.items():
        labels = "" if len(by_command) == 1 else f" ({', '.join(dict.fromkeys(run['label'] for run in own))})"
        seeds = sorted({run["seed"] for run in own})
        rounds = sorted({run["figures"]["rounds"] for run in own})
        seconds = sum(run["figures"]["train_seconds"] for run in own)
        lines.append(
            f"`{command}`{labels}; {hardware}. {'Seed' if len(seeds) == 1 else 'Seeds'} {joined(seeds)}, "
            f"{joined(rounds)} rounds of {found.part.experiment.train.rounds}; {seconds:.0f} s of training in all."
        )
    if otherwise := _otherwise(found):
        lines.append(f"Otherwise than in the experiment now (in brackets): {'; '.join(otherwise)}.")
    return "<br>\n".join(lines)


def _shown(found: Table) -> list[RunDigest]:
    """The runs that the tables show: of a method without one that counts, the others."""
    return [run for label, runs in found.runs.items() for run in found.counted.get(label) or runs]


def _otherwise(found: Table) -> list[str]:
    """What differs, and in which methods where not in all."""
    where: dict[str, list[str]] = {}
    for run in _shown(found):
        for key, values in {**set_up_changes(found.part, run), **changes(found.part, run)}.items():
            where.setdefault(f"{key} = {values}", []).append(run["label"])
    every = len(_shown(found))
    return [
        text if len(labels) == every else f"{text}: {', '.join(dict.fromkeys(labels))}"
        for text, labels in where.items()
    ]


def joined(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


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
    """Methods that count less FedAvg, by what clients hold before the server averages, in the last round."""
    found = read_table(experiment, setting)
    rows = []
    for label in LIKE_FEDAVG[experiment]:
        runs = [run for run in found.counted.get(label, ()) if found.no_longer(run, "mean") is None]
        if not runs:
            continue
        cells = [f"{label} less fedavg"]
        for name in ("mean", "worst5"):
            view = View.named(f"before_agg:{name}@last")
            assert view is not None
            fedavg = {run["seed"]: figure(run, view) for run in found.runs["fedavg"]}
            gains = [
                100 * (own - other)
                for run in runs
                if (own := figure(run, view)) is not None and (other := fedavg.get(run["seed"])) is not None
            ]
            cells += [f"{fmean(gains):+.2f}", *_beyond(gains)]
        rows.append(cells)
    return table(["before averaging, last round", *ERRORS, *(f"lowest 5 %: {name}" for name in ERRORS)], rows)


ERRORS = ("difference", "standard error", "beyond Student's t")


def _beyond(values: Sequence[float]) -> tuple[str, str]:
    if len(values) < 2:
        return "-", "one seed"
    error, needed = stdev(values) / math.sqrt(len(values)), standard_errors(len(values))
    answer = "yes" if abs(fmean(values)) > needed * error else "no"
    return f"{error:.2f}", f"{answer} ({len(values)} seeds: {needed:.2f} errors)"


BLOCKS: dict[str, Callable[[str, str], str]] = {
    "items": items,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = ("COMMAND", "HARDWARE")
    parser.add_argument("--collect", nargs=4, metavar=("FOLDER", "EXPERIMENT", *how))
    parser.add_argument("--collect-trials", nargs=5, metavar=("FOLDER", "EXPERIMENT", "SETTING", *how))
    parser.add_argument("--supersede", nargs=5, metavar=("EXPERIMENT", "SETTING", "LABELS", "MEASURES", "REASON"))
    given = parser.parse_args()
    COLLECTION.mkdir(exist_ok=True)
    if given.collect:
        folder, experiment, command, hardware = given.collect
        try:
            taken = collect(Path(folder), experiment, Made(command=command, hardware=hardware))
        except InputError as error:
            parser.error(str(error))
        print(f"taken in: {', '.join(taken) or 'nothing, no finished runs'}")
    if given.collect_trials:
        folder, experiment, setting, command, hardware = given.collect_trials
        collect_trials(Path(folder), experiment, setting, Made(command=command, hardware=hardware))
    if given.supersede:
        experiment, setting, labels, metrics, reason = given.supersede
        supersede(experiment, setting, labels.split(","), metrics, reason)
    text = PAGE.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["kind"] in WORDS:
            draw(block["kind"], block["experiment"], block["setting"])
    PAGE.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
