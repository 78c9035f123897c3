"""Hyper-parameters are checked by type and range, and described in words."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from bespokefl.core import InputError, hyper
from bespokefl.core.hyper import checked, hyperparameters


@dataclass(frozen=True)
class Example:
    rate: float = hyper(0.1, "eta: a rate", low=0, below=1)
    share: float = hyper(0.5, "s: a share", above=0, high=1)
    count: int = hyper(3, "K: a count", low=1)
    size: int | None = hyper(50, "B: a size", low=1)
    on: bool = hyper(False, "a switch")
    kind: Literal["a", "b"] = hyper("a", "which one")
    free: float = hyper(0.0, "any number")


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("rate", 0, 0.0),
        ("rate", 0.999, 0.999),
        ("share", 1, 1.0),
        ("share", 1e-9, 1e-9),
        ("count", 1, 1),
        ("size", 7, 7),
        ("size", None, None),
        ("on", True, True),
        ("kind", "b", "b"),
        ("free", -1e9, -1e9),
    ],
)
def test_values_in_range_are_kept_in_the_type_of_their_field(name: str, value: Any, kept: Any) -> None:
    (out,) = checked(Example, {name: value}, "example").values()
    assert out == kept and type(out) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rate", -0.1, "a number at least 0 and below 1"),
        ("rate", 1, "a number at least 0 and below 1"),
        ("rate", float("nan"), "a number at least 0 and below 1"),
        ("rate", "0.1", "a number at least 0 and below 1"),
        ("rate", True, "a number at least 0 and below 1"),
        ("share", 0.0, "a number above 0 and at most 1"),
        ("share", 1.1, "a number above 0 and at most 1"),
        ("count", 0, "a whole number at least 1"),
        ("count", 2.0, "a whole number at least 1"),
        ("count", True, "a whole number at least 1"),
        ("count", None, "a whole number at least 1"),
        ("size", 0, "a whole number or nothing at least 1"),
        ("on", 1, "true or false"),
        ("on", "yes", "true or false"),
        ("kind", "c", "'a' or 'b'"),
        ("kind", ["a"], "'a' or 'b'"),
        ("free", float("nan"), "a number"),
        ("free", None, "a number"),
    ],
)
def test_other_values_are_refused_in_words(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        checked(Example, {"count": 2, name: value}, "example")
    seen = float(value) if name == "rate" and value == 1 and value is not True else value
    assert str(caught.value) == f"algorithm.{name} = {seen!r} (example): it must be {allowed}"


def test_an_unknown_name_is_met_with_the_nearest_ones() -> None:
    with pytest.raises(InputError, match=r"algorithm\.conut = 3 is not a hyper-parameter of example") as caught:
        checked(Example, {"conut": 3}, "example")
    assert "Did you mean count" in str(caught.value)
    assert "rate, share, count, size, on, kind, free" in str(caught.value)


def test_the_description_of_a_class() -> None:
    described = {h.name: h for h in hyperparameters(Example)}
    assert list(described) == ["rate", "share", "count", "size", "on", "kind", "free"]
    assert described["rate"] == ("rate", "a number", 0.1, "eta: a rate", "a number at least 0 and below 1")
    assert described["kind"].type == "'a' or 'b'" and described["kind"].allowed == ""
    assert described["size"].type == "a whole number or nothing"


def test_a_text_is_called_a_name() -> None:
    @dataclass(frozen=True)
    class Named:
        layer: str | None = hyper(None, "a layer")

    assert hyperparameters(Named)[0].type == "a name or nothing"
    with pytest.raises(InputError, match="it must be a name or nothing"):
        checked(Named, {"layer": 3}, "example")
