"""What was chosen, as a table."""

from collections.abc import Iterator

from rich import box
from rich.table import Table

from bespokefl.results.table import DASH
from bespokefl.tuning.tuner import MethodResult, Tuning


def rich_table(tuning: Tuning) -> Table:
    """One row per method, in the experiment's order."""
    table = Table(caption=_caption(tuning), caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("best values")
    for name in ("validation\nmean %", "worst\n5 %", "trials"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for method in tuning.methods:
        table.add_row(*_cells(method))
    return table


def _cells(method: MethodResult) -> Iterator[str]:
    best = method.best
    yield method.label
    yield ", ".join(f"{key} = {value}" for key, value in best.parameters.items()) if best else DASH
    for figure in (best.mean, best.worst5) if best else (None, None):
        yield DASH if figure is None else f"{100 * figure:.2f}"
    yield str(len(method.trials))
    yield "; ".join(notes(method))


def notes(method: MethodResult) -> Iterator[str]:
    """What a reader should know before using the values."""
    if not method.space.domains:
        yield "nothing to tune"
    elif method.best is None:
        yield "every trial failed; values as they were"
    else:
        for key, edge in method.space.edges(method.best.parameters).items():
            yield f"{key} lies at the {edge} edge of its grid"
        for state in ("failed", "pruned"):
            if count := sum(trial.state == state for trial in method.trials):
                yield f"{count} {state}"


def _caption(tuning: Tuning) -> str:
    return f"Chosen by {tuning.criterion}. Test samples took no part. {budget_note(tuning)}"


def budget_note(tuning: Tuning) -> str:
    """Whether every tuned method had as many trials as the others."""
    numbers = {len(method.trials) for method in tuning.methods if method.space.domains}
    if len(numbers) == 1:
        return f"Every tuned method had {numbers.pop()} trials."
    return f"Methods had different numbers of trials; tune.trials = {min(numbers)} gives each the same."
