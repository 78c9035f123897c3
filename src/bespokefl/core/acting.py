"""Under which other hyper-parameters a hyper-parameter acts, so that one that changes nothing is known by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bespokefl.core.registry import Chosen

Values = Mapping[str, Any]


class Needed(NamedTuple):
    """A hyper-parameter has one of some values or, if ``not_these``, none of them."""

    name: str
    values: tuple[Any, ...]
    not_these: bool = False

    def holds(self, given: Values) -> bool:
        value = given[self.name]
        return ((value.name if isinstance(value, Chosen) else value) in self.values) != self.not_these

    def __str__(self) -> str:
        link = " other than " if self.not_these else " = "
        return f"{self.name}{link}{' or '.join(map(in_words, self.values))}"


@dataclass(frozen=True)
class Condition:
    """When a hyper-parameter acts: if all that one of the ``ways`` needs is given. Conditions join by & and |."""

    ways: tuple[tuple[Needed, ...], ...]
    never: str = ""  # without any way: why

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(tuple(a + b for a in self.ways for b in other.ways), self.never or other.never)

    def __or__(self, other: "Condition") -> "Condition":
        return Condition(self.ways + other.ways, self.never and other.never)

    @property
    def names(self) -> set[str]:
        """The hyper-parameters that it depends on."""
        return {needed.name for way in self.ways for needed in way}

    def why_not(self, given: Values) -> str:
        """Why the hyper-parameter changes nothing; empty if it acts."""
        if any(all(needed.holds(given) for needed in way) for way in self.ways):
            return ""
        if not self.ways:
            return self.never
        lacking = [[needed for needed in way if not needed.holds(given)] for way in self.ways]
        lacking = [way for way in lacking if len(way) == min(map(len, lacking))]
        wanted = ", or with ".join(dict.fromkeys(" and ".join(map(str, way)) for way in lacking))
        names = dict.fromkeys(needed.name for way in lacking for needed in way)
        return f"it acts only with {wanted}; here {' and '.join(f'{n} is {in_words(given[n])}' for n in names)}"


ALWAYS = Condition(((),))


def when(**others: Any) -> Condition:
    """It acts while each of these hyper-parameters has the given value, or one of a tuple's."""
    return Condition((tuple(Needed(name, _several(value)) for name, value in others.items()),))


def unless(**others: Any) -> Condition:
    """It acts while none of these hyper-parameters has the given value, or one of a tuple's."""
    return Condition((tuple(Needed(name, _several(value), not_these=True) for name, value in others.items()),))


def never(why: str) -> Condition:
    """An inherited hyper-parameter that the method does not use at all."""
    return Condition((), why)


def conditions(cls: type) -> dict[str, Condition]:
    """By name, those of a class's hyper-parameters that do not always act.

    What the fields and ``acts`` of the class and of its bases say must all hold; ALWAYS in a class lifts what its bases
    say.
    """
    found: dict[str, Condition] = {}
    for base in reversed(cls.__mro__):
        declared = vars(base).get("__dataclass_fields__", {})
        own = {k: declared[k].metadata.get("when") for k in vars(base).get("__annotations__", {}) if k in declared}
        for name, condition in (*own.items(), *vars(base).get("acts", {}).items()):
            if condition is not None:
                found[name] = ALWAYS if condition is ALWAYS else found.get(name, ALWAYS) & condition
    return {name: condition for name, condition in found.items() if condition != ALWAYS}


def unused(cls: type, given: Values) -> dict[str, str]:
    """The hyper-parameters that change nothing beside the given values (of all of them), each with the reason."""
    told = {name: condition.why_not(given) for name, condition in conditions(cls).items()}
    return {name: why for name, why in told.items() if why}


def in_words(value: Any) -> str:
    """A value as an experiment file has it."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, Chosen) else repr(value)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
