"""The documentation is true: its Python runs, its excerpts are the code, its commands and links exist."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import typer

from bespokefl.algorithms import ALGORITHMS
from bespokefl.cli import app
from bespokefl.data import PARTITIONS, SOURCES
from bespokefl.engines import ENGINES
from bespokefl.experiments.reading import parse_setting, read_experiment
from bespokefl.experiments.schema import SECTIONS
from bespokefl.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


class Block(NamedTuple):
    language: str
    file: str | None  # an excerpt of this file
    text: str
    line: int  # of its first line in the page


def blocks(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        language, *options = match["info"].split()
        file = next((option.removeprefix("file=") for option in options if option.startswith("file=")), None)
        yield Block(language, file, match["text"], page.count("\n", 0, match.start("text")) + 1)


def run_python(page: str, name: str) -> int:
    """Runs the page's Python blocks in order, as one module; how many there were."""
    module = ModuleType("page_of_the_docs")
    runnable = [block for block in blocks(page) if block.language == "python" and block.file is None]
    sys.modules[module.__name__] = module  # dataclasses and checkpoints look their classes up there
    try:
        for block in runnable:
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return len(runnable)


def commands(page: str) -> list[list[str]]:
    """The arguments of every `bespoke` command in a shell block."""
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("bespoke ")]


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page.read_text(encoding="utf-8"), str(page))


def test_pages_with_python_are_found() -> None:
    for name in ("README.md", "docs/python.md", "docs/algorithms.md", "docs/data.md", "docs/engines.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert any(block.language == "python" and block.file is None for block in blocks(text)), name


@pytest.mark.parametrize("broken", ["assert x == 2", "undefined", "import bespokefl.no_such_module", "x = = 1"])
def test_a_broken_block_is_noticed(broken: str) -> None:
    page = f"```python\nx = 1\n```\ntext\n```python\nassert x == 1\n{broken}\n```\n"
    with pytest.raises((AssertionError, NameError, ImportError, SyntaxError)):
        run_python(page, "page")
    assert run_python(page.replace(broken, "y = x"), "page") == 2


@every_page
def test_every_fence_is_understood(page: Path) -> None:
    """A misspelt language, or an odd fence, would take a block out of the tests above."""
    text = page.read_text(encoding="utf-8")
    found = list(blocks(text))
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(found)
    assert {block.language for block in found} <= {"python", "sh", "toml", "text", "json"}


@every_page
def test_excerpts_are_the_code(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.file is not None:
            assert block.text in (ROOT / block.file).read_text(encoding="utf-8"), f"{page.name}, line {block.line}"


@every_page
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(app)
    for name, *arguments in commands(page.read_text(encoding="utf-8")):
        context = group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
        if name == "run":
            path = Path(context.params["experiment"] or ROOT / "src/bespokefl/demo.toml")
            read_experiment(path, [parse_setting(text) for text in context.params["settings"] or ()])


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("README.md", [*ALGORITHMS, *ENGINES, *MODELS]),
        ("docs/data.md", [*SOURCES, *PARTITIONS]),
        ("docs/engines.md", list(ENGINES)),
        ("docs/cli.md", [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys.model_fields]),
    ],
)
def test_all_that_exists_is_named(page: str, names: list[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [name for name in names if f"`{name}`" not in text and not name.endswith(".options")]
    assert not missing


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"} <= set(LINK.findall(index))
