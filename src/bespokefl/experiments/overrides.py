"""Laying one configuration over another: what the command line, a setting or a scale changes in a document."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from bespokefl.data import PARTITIONS, SOURCES
from bespokefl.data.options import lookup, option_names
from bespokefl.errors import InputError
from bespokefl.experiments.schema import DataSection, Document, ModelSection, Section
from bespokefl.models import MODELS

Setting = tuple[str, Any]  # a dotted key and its value, as given by --set


def with_settings(document: Mapping[str, Any], settings: Sequence[Setting]) -> Document:
    """A copy with the settings of the command line; a value replaces what stood at its key."""
    out: Document = copy.deepcopy(dict(document))
    _make_room(out, dict(settings))
    for key, value in settings:
        *path, last = key.split(".")
        table = out
        for depth, part in enumerate(path, start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InputError(f"{'.'.join(path[:depth])} is not a table, so {key} cannot be set in it.")
        table[last] = value
    return out


def overlaid(document: Mapping[str, Any], over: Mapping[str, Any]) -> Document:
    """A copy with another document on top, table by table; None takes a key away."""
    out: Document = copy.deepcopy(dict(document))
    _make_room(out, {f"{name}.{key}": v for name, table in over.items() for key, v in _items(table)} | dict(over))
    _merge(out, over, "")
    return out


def _merge(out: Document, over: Mapping[str, Any], path: str) -> None:
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping) and path and "name" in value:  # a choice with its options, chosen anew
            out[key] = copy.deepcopy(dict(value))
        elif isinstance(value, Mapping):
            below = out.setdefault(key, {})
            if not isinstance(below, dict):
                raise InputError(f"{path}{key} = {below!r} is not a table, so {dict(value)!r} cannot be set in it.")
            _merge(below, value, f"{path}{key}.")
        else:
            out[key] = copy.deepcopy(value)


def _items(table: Any) -> Any:
    return table.items() if isinstance(table, Mapping) else ()


def _make_room(out: Document, chosen: Mapping[str, Any]) -> None:
    """What is chosen anew does not take over the options of the choice before it."""
    if "algorithms" in chosen:
        out.pop("algorithm", None)
    if "algorithm.name" in chosen:
        out.pop("algorithms", None)
        given = out.get("algorithm")
        if not isinstance(given, dict) or given.get("name") != chosen["algorithm.name"]:
            out["algorithm"] = {}
    for name, kind, choices in (("data", DataSection, ("source", "partition")), ("model", ModelSection, ("name",))):
        anew = {key: chosen[f"{name}.{key}"] for key in choices if f"{name}.{key}" in chosen}
        if anew and isinstance(given := out.get(name), dict):
            gone = set(options_of(kind, given)) - set(options_of(kind, given | anew))
            out[name] = {key: value for key, value in given.items() if key not in gone}


def options_of(kind: type[Section], given: Mapping[str, Any]) -> list[str]:
    """The options of the chosen source and partition, or of the chosen model."""
    if kind is DataSection:
        section = DataSection()
        source = lookup("data.source", given.get("source", section.source), SOURCES)
        partition = lookup("data.partition", given.get("partition", section.partition), PARTITIONS)
        return [*option_names(source.options), *option_names(partition.options)]
    if kind is ModelSection:
        spec = MODELS.get(given.get("name", ModelSection().name))
        return list(spec.options) if spec else []
    return []
