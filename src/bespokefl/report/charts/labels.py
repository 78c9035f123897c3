"""Labels per client: how different the clients' data are."""

import altair as alt

from bespokefl.report.panels import Panel, Section, ink, named
from bespokefl.report.tables import Column, Table

TALLEST = 760  # pixels of the map


def data_of_clients(labels: Table) -> Section:
    heading = ("data", "What each client's data look like")
    if not labels:
        return Section(
            *heading, "The folder has no counts of labels (partition-seed-*.csv), or the data have no labels."
        )
    clients = len(set(labels["client"]))
    different = list(dict.fromkeys(sorted(labels["label"], key=_by_number)))
    names = dict(zip(labels["client"], labels["name"], strict=True))
    base = named("labels").transform_filter("datum.seed == seed")
    cells = base.mark_rect().encode(
        y=alt.Y(
            "client:O",
            title="client",
            axis=alt.Axis(labelOverlap=True, labelExpr="datum.value", labelColor=ink("soft")),
        ),
        x=alt.X(
            "label:N",
            title="label",
            sort=different,
            axis=alt.Axis(labelAngle=0 if len(different) <= 12 else -90, labelLimit=90, labelOverlap=True),
        ),
        color=alt.Color(
            "samples:Q",
            title="samples",
            scale=alt.Scale(range="heatmap", type="sqrt"),
            legend=alt.Legend(orient="bottom", direction="horizontal"),
        ),
        tooltip=[
            alt.Tooltip("name:N", title="client"),
            alt.Tooltip("label:N"),
            alt.Tooltip("samples:Q"),
            alt.Tooltip("train:Q"),
            alt.Tooltip("test:Q"),
        ],
    )
    sizes = (
        base.transform_aggregate(
            total="sum(samples)", trained="sum(train)", tested="sum(test)", groupby=["client", "name"]
        )
        .mark_bar(color=ink("good"), height={"band": 0.7})
        .encode(
            y=alt.Y("client:O", title=None, axis=alt.Axis(labelOverlap=True)),
            x=alt.X("total:Q", title="samples, all splits"),
            tooltip=[
                alt.Tooltip("name:N", title="client"),
                alt.Tooltip("total:Q", title="samples"),
                alt.Tooltip("trained:Q", title="train"),
                alt.Tooltip("tested:Q", title="test"),
            ],
        )
    )
    height = min(TALLEST, max(6, min(18, TALLEST // max(clients, 1))) * clients)
    columns = [
        Column("seed", "seed"),
        Column("name", "client"),
        Column("label", "label"),
        Column("samples", "samples"),
        Column("train", "train"),
        Column("test", "test"),
    ]
    attackers = (
        " Clients that attack are named so in the tables." if any("attacks" in name for name in names.values()) else ""
    )
    return Section(
        *heading,
        "The more a row differs from its neighbours, the harder one model serves all clients." + attackers,
        [
            Panel(
                "labels",
                "Samples by client and label",
                "The stronger the colour, the more samples; empty is none.",
                cells.properties(height=height),
                "labels",
                columns,
                by_seed=True,
            ),
            Panel(
                "sizes",
                "Samples of each client",
                "Train, validation and test samples together.",
                sizes.properties(height=height),
                "labels",
                columns,
                by_seed=True,
            ),
        ],
        controls=["seed"] if len(set(labels["seed"])) > 1 else [],
    )


def _by_number(label: str) -> tuple[int, float, str]:
    """Labels that are numbers by their value, before the others by name."""
    return (0, float(label), "") if label.replace(".", "", 1).isdecimal() else (1, 0.0, label)
