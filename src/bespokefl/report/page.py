"""The report as one HTML page: words, the ranking, the charts' specifications, and every table once."""

import functools
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files as resources
from string import Template
from typing import Any

import vl_convert

from bespokefl import __version__
from bespokefl.report.content import Content
from bespokefl.report.gather import REFERENCES, Comparison, Problem
from bespokefl.report.panels import Panel, Section, page_spec
from bespokefl.report.ranking import ranking_html
from bespokefl.report.tables import packed
from bespokefl.report.theme import DARK, DASHES, INKS, LABELLING, LIGHT, MOST_PICKS, NAMES, SHAPES, vega_config
from bespokefl.results.table import Figure, MethodRow

THEME = '<button type="button" id="theme" aria-pressed="false">Dark</button>'
SCRIPTS = ("state.js", "charts.js", "numbers.js", "main.js")  # in this order, as one


def page(content: Content) -> str:
    comparison = content.comparison
    body = []
    if comparison.methods:
        body.append(_cards(comparison))
        body.append(
            '<section id="ranking"><h2>Ranking</h2>'
            '<p class="lead">The best mean first; a click on a heading sorts by it.</p>'
            f"{ranking_html(comparison)}</section>"
        )
    if content.problems:
        body.append(_problems(content.problems))
    numbers = {panel.id: number for number, panel in enumerate(content.panels)}
    body += [_section(section, numbers, content) for section in content.sections]
    return Template(_asset("page.html")).substitute(
        title=html.escape(comparison.folder.resolve().name),
        version=__version__,
        style=_asset("style.css"),
        setting=html.escape(_setting(comparison)),
        navigation=_navigation(content),
        theme=THEME if comparison.methods else "",
        filter=_filter(comparison) if comparison.methods else "",
        body="\n".join(body).replace(" %", "\u00a0%"),
        data=_json(_data(content, numbers)),
        scripts=_scripts() if comparison.methods else "",
    )


def _asset(name: str) -> str:
    return resources("bespokefl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """No character that could end the script it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _scripts() -> str:
    own = "\n".join(_asset(name) for name in SCRIPTS)
    return "\n".join(_script(code) for code in (_vega(), own))


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; bundling takes seconds."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _script(code: str) -> str:
    safe = code.replace("</script", "<\\/script")
    return f'<script type="module">\n{safe}\n</script>'


def _data(content: Content, numbers: Mapping[str, int]) -> dict[str, Any]:
    looks = content.looks
    return {
        "labels": list(looks.labels),
        "tables": {name: packed(table) for name, table in content.tables.items()},
        "panels": [_panel_data(panel, numbers[panel.id], content) for panel in content.panels],
        "start": {
            "picks": list(looks.picks),
            "focus": looks.focus,
            "seed": looks.seed,
            "reference": f"over_{looks.references[0]}" if looks.references else "",
        },
        "looks": {"colours": {"light": LIGHT, "dark": DARK}, "dashes": DASHES, "shapes": SHAPES},
        "inks": INKS,
        "labelling": {"layer": NAMES, "transform": LABELLING},
        "configs": {mode: vega_config(mode) for mode in INKS},
    }


def _panel_data(panel: Panel, number: int, content: Content) -> dict[str, Any]:
    return {
        "id": panel.id,
        "number": number,
        "title": panel.title,
        "spec": page_spec(panel.chart, content.looks),
        "data": panel.data,
        "columns": [{"field": c.field, "title": c.title, "digits": c.digits} for c in panel.columns],
        "focus": panel.focus,
        "bySeed": panel.by_seed,
        "legend": panel.legend,
        "step": panel.step,
    }


# words -----------------------------------------------------------------------------------------------


def _setting(comparison: Comparison) -> str:
    """What was run, as far as the runs agree on it."""
    configs = [comparison.configs[run.folder] for run in comparison.runs if run.folder in comparison.configs]
    seeds = sorted({run.seed for run in comparison.runs})
    labels = {run.label for run in comparison.runs}
    said = [
        _common(configs, "data", "source", "data {}"),
        _common(configs, "data", "partition", "partition {}"),
        _common(configs, "data", "alpha", "alpha {}"),
        _common(configs, "data", "labels_per_client", "{} labels per client"),
        _common(configs, "data", "clients", "{} clients"),
        _common(configs, "model", "name", "model {}"),
        _common(configs, "train", "rounds", "{} rounds"),
        _common(configs, "train", "participation", "participation {}"),
        f"{len(labels)} method{'s' if len(labels) != 1 else ''}",
        f"seed{'s' if len(seeds) != 1 else ''} {', '.join(map(str, seeds))}",
    ]
    return " · ".join(part for part in said if part)


def _common(configs: Iterable[Mapping[str, Any]], section: str, key: str, text: str) -> str:
    values = {str(found) for config in configs if (found := _get(config, section, key)) is not None}
    return text.format(values.pop()) if len(values) == 1 else ""


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, Mapping) else None


def _navigation(content: Content) -> str:
    links = [("ranking", "Ranking")] if content.comparison.methods else []
    links += [("problems", "Runs with problems")] if content.problems else []
    links += [(section.id, section.title) for section in content.sections]
    return "".join(f'<a href="#{id_}">{html.escape(title)}</a>' for id_, title in links)


def _cards(comparison: Comparison) -> str:
    rows = comparison.rows
    cards = [
        _card("Best mean", rows, lambda row: row.mean, max, "{:.2f} %"),
        _card("Best worst 5 %", rows, lambda row: row.worst5, max, "{:.1f} %"),
        _card("Largest gain over Local", rows, lambda row: row.gain, max, "{:+.2f} points"),
        _card("Fewest clients harmed", rows, lambda row: row.worse_off, min, "{:.0f} %"),
        _card("Best on everybody's data", rows, lambda row: row.g_acc, max, "{:.1f} %"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>' if len(rows) > 1 else ""


def _card(what: str, rows: list[MethodRow], figure: Any, best: Any, text: str) -> str:
    known: dict[str, Figure] = {row.label: found for row in rows if (found := figure(row)) is not None}
    if not known:
        return ""
    shown = text.format(best(found.mean for found in known.values()))
    who = [label for label, found in known.items() if text.format(found.mean) == shown]
    named = html.escape(who[0]) + (f" and {len(who) - 1} more" if len(who) > 1 else "")
    return f'<div class="card"><p class="what">{what}</p><p class="value">{shown}</p><p class="who">{named}</p></div>'


def _filter(comparison: Comparison) -> str:
    many = len(comparison.labels) > MOST_PICKS
    chips = "".join(_chip(label, many) for label in comparison.labels)
    quick = {"all": "All", "none": "None"} | ({"best": f"Best {MOST_PICKS}", "coloured": "Coloured"} if many else {})
    buttons = "".join(f'<button type="button" data-quick="{key}">{text}</button>' for key, text in quick.items())
    hint = (
        f'<p class="note">At most {MOST_PICKS} methods have a colour at a time; the others are grey.</p>'
        if many
        else ""
    )
    return (
        '<div class="filter"><div><details id="filter"><summary>Methods <span id="count"></span></summary>'
        f'<div class="quick">{buttons}</div>{hint}'
        f'<ul class="chips" aria-label="Methods">{chips}</ul></details></div></div>'
    )


def _chip(label: str, many: bool) -> str:
    name = html.escape(label)
    colour = f'<button type="button" class="pick" aria-label="Colour for {name}">colour</button>' if many else ""
    return f'<li class="chip" data-method="{name}"><label><input type="checkbox" checked>{name}</label>{colour}</li>'


def _problems(problems: Iterable[Problem]) -> str:
    items = "".join(
        f"<li>{html.escape(p.run)}: {html.escape(p.what)}"
        + (f"<pre>{html.escape(p.detail)}</pre>" if p.detail else "")
        + "</li>"
        for p in problems
    )
    return f'<section id="problems"><h2>Runs with problems</h2><div class="problems"><ul>{items}</ul></div></section>'


def _section(section: Section, numbers: Mapping[str, int], content: Content) -> str:
    controls = "".join(_control(name, content) for name in section.controls)
    controls = f'<div class="controls">{controls}</div>' if controls else ""
    panels = "".join(_panel(panel, numbers[panel.id]) for panel in section.panels)
    grid = f'<div class="grid{" small" if section.small else ""}">{panels}</div>' if panels else ""
    lead = f'<p class="lead">{_marked(section.text)}</p>'
    return f'<section id="{section.id}"><h2>{html.escape(section.title)}</h2>{lead}{controls}{grid}</section>'


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _control(name: str, content: Content) -> str:
    if name == "reference":
        options = [(f"over_{key}", REFERENCES[key]) for key in content.looks.references]
        return _select(name, "Reference", options, "")
    if name == "focus":
        return _select(
            name, "Method to look at", [(label, label) for label in content.looks.labels], content.looks.focus
        )
    seeds = sorted(set(content.tables["labels"]["seed"]))
    return _select(name, "Seed", [(str(seed), str(seed)) for seed in seeds], str(content.looks.seed))


def _select(name: str, title: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    listed = "".join(
        f'<option value="{html.escape(value)}"{" selected" if value == chosen else ""}>{html.escape(text)}</option>'
        for value, text in options
    )
    return f'<label>{title} <select data-choice="{name}">{listed}</select></label>'


def _panel(panel: Panel, number: int) -> str:
    title = html.escape(panel.title)
    described = html.escape(f"Chart: {panel.title}. {panel.note} The numbers are in the table below.")
    note = f'<p class="note">{html.escape(panel.note)}</p>' if panel.note else ""
    legend = '<ul class="legend" aria-label="Colours"></ul>' if panel.legend else ""
    whose = f' data-method="{html.escape(panel.method)}"' if panel.method else ""
    kinds = ["chart", *(kind for kind in ("wide", "tall") if getattr(panel, kind))]
    return (
        f'<figure class="{" ".join(kinds)}" id="panel-{number}" data-panel="{html.escape(panel.id)}"{whose}>'
        f"<figcaption><h3>{title}</h3>{note}</figcaption>{legend}"
        f'<div class="drawing" role="img" aria-label="{described}"><div></div></div>'
        f'<details class="numbers"><summary>Numbers<span class="unseen"> of {title}</span></summary>'
        "<div></div></details></figure>"
    )
