"""Fill the list of experiments in docs/reproduce.md from their files: `python docs/make_reproduce.py`."""

import re
from pathlib import Path

from bespokefl.experiments.reading import read_parts
from bespokefl.experiments.schema import Part

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reproduce.md"
EXPERIMENTS = DOCS.parent / "experiments"
COMMAND = "python docs/make_reproduce.py"

PAPERS = ("plgu", "pgfed", "fedpg", "lgmix")
LIST = re.compile(r"(<!-- experiments -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = "| name | what it shows | settings | data |\n| --- | --- | --- | --- |\n"


def filled(text: str) -> str:
    """The page with the list as the files have it: the papers' items, then what is not of the papers."""
    names = [path.stem for path in EXPERIMENTS.glob("*.toml") if path.stem.partition("-")[0] in PAPERS]
    items = sorted((name for name in names if is_item(name)), key=_place)
    others = sorted(name for name in names if not is_item(name))
    rows = "".join(_row(name) for name in [*items, *others])
    return LIST.sub(lambda found: found[1] + HEADER + rows + found[2], text)


def is_item(name: str) -> bool:
    """Whether a paper has a table or a figure of this number."""
    return re.search(r"-(table|figure)\d+[a-z]?$", name) is not None


def _place(name: str) -> tuple[int, bool, int, str]:
    kind, number, letter = re.fullmatch(r".*-(table|figure)(\d+)([a-z]?)", name).groups()  # type: ignore[union-attr]
    return PAPERS.index(name.partition("-")[0]), kind == "figure", int(number), letter


def _row(name: str) -> str:
    parts = read_parts(EXPERIMENTS / f"{name}.toml")
    settings = ", ".join(f"`{part.name}`" for part in parts if part.name) or "-"
    data = ", ".join(dict.fromkeys(_data(part) for part in parts))
    return f"| `{name}` | {parts[0].experiment.paper.title} | {settings} | {data} |\n"


def _data(part: Part) -> str:
    """The source, or the folder or file where any will do."""
    data = part.experiment.data
    return f"`{data.root}`" if data.root and data.source in ("npz", "images", "domains") else f"`{data.source}`"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
