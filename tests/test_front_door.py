"""`import bespokefl as bfl`: what it loads, what its names are, and that their docstrings are there and true."""

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from docs.make_public_api import COMMAND, FILE, listing

import bespokefl as bfl
import bespokefl.algorithms as algorithms
import bespokefl.core as core

HEAVY = ("torch", "numpy", "scipy", "sklearn", "duckdb", "altair", "PIL", "pydantic", "rich")
SECONDS = 3.0  # of CPU, for the example of one name: on a machine with nothing else to do none takes one
ROOMS = (bfl, core, algorithms)
NAMES = [(room, name) for room in ROOMS for name in room.__all__]
every_name = pytest.mark.parametrize(("room", "name"), NAMES, ids=[f"{r.__name__}.{n}" for r, n in NAMES])


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# what is loaded ----------------------------------------------------------------------------------------
def test_the_import_alone_loads_nothing_heavy() -> None:
    code = f"import sys, bespokefl; print([name for name in {HEAVY!r} if name in sys.modules], dir(bespokefl))"
    loaded, _, names = python(code).partition("] ")
    assert loaded == "["
    assert all(repr(name) in names for name in bfl.__all__)


def test_a_federation_of_one_method_loads_no_charts_no_sql_and_no_other_method() -> None:
    others = ("duckdb", "altair", "bespokefl.algorithms.pgfed")
    code = "import sys, bespokefl as b; b.Federation, b.Task; from bespokefl.algorithms.ditto import Ditto; "
    assert python(f"{code} print([name for name in {others!r} if name in sys.modules])") == "[]\n"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Federatoin'"):
        bfl.Federatoin  # noqa: B018


@pytest.mark.parametrize("name", ["report", "results", "reproduce"])
def test_functions_are_not_hidden_by_packages_of_the_same_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_package = f"bespokefl.{name}"
    importlib.import_module(of_package)
    assert inspect.isfunction(getattr(bfl, name))
    monkeypatch.delitem(sys.modules, of_package)
    again = importlib.import_module(of_package)  # which sets the attribute anew
    assert again.__doc__ and inspect.isfunction(getattr(bfl, name)) and sys.modules[of_package] is again


# what type checkers are told -----------------------------------------------------------------------------
def told(module: ModuleType) -> dict[str, str]:
    """The names that a module imports for type checkers alone, and from where, in full."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name)]
    imports = [n for block in blocks if block.test.id == "TYPE_CHECKING" for n in block.body]  # type: ignore[attr-defined]
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_are_told_of_every_name_of_the_front_door() -> None:
    found = told(bfl)
    assert sorted(found) == sorted(bfl.__all__) == sorted(bfl._HOMES)
    for name, place in found.items():
        module, _, attribute = place.partition(":")
        assert getattr(bfl, name) is getattr(__import__(module, fromlist=["_"]), attribute), name


def test_type_checkers_are_told_of_every_method() -> None:
    classes = {
        spec.cls.__name__: f"{spec.cls.__module__}:{spec.cls.__name__}" for spec in algorithms.ALGORITHMS.values()
    }
    assert told(algorithms) == classes
    assert set(classes) <= set(algorithms.__all__) <= set(dir(algorithms))


@pytest.mark.parametrize("spec", algorithms.ALGORITHMS.values(), ids=lambda spec: spec.name)
def test_every_method_is_imported_by_its_class(spec: algorithms.AlgorithmSpec) -> None:
    assert getattr(algorithms, spec.cls.__name__) is spec.cls


# what is written -----------------------------------------------------------------------------------------
def test_the_public_names_are_those_recorded() -> None:
    assert FILE.read_text(encoding="utf-8") == listing(), f"public names changed; if that is meant, run: {COMMAND}"


def documented(thing: Any) -> bool:
    """Whether a function or a class says something of itself; a dataclass and a named tuple would list their fields."""
    text = (vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""
    generated = text.startswith((f"{thing.__name__}(", "Create new instance", "Alias for field"))
    return len(text) > 10 and not generated


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of ours has itself."""
    for name, value in vars(cls).items():
        if not name.startswith("_"):
            inner = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
            if inspect.isfunction(inner):
                yield name, inner


@every_name
def test_every_public_name_is_described(room: ModuleType, name: str) -> None:
    thing = getattr(room, name)
    if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("bespokefl")):
        assert documented(thing), name
    if inspect.isclass(thing) and room is not algorithms:
        missing = [member for member, function in members(thing) if not inspect.getdoc(getattr(thing, member))]
        assert not [member for member in missing if not inherited_doc(thing, member)], name


def inherited_doc(cls: type, member: str) -> str | None:
    return next((inspect.getdoc(vars(base)[member]) for base in cls.__mro__ if member in vars(base)), None)


def test_what_says_nothing_is_noticed() -> None:
    class Silent(NamedTuple):
        number: int

        def method(self) -> None: ...

    assert not documented(Silent) and not documented(Silent.method)
    assert [name for name, _ in members(Silent)] == ["method"]
    assert documented(bfl.Federation)


# examples ------------------------------------------------------------------------------------------------
CALLED = [name for name in bfl.__all__ if name not in ("Algorithm", "ExperimentHistory", "InputError")]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``runs/small`` is the output of a small experiment."""
    folder = tmp_path_factory.mktemp("examples")
    small = {
        "algorithms": ["local", "ditto"],
        "data": {"clients": 3, "max_samples": 150},
        "model": {"name": "linear"},
        "train": {"rounds": 2, "local_epochs": 1},
    }
    bfl.run_experiment(small, folder / "runs" / "small").report()  # which also imports what examples need
    return folder


def example_of(name: str) -> doctest.DocTest:
    values = {"bfl": bfl, "np": np, "torch": torch}
    text = inspect.getdoc(getattr(bfl, name)) or ""
    return doctest.DocTestParser().get_doctest(text, values, name, None, 0)


@pytest.mark.parametrize("name", CALLED)
def test_examples_run(name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder)
    test = example_of(name)
    assert test.examples, f"{name} has no example"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner, said = doctest.DocTestRunner(optionflags=options), []
    start = time.process_time()
    result = runner.run(test, out=said.append)
    assert not result.failed, "".join(said)
    assert time.process_time() - start < SECONDS, "an example is to be short"


def test_a_wrong_example_is_noticed() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    quiet: Callable[[str], Any] = lambda text: None  # noqa: E731
    assert doctest.DocTestRunner().run(test, out=quiet).failed == 1
