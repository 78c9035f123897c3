"""What there is to choose from, for `bespoke list`, and where the shipped experiments lie."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bespokefl.errors import unknown_name

Entry = dict[str, Any]  # name, description, and what else a kind has; JSON-able


def list_algorithms() -> list[Entry]:
    """The methods: name, description, paper, their own options and those of local training, each with its meaning.

    >>> ditto = next(entry for entry in bfl.list_algorithms() if entry["name"] == "ditto")
    >>> ditto["options"]["lam"]["default"]
    1.0
    """
    from bespokefl.algorithms import ALGORITHMS, Algorithm

    shared = {field.name for field in dataclasses.fields(Algorithm)}
    entries = []
    for spec in ALGORITHMS.every().values():
        hyper = {parameter.name: parameter._asdict() for parameter in spec.hyperparameters}
        own = {name: parameter for name, parameter in hyper.items() if name not in shared}
        training = {name: parameter for name, parameter in hyper.items() if name in shared}
        about = {"name": spec.name, "description": spec.summary, "paper": spec.paper}
        entries.append(about | {"options": own, "training": training})
    return entries


def optimizers() -> list[Entry]:
    from bespokefl.core.optimizers import OPTIMIZERS

    def defaults(name: str) -> dict[str, Any]:
        options = OPTIMIZERS.every_option(name)
        return {key: "needed" if option.needed else option.default for key, option in options.items()}

    return [
        {"name": name, "description": (cls.__doc__ or "").partition("\n")[0], "options": defaults(name)}
        for name, cls in OPTIMIZERS.every().items()
    ]


def list_datasets() -> list[Entry]:
    """The sources of data: name, description, the files that they need, and options with their defaults.

    >>> [entry["name"] for entry in bfl.list_datasets() if not entry["files"]]  # made or embedded
    ['digits', 'synth-digits', 'blobs']
    """
    from bespokefl.data import SOURCES

    return [
        {
            "name": source.name,
            "description": source.description,
            "files": source.files,
            "options": _defaults(source.options),
        }
        for source in SOURCES.values()
    ]


def list_models() -> list[Entry]:
    """The networks: name, description, and options with their defaults.

    >>> mlp = next(entry for entry in bfl.list_models() if entry["name"] == "mlp")
    >>> mlp["options"]["hidden"]
    (200, 200)
    """
    from bespokefl.models import MODELS

    return [{"name": m.name, "description": m.description, "options": dict(m.options)} for m in MODELS.every().values()]


def partitions() -> list[Entry]:
    from bespokefl.data import PARTITIONS

    return [
        {"name": p.name, "description": p.description, "options": _defaults(p.options)} for p in PARTITIONS.values()
    ]


def engines() -> list[Entry]:
    from bespokefl.engines import ENGINES

    return [{"name": name, "description": text, "options": {}} for name, text in ENGINES.items()]


def experiments() -> list[Entry]:
    return [
        {"name": name, "description": _title(path), "file": str(path), "options": {}}
        for name, path in sorted(_experiment_files().items())
    ]


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "algorithms": list_algorithms,
    "optimizers": optimizers,
    "datasets": list_datasets,
    "models": list_models,
    "partitions": partitions,
    "engines": engines,
    "experiments": experiments,
}


def listing(kind: str, name: str | None = None) -> list[Entry]:
    """All entries of a kind, or the one with the given name."""
    if kind not in KINDS:
        raise unknown_name("list", kind, KINDS)
    entries = KINDS[kind]()
    if name is None:
        return entries
    if name not in (names := [entry["name"] for entry in entries]):
        raise unknown_name(f"list {kind}", name, names)
    return [entries[names.index(name)]]


def experiment_file(name: str) -> Path:
    """The TOML file of a shipped experiment, or of one in ./experiments."""
    known = _experiment_files()
    if name not in known:
        raise unknown_name("experiment", name, known)
    return known[name]


def _experiment_files() -> dict[str, Path]:
    """By name; the current directory first, then the installed package, then the checkout it is run from."""
    package = Path(__file__).resolve().parents[1]
    places = (package.parents[1] / "experiments", package / "reproduce" / "items", Path("experiments"))
    return {path.stem: path for place in places for path in sorted(place.glob("*.toml"))}


def _title(path: Path) -> str:
    try:
        title = tomllib.loads(path.read_text(encoding="utf-8")).get("paper", {}).get("title", "")
    except (OSError, tomllib.TOMLDecodeError, AttributeError) as error:
        return f"cannot be read: {error}"
    return str(title)


def _defaults(options: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(options)}
