import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bespokefl.results.tomlfile import dumps, key_lines, parse_value

_text = st.text(st.characters(exclude_categories=["Cs"]))
_scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _text
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
_tables = st.recursive(
    st.dictionaries(_text, _values, max_size=4), lambda inner: st.dictionaries(_text, _values | inner, max_size=3)
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, so that 1, 1.0 and True are told apart, and 0.0 and -0.0."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@given(_tables)
def test_what_is_written_reads_back_the_same(document: dict[str, Any]) -> None:
    assert same(tomllib.loads(dumps(document)), document)


def test_lists_of_tables_and_missing_values() -> None:
    document = {"a": [{"name": "x", "mu": 0.1, "none": None}, {"name": "y"}], "gone": None, "t": {"u": {"v": 1}}}
    expected = {"a": [{"name": "x", "mu": 0.1}, {"name": "y"}], "t": {"u": {"v": 1}}}
    assert tomllib.loads(dumps(document)) == expected


def test_values_that_toml_cannot_hold_are_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        dumps({"a": {1, 2}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("dirichlet", "dirichlet"),
        ('"two words"', "two words"),
        ("two words", "two words"),
        ("[1, 2]", [1, 2]),
        ("[local, fedavg]", ["local", "fedavg"]),
        ("{name = 'ditto', lam = 0.5}", {"name": "ditto", "lam": 0.5}),
        ("/some/where", "/some/where"),
        ("", ""),
    ],
)
def test_values_of_the_command_line(text: str, value: object) -> None:
    assert same(parse_value(text), value)


def test_lines_of_keys() -> None:
    text = """seeds = [0]
algorithms = [
  "local",  # {name = "in a comment", lam = 0}
  {name = "ditto", lam = 1.0, label = "a{b = 1}"},
  {name = "fedprox", nested = [[1,
    2], ["x", {deep = 3}]]},
  '''
lam = 7
[data]
''', 'fedavg',
]

[data]   # a comment
alpha=0.3
"quoted".x = 1
grid = {"train.lr" = [0.1, 0.2], algorithm.mu = {low = 0.1, high = 1.0}}

[[things]]
a = 1
[[things]]
b = 2
"""
    lines = key_lines(text)
    expected = {
        "seeds": 1,
        "algorithms": 2,
        "algorithms.0": 3,
        "algorithms.1": 4,
        "algorithms.1.lam": 4,
        "algorithms.2.name": 5,
        "algorithms.2.nested.0.1": 6,
        "algorithms.2.nested.1.1.deep": 6,
        "algorithms.3": 7,
        "algorithms.4": 10,
        "data": 13,
        "data.alpha": 14,
        "data.quoted.x": 15,
        "data.grid.train.lr": 16,
        "data.grid.algorithm.mu": 16,
        "data.grid.algorithm.mu.low": 16,
        "things": 18,
        "things.0.a": 19,
        "things.1": 20,
        "things.1.b": 21,
    }
    assert {key: lines.get(key) for key in expected} == expected
    assert not {"lam", "data.lam", "algorithms.5"} & set(lines)


_names = st.from_regex(r"[a-z][a-z0-9_-]{0,4}", fullmatch=True)
_plain_tables = st.recursive(
    st.dictionaries(_names, _values, max_size=4), lambda inner: st.dictionaries(_names, _values | inner, max_size=3)
)


@given(_plain_tables)
def test_lines_of_whatever_is_written(document: dict[str, Any]) -> None:
    """The writer puts a key on each line, whatever quotes, braces and hashes are in its values."""
    text, table, expected = dumps(document), "", {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("["):
            table = line.strip("[]") + "."
            expected[table[:-1]] = number
        elif line:
            expected[table + line.partition(" = ")[0]] = number
    found = key_lines(text)
    assert {key: found.get(key) for key in expected} == expected
    tops = {key for key in found if not any(part.isdecimal() for part in key.split("."))}
    assert tops == set(expected)
