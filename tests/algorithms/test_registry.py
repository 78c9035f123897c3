"""The registry of algorithms, and building one by name."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import bespokefl.algorithms as package
from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.algorithms.ditto import Ditto
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import InputError, hyper
from bespokefl.core.hyper import checked

NOT_METHODS = {"__init__", "acting", "averaging", "headed", "base", "exchange", "hyper"}


@dataclass(frozen=True)
class Mine(FedAvg):
    kappa: float = hyper(2.0, "kappa: my own", low=1)


@pytest.fixture
def my_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module outside the package, as a user would have one."""
    module = ModuleType("my_methods")
    module.Mine, module.number = Mine, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_methods", module)
    return "my_methods"


def test_every_file_of_the_folder_registers_a_method() -> None:
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - NOT_METHODS
    assert {spec.cls.__module__.rpartition(".")[2] for spec in ALGORITHMS.values()} == files
    assert {"local", "fedavg", "fedprox", "ditto"} <= set(ALGORITHMS)
    assert list(ALGORITHMS) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_is_described_and_builds_by_default(name: str) -> None:
    spec = ALGORITHMS[name]
    assert spec.name == name == spec.cls.name and name == name.lower()
    assert spec.paper and len(spec.summary) > 20 and spec.summary.endswith(".")
    for h in spec.hyperparameters:
        assert h.meaning, f"{name}.{h.name} has no meaning"
    defaults = {h.name: h.default for h in spec.hyperparameters}
    assert checked(spec.cls, defaults, name) == defaults  # every default is allowed
    built = build_algorithm(name)
    assert type(built) is spec.cls and built == spec.cls()
    assert hash(built) == hash(spec.cls())  # engines keep graphs by it


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -0.1), ("momentum", 1.0), ("momentum", -0.1), ("weight_decay", -1.0), ("local_epochs", 0),
        ("batch_size", 0), ("drop_last", 1), ("weights", "size"), ("opt_state", "forget"), ("lr", float("nan")),
    ],
)  # fmt: skip
def test_the_common_settings_have_ranges_in_every_method(name: str, setting: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{setting} = .*\({name.replace('+', '[+]')}\): it must be"):
        build_algorithm(name, {setting: value})


@pytest.mark.parametrize(("name", "key", "value"), [("fedprox", "mu", -1), ("ditto", "lam", -0.5)])
def test_a_methods_own_ranges(name: str, key: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{key} = .* at least 0"):
        build_algorithm(name, hyper={key: value})


def test_own_hyper_parameters_win_over_settings() -> None:
    built = build_algorithm("ditto", {"lr": 0.5, "local_epochs": 2}, {"lr": 1, "lam": 3})
    assert built == Ditto(lr=1.0, local_epochs=2, lam=3.0)


@pytest.mark.parametrize(("typo", "meant"), [("fedavgg", "fedavg"), ("dito", "ditto"), ("FedProx", "fedprox")])
def test_a_misspelt_name_is_met_with_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.name = '{typo}' is not known") as caught:
        build_algorithm(typo)
    hint, _, allowed = str(caught.value).partition("Allowed:")
    assert meant in hint
    assert all(name in allowed for name in ALGORITHMS)


def test_a_misspelt_hyper_parameter() -> None:
    with pytest.raises(InputError, match=r"algorithm\.lamb = 1 is not a hyper-parameter of ditto.*Did you mean lam"):
        build_algorithm("ditto", hyper={"lamb": 1})


def test_a_class_of_ones_own(my_module: str) -> None:
    built = build_algorithm("my_methods:Mine", {"lr": 0.3}, {"kappa": 4})
    assert built == Mine(lr=0.3, kappa=4.0)
    with pytest.raises(InputError, match=r"algorithm\.kappa = 0\.5 \(my_methods:Mine\).*at least 1"):
        build_algorithm("my_methods:Mine", hyper={"kappa": 0.5})


@pytest.mark.parametrize("name", ["no_such:X", "my_methods:Missing", "my_methods:", ":Mine", ".my_methods:Mine"])
def test_what_cannot_be_imported(my_module: str, name: str) -> None:
    with pytest.raises(InputError, match="cannot be imported") as caught:
        build_algorithm(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["my_methods:number", "pathlib:Path", "json:loads"])
def test_what_is_not_an_algorithm(my_module: str, name: str) -> None:
    with pytest.raises(InputError, match="not a class derived from"):
        build_algorithm(name)


def test_named_tuples_are_those_of_the_files_of_the_class() -> None:
    for spec in ALGORITHMS.values():
        own = {
            f"{value.__module__}:{value.__name__}": value
            for value in vars(sys.modules[spec.cls.__module__]).values()
            if isinstance(value, type) and value.__module__ == spec.cls.__module__ and hasattr(value, "_fields")
        }
        assert own.items() <= spec.cls.named_tuples().items()
