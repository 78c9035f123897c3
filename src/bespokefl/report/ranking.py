"""The ranking as HTML: it stands in the page as it is, without JavaScript, and can be sorted with it."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bespokefl.report.gather import Comparison
from bespokefl.results.methods import scores
from bespokefl.results.table import FURTHER, Figure, MethodRow, caption


@dataclass(frozen=True)
class _Column:
    title: str
    help: str
    figure: Callable[[MethodRow], Figure | None]
    digits: int = 1
    best: Callable[[Sequence[float]], float] | None = None  # max or min; None where neither is better
    sign: bool = False
    unit: str = ""


_COLUMNS = (
    _Column("mean %", "Mean over clients, each with its model on its own test data (L-acc)", lambda r: r.mean, 2, max),
    _Column("worst 5 %", "Mean of the worst 5 % of the clients", lambda r: r.worst5, best=max),
    _Column("top 5 %", "Mean of the best 5 % of the clients", lambda r: r.top5, best=max),
    _Column("std over clients", "Standard deviation over the clients", lambda r: r.std, best=min),
    _Column("gain over Local", "Mean over clients, percentage points", lambda r: r.gain, 2, max, sign=True),
    _Column("clients harmed", "Clients below what they reach alone, mean over seeds", lambda r: r.harmed, best=min),
    _Column("S\u2011acc %", "On the client's own and some other clients' test data", lambda r: r.s_acc, best=max),
    _Column("G\u2011acc %", "On all clients' test data together", lambda r: r.g_acc, best=max),
    _Column("global model %", "The server's model on all clients' test data", lambda r: r.gm_acc, best=max),
)
_COSTS = (
    _Column("sent, MB", "Bytes that clients receive and send in the whole run", lambda r: r.megabytes, best=min),
    _Column("training, s", "Seconds of training, without evaluation", lambda r: r.seconds, best=min),
    _Column("peak GPU memory, MB", "Of the GPU, in this run", lambda r: r.gpu_megabytes, 0, min),
)


def _further(name: str) -> _Column:
    """Another metric that runs may report."""
    heading, factor, digits = FURTHER[name]

    def figure(row: MethodRow) -> Figure | None:
        found = row.further.get(name)
        return found and Figure(factor * found.mean, None if found.std is None else factor * found.std)

    better = min if name == "hausdorff" else max
    return _Column(heading, "Mean over the clients that have it", figure, digits, better)


def _wanted(comparison: Comparison) -> list[_Column]:
    target = next((row.target for row in comparison.rows if row.target is not None), None)
    within = f"rounds to {100 * (target or 0):g} %"
    columns = [
        *_COLUMNS,
        *map(_further, FURTHER),
        _Column(within, "The first evaluated round whose mean is that high", lambda r: r.rounds_to_target, best=min),
        *_COSTS,
    ]
    return [column for column in columns if any(column.figure(row) is not None for row in comparison.rows)]


def ranking_html(comparison: Comparison) -> str:
    rows = comparison.rows
    columns = _wanted(comparison)
    head = _heading("method", "Sort by name", "text", "ascending") + "".join(_column_heading(c) for c in columns)
    best = {column.title: _best(column, rows) for column in columns}
    first, *notes = caption(comparison.runs).splitlines()
    told = "".join(f'<p class="note">{html.escape(text)}</p>' for text in (f"{first} {_more(comparison)}", *notes))
    clients = {label: _clients(comparison, label) for label in comparison.labels}
    body = "\n".join(_row(row, columns, best, clients[row.label]) for row in rows)
    return (
        '<div class="ranking"><div class="scroll" tabindex="0" role="region" aria-label="Ranking">'
        '<table><caption class="unseen">Methods, the best mean first</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        f"{told}</div>"
    )


def _heading(title: str, help_: str, kind: str, first: str, sorted_: str = "") -> str:
    state = f' aria-sort="{sorted_}"' if sorted_ else ""
    return (
        f'<th scope="col" data-kind="{kind}" data-first="{first}"{state}>'
        f'<button type="button" title="{html.escape(help_)}">{html.escape(title)}</button></th>'
    )


def _column_heading(column: _Column) -> str:
    first = "ascending" if column.best is min else "descending"
    return _heading(column.title, column.help, "number", first, "descending" if column.title.startswith("mean") else "")


def _best(column: _Column, rows: Sequence[MethodRow]) -> float | None:
    known = [figure.mean for row in rows if (figure := column.figure(row)) is not None]
    if column.best is None or len(known) < 2:
        return None
    best = column.best(known)
    tied = sum(f"{value:.{column.digits}f}" == f"{best:.{column.digits}f}" for value in known)
    return best if 2 * tied <= len(known) else None  # what most have is no distinction


def _row(row: MethodRow, columns: Sequence[_Column], best: dict[str, float | None], clients: int) -> str:
    label = html.escape(row.label)
    cells = "".join(_cell(column, column.figure(row), best[column.title], clients) for column in columns)
    return f'<tr data-method="{label}"><th scope="row" data-value="{label}" title="{label}">{label}</th>{cells}</tr>'


def _cell(column: _Column, figure: Figure | None, best: float | None, clients: int) -> str:
    if figure is None:
        return '<td data-value="">–</td>'
    digits = column.digits
    if column.title == "clients harmed":
        digits = 0 if float(figure.mean).is_integer() else 1
    text = f"{figure.mean:+.{digits}f}" if column.sign else f"{figure.mean:.{digits}f}"
    kinds = ["best"] if best is not None and f"{figure.mean:.{digits}f}" == f"{best:.{digits}f}" else []
    if column.sign and figure.mean:
        kinds.append("gains" if figure.mean > 0 else "harms")
    spread = f" <small>±{figure.std:.{digits}f}</small>" if figure.std is not None else ""
    if column.title == "clients harmed":
        spread = f" <small>of {clients}</small>"
        kinds += ["harms"] if figure.mean else []
    return f'<td data-value="{figure.mean!r}" class="{" ".join(kinds)}">{text}{spread}</td>'


def _clients(comparison: Comparison, label: str) -> int:
    return int(np.isfinite(scores(comparison.methods[label][0])).sum())


def _more(comparison: Comparison) -> str:
    said = ["★ marks the best of a column."]
    if len({row.seeds for row in comparison.rows}) > 1:
        said.append("Not all methods have the same number of seeds.")
    if "local" not in comparison.references:
        said.append("There is no finished run of Local, so gains over it are unknown.")
    if comparison.malicious:
        listed = "; ".join(
            f"seed {seed}: {', '.join(map(str, sorted(clients)))}"
            for seed, clients in sorted(comparison.malicious.items())
        )
        said.append(f"Clients that attack are left out ({listed}).")
    fractions = {
        run.summary["s_fraction"]
        for own in comparison.methods.values()
        for run in own
        if run.summary is not None and run.summary.get("s_fraction") is not None
    }
    if fractions and any(row.s_acc is not None for row in comparison.rows):
        said.append(f"S-acc meets {' or '.join(f'{100 * f:g} %' for f in sorted(fractions))} of the other clients.")
    return " ".join(said)
