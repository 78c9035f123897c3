"""The report: one HTML file that needs nothing else, of whatever an output folder holds."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bespokefl import __version__
from bespokefl.errors import InputError
from bespokefl.results import pictures
from bespokefl.results.fact_pictures import facts_figure
from bespokefl.results.facts import FOLDER, read_facts
from bespokefl.results.files import StoredRun, read_runs, write_atomically
from bespokefl.results.table import caption, columns, method_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { position: sticky; top: 0; background: #fff; }
svg { max-width: 100%; height: auto; } .scroll { overflow: auto; max-height: 32rem; }
.low { background: #fbe3d6; } .note { color: #555; } pre { white-space: pre-wrap; background: #f6f6f6; padding: .6rem; }
"""


def publish(out: Path, runs: Sequence[StoredRun] | None = None) -> Path:
    """Write the comparison's picture and the report of an output folder; the report's path."""
    known = read_runs(out) if runs is None else runs
    if not known:
        raise InputError(f"{out} holds no runs; give the folder that was --out of `bespoke run`.")
    if any(run.summary is not None for run in known):
        pictures.save(pictures.result_figure(known), out / "result")
    for run in known:
        if facts := read_facts(run.folder):
            pictures.save(facts_figure(facts), run.folder / FOLDER / "picture")
    path = out / "report.html"
    write_atomically(path, _page(out, known))
    return path


def _page(out: Path, runs: Sequence[StoredRun]) -> str:
    finished = [run for run in runs if run.summary is not None]
    unfinished = [run for run in runs if run.summary is None]
    body = [f"<h1>{html.escape(out.resolve().name)}</h1>"]
    if finished:
        body += [_ranking(finished), _section("Clients and rounds", _svg(out / "result.svg"))]
    if unfinished:
        body.append(_section("Not finished", _unfinished(unfinished)))
    for picture in sorted(out.glob("partition-seed-*.svg")):
        body.append(_section(f"Partition, seed {picture.stem.rpartition('-')[2]}", _svg(picture)))
    for own in pictures.by_method(finished).values():
        run = own[0]  # one seed is enough to look at; the others' pictures lie in their folders
        picture = run.folder / FOLDER / "picture.svg"
        if picture.is_file():
            body.append(_section(f"What {run.label} shows of itself, seed {run.seed}", _svg(picture)))
    for seed in sorted({run.seed for run in finished}):
        own = [run for run in finished if run.seed == seed]
        body.append(_section(f"Accuracy of every client, seed {seed}", _per_client(own)))
    body.append(f'<p class="note">Made by bespokefl {__version__}.</p>')
    title = html.escape(f"{out.resolve().name}: report")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{content}"


def _svg(path: Path) -> str:
    """The picture itself, without the lines that only a file of its own needs."""
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _ranking(runs: Sequence[StoredRun]) -> str:
    rows = method_rows(runs)
    shown = columns(rows)
    table = _table(shown, ([(cell(row), "") for cell in shown.values()] for row in rows))
    return f'{table}<p class="note">{html.escape(caption(runs))} Accuracies in percent.</p>'


def _unfinished(runs: Iterable[StoredRun]) -> str:
    """What is missing, and why where it is known."""
    parts = []
    for run in runs:
        name = html.escape(f"{run.label}, seed {run.seed}")
        reason = "failed" if run.error else "not finished"
        parts.append(f"<p>{name}: {reason} after {len(run.rounds)} rounds; it is in no table and no picture.</p>")
        if run.error:
            parts.append(f"<pre>{html.escape(run.error.strip())}</pre>")
    return "\n".join(parts)


def _per_client(runs: Sequence[StoredRun]) -> str:
    """A row per client, a column per method; the lowest 5 % of a method are marked."""
    methods = pictures.by_method(runs)
    clients = next(iter(methods.values()))[0].clients
    assert clients is not None
    accuracy = [own[0].clients["accuracy"] for own in methods.values() if own[0].clients is not None]
    lowest = [_lowest(values) for values in accuracy]
    rows = (
        [
            (_client_name(clients["client"][i], clients["name"][i]), ""),
            (f"{clients['n_train'][i]:.0f}", ""),
            (f"{clients['n_test'][i]:.0f}", ""),
            *((_percent(values[i]), "low" if i in low else "") for values, low in zip(accuracy, lowest, strict=True)),
        ]
        for i in range(len(clients["client"]))
    )
    table = _table(["client", "train", "test", *methods], rows)
    return f'<div class="scroll">{table}</div><p class="note">Marked: the lowest 5 % of each method.</p>'


def _lowest(accuracy: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> set[int]:
    present = np.flatnonzero(~np.isnan(accuracy))
    count = max(1, round(len(present) / 20))
    return {int(client) for client in present[np.argsort(accuracy[present], kind="stable")[:count]]}


def _client_name(number: float, name: object) -> str:
    plain = f"{number:.0f}"
    shown = f"{name:.0f}" if isinstance(name, float) else str(name)
    return plain if shown == plain else f"{plain} {shown}"


def _percent(fraction: float) -> str:
    return "-" if np.isnan(fraction) else f"{100 * fraction:.1f}"


def _table(header: Iterable[str], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Rows of (text, class of the cell)."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for row in rows:
        cells = "".join(f'<td class="{kind}">{html.escape(text)}</td>' for text, kind in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])
