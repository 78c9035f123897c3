"""Writes docs/methods.md from the docstrings and the hyper-parameters of the algorithms: python docs/make_methods.py"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bespokefl.algorithms import ALGORITHMS, Algorithm, AlgorithmSpec, description
from bespokefl.core.averaging import ModelAveraging
from bespokefl.core.hyper import HyperParameter, hyperparameters

COMMAND = "python docs/make_methods.py"
PAGE = Path(__file__).with_name("methods.md")
PAPERS = {
    "PLGU": ("plgu-lf", "plgu-grep", "plgu-ghn"),
    "PGFed": ("pgfed", "pgfedmo"),
    "FedPG": ("fedpg", "s-fedpg"),
    "LG-Mix": ("lg-mix",),
}
SHARED = {setting.name: setting for setting in hyperparameters(Algorithm)}
AVERAGING = {s.name: s for s in hyperparameters(ModelAveraging) if s.name not in SHARED}
TOP = """# Methods

Every method that Bespoke knows by name, in the words of its own file, with its hyper-parameters.
This page is made from the code by `{command}`: change the docstrings, not the page.

[Baselines](baselines.md) says where implementations of the same method differ, and what was taken here.

{lists}
## Settings that all methods share

{table}
Methods whose server averages models have these too ([attacks](attacks.md) says what each rule computes):
{averaging}.

{rules}
A method's own table follows its description. Where one of these has another default or another meaning, its section
says so.

## Every method's own defaults

What neither the experiment file nor the arguments say is the method's own, in Python and on the command line alike.
Rates that no paper or released code states are the common ones; tune them ([tuning](tuning.md)). To compare methods at
equal local work, write `local_epochs`, `batch_size` and the rest in `[train]`. A dash: it changes nothing in the method
as it stands. All start with `optimizer = "sgd"`, `opt_state = "reset"` and `drop_last = false`.

{defaults}
"""
DEFAULTS = ("lr", "lr_decay", "momentum", "weight_decay", "local_epochs", "batch_size", "weights")


def page() -> str:
    """The whole page."""
    return "\n".join([top(), *(section(spec) for spec in ALGORITHMS.values())])


def top() -> str:
    of_papers = {name for names in PAPERS.values() for name in names}
    groups = PAPERS | {"Baselines": tuple(name for name in ALGORITHMS if name not in of_papers)}
    lists = [
        f"**{title}**\n\n" + "".join(index_line(ALGORITHMS[name]) for name in names) for title, names in groups.items()
    ]
    averaging = ", ".join(name for name, spec in ALGORITHMS.items() if issubclass(spec.cls, ModelAveraging))
    rules = table(AVERAGING.values())
    return TOP.format(
        command=COMMAND,
        lists="\n".join(lists),
        table=table(SHARED.values()),
        averaging=averaging,
        rules=rules,
        defaults=defaults(),
    )


def defaults() -> str:
    """A row for each method: what it starts with of what all methods share."""
    lines = [f"| method | {' | '.join(f'`{name}`' for name in DEFAULTS)} |", f"|{' --- |' * (1 + len(DEFAULTS))}"]
    for name, spec in ALGORITHMS.items():
        algorithm = spec.cls()
        unused = algorithm.unused()
        cells = ("-" if key in unused else value(getattr(algorithm, key)) for key in DEFAULTS)
        lines.append(f"| [{name}](#{anchor(name)}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def index_line(spec: AlgorithmSpec) -> str:
    return f"* [{spec.name}](#{anchor(spec.name)}): {markdown_text(spec.summary.partition(': ')[2])}\n"


def anchor(heading: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def section(spec: AlgorithmSpec) -> str:
    file = f"src/bespokefl/{spec.cls.__module__.removeprefix('bespokefl.').replace('.', '/')}.py"
    parts = [f"## {spec.name}\n", f"{markdown_text(spec.paper)} · [{Path(file).name}](../{file})\n"]
    parts += markdown(description(spec.cls))
    first = first_of_file(spec)
    if first is not spec:
        parts.append(f"All else is [{first.name}](#{anchor(first.name)})'s.\n")
    own = [h for h in spec.hyperparameters if h.name not in SHARED | AVERAGING or says_more(h)]
    if own:
        parts.append(table(own))
    others = [f"`{h.name}` = {value(h.default)}" for h in spec.hyperparameters if has_other_default(h)]
    if others:
        parts.append(f"Shared settings with another default: {', '.join(others)}.\n")
    return "\n".join(parts)


def first_of_file(spec: AlgorithmSpec) -> AlgorithmSpec:
    """The method that the docstring of the file describes."""
    text = inspect.getdoc(inspect.getmodule(spec.cls))
    same_file = (s for s in ALGORITHMS.values() if s.cls.__module__ == spec.cls.__module__)
    return next(s for s in same_file if description(s.cls) == text)


def says_more(setting: HyperParameter) -> bool:
    """Whether a shared setting means something else in this method, or has another range."""
    shared = (SHARED | AVERAGING)[setting.name]
    return (setting.meaning, setting.allowed) != (shared.meaning, shared.allowed)


def has_other_default(setting: HyperParameter) -> bool:
    return setting.name in SHARED and setting.default != SHARED[setting.name].default


# Markdown --------------------------------------------------------------------------------------------
def table(settings: Iterable[HyperParameter]) -> str:
    lines = ["| name | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for h in settings:
        cells = (f"`{h.name}`", value(h.default), allowed(h), markdown_text(h.meaning).replace("|", r"\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def value(default: Any) -> str:
    """As an experiment file has it."""
    if default is None:
        return "nothing"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return str(list(default))
    return f"`{default}`" if isinstance(default, str) else str(default)


def allowed(setting: HyperParameter) -> str:
    words = setting.allowed or setting.type
    if " or nothing " in words:  # "a number or nothing at least 1"
        words = f"{words.replace(' or nothing', '')}, or nothing"
    return re.sub(r"'([^']*)'", r"`\1`", words)


def markdown(docstring: str) -> Iterator[str]:
    """The blocks of a docstring: paragraphs, lists of ``* `` items, and equations, which are indented."""
    for block in re.split(r"\n\s*\n", docstring):
        if block.startswith("    "):
            yield f"```text\n{textwrap.dedent(block)}\n```\n"
        elif block.startswith("* "):
            items = re.split(r"\n(?=\* )", block)
            yield "".join(f"* {markdown_text(item[2:])}\n" for item in items)
        else:
            yield f"{markdown_text(block)}\n"


def markdown_text(text: str) -> str:
    """On one line, for a line that begins with - or + would begin a list."""
    pieces = re.split(r"``(.*?)``", re.sub(r"\s+", " ", text))
    return "".join(f"`{piece}`" if k % 2 else escaped(piece) for k, piece in enumerate(pieces))


def escaped(text: str) -> str:
    """What Markdown would take for emphasis, for struck out text or for HTML; w_i may stay as it is."""
    return re.sub(r"[*~`]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|<(?=[A-Za-z/!?])", r"\\\g<0>", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
