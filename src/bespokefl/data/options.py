"""Options of sources and partitions: frozen dataclasses, filled from plain keys with messages a user can act on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from bespokefl.errors import InputError, nearest, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class NoOptions:
    """For a source or partition without options."""


def option_names(options: type[Any]) -> tuple[str, ...]:
    """The option keys that a source or partition declares."""
    return tuple(field.name for field in fields(options))


def unknown_option(key: str, value: object, owner: str, allowed: Iterable[str]) -> InputError:
    """The error for an option that `owner` does not have; suggests the nearest ones."""
    return InputError(f"data.{key} = {value!r}: this option is not one of {owner}.{nearest(key, allowed)}")


def lookup(key: str, name: str, registry: Mapping[str, T]) -> T:
    """The registry's entry of that name, or an error that suggests the nearest names."""
    if name not in registry:
        raise unknown_name(key, name, registry)
    return registry[name]


def parse_options(options: type[T], given: Mapping[str, object], owner: str) -> T:
    """Fill an options dataclass; `owner` says in messages whose options they are."""
    for key in given:
        if key not in option_names(options):
            raise unknown_option(key, given[key], owner, option_names(options))
    try:
        return TypeAdapter(options).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        raise InputError(f"data.{key} = {first['input']!r} ({owner}): {first['msg']}.") from None
