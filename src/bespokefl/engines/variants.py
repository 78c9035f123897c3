"""Programs that are alike but for floats (a learning rate, the mu of a proximal term) as one program.

A program's functions are methods of an algorithm, a frozen dataclass of hyper-parameters. Where programs of several
runs, or of several rounds of one, differ in its floats only, one program can stand for all: its functions are those of
a copy of the algorithm in which these floats are tensors, that come to each client with its download.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bespokefl.core.program import Down, Phase, Program
from bespokefl.core.trees import Tree

HYPER = "hyper-parameters"  # the download that holds the tensors; no program has one of this name, which has a dash


class Fingerprint(NamedTuple):
    """A program in two parts: equal shapes say that two programs differ in these floats only."""

    shape: Hashable
    floats: tuple[float, ...]  # in the order in which they are met
    moving: tuple[int, ...] = ()  # the places of those that will differ in other rounds


def fingerprint(program: Program) -> Fingerprint:
    reader = _Reader()
    shape = reader.read(program)
    try:
        hash(shape)
    except TypeError:  # an algorithm of somebody's own that holds a list, say: it is like nothing but itself
        return Fingerprint(program, ())
    return Fingerprint(shape, tuple(reader.floats), tuple(reader.moving))


class Variant(NamedTuple):
    """One program for several, and per program the floats that it is to be given."""

    program: Program
    floats: list[tuple[float, ...]]

    @property
    def varies(self) -> bool:
        return bool(self.floats[0])

    def download(self, clients: Sequence[int], dtype: torch.dtype, device: torch.device) -> dict[str, Tree]:
        """The floats as tensors, a row for each of so many clients of each program."""
        if not self.varies:
            return {}
        sizes = torch.tensor(clients, device=device)
        columns = [torch.tensor(column, dtype=dtype, device=device) for column in zip(*self.floats, strict=True)]
        return {HYPER: tuple(column.repeat_interleave(sizes) for column in columns)}


class Variants:
    """The programs made so far: always the same one for the same need, so that engines know its functions again."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, Program] = {}
        self._refused: set[Hashable] = set()

    def of(self, programs: Sequence[Program]) -> Variant | None:
        """One program for programs of one shape; None if that was refused before."""
        fingerprints = [fingerprint(program) for program in programs]
        shape, floats = fingerprints[0].shape, [own.floats for own in fingerprints]
        places = self._places(fingerprints)
        if places is None:
            return None
        constant = tuple(value for place, value in enumerate(floats[0]) if place not in places)
        key = (shape, places, constant)
        if key not in self._programs:
            self._programs[key] = _varied(programs[0], places) if places else programs[0]
        return Variant(self._programs[key], [tuple(own[place] for place in places) for own in floats])

    def refuse(self, programs: Sequence[Program]) -> None:
        """Tensors cannot stand for these floats (one decides in Python, perhaps): not to be tried again."""
        fingerprints = [fingerprint(program) for program in programs]
        self._refused.add((fingerprints[0].shape, self._places(fingerprints)))

    def _places(self, fingerprints: Sequence[Fingerprint]) -> tuple[int, ...] | None:
        """Of floats that differ, or will in other rounds; or of those only that differ; None if both are refused."""
        together = zip(*(own.floats for own in fingerprints), strict=True)
        differing = {place for place, values in enumerate(together) if len(set(values)) > 1}
        wanted = [tuple(sorted(differing | set(fingerprints[0].moving))), tuple(sorted(differing))]
        return next((places for places in wanted if (fingerprints[0].shape, places) not in self._refused), None)


def _varied(program: Program, places: tuple[int, ...]) -> Program:
    """The program whose floats at these places are downloads."""

    def at(pick: Callable[[Program], Any]) -> Callable[..., Any]:
        def function(task: Any, down: Down, *rest: Any) -> Any:
            downloads = dict(vars(down))
            values = dict(zip(places, downloads.pop(HYPER), strict=True))
            return pick(_Writer(values).write(program))(task, Down(**downloads), *rest)

        return function

    def phase(k: int, own: Phase) -> Phase:
        enter = None if own.enter is None else at(lambda program: program.phases[k].enter)
        return Phase(at(lambda program: program.phases[k].step), own.batches, enter)

    phases = tuple(phase(k, own) for k, own in enumerate(program.phases))
    return Program(at(lambda program: program.begin), phases, at(lambda program: program.finish))


# walking through a program: methods, the frozen dataclasses that they belong to, tuples -----------------


class _Reader:
    """What a program is made of as a value that can be compared, and its floats."""

    def __init__(self) -> None:
        self.floats: list[float] = []
        self.moving: list[int] = []  # places in it
        self._met: dict[int, int] = {}  # settings, by id: numbers in the order of meeting

    def read(self, value: Any) -> Hashable:
        if type(value) is float:
            self.floats.append(value)
            return float
        if _is_own_method(value):
            return "method", value.__func__, self.read(value.__self__)
        if isinstance(value, tuple):
            return type(value), *map(self.read, value)
        if _is_settings(value):
            if id(value) in self._met:
                return "met before", self._met[id(value)]
            self._met[id(value)] = len(self._met)
            return type(value), *(self._field(value, f.name) for f in fields(value))
        hashable: Hashable = value
        return hashable

    def _field(self, settings: Any, name: str) -> Hashable:
        first = len(self.floats)
        read = self.read(getattr(settings, name))
        if name in getattr(settings, "moving", ()):
            self.moving += range(first, len(self.floats))
        return read


class _Writer:
    """The same walk, which makes a program with other values at some of the floats' places."""

    def __init__(self, values: Mapping[int, Tensor]) -> None:
        self._values, self._place = values, 0
        self._made: dict[int, Any] = {}  # settings, by the id of the original

    def write(self, value: Any) -> Any:
        if type(value) is float:
            self._place += 1
            return self._values.get(self._place - 1, value)
        if _is_own_method(value):
            return MethodType(value.__func__, self.write(value.__self__))
        if isinstance(value, tuple):
            parts = [self.write(part) for part in value]
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
        if _is_settings(value):
            if id(value) not in self._made:
                # Its fields only: checks would refuse tensors, and what it has computed from floats is not theirs.
                self._made[id(value)] = copy = object.__new__(type(value))
                for f in fields(value):
                    object.__setattr__(copy, f.name, self.write(getattr(value, f.name)))
            return self._made[id(value)]
        return value


def _is_own_method(value: Any) -> bool:
    return inspect.ismethod(value) and _is_settings(value.__self__)


def _is_settings(value: Any) -> bool:
    """Whether all that the value is stands in its fields, and never changes."""
    return is_dataclass(value) and not isinstance(value, type) and bool(value.__dataclass_params__.frozen)  # type: ignore[attr-defined]
