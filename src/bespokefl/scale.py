"""`--scale small`: the same set-up on the embedded digits, in minutes on a laptop.

Partition kind, participation, methods, hyper-parameters and metrics stay those of the experiment. What changes is
below; a [small] table in the experiment, or in one of its settings, goes on top.
"""

from collections.abc import Mapping
from typing import Any, Literal

from bespokefl.config import Document

Scale = Literal["paper", "small"]

SMALL: Document = {
    "seeds": [0],
    "data": {"source": "digits", "root": None, "normalize": "unit", "max_samples": None},
    "model": {"name": "mlp", "hidden": [64, 32], "head": None},
    "train": {"rounds": 30, "local_epochs": 2, "batch_size": 20, "lr": 0.05},
    "eval": {"every": 5},
}
DOMAINS = 5  # of the embedded digits, where clients are domains
FEWEST, MOST = 5, 20  # clients


def small_changes(document: Mapping[str, Any]) -> Document:
    """What the small scale changes in an experiment: a fifth of its clients, or so many domains of digits."""
    data = document.get("data", {})
    if data.get("partition") == "domain":
        changed: Document = {"clients": None, "domains": DOMAINS}
    else:
        changed = {"clients": max(FEWEST, min(MOST, data.get("clients", 100) // 5))}
    return SMALL | {"data": SMALL["data"] | changed}
