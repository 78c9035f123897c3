"""Hyper-parameters as dataclass fields that carry their meaning and range, checked before anything runs."""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from bespokefl.core.acting import Condition
from bespokefl.errors import InputError, unknown_name


class HyperParameter(NamedTuple):
    name: str
    type: str
    default: Any
    meaning: str  # the paper's symbol and equation
    allowed: str  # the range in words, empty if any value of the type will do


def hyper(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    when: Condition | None = None,
) -> Any:
    """A field with its meaning (the paper's symbol first), its range (low and high belong to it), and when it acts."""
    bounds = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"meaning": meaning, "when": when, **bounds})


def hyperparameters(cls: type) -> tuple[HyperParameter, ...]:
    """The hyper-parameters of an algorithm class, in order."""
    hints = get_type_hints(cls)
    return tuple(
        HyperParameter(
            f.name, _type_name(hints[f.name]), f.default, f.metadata.get("meaning", ""), _range(f, hints[f.name])
        )
        for f in dataclasses.fields(cls)
    )


def checked(cls: type, values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The values in the fields' types; InputError names the first that is unknown, ill-typed or out of range."""
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown_name(f"algorithm.{name}", value, fields, what=f"a hyper-parameter of {owner}", seen=name)
        out[name] = _checked(fields[name], hints[name], value, owner)
    return out


def _checked(field: "dataclasses.Field[Any]", hint: Any, value: Any, owner: str) -> Any:
    value = float(value) if _accepts(hint, float) and type(value) is int else value
    if get_origin(hint) is tuple and isinstance(value, list | tuple):  # a file has lists; fields are hashed
        value = tuple(float(v) if type(v) is int else v for v in value)
    numbers = value if isinstance(value, tuple) else (value,)
    if not any(_is(option, value) for option in _options(hint)) or not all(_in_range(field, v) for v in numbers):
        allowed = _range(field, hint) or _type_name(hint)
        raise InputError(f"algorithm.{field.name} = {value!r} ({owner}): it must be {allowed}")
    return value


def _in_range(field: "dataclasses.Field[Any]", value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high, above, below = (field.metadata.get(k) for k in ("low", "high", "above", "below"))
    return (
        value == value  # not NaN
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _accepts(hint: Any, kind: type) -> bool:
    return kind in _options(hint)


def _is(option: Any, value: Any) -> bool:
    if get_origin(option) is Literal:
        return value in get_args(option)
    if get_origin(option) is tuple:
        parts = get_args(option)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_is, parts, value))
    if option is NoneType or option is None:
        return value is None
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(option, type) and isinstance(value, option)


_WORDS = {NoneType: "nothing", int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


def _type_name(hint: Any) -> str:
    names = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            names += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            names.append(f"a list of {len(get_args(option))} numbers")
        else:
            names.append(_WORDS.get(option, str(option)))
    return " or ".join(names)


def _range(field: "dataclasses.Field[Any]", hint: Any) -> str:
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    parts = [f"{text} {field.metadata[k]:g}" for k, text in words.items() if field.metadata.get(k) is not None]
    each = ", each" if get_origin(hint) is tuple else ""
    return f"{_type_name(hint)}{each} {' and '.join(parts)}" if parts else ""
