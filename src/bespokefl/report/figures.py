"""Charts as files: SVG and PNG, without a browser; the same numbers always give the same bytes."""

import re
from pathlib import Path
from typing import Any

import vl_convert

from bespokefl.report.content import Content
from bespokefl.report.panels import figure_spec, joined_spec
from bespokefl.report.theme import LABELLING, NAMES
from bespokefl.results.files import write_atomically

SCALE = 2  # pixels of a PNG for each of the page


def render(spec: dict[str, Any]) -> dict[str, bytes]:
    vega = vl_convert.vegalite_to_vega(spec)
    for mark in vega["marks"]:
        if mark["type"] == "text" and mark.get("name", "").startswith(NAMES):
            mark["transform"] = [LABELLING]
    svg = vl_convert.vega_to_svg(vega)
    return {"svg": svg.encode(), "png": vl_convert.svg_to_png(svg, scale=SCALE)}


def write_result(content: Content, out: Path) -> None:
    """out/result.png and .svg: every client, and how the mean and the worst 5 % came about."""
    panels = {panel.id: panel for panel in content.panels}
    right = [panels["rounds-mean"], panels["rounds-worst5"]]
    spec = joined_spec(panels["score-of-clients"], right, content.looks, content.tables)
    for suffix, image in render(spec).items():
        write_atomically(out / f"result.{suffix}", image)


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Every chart of the page, as it looks at first on light paper."""
    written = []
    for panel in content.panels:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", panel.id).strip("-")
        for suffix, image in render(figure_spec(panel, content.looks, content.tables)).items():
            path = folder / f"{name}.{suffix}"
            write_atomically(path, image)
            written.append(path)
    return written
