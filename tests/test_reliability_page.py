"""The page of promises: every test that it names is there, and its limits are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from bespokefl.flower import limits

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TRIED = PAGE[PAGE.index("## What was tried") :]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_promise_has_its_test(file: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_row_of_promises_names_a_test() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE[: PAGE.index("## Limits")], re.MULTILINE)
    promises = [row for row in rows if row[0] not in ("promise", "---")]
    assert len(promises) >= 20
    assert all("::test_" in kept for _, kept in promises)


def test_what_was_tried_can_be_tried_again() -> None:
    """Every row has a number of tries and a command whose files are there, and whose `-k` has words of their tests."""
    rows = [row.split(" | ") for row in TRIED.splitlines() if row.startswith("| ") and "`pytest" in row]
    assert len(rows) >= 4
    for _, command, date, tries, *_ in rows:
        words = shlex.split(command.strip("`"))
        files = [ROOT / word for word in words if word.startswith("tests/")]
        code = "\n".join(file.read_text("utf-8") for file in files)
        tests = re.findall(r'^def (test_\w+)|^    "([^"]+)": ', code, re.MULTILINE)  # by name, and by that of a case
        chosen = words[words.index("-k") + 1] if "-k" in words else ""
        named = set(re.findall(r"\w+", chosen)) - {"or", "and", "not"}
        assert files and all(any(name in test + case for test, case in tests) for name in named), command
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", date) and re.fullmatch(r"[\d,]+", tries), command


def test_limits_are_those_of_the_code() -> None:
    section = PAGE[PAGE.index("## Limits") : PAGE.index("## Who sees what")]
    for words in (
        f"{limits.NAME} characters, all printable",
        f"{limits.TEXT} characters; control",
        f"{limits.CLASSES:,}; {limits.CLIENTS:,}",
        f"{limits.HEADER_BYTES >> 20} MiB of header, {limits.ARRAYS:,} arrays of {limits.DIMENSIONS} dimensions",
        f"2^{limits.SAMPLES.bit_length() - 1} |",
        f"2^{limits.WORK.bit_length() - 1} |",
        "1e30 |",
    ):
        assert words in section, words
