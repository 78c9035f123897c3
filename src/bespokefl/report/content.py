"""All that a report shows, before it is HTML or files: sections with their charts, and the tables these read."""

from dataclasses import dataclass

from bespokefl.report.charts import clients, facts, labels, personalisation, rounds, surface, tradeoffs
from bespokefl.report.facts import shown_facts
from bespokefl.report.gather import (
    Comparison,
    Problem,
    clients_table,
    curves_table,
    gains_over_global,
    gamma_table,
    methods_table,
)
from bespokefl.report.labels import labels_table
from bespokefl.report.panels import Looks, Panel, Section
from bespokefl.report.surface import shown_surfaces
from bespokefl.report.tables import Table
from bespokefl.report.theme import default_picks


@dataclass(frozen=True)
class Content:
    comparison: Comparison
    looks: Looks
    tables: dict[str, Table]
    sections: list[Section]
    problems: list[Problem]

    @property
    def panels(self) -> list[Panel]:
        return [panel for section in self.sections for panel in section.panels]


def gather_content(comparison: Comparison) -> Content:
    problems = list(comparison.problems)
    if not comparison.methods:
        return Content(comparison, Looks([], []), {}, [], problems)
    tables = {
        "methods": methods_table(comparison),
        "clients": clients_table(comparison),
        "curves": curves_table(comparison),
    }
    by_label, damaged = labels_table(comparison)
    problems += damaged
    if by_label:
        tables["labels"] = by_label
    looks = _looks(comparison, by_label)
    dots = len(tables["clients"]["client"]) // len(comparison.methods)
    own, damaged = _own_section(comparison, tables)
    problems += damaged
    around, damaged = shown_surfaces(comparison)
    problems += damaged
    tables |= {surface.surface_table(one): one.table for one in around}
    over_global = gains_over_global(comparison)
    tables |= personalisation.over_global_tables(over_global)
    sections = [
        clients.distribution(looks, dots),
        clients.gain(looks, dots),
        personalisation.over_global(looks, over_global),
        rounds.convergence(looks, len(comparison.seeds)),
        tradeoffs.personal_and_general(tables["methods"]),
        tradeoffs.cost(looks),
        labels.data_of_clients(by_label),
        own,
        surface.around_models(around) if around else None,
    ]
    return Content(comparison, looks, tables, [s for s in sections if s is not None], problems)


def _looks(comparison: Comparison, by_label: Table) -> Looks:
    compared = [runs[min(runs)].label for runs in comparison.references.values()]
    focus = next((label for label in comparison.labels if label not in compared), comparison.labels[0])
    seed = min(by_label["seed"]) if by_label else 0
    picks = default_picks(comparison.labels, compared)
    return Looks(comparison.labels, picks, list(comparison.references), focus, seed, comparison.metric)


def _own_section(comparison: Comparison, tables: dict[str, Table]) -> tuple[Section | None, list[Problem]]:
    """What the methods show of themselves; adds its tables to the others."""
    shown, problems = shown_facts(comparison)
    constants = [fact for fact in shown if fact.kind == "constant"]
    panels = []
    for fact in sorted(shown, key=lambda fact: fact.kind != "matrix"):  # the large ones first
        if fact.kind != "constant":
            tables |= facts.fact_tables(fact)
            summary = comparison.methods[fact.method][0].summary
            panels += facts.fact_panels(fact, summary["algorithm"] if summary else "")
    if sweep := gamma_table(comparison):
        tables["gamma"] = sweep
        panels.append(facts.gamma_panel(sweep))
    if not panels:
        return None, problems
    text = "What each method's paper draws of its inner state."
    if constants:
        listed = ", ".join(f"{fact.method}'s {fact.name} = {fact.table['value'][0]}" for fact in constants)
        text += f" The same in every round: {listed}."
    return Section("own", "What methods show of themselves", text, panels), problems
