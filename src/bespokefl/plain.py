"""Texts that somebody else wrote, on their way to a terminal, a log or a file."""

import unicodedata

LINES = "\n"


def printable(text: str, most: int | None = None) -> str:
    """The text with whatever a terminal would not print, or would obey, as a backslash escape; newlines stay."""
    cut = text if most is None or len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c in LINES or is_plain(c) else _escaped(c) for c in cut)


def one_line(text: str, most: int | None = None) -> str:
    """The same, in one line."""
    return printable(text.replace(LINES, " "), most)


def is_plain(text: str) -> bool:
    """Whether all of it prints: letters, digits, signs and spaces of any language, valid Unicode."""
    return text.isprintable() or all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text)


def quoted(text: str) -> str:
    """The text for a cell of a table: with a ' before what a spreadsheet would take for a formula."""
    return f"'{text}" if _computes(text) else text


def unquoted(cell: str) -> str:
    """The inverse of `quoted`."""
    return cell[1:] if cell.startswith("'") and _computes(cell) else cell


def _computes(text: str) -> bool:
    return text.lstrip("'").startswith(("=", "+", "-", "@"))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
