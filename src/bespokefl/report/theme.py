"""Colours and marks that nearly everybody can tell apart, on light and on dark paper.

The hues are Okabe and Ito's. On white the pale ones are darkened until they stand out (contrast 3 and more), and wine
red stands in for yellow. A method has a dash and a shape beside its colour, so that no reader depends on colour.
"""

from collections.abc import Sequence
from typing import Any

LIGHT = ("#0072B2", "#D55E00", "#008F68", "#BC5A91", "#2E8FCB", "#B87A00", "#1A1A1A", "#882255")
DARK = ("#4DA3DC", "#F0793A", "#1FBF92", "#DE93BC", "#8CCBF2", "#F0B13C", "#F4F4F4", "#F0E442")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [13, 3], [4, 2, 1, 2, 1, 2], [1, 3], [5, 5])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
MOST_PICKS = len(LIGHT)  # methods that have a colour at a time; the others are grey
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FIGURE_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"

# By the names that charts use as expressions: page.js sets them anew when the reader switches.
INKS = {
    "light": {
        "paper": "#ffffff",
        "ink": "#1d2329",
        "soft": "#5b6670",
        "line": "#e3e7eb",
        "muted": "#8a95a0",
        "good": "#0072B2",
        "bad": "#D55E00",
    },
    "dark": {
        "paper": "#171b20",
        "ink": "#e8ecf0",
        "soft": "#9aa5b0",
        "line": "#2b323a",
        "muted": "#5f6b77",
        "good": "#4DA3DC",
        "bad": "#F0793A",
    },
}
SEQUENTIAL = {  # from nothing to much
    "light": ["#f1f5f9", "#bcd7ea", "#6fabd3", "#2a7ab5", "#08467d"],
    "dark": ["#1f262d", "#1d4564", "#20699a", "#4a9bd0", "#b9e0fa"],
}
DIVERGING = {  # below zero, zero, above zero
    "light": ["#9c3a00", "#D55E00", "#f0ad80", "#f6f6f6", "#8cbfe0", "#0072B2", "#00436b"],
    "dark": ["#ffb085", "#f0793a", "#8a4a2a", "#23292f", "#265a7c", "#4DA3DC", "#a9d8f7"],
}


# Vega's way to write names beside points so that none covers another; Vega-Lite has no word for it.
NAMES = "names"  # the layer that it belongs to
LABELLING = {
    "type": "label",
    "size": {"signal": "[width + 60, height]"},
    "anchor": ["right", "left", "top", "bottom", "top-right", "bottom-right", "top-left", "bottom-left"],
    "offset": [8],
}


def default_picks(labels: Sequence[str], important: Sequence[str]) -> list[str]:
    """The methods that have a colour at first: all, or the best and those that others are compared with."""
    if len(labels) <= MOST_PICKS:
        return list(labels)
    kept = [label for label in important if label in labels]
    best = [label for label in labels if label not in kept][: MOST_PICKS - len(kept)]
    return [label for label in labels if label in kept or label in best]


def vega_config(mode: str, font: str = FONT) -> dict[str, Any]:
    ink = INKS[mode]
    text = {"labelColor": ink["soft"], "titleColor": ink["soft"], "labelFontSize": 11.5, "titleFontSize": 12}
    return {
        "font": font,
        "background": None,
        "aria": False,  # the chart as a whole has a name, and its numbers are in a table
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            **text,
            "titleFontWeight": "normal",
            "gridColor": ink["line"],
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "titlePadding": 8,
        },
        "axisBand": {"grid": False},
        "axisX": {"titleAnchor": "end", "labelFlush": False, "labelSeparation": 6},
        "legend": {**text, "titleFontWeight": "normal", "gradientLength": 160, "gradientThickness": 10},
        "text": {"color": ink["ink"], "fontSize": 11.5},
        "title": {"color": ink["ink"], "anchor": "start", "fontSize": 13, "fontWeight": 600, "offset": 10},
        "range": {
            "heatmap": SEQUENTIAL[mode],
            "ramp": SEQUENTIAL[mode],
            "diverging": DIVERGING[mode],
        },
        "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 75)"}},
        "line": {"strokeWidth": 2},
    }
