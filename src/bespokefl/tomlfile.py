"""TOML beyond the standard library: an exact writer, the line of each key, and values typed on a command line."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]\]?")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")
_INLINE_NAME = re.compile(rf"[{{,]\s*({_DOTTED})\s*=")


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
    """The line (from 1) where each dotted key is set; entries of arrays are numbered, as in ``algorithms.0.mu``.

    Reads line by line, which is enough to point a reader at a key: it never decides what a document means.
    """
    lines: dict[str, int] = {}
    table = array = ""
    in_array = True
    items: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _plain(header[2])
            if header[1] == "[[":
                items[table] = items.get(table, -1) + 1
                table = f"{table}.{items[table]}"
            else:
                table = _numbered(table, items)
            lines.setdefault(table, number)
            array = ""
            continue
        if assignment := _ASSIGNMENT.match(line):
            key = _plain(assignment[1])
            array = f"{table}.{key}" if table else key
            lines.setdefault(array, number)
            line = line[assignment.end() :]
            in_array = not line.lstrip().startswith("{")
        if array and in_array:
            _note_inline_tables(line, number, array, items, lines)
        elif array:
            _note_names(line, number, array, lines)
    return lines


def _numbered(table: str, items: Mapping[str, int]) -> str:
    """``a.b`` below the newest ``[[a]]`` belongs to that one."""
    above = next((array for array in items if table.startswith(f"{array}.")), None)
    return table if above is None else f"{above}.{items[above]}{table.removeprefix(above)}"


def _note_inline_tables(line: str, number: int, array: str, items: dict[str, int], lines: dict[str, int]) -> None:
    """Inline tables in an array that may go over several lines."""
    for piece in re.split(r"(?=\{)", line)[1:]:
        items[array] = items.get(array, -1) + 1
        _note_names(piece, number, f"{array}.{items[array]}", lines)


def _note_names(text: str, number: int, table: str, lines: dict[str, int]) -> None:
    for name in _INLINE_NAME.findall(text):
        lines.setdefault(f"{table}.{_plain(name)}", number)


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
