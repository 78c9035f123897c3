"""From an output folder to its report. Charts need Altair and vl-convert, which are imported only here."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from bespokefl.errors import InputError
from bespokefl.results.files import StoredRun, read_runs, write_atomically

REPORT, FIGURES = "report.html", "figures"
PACKAGES = {"altair": "altair", "vl_convert": "vl-convert-python"}


def publish(out: Path, runs: Sequence[StoredRun] | None = None, *, figures: bool = False) -> Path:
    """Write the report of an output folder, and its charts as files where they are wanted; the report's path."""
    known = read_runs(out) if runs is None else runs
    if not known:
        raise InputError(f"{out} holds no runs; give the folder that was --out of `bespoke run`.")
    if missing := missing_packages():
        raise InputError(f"the report needs `pip install {' '.join(missing)}`.")
    from bespokefl.report.content import gather_content
    from bespokefl.report.figures import write_figures, write_result
    from bespokefl.report.gather import Comparison
    from bespokefl.report.page import page

    content = gather_content(Comparison(out, known))
    if content.panels:
        write_result(content, out)
        if figures:
            write_figures(content, out / FIGURES)
    write_atomically(out / REPORT, page(content))
    return out / REPORT


def missing_packages() -> list[str]:
    """Names for pip of what is needed and not installed."""
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
