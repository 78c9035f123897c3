"""TOML beyond the standard library: an exact writer, the line of each key, and values typed on a command line."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = re.compile(rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*")
_BLANKS_AND_LINES = re.compile(r"(?:\s|#[^\n]*)+")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_CLOSING = re.compile(r"[ \t]*\]+")
_STRINGS = (
    r'"""(?:[^\\]|\\.)*?"""+',
    r"'''.*?'''+",
    r'"(?:[^"\\\n]|\\.)*"',
    r"'[^'\n]*'",
)
_PLAIN_VALUE = re.compile(rf"{'|'.join(_STRINGS)}|[^,\]}}#\n]+", re.DOTALL)


def dumps(document: Mapping[str, Any]) -> str:
    """TOML that `tomllib.loads` turns back into the same document, types included.

    Strings, booleans, integers, floats, lists and tables; an entry that is None is left out, since TOML has no null.
    """
    return "\n".join(_table_lines(document, ())) + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """The plain entries of a table, then its sub-tables under headers of their own."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, Mapping)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            header = ".".join(_key(part) for part in (*path, key))
            lines += ["", f"[{header}]", *_table_lines(value, (*path, key))]
    return lines


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL as it is, TOML does not


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    raise TypeError(f"TOML has no place for {value!r} of type {type(value).__name__}")


def key_lines(text: str) -> dict[str, int]:
    """The line (from 1) where each dotted key of a valid document is set; entries of arrays are numbered from 0.

    ``algorithms.1`` is the second entry, ``algorithms.1.mu`` a key of it.
    """
    return _Scanner(text).lines


def _numbered(table: str, items: Mapping[str, int]) -> str:
    """``a.b`` below the newest ``[[a]]`` belongs to that one."""
    above = next((array for array in items if table.startswith(f"{array}.")), None)
    return table if above is None else f"{above}.{items[above]}{table.removeprefix(above)}"


class _Scanner:
    """Finds keys and entries, and passes over values; `tomllib` says what they mean."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.lines: dict[str, int] = {}
        tables: dict[str, int] = {}  # entries so far of each array of tables
        table = ""
        while self._skip(_BLANKS_AND_LINES):
            if self._text[self._at] == "[":
                array = self._text.startswith("[[", self._at)
                self._at += 2 if array else 1
                line, table = self._line, _numbered(self._key(), tables)
                if array:
                    tables[table] = tables.get(table, -1) + 1
                    self.lines.setdefault(table, line)
                    table = f"{table}.{tables[table]}"
                self.lines.setdefault(table, line)
                self._skip(_CLOSING)
            else:
                self._assignment(table)

    @property
    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Go behind what the pattern matches here; whether anything is left."""
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at < len(self._text)

    def _key(self) -> str:
        self._skip(_BLANKS_AND_LINES)
        match = _DOTTED.match(self._text, self._at)
        self._at = match.end() if match else len(self._text)
        return _plain(match[0]) if match else ""

    def _assignment(self, table: str) -> None:
        self._skip(_BLANKS_AND_LINES)
        line, key = self._line, self._key()
        name = f"{table}.{key}" if table else key
        self.lines.setdefault(name, line)
        self._skip(_EQUALS)
        self._value(name)

    def _value(self, name: str) -> None:
        if self._text.startswith("[", self._at):
            self._entries("]", lambda number: self._entry(f"{name}.{number}"))
        elif self._text.startswith("{", self._at):
            self._entries("}", lambda _: self._assignment(name))
        else:
            self._skip(_PLAIN_VALUE)

    def _entry(self, name: str) -> None:
        self.lines.setdefault(name, self._line)
        self._value(name)

    def _entries(self, closing: str, read: Callable[[int], None]) -> None:
        self._at += 1
        number = 0
        while self._skip(_BLANKS_AND_LINES) and self._text[self._at] != closing:
            if self._text[self._at] == ",":
                self._at += 1
                continue
            read(number)
            number += 1
        self._at += 1


def _plain(dotted: str) -> str:
    """A dotted key without quotes and blanks."""
    return ".".join(part.strip().strip("\"'") for part in re.findall(_KEY, dotted))


def parse_value(text: str) -> Any:
    """A value as typed after ``--set key=``: TOML, where words (also those in a list) need no quotes."""
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(part) for part in text[1:-1].split(",") if part.strip()]
    return text
