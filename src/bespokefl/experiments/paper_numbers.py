"""What the papers print: the numbers of their tables, shipped with the package, as an experiment's ``[paper]``.

``numbers_from = "pgfed.table1"`` fills numbers, spreads, lost cells and the notes on them for a setting of that name.
The tables, and how their files are written: papers/README.md.
"""

import fnmatch
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from bespokefl.errors import unknown_name
from bespokefl.experiments.schema import Contradiction, PaperSection

FOLDER = files("bespokefl.reproduce") / "papers"
NOT_FILLED = {"speed_up": "the slowest method's rounds to the target over this one's: it follows from those"}


class Place(NamedTuple):
    """A row of a table."""

    setting: str
    row: str


class Printed(NamedTuple):
    """A number of a table."""

    metric: str  # as an experiment names it
    key: str  # as the paper's file does
    value: float  # nan: printed, but lost
    spread: float | None


def paper_names() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


@cache
def read_paper(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def table_names(name: str) -> list[str]:
    return [key for key in read_paper(name) if key.startswith("table")]


def settings_of(table: Mapping[str, Any]) -> list[str]:
    return [key for key, entry in table.items() if isinstance(entry, Mapping)]


def printed(document: Mapping[str, Any], table: str, place: Place) -> Iterator[Printed]:
    """The numbers of a row; those of single clients one by one, by the clients' names."""
    for key, entry in document[table][place.setting][place.row].items():
        if key == "clients" or key.endswith("_clients"):
            column = key.removesuffix("clients").rstrip("_")
            names = document["clients"][place.setting]
            for number, (client, one) in enumerate(zip(names, entry, strict=True)):
                metric = f"client:{client}:{column}" if column else f"client:{client}"
                yield Printed(metric, f"{key}[{number}]", *_value_and_spread(one))
        else:
            yield Printed(key, key, *_value_and_spread(entry))


def _value_and_spread(entry: float | list[float]) -> tuple[float, float | None]:
    value, spread = entry if isinstance(entry, list) else (entry, math.nan)
    return float(value), None if math.isnan(spread) else float(spread)


def with_printed(paper: PaperSection, setting: str, labels: Sequence[str]) -> PaperSection:
    """The section with the numbers of the table that it names, for a setting's labels; what it gives itself wins."""
    if not paper.numbers_from:
        return paper
    document, name, own = _find(paper, setting)
    table = document[name]
    by_label = {label: place for label in labels if (place := _place(paper, table, own, label))}
    over_clients = "clients" in table.get("spread", "")
    numbers: dict[str, dict[str, float]] = {}
    spreads: dict[str, dict[str, float]] = {}
    lost: list[str] = []
    for label, place in by_label.items():
        for cell in printed(document, name, place):
            if cell.metric in NOT_FILLED:
                continue
            if math.isnan(cell.value):
                lost.append(f"{cell.metric}/{label}")
            else:
                numbers.setdefault(cell.metric, {})[label] = cell.value
            if cell.spread is not None:
                spreads.setdefault(cell.metric, {})[label] = cell.spread
                if over_clients:
                    numbers.setdefault(f"{cell.metric}_std", {})[label] = cell.spread
    notes = _notes(document, name, setting, by_label)
    filled = {
        "numbers": {key: numbers.get(key, {}) | paper.numbers.get(key, {}) for key in numbers | paper.numbers},
        "spreads": {key: spreads.get(key, {}) | paper.spreads.get(key, {}) for key in spreads | paper.spreads},
        "spread_of": "clients" if over_clients else "seeds",
        "lost": list(dict.fromkeys([*paper.lost, *lost])),
        "unit": "fraction" if table["unit"] == "fraction" else "percent",
        "contradictions": merged([*paper.contradictions, *notes]),
        "remarks": list(dict.fromkeys([*paper.remarks, *_remarks(document, name)])),
    }
    return paper.model_copy(update=filled)


def _find(paper: PaperSection, setting: str) -> tuple[Mapping[str, Any], str, str]:
    """The paper's file, the table, and the setting in it: the one that is named, or the experiment's own."""
    name, _, rest = paper.numbers_from.partition(".")
    if name not in paper_names():
        known = [f"{one}.{table}" for one in paper_names() for table in table_names(one)]
        raise unknown_name("paper.numbers_from", paper.numbers_from, known)
    document = read_paper(name)
    table, _, named = rest.partition(".")
    if table not in table_names(name):
        raise unknown_name("paper.numbers_from", paper.numbers_from, [f"{name}.{one}" for one in table_names(name)])
    known = settings_of(document[table])
    own = named or setting
    if own not in known and (named or not paper.rows):
        seen = paper.numbers_from if named else f"{paper.numbers_from}.{setting}".rstrip(".")
        raise unknown_name("paper.numbers_from", seen, [f"{name}.{table}.{one}" for one in known])
    return document, table, own


def _place(paper: PaperSection, table: Mapping[str, Any], setting: str, label: str) -> Place | None:
    """Where the paper has this label's numbers; None: nowhere."""
    named = paper.rows.get(label)
    first, slash, second = (named or label).partition("/")
    place = Place(first, second) if slash else Place(setting, first)
    if place.row in table.get(place.setting, {}):
        return place
    if named is not None:
        rows = [f"{one}/{row}" for one in settings_of(table) for row in table[one]]
        raise unknown_name(f"paper.rows.{label}", named, rows)
    return None


def _notes(
    document: Mapping[str, Any], table: str, setting: str, by_label: Mapping[str, Place]
) -> Iterator[Contradiction]:
    """The notes on rows and cells of the table, with the labels of the experiment in their places."""
    for note in document["note"]:
        where = []
        for path in _paths(note["where"]):
            for label, place in by_label.items():
                row = f"{table}.{place.setting}.{place.row}"
                if path == f"{table}.{place.setting}" or _matches(row, path):
                    where.append(_cell(setting, label, "*"))
                else:
                    cells = printed(document, table, place)
                    where += [_cell(setting, label, c.metric) for c in cells if _matches(f"{row}.{c.key}", path)]
        if where:
            yield Contradiction(where=list(dict.fromkeys(where)), says=note["says"])


def _remarks(document: Mapping[str, Any], table: str) -> list[str]:
    """The notes on the whole table."""
    return [note["says"] for note in document["note"] if table in _paths(note["where"])]


def _paths(where: str) -> list[str]:
    """The places of a note; one that starts with a dot differs from the place before it in its last name only."""
    paths: list[str] = []
    for text in where.split(", "):
        paths.append(paths[-1].rpartition(".")[0] + text if text.startswith(".") else text)
    return paths


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))


def _cell(setting: str, label: str, metric: str) -> str:
    return "/".join(text for text in (setting, label, metric) if text)


def merged(contradictions: Iterable[Contradiction]) -> list[Contradiction]:
    """Those that say the same become one, with all their places."""
    places: dict[str, list[str]] = {}
    for one in contradictions:
        places.setdefault(one.says, []).extend(one.places)
    return [Contradiction(where=list(dict.fromkeys(where)), says=says) for says, where in places.items()]
