"""docs/methods.md says what the code says, and docs/baselines.md names options and defaults that exist."""

import re
from collections.abc import Iterator

import pytest
from docs.make_methods import COMMAND, PAGE, PAPERS, anchor, escaped, markdown, page, value

from bespokefl.algorithms import ALGORITHMS


def test_the_page_is_what_the_code_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/methods.md is not up to date; run: {COMMAND}"


def test_every_method_has_one_section_and_one_link_to_it() -> None:
    text = page()
    for name in ALGORITHMS:
        assert text.count(f"\n## {name}\n") == 1
        assert text.count(f"\n* [{name}](#{anchor(name)}): ") == 1


def test_every_hyper_parameter_is_on_the_page() -> None:
    sections = {text.partition("\n")[0]: text for text in page().split("\n## ")}
    shared = sections["Settings that all methods share"]
    for name, spec in ALGORITHMS.items():
        for parameter in spec.hyperparameters:
            assert f"| `{parameter.name}` |" in sections[name] + shared


def test_a_docstring_as_markdown() -> None:
    docstring = """Name: what it does,
- in two lines.

    w <- w -
        eta g

* ``mu`` adds
  mu |w_i|^2.
* A second item."""
    assert list(markdown(docstring)) == [
        "Name: what it does, - in two lines.\n",
        "```text\nw <- w -\n    eta g\n```\n",
        "* `mu` adds mu |w_i|^2.\n* A second item.\n",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w_i <- w_i - eta", "w_i <- w_i - eta"),
        ("sum_{i in S} w+_n", r"sum\_{i in S} w+\_n"),
        ("lambda* and w~", r"lambda\* and w\~"),
        ("<v, w> < 1", r"\<v, w> < 1"),
    ],
)
def test_what_markdown_would_misread_is_escaped(text: str, expected: str) -> None:
    assert escaped(text) == expected


def differences() -> Iterator[tuple[str, str, str]]:
    """Method, our default and why, for each row of the table of baselines and each method that the row is about."""
    methods: list[str] = []
    for line in PAGE.with_name("baselines.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| method", "| ---")):
            method, *_, ours, why = (cell.strip() for cell in line.strip("|").split("|"))
            methods = re.findall(r"\[([^]]+)\]", method) or methods
            yield from ((name, ours, why) for name in methods)


def test_the_baselines_options_and_defaults_are_those_of_the_code() -> None:
    named = 0
    for method, ours, why in differences():
        defaults = {parameter.name: value(parameter.default) for parameter in ALGORITHMS[method].hyperparameters}
        choices = " ".join(parameter.type for parameter in ALGORITHMS[method].hyperparameters)
        stated = re.findall(r"`(\w+) = (.*?)`", ours) + re.findall(r"`(\w+)` (?:and `\w+` )?(nothing)", ours)
        for option, default in stated:
            assert defaults[option].strip("`") == default.strip('"'), f"{method}: {option}"
        for choice in re.findall(r'`"(\w+)"`', ours + why):
            assert f"'{choice}'" in choices, f"{method}: {choice}"
        named += len(stated)
    assert named > 80


def test_every_baseline_is_among_the_differences() -> None:
    of_papers = {name for names in PAPERS.values() for name in names}
    assert {method for method, _, _ in differences()} == set(ALGORITHMS) - of_papers
