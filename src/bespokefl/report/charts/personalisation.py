"""What clients gain by their personal models over the run's own global one."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt

from bespokefl.report.panels import Looks, Panel, Section, ink, named, signed_axis
from bespokefl.report.tables import Column, Table, plain

HEIGHT = 180
STEPS, MOST_BARS = (0.5, 1, 2, 5, 10), 24  # percentage points of a bar, and bars of a histogram


class Bars(NamedTuple):
    """The bars that all histograms have in common; zero is between two of them."""

    step: float
    low: float
    high: float

    def table(self, gains: Sequence[float]) -> Table:
        """The bars that are not empty, with their numbers of clients."""
        found = sorted(Counter(math.floor(gain / self.step) for gain in gains).items())
        return {
            "from": plain(self.step * k for k, _ in found),
            "to": plain(self.step * (k + 1) for k, _ in found),
            "clients": [n for _, n in found],
        }


def common_bars(gains: Sequence[float]) -> Bars:
    """Bars as narrow as their number allows."""
    low, high = min(gains), max(gains)
    step = next((s for s in STEPS if high - low <= (MOST_BARS - 2) * s), STEPS[-1])
    return Bars(step, step * math.floor(min(low, -step) / step), step * (math.floor(max(high, 0) / step) + 1))


def over_global_tables(gains: Mapping[str, Sequence[float]]) -> dict[str, Table]:
    """The histogram of each method's clients, by the table's name."""
    if not gains:
        return {}
    bars = common_bars([gain for own in gains.values() for gain in own])
    return {_table(label): bars.table(own) for label, own in gains.items()}


def over_global(looks: Looks, gains: Mapping[str, Sequence[float]]) -> Section | None:
    """A histogram a method; nothing if no method has gains over its global model."""
    if not gains:
        return None
    tables = over_global_tables(gains)
    highest = max(max(table["clients"]) for table in tables.values())
    bars = common_bars([gain for own in gains.values() for gain in own])
    return Section(
        "over-global",
        "What personalisation gains",
        f"Each client's {looks.metric} with its own model minus that with the global model of the same run, in "
        "percentage points, over all seeds. Left of zero the global model serves the client better. All methods have "
        "the same axes; those whose clients use the global model itself are left out.",
        [_histogram(label, bars, highest) for label in gains],
        small=True,
    )


def _table(label: str) -> str:
    return f"over-global-{label}"


def _histogram(label: str, bars: Bars, highest: int) -> Panel:
    axis = alt.X(
        "from:Q",
        bin="binned",
        title="gain over the global model, points",
        axis=signed_axis(),
        scale=alt.Scale(domain=[bars.low, bars.high]),
    )
    drawn = (
        named(_table(label))
        .transform_calculate(bar_colour="datum.from < 0 ? bad : good")
        .mark_bar(binSpacing=1)
        .encode(
            x=axis,
            x2="to",
            y=alt.Y("clients:Q", title="clients", scale=alt.Scale(domain=[0, highest]), axis=alt.Axis(tickMinStep=1)),
            color=alt.Color("bar_colour:N", scale=None),
            tooltip=[
                alt.Tooltip("from:Q", title="from, points", format="+"),
                alt.Tooltip("to:Q", title="to below, points", format="+"),
                "clients:Q",
            ],
        )
    )
    zero = alt.Chart(alt.InlineData([{"zero": 0}])).mark_rule(color=ink("soft"), strokeWidth=1.2).encode(x="zero:Q")
    return Panel(
        _table(label),
        f"{label}: gain over the global model",
        f"Clients by gain, in steps of {bars.step:g} points.",
        alt.layer(drawn, zero).properties(height=HEIGHT),
        _table(label),
        [Column("from", "from, points", 1), Column("to", "to below, points", 1), Column("clients", "clients")],
        method=label,
    )
