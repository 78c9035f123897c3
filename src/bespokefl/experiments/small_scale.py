"""`--scale small`: an experiment on data of the package, in minutes on two cores.

What a table is about stays the experiment's: the kind of partition, participation, methods and their hyper-parameters,
local epochs, attacks, metrics. A small set-up, a file of reproduce/small, has the rest: data, network, batches, and, in
its file of reproduce/small/tuned, the rounds and a learning rate for every method, chosen on these very data. The
[small] table of an experiment names its set-up and goes on top, as does that of a setting.
"""

import fnmatch
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from bespokefl.errors import InputError, unknown_name
from bespokefl.experiments.overrides import overlaid
from bespokefl.experiments.schema import Document

Scale = Literal["paper", "small"]

_SECTIONS = ("seeds", "data", "model", "train", "eval")
SET_UP = "set_up"  # the key of [small] that names one
FEWEST_CLIENTS, FEWEST_A_ROUND = 20, 5
# Of [data], what says how clients differ; the rest belongs to the data set.
_KEPT_OF_DATA = ("partition", "alpha", "labels_per_client", "variant", "test", "val")


@dataclass(frozen=True)
class SetUp:
    """A small set-up."""

    name: str
    partitions: tuple[str, ...]  # of experiments that name no set-up
    changes: Document  # what it puts in the place of the experiment's
    uncomparable: tuple[str, ...]  # patterns of metrics of which it cannot carry the ordering
    target: float | None = None  # in the place of the experiment's eval.target
    rates: Mapping[str, float] | None = None  # by method

    def carries(self, metric: str) -> bool:
        """Whether the ordering of methods by this metric means something here."""
        return not any(fnmatch.fnmatchcase(metric, pattern) for pattern in self.uncomparable)


def set_ups() -> tuple[str, ...]:
    """The names of all."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _files().iterdir() if entry.is_file()))


@lru_cache
def read_set_up(name: str) -> SetUp:
    """A set-up by name, with what was chosen on its data."""
    if name not in set_ups():
        raise unknown_name(f"small.{SET_UP}", name, set_ups())
    table = tomllib.loads((_files() / f"{name}.toml").read_text(encoding="utf-8"))
    chosen_file = _files() / "tuned" / f"{name}.toml"
    chosen = tomllib.loads(chosen_file.read_text(encoding="utf-8")) if chosen_file.is_file() else {}
    changes: Document = {key: table[key] for key in _SECTIONS if key in table}
    return SetUp(
        name,
        tuple(table["partitions"]),
        overlaid(changes, {"train": chosen["train"]}) if chosen else changes,
        tuple(table["uncomparable"]),
        chosen.get("target"),
        chosen.get("rates"),
    )


def _files() -> Any:
    return resources.files("bespokefl") / "reproduce" / "small"


def chosen_set_up(document: Mapping[str, Any], small: Sequence[Mapping[str, Any]]) -> SetUp:
    """The one that the last of the [small] tables names, else the one for the experiment's partition."""
    if named := [table[SET_UP] for table in small if SET_UP in table]:
        return read_set_up(str(named[-1]))
    partition = document.get("data", {}).get("partition", "dirichlet")
    found = [name for name in set_ups() if partition in read_set_up(name).partitions]
    if not found:
        raise InputError(
            f"data.partition = {partition!r}: no small set-up is made for it. Name one in the experiment's [small] "
            f"table, {SET_UP} = NAME: {', '.join(set_ups())}."
        )
    return read_set_up(found[0])


def at_small_scale(document: Mapping[str, Any], small: Sequence[Mapping[str, Any]]) -> Document:
    """The experiment at the small scale; ``small`` are the [small] tables of the file and of the setting, in order."""
    set_up = chosen_set_up(document, small)
    data = {key: value for key, value in document.get("data", {}).items() if key in _KEPT_OF_DATA}
    emptied = {**document, "data": data, "model": {}}
    if "target" in emptied.get("eval", {}):
        emptied = overlaid(emptied, {"eval": {"target": set_up.target}})
    out = _with_rates(overlaid(emptied, set_up.changes), set_up.rates or {}, wins=True)
    for table in small:
        out = overlaid(out, {key: value for key, value in table.items() if key != SET_UP})
    out = _with_rates(out, set_up.rates or {}, wins=False)  # of methods that [small] lists
    if "clients" not in out["data"] and out["data"].get("partition") != "domain":
        participation = out.get("train", {}).get("participation", 1.0)
        out["data"]["clients"] = max(FEWEST_CLIENTS, math.ceil(FEWEST_A_ROUND / participation - 1e-9))
    return out


def _with_rates(document: Document, rates: Mapping[str, float], *, wins: bool) -> Document:
    """Every method with its own rate; one that has none here gets that of [train], never that of other data."""

    def tuned(entry: Any) -> Any:
        method: Document = {"name": entry} if isinstance(entry, str) else dict(entry)
        if wins:
            method.pop("lr", None)
        own = {"lr": rates[method["name"]]} if method.get("name") in rates else {}
        return own | method

    out = dict(document)
    if isinstance(out.get("algorithms"), list):
        out["algorithms"] = [tuned(entry) for entry in out["algorithms"]]
    if isinstance(out.get("algorithm"), Mapping):
        shared = {key: value for key, value in out["algorithm"].items() if key != "lr" or not wins}
        out["algorithm"] = tuned(shared) if "name" in shared else shared
    return out
