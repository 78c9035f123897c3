"""What is tuned: for each method the hyper-parameters that [tune] names, with values to try or a range."""

import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pydantic import ValidationError

from bespokefl.core.acting import conditions
from bespokefl.core.hyper import checked
from bespokefl.core.rng import stream
from bespokefl.errors import InputError, unknown_name
from bespokefl.experiments.resolve import OF_THE_RUN, make_algorithm
from bespokefl.experiments.schema import AlgorithmChoice, Document, Experiment, Section, TrainSection

Value = bool | int | float | str
Parameters = dict[str, Value]  # by key, such as "train.lr"

TRIALS_OF_A_RANGE = 20
CLOSE = 0.05  # share of a range that counts as its edge
LOCAL_TRAINING = tuple(key for key in TrainSection.model_fields if key not in OF_THE_RUN)


class Bounds(NamedTuple):
    """The least and the greatest value that the hyper-parameter may have at all."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Choices:
    """Some values to try."""

    where: str  # the key in the file
    values: tuple[Value, ...]
    bounds: Bounds

    def __contains__(self, value: object) -> bool:
        return any(type(own) is type(value) and own == value for own in self.values)

    @property
    def examples(self) -> tuple[Value, ...]:
        """What must be valid."""
        return self.values

    def edge(self, value: Value) -> str | None:
        """``lower`` or ``upper`` where better values may lie beyond; None also where there are none beyond."""
        numbers = [own for own in self.values if isinstance(own, int | float) and not isinstance(own, bool)]
        if len(numbers) < max(2, len(self.values)):
            return None
        if value == min(numbers) != self.bounds.low:
            return "lower"
        return "upper" if value == max(numbers) != self.bounds.high else None


@dataclass(frozen=True)
class Range:
    """All values from low to high; whole numbers where both are."""

    where: str
    low: int | float
    high: int | float
    log: bool
    bounds: Bounds

    def __contains__(self, value: object) -> bool:
        return type(value) is type(self.low) and self.low <= value <= self.high

    @property
    def examples(self) -> tuple[Value, ...]:
        return self.low, self.high

    def edge(self, value: Value) -> str | None:
        scale = math.log if self.log else float
        low, high, place = scale(self.low), scale(self.high), scale(value)  # type: ignore[arg-type]
        share = (place - low) / (high - low)
        if share <= CLOSE and self.low != self.bounds.low:
            return "lower"
        return "upper" if share >= 1 - CLOSE and self.high != self.bounds.high else None


@dataclass(frozen=True)
class Space:
    """The tuned hyper-parameters of one method, by key."""

    domains: Mapping[str, Choices | Range]

    @property
    def is_grid(self) -> bool:
        return all(isinstance(domain, Choices) for domain in self.domains.values())

    def budget(self, trials: int | None) -> int:
        """How many trials the method gets."""
        if not self.domains:
            return 0
        if not self.is_grid:
            return trials or TRIALS_OF_A_RANGE
        size = math.prod(len(domain.examples) for domain in self.domains.values())
        return min(trials or size, size)

    def points(self, trials: int | None, seed: int) -> list[Parameters]:
        """The points of a grid as they are written; shuffled where only some of them will be tried."""
        columns = [domain.examples for domain in self.domains.values()]
        points = [dict(zip(self.domains, point, strict=True)) for point in itertools.product(*columns)]
        if self.budget(trials) < len(points):
            points = [points[place] for place in stream(seed, "tune").permutation(len(points))]
        return points

    def __contains__(self, parameters: Parameters) -> bool:
        return parameters.keys() == self.domains.keys() and all(
            value in self.domains[key] for key, value in parameters.items()
        )

    def edges(self, parameters: Parameters) -> dict[str, str]:
        """The keys whose value lies at an edge, and which one."""
        found = {key: self.domains[key].edge(value) for key, value in parameters.items()}
        return {key: edge for key, edge in found.items() if edge}


def chosen(choice: AlgorithmChoice, parameters: Parameters) -> AlgorithmChoice:
    """The method with these values, which win over [train]'s; one that changes nothing beside the others is let be."""
    hyper = {_hyper_name(key): value for key, value in parameters.items()}
    return choice.model_copy(update={"hyper": choice.hyper | hyper, "shared": choice.shared | hyper.keys()})


def _hyper_name(key: str) -> str:
    return key.rpartition(".")[2]


# reading [tune] ----------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    key: str  # "train.lr"
    where: str  # "tune.grid.train.lr"
    given: Any


class _RangeTable(Section):
    low: int | float
    high: int | float
    log: bool = False


def read_spaces(experiment: Experiment) -> dict[str, Space]:
    """By label. Keys of [train] go to all methods, those of [algorithm] to the methods that have them.

    What no method has is refused, unless it was meant for methods of the file that the command line replaced.
    """
    section, command = experiment.tune, experiment.origin.from_command
    others_chosen = not command.isdisjoint(("algorithms", "algorithm.name"))
    known = {choice.label: _hyper_names(experiment, choice) for choice in experiment.algorithms}
    for label in section.own:
        if label not in known and not others_chosen:
            raise unknown_name(f"tune.own.{label}", section.own[label], known, what="the label of a method", seen=label)
    shared = _entries("tune.grid", section.grid)
    for hyper, entry in shared.items():
        had = any(hyper in names for names in known.values())
        if not had and (entry.where in command or not others_chosen):
            every = sorted({name for names in known.values() for name in names})
            what = "a hyper-parameter of any of these algorithms"
            raise unknown_name(entry.where, entry.given, every, what=what, seen=hyper)
    spaces = {}
    for choice in experiment.algorithms:
        names = known[choice.label]
        own = _entries(f"tune.own.{choice.label}", section.own.get(choice.label, {}))
        for hyper, entry in own.items():
            if hyper not in names:
                what = f"a hyper-parameter of {choice.name}"
                raise unknown_name(entry.where, entry.given, names, what=what, seen=hyper)
            if why := _why_unused(experiment, choice, hyper, shared.keys() | own.keys()):
                raise InputError(f"{entry.where} = {entry.given!r} changes nothing in {choice.label}: {why}.")
        wanted = {
            hyper: entry
            for hyper, entry in shared.items()
            if hyper in names and not _why_unused(experiment, choice, hyper, shared.keys() | own.keys())
        } | own
        domains = {e.key: _domain(experiment, choice, e) for e in wanted.values() if e.given != []}
        spaces[choice.label] = Space(domains)
    if not any(space.domains for space in spaces.values()):
        raise InputError(f"tune.grid = {section.grid!r}: nothing to tune; name a key, such as train.lr = [0.01, 0.1].")
    return spaces


def _why_unused(experiment: Experiment, choice: AlgorithmChoice, hyper: str, tuned: Set[str]) -> str:
    """Why it changes nothing to tune a hyper-parameter; empty if it acts, or may beside another that is tuned."""
    algorithm = make_algorithm(experiment, choice)
    why = algorithm.unused().get(hyper, "")
    return "" if why and conditions(type(algorithm))[hyper].names & tuned else why


def _hyper_names(experiment: Experiment, choice: AlgorithmChoice) -> list[str]:
    return [field.name for field in fields(make_algorithm(experiment, choice))]


def _entries(where: str, table: Document) -> dict[str, _Entry]:
    """By hyper-parameter; the last one said counts, so that the command line wins over the file."""
    entries = {}
    for key, given in _flat(table):
        group, _, hyper = key.partition(".")
        if group not in ("train", "algorithm") or not hyper:
            raise InputError(
                f"{where}.{key} = {given!r}: a key that can be tuned is train.KEY or algorithm.KEY, such as train.lr."
            )
        if group == "train" and hyper not in LOCAL_TRAINING:
            raise unknown_name(
                f"{where}.{key}", given, LOCAL_TRAINING, what="a key of [train] that can be tuned", seen=hyper
            )
        entries[hyper] = _Entry(key, f"{where}.{key}", given)
    return entries


def _flat(table: Document) -> Iterator[tuple[str, Any]]:
    """TOML reads "train.lr" in quotes as one key, and without them as a table in a table."""
    for key, given in table.items():
        if key in ("train", "algorithm") and isinstance(given, Mapping):
            yield from ((f"{key}.{inner}", value) for inner, value in given.items())
        else:
            yield key, given


def _domain(experiment: Experiment, choice: AlgorithmChoice, entry: _Entry) -> Choices | Range:
    bounds = _bounds(experiment, choice, _hyper_name(entry.key))
    if isinstance(entry.given, list):
        values = tuple(_typed(experiment, choice, entry, value) for value in entry.given)
        if len(set(values)) < len(values):
            raise InputError(f"{entry.where} = {entry.given!r}: holds a value twice.")
        return Choices(entry.where, values, bounds)
    try:
        table = _RangeTable.model_validate(entry.given)
    except ValidationError:
        raise InputError(
            f"{entry.where} = {entry.given!r}: should be a list of values such as [0.01, 0.1], "
            "or a range such as {low = 0.001, high = 0.1, log = true}."
        ) from None
    low, high = (_typed(experiment, choice, entry, value) for value in (table.low, table.high))
    assert isinstance(low, int | float) and isinstance(high, int | float)
    if low >= high or (table.log and low <= 0):
        raise InputError(
            f"{entry.where} = {entry.given!r}: low must be below high{', and above 0 for log' if table.log else ''}."
        )
    return Range(entry.where, low, high, table.log, bounds)


def _typed(experiment: Experiment, choice: AlgorithmChoice, entry: _Entry, value: Any) -> Value:
    """The value as the method takes it: 1 becomes 1.0 where it is a number with a fraction."""
    if not isinstance(value, bool | int | float | str):
        raise InputError(f"{entry.where} = {entry.given!r}: {value!r} is not a number, a word, true or false.")
    try:
        algorithm = make_algorithm(experiment, chosen(choice, {entry.key: value}))
    except InputError as error:
        raise InputError(f"{entry.where} = {entry.given!r}: {error}") from None
    name = _hyper_name(entry.key)
    typed: Value = checked(type(algorithm), {name: value}, choice.name)[name]
    return typed


def _bounds(experiment: Experiment, choice: AlgorithmChoice, hyper: str) -> Bounds:
    field = next(f for f in fields(make_algorithm(experiment, choice)) if f.name == hyper)
    return Bounds(field.metadata.get("low"), field.metadata.get("high"))
