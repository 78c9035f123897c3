"""docs/methods.md says what the code says."""

import pytest
from docs.make_methods import COMMAND, PAGE, anchor, escaped, markdown, page

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
