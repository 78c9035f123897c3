"""Texts of others: never raw on a terminal, never a formula in a table; and they come back as they were."""

import io
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bespokefl.cli.common import say_error
from bespokefl.plain import is_plain, one_line, printable, quoted, unquoted
from bespokefl.progress import BarReporter, LineReporter
from bespokefl.results.files import read_csv, write_csv

RUDE = "\x1b[2J\x07a\ud800\x9b\u202eb\r"


@given(st.text() | st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Co", "Zl", "Zp"])))
def test_what_is_printable_prints(text: str) -> None:
    assert is_plain(one_line(text)) and printable(text).encode() is not None
    assert not is_plain(text) or printable(text) == text


def test_names_of_all_languages_are_plain() -> None:
    assert all(map(is_plain, ("Zürich", "東京　病院", "Ε.Ι.Μ.", "München 1", "a b")))
    assert not any(map(is_plain, ("a\nb", "\ud800", "\x1b[2J", "\u202e", "\x00")))


def test_a_cut_text_says_so() -> None:
    assert one_line("x" * 50, 10) == "x" * 9 + "…"


def test_reporters_and_errors_print_no_control_characters(capsys: object) -> None:
    for make in (LineReporter, BarReporter):
        out = io.StringIO()
        make(Console(file=out, force_terminal=False)).note(RUDE)
        assert out.getvalue().rstrip("\n") == r"\x1b[2J\x07a\ud800\x9b\u202eb\r"
    say_error(RUDE)
    assert "\\x1b[2J" in capsys.readouterr().err  # type: ignore[attr-defined]


@given(st.text(alphabet="'=+-@ab1"))
def test_quoting_is_undone(text: str) -> None:
    assert unquoted(quoted(text)) == text
    assert not quoted(text).startswith(("=", "+", "-", "@"))


def test_a_name_is_no_formula_in_a_table(tmp_path: Path) -> None:
    names = ["=1+2", "+a", "-b", "@c", "'=d", "'e", "plain", "-1"]
    write_csv(tmp_path / "t.csv", {"name": names, "value": np.arange(8.0) - 3})
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[1:6] == ["'=1+2,-3.0", "'+a,-2.0", "'-b,-1.0", "'@c,0.0", "''=d,1.0"]
    back = read_csv(tmp_path / "t.csv", texts=["name"])
    assert back["name"].tolist() == names and back["value"].tolist() == [-3, -2, -1, 0, 1, 2, 3, 4]
