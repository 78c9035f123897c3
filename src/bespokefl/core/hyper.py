"""Hyper-parameters as dataclass fields that carry their meaning and range, checked before anything runs."""

import dataclasses
import inspect
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from bespokefl.core.acting import Condition
from bespokefl.core.registry import Chosen, Registry
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
    among: Registry[Any] | None = None,
) -> Any:
    """A field with its meaning (the paper's symbol first), its range (low and high belong to it), and when it acts.

    ``among`` is the list that its value names an entry of, as a name or as a table of a name with options.

    >>> from dataclasses import dataclass
    >>> from bespokefl.algorithms import FedAvg
    >>> @dataclass(frozen=True)
    ... class Mine(FedAvg):
    ...     mu: float = bfl.hyper(0.1, "mu: strength of the pull, eq. (3)", low=0)
    >>> Mine(mu=-1.0)
    Traceback (most recent call last):
    ...
    bespokefl.errors.InputError: algorithm.mu = -1.0 (fedavg): it must be a number at least 0...
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"meaning": meaning, "when": when, "among": among, **bounds})


def hyperparameters(cls: type) -> tuple[HyperParameter, ...]:
    """The hyper-parameters of an algorithm class, in order."""
    hints = get_type_hints(cls)
    return tuple(
        HyperParameter(
            f.name,
            _type_name(hints[f.name]),
            f.default,
            f.metadata.get("meaning", ""),
            _range(f.metadata, hints[f.name]),
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
        among = fields[name].metadata.get("among")
        if among is None:
            out[name] = check_value(f"algorithm.{name}", value, hints[name], fields[name].metadata, f" ({owner})")
        else:
            out[name] = choose(among, value, f"algorithm.{name}", f" ({owner})")
    return out


def check_value(key: str, value: Any, hint: Any, bounds: Mapping[str, Any], owner: str = "") -> Any:
    """The value in the hint's type; InputError if it has none of its types, or is out of bounds."""
    value = float(value) if _accepts(hint, float) and type(value) is int else value
    if get_origin(hint) is tuple and isinstance(value, list | tuple):  # a file has lists; fields are hashed
        value = tuple(float(v) if type(v) is int else v for v in value)
    numbers = value if isinstance(value, tuple) else (value,)
    if not any(_is(option, value) for option in _options(hint)) or not all(_in_range(bounds, v) for v in numbers):
        raise InputError(f"{key} = {value!r}{owner}: it must be {_range(bounds, hint) or _type_name(hint)}")
    return value


def choose(among: Registry[Any], value: Any, key: str, owner: str = "") -> str | Chosen:
    """The entry of a list that a value names, its options in their types; a plain name where none are given."""
    choice = among.chosen(value, key)
    allowed = among.options(choice.name)
    found = []
    for name, given in choice.options:
        if name not in allowed:
            what = f"an option of {choice.name!r}{owner}" + among.why_no_option(choice.name, name)
            raise unknown_name(f"{key}.{name}", given, allowed, what=what, seen=name)
        option = allowed[name]
        found.append((name, check_value(f"{key}.{name}", given, option.hint, option.bounds, owner)))
    lacking = [name for name, option in allowed.items() if option.needed and name not in dict(found)]
    if lacking:
        raise InputError(
            f"{key} = {choice}{owner} needs {' and '.join(lacking)}: {{name = '{choice.name}', {lacking[0]} = ...}}"
        )
    return Chosen(choice.name, tuple(found)) if found else choice.name


def refuse_code(cls: type, values: Mapping[str, Any], why: str) -> None:
    """InputError for a hyper-parameter that names code which is not ours, before anything of it is imported."""
    for field in dataclasses.fields(cls):
        among, value = field.metadata.get("among"), values.get(field.name)
        if among is None or value is None:
            continue
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", value)
        if not isinstance(name, str) or name not in among:
            seen = f"algorithm.{field.name} = {str(name)[:60]!r}"
            raise InputError(f"{seen} is not one of ours ({', '.join(among)}), and {why}")


def _in_range(bounds: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high, above, below = (bounds.get(k) for k in ("low", "high", "above", "below"))
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
    if option in (Any, inspect.Parameter.empty):
        return True
    if get_origin(option) in (Union, UnionType):
        return any(_is(one, value) for one in get_args(option))
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


_WORDS = {
    NoneType: "nothing",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a name",
    Chosen: "a table",
}


def _type_name(hint: Any) -> str:
    names = []
    for option in _options(hint):
        if option is Tensor:  # in the place of a number that differs between the clients of a stack
            continue
        if get_origin(option) is Literal:
            names += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            names.append(f"a list of {len(get_args(option))} numbers")
        else:
            names.append(_WORDS.get(option, str(option)))
    return " or ".join(names)


def _range(bounds: Mapping[str, Any], hint: Any) -> str:
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    parts = [f"{text} {bounds[k]:g}" for k, text in words.items() if bounds.get(k) is not None]
    each = ", each" if get_origin(hint) is tuple else ""
    return f"{_type_name(hint)}{each} {' and '.join(parts)}" if parts else ""
