"""Writes the table of what leaves a silo into docs/federation.md, from what methods declare:
python docs/make_federation.py"""

import sys
from pathlib import Path

from bespokefl.algorithms import ALGORITHMS, Algorithm
from bespokefl.core.exchange import Exchange

PAGE = Path(__file__).with_name("federation.md")
BEGIN, END = "<!-- what leaves: python docs/make_federation.py -->", "<!-- end of what leaves -->"
HEAD = "| methods | what a client sends in a round | what never leaves it | how near that is to samples |"


def table() -> str:
    """A row for all methods that send the same."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, spec in ALGORITHMS.items():
        rows.setdefault((_sent(spec.cls), _stays(spec.cls), _shows(spec.cls)), []).append(name)
    lines = [f"| {' '.join(f'`{name}`' for name in names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join([HEAD, "| --- | --- | --- | --- |", *lines])


def _sent(cls: type[Algorithm]) -> str:
    told: dict[str, list[str]] = {}
    for exchange in cls.exchanges:
        for upload, what in exchange.sends.items():
            told.setdefault(f"`{upload}`: {what}", []).append(_only(exchange))
    parts = [what if "" in only else f"{what} ({only[0]})" for what, only in told.items()]
    return "; ".join(parts) or "nothing"


def _only(exchange: Exchange) -> str:
    """The hyper-parameters under which a round has an exchange; empty if always."""
    ways = [" and ".join(map(str, way)) for way in exchange.only.ways]
    return "" if "" in ways else f"with {' or '.join(ways)}"


def _stays(cls: type[Algorithm]) -> str:
    return "; ".join(cls.stays.values()) or "its samples"


def _shows(cls: type[Algorithm]) -> str:
    shown = dict.fromkeys(exchange.shows for exchange in cls.exchanges if exchange.shows)
    if shown:
        return f"**{'; '.join(shown)}**"
    return (
        "as many steps away as a round has" if any(exchange.sends for exchange in cls.exchanges) else "nothing to read"
    )


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
