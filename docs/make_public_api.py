"""The public names, recorded in tests/public_api.txt: `python -m docs.make_public_api` renews the list.

A name that comes, goes or changes its signature changes the list, and a test fails until somebody has renewed it on
purpose (and said so in CHANGELOG.md).
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import bespokefl
import bespokefl.algorithms
import bespokefl.core

FILE = Path(__file__).resolve().parents[1] / "tests" / "public_api.txt"
COMMAND = "python -m docs.make_public_api"
ROOMS = (bespokefl, bespokefl.core, bespokefl.algorithms)


def listing() -> str:
    """A line for each public name."""
    lines = [f"{room.__name__}.{name}{arguments(getattr(room, name))}" for room in ROOMS for name in room.__all__]
    return "".join(f"{line}\n" for line in lines)


def arguments(thing: Any) -> str:
    """The names of a function's arguments, those with a default with an =; of a class, what makes one."""
    if not (inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("bespokefl"))):
        return ""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return ""
    return f"({', '.join(f'{p.name}=' if p.default is not p.empty else _written(p) for p in parameters)})"


def _written(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"{stars.get(parameter.kind, '')}{parameter.name}"


if __name__ == "__main__":
    FILE.write_text(listing(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
