"""The first table of docs/reproduction.md: what every item of the papers comes to, from its stored runs."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from docs.stored_runs import EXPERIMENTS, WHOLE, Table, changes, parts, read_table, set_up_changes

from bespokefl.experiments.paper_numbers import paper_names, read_paper
from bespokefl.reproduce.block import cells_text, mean_difference_text, outside_text, pairs_text, tau_text
from bespokefl.reproduce.digest import RunDigest
from bespokefl.reproduce.verdict import Tally, total

ITEM = re.compile(r"(?P<paper>[a-z]+)-(supp-)?(table|figure|supplement)\d*\w*")  # of a paper, as it numbers them
NOT_RUN = "not run"
MOST_KEYS = 4  # that are named
HEADINGS = (
    "item",
    "cells",
    "mean \\|difference\\|",
    "outside both spreads",
    "tau",
    "pairs",
    "rounds",
    "seeds (degrees of freedom)",
    "verdict",
    "otherwise than in the experiment",
)


class Item(NamedTuple):
    """A table or figure of a paper, with all its settings."""

    name: str
    settings: tuple[Table, ...]

    @property
    def tally(self) -> Tally:
        """Of all settings; those that were not run have the paper's numbers and none of ours."""
        return total(column.tally for setting in self.settings for column in setting.columns)

    @property
    def current(self) -> list[tuple[Table, RunDigest]]:
        """The runs that count, in some measure of the paper's."""
        return [
            (setting, run)
            for setting in self.settings
            for runs in setting.counted.values()
            for run in runs
            if any(setting.no_longer(run, metric) is None for metric in setting.part.experiment.paper.metrics)
        ]


def item_names() -> list[str]:
    """The experiments that are an item of one of the papers, in their order."""
    papers = paper_names()
    names = [path.stem for path in EXPERIMENTS.glob("*.toml")]
    return sorted(
        (name for name in names if (found := ITEM.fullmatch(name)) and found["paper"] in papers), key=_natural
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """table9 before table10, tables before figures."""
    texts = re.split(r"(\d+)", name.replace("-table", "-1table").replace("-figure", "-2figure"))
    return [(int(text), "") if text.isdigit() else (0, text) for text in texts]


def read_item(name: str) -> Item:
    return Item(name, tuple(read_table(name, part.name or WHOLE) for part in parts(name)))


def items_table(names: Sequence[str] | None = None) -> list[list[str]]:
    """A row for each item."""
    return [row(read_item(name)) for name in (item_names() if names is None else names)]


def row(item: Item) -> list[str]:
    found, runs = item.tally, item.current
    link = f"[{item.name}](../experiments/{item.name}.toml)"
    if not runs:
        return [link, cells_text(found) if found.printed else "-", *["-"] * 6, NOT_RUN, _otherwise(item)]
    return [
        link,
        cells_text(found) if found.printed else "no numbers",
        mean_difference_text(found),
        outside_text(found),
        tau_text(found),
        pairs_text(found),
        rounds_text(item),
        seeds_text(item),
        _verdict(item),
        _otherwise(item),
    ]


def _verdict(item: Item) -> str:
    found = item.tally
    if not found.printed:
        return "nothing to compare"
    fewer = any(run["figures"]["rounds"] < table.part.experiment.train.rounds for table, run in item.current)
    older = any(changes(table.part, run) for table, run in item.current)
    aside = ", ".join(["older settings"] * older + ["fewer rounds"] * fewer)
    return found.verdict.answer + (f" ({aside})" if aside else "")


def _seeds(item: Item) -> dict[tuple[str, str], set[int]]:
    """By setting and label."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for setting, run in item.current:
        seeds.setdefault((setting.part.name, run["label"]), set()).add(run["seed"])
    return seeds


def rounds_text(item: Item) -> str:
    """Rounds run of the experiment's rounds, which are the paper's where it states them."""
    run = dict.fromkeys((run["figures"]["rounds"], t.part.experiment.train.rounds) for t, run in item.current)
    stated = "" if _states_rounds(item.name) else " (the paper does not say)"
    return ", ".join(f"{rounds} of {wanted}" for rounds, wanted in run) + stated


def seeds_text(item: Item) -> str:
    """How many seeds the methods have, the fewest first, and the degrees of freedom of their differences' errors."""
    counts = sorted({len(seeds) for seeds in _seeds(item).values()})
    return f"{'/'.join(map(str, counts))} ({'/'.join(str(count - 1) for count in counts)})"


def _states_rounds(item: str) -> bool:
    return "rounds" not in read_paper(item.partition("-")[0])["setup"].get("not_stated", ())


def _otherwise(item: Item) -> str:
    """The keys that differ in the runs that count, and the rows that do not."""
    keys = [key for table, run in item.current for key in [*set_up_changes(table.part, run), *changes(table.part, run)]]
    standing = _seeds(item).keys()
    left = [label for setting in item.settings for label in setting.runs if (setting.part.name, label) not in standing]
    known = list(dict.fromkeys(keys))
    texts = [f"`{key}`" for key in known] if len(known) <= MOST_KEYS else [f"{len(known)} keys"]
    return ", ".join([*texts, *([f"left out: {_joined(left)}"] if left else [])])


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
