"""The rooms of the package: each imports only from those below it, and the root holds little."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bespokefl

PACKAGE = Path(bespokefl.__file__).parent
ROOT = ("__init__", "__main__", "errors", "interrupts", "plain", "progress")  # the modules beside the rooms
BELOW_ALL = {"errors", "interrupts", "plain", "progress"}  # they import one another and nothing else of ours

MAY_IMPORT: dict[str, set[str]] = {
    "nn": set(),
    "core": {"nn"},
    "algorithms": {"core"},
    "data": {"core"},
    "models": {"core"},
    "engines": {"core", "nn"},
    "evaluation": {"core", "data", "engines"},
    "federation": {"core", "data", "engines", "evaluation", "algorithms"},
    "results": {"data", "evaluation", "federation"},  # the latter two for types alone, and the figures' names
    "tracking": {"results"},
    "experiments": {
        *("core", "algorithms", "data", "models", "engines", "evaluation", "federation", "results", "tracking")
    },
    "tuning": {"core", "data", "engines", "results", "experiments"},
    "products": {"core", "algorithms", "data", "models", "federation", "results", "experiments"},
    "report": {"results"},
    "reproduce": {"data", "engines", "evaluation", "results", "experiments"},
    "api": {
        *("core", "data", "federation", "results", "evaluation", "experiments", "tuning", "products", "report"),
        "reproduce",
    },
    "flower": {
        *("core", "algorithms", "data", "models", "engines", "evaluation", "federation", "results", "tracking"),
        *("experiments", "products"),
    },
    "cli": {
        *("data", "evaluation", "federation", "results", "experiments", "tuning", "products", "report", "reproduce"),
        "flower",
    },
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts), path


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("bespokefl.") for name in found if name.startswith("bespokefl.")}


def test_every_room_is_listed_and_says_what_lives_there() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(MAY_IMPORT)
    for room in rooms:
        text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
        assert text and len(text) > 40, room


def test_the_root_holds_little() -> None:
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(ROOT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_from_below_only(room: str) -> None:
    above = {
        f"{name} imports {target}"
        for name, path in modules()
        if name.split(".")[0] == room
        for target in imports(path)
        if target.split(".")[0] not in {room, *MAY_IMPORT[room], *BELOW_ALL, "__version__"}
    }
    assert not above, "\n".join(sorted(above))


def test_what_lies_below_all_imports_nothing_of_a_room() -> None:
    for name, path in modules():
        if name in BELOW_ALL:
            assert {target.split(".")[0] for target in imports(path)} <= BELOW_ALL, name


def test_rooms_have_no_circle() -> None:
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        free = [room for room, below in MAY_IMPORT.items() if room not in done and below <= set(done)]
        assert free, sorted(set(MAY_IMPORT) - set(done))
        done += free


def test_an_algorithm_imports_core_and_its_family() -> None:
    """A method's file builds on `core`, on another method that it is a variant of, and on its family's folder."""
    for name, path in modules():
        if name.startswith("algorithms.") and not name.endswith("__init__"):
            assert {target.split(".")[0] for target in imports(path)} <= {"core", "algorithms"}, name
