"""Lists that anybody can add to: names of ours, names of installed packages, and ``module:name`` for one's own.

A package adds to a list by an entry point of the group ``bespokefl.<kind>`` (``bespokefl.optimizers``, ...). Nothing of
an installed package is imported before its name is asked for, or all names are listed.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from bespokefl.errors import InputError, nearest, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """A name of a list with options of its own: ``{name = "mine:Lion", beta = 0.9}`` in an experiment file."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Chosen") -> "Chosen":
        """From a name, or a table with a name."""
        if isinstance(value, Chosen):
            return value
        if isinstance(value, str):
            return cls(value)
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items() if key != "name"}
        return cls(value["name"], tuple(sorted(options.items())))

    def plain(self) -> "str | dict[str, Any]":
        """As an experiment file has it."""
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in self.options}
        return {"name": self.name, **listed} if listed else self.name

    def __str__(self) -> str:
        return repr(self.plain())


class Option(NamedTuple):
    """What an entry can be told: an argument of its own."""

    default: Any
    hint: Any  # its type
    bounds: Mapping[str, Any]  # and the range and meaning that `hyper` gives it

    @property
    def needed(self) -> bool:
        return self.default is inspect.Parameter.empty


def options_of(function: Callable[..., Any], given: int) -> dict[str, Option]:
    """The arguments of a function or a dataclass behind the first ``given``, which it gets from us."""
    bounds = {f.name: f.metadata for f in dataclasses.fields(function)} if dataclasses.is_dataclass(function) else {}
    hints = get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_KEYWORD,)]
    return {p.name: Option(p.default, hints.get(p.name, Any), bounds.get(p.name, {})) for p in parameters[given:]}


class Registry(Mapping[str, T], Generic[T]):
    """What there is of a kind, by name. As a mapping it holds ours alone; ``find`` knows the others' too.

    Args:
        kind: of what, in the plural: the entry points' group is ``bespokefl.<kind>``.
        key: of the experiment file that names one, for messages.
        ours: by name.
        adopt: makes an entry of what somebody else's name leads to; None if it is not ``wanted``.
        wanted: what that has to be, in words.
        options: what an entry can be told.
        beside: of some of ours, options that stand beside the name in the experiment file, not with it.
    """

    def __init__(
        self,
        kind: str,
        key: str,
        ours: Mapping[str, T],
        adopt: Callable[[str, Any], T | None],
        wanted: str,
        options: Callable[[T], Mapping[str, Option]] = lambda entry: {},
        beside: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.kind, self.key, self._ours, self._adopt, self._wanted = kind, key, dict(ours), adopt, wanted
        self._options, self.beside = options, beside or {}

    def __getitem__(self, name: str) -> T:
        return self._ours[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ours)

    def __len__(self) -> int:
        return len(self._ours)

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """What installed packages add; one of our names stays ours."""
        found = entry_points(group=f"bespokefl.{self.kind}")
        return {point.name: point for point in sorted(found) if point.name not in self._ours}

    def from_outside(self, name: object) -> bool:
        """Whether a name is somebody else's, installed or ``module:name``."""
        return isinstance(name, str) and name not in self._ours and (":" in name or name in self.installed)

    def find(self, name: str, key: str = "") -> T:
        """The entry of a name, or what ``module:name`` leads to; InputError says what is wrong with it."""
        return self._ours[name] if name in self._ours else self._outside(name, key or self.key)

    def chosen(self, value: Any, key: str) -> Chosen:
        """What a name, or a table with a name and options, chooses; the options are not looked at."""
        named = isinstance(value, Mapping) and isinstance(value.get("name"), str)
        if not named and not isinstance(value, str | Chosen):
            raise InputError(f"{key} = {value!r}: it must be a name, or a table of a name and its options")
        choice = Chosen.of(value)
        self.find(choice.name, key)
        return choice

    def options(self, name: str) -> dict[str, Option]:
        """What may stand in a table beside the name."""
        return {k: v for k, v in self.every_option(name).items() if k not in self.beside.get(name, ())}

    def every_option(self, name: str) -> dict[str, Option]:
        """The same, and what stands beside that table."""
        return dict(self._options(self.find(name)))

    def why_no_option(self, name: str, option: str) -> str:
        """What stands behind the refusal of an option that is not the entry's; empty if there is nothing to say."""
        return f": it stands beside {self.key.rpartition('.')[2]}" if option in self.beside.get(name, ()) else ""

    def every(self) -> dict[str, T]:
        """Ours, and all that is installed."""
        return {name: self.find(name) for name in (*self, *self.installed)}

    def _outside(self, name: str, key: str) -> T:
        if ":" in name:
            value, leads = imported(name, key, self._wanted), ""
        elif name in self.installed:
            point = self.installed[name]
            leads = f" (of the installed package {point.dist.name if point.dist else '?'}: {point.value})"
            try:
                value = point.load()
            except Exception as error:
                raise InputError(f"{key} = {name!r}{leads} cannot be imported: {told(error)}") from error
        else:
            known = (*self._ours, *self.installed)
            raise unknown_name(key, name, known, what="known, nor your own as 'package.module:name'", seen=name)
        entry = self._adopt(name, value)
        if entry is None:
            raise InputError(f"{key} = {name!r}{leads} is {_what(value)}, not {self._wanted}")
        return entry


def imported(name: str, key: str, wanted: str) -> Any:
    """What ``module:name`` leads to; modules of the current folder count for the command line."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f"{key} = {name!r} cannot be imported: importing {module_name!r} failed: {told(error)}; the module must be "
            "installed, or its folder listed in PYTHONPATH"
        ) from error
    if not attribute or not hasattr(module, attribute):
        near = nearest(attribute, [known for known in vars(module) if not known.startswith("_")])
        raise InputError(
            f"{key} = {name!r} cannot be imported: {module_name!r} has no {attribute!r}; it must be {wanted}.{near}"
        )
    return getattr(module, attribute)


def plain(value: Any) -> Any:
    """A hyper-parameter's value as an experiment file has it."""
    return value.plain() if isinstance(value, Chosen) else list(value) if isinstance(value, tuple) else value


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _what(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
