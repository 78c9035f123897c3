"""A run in figures: the columns of clients.csv, and those of summary.json that say how well it went.

Every figure of summary.json is explained in its entry `what`: of which model, of which clients, on which data, when.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bespokefl.evaluation import metrics
from bespokefl.results.files import Line

if TYPE_CHECKING:  # both need torch
    from bespokefl.evaluation.score import Score
    from bespokefl.federation.loop import Census

LEFT_OUT = "_left_out"  # behind a metric's name: the number of clients without it


def client_columns(data: "Census", score: "Score", lines: Sequence[Line]) -> dict[str, Any]:
    """clients.csv: the selected round, and how often a client took part in all rounds."""
    asked = np.bincount([c for line in lines for c in line["clients"]], minlength=data.clients)
    failed = np.bincount([int(c) for line in lines for c in line["failed"]], minlength=data.clients)
    return {
        "client": range(data.clients),
        "n_train": data.sizes("train"),
        "n_test": data.sizes("test"),
        "accuracy": score.accuracy,
        "loss": score.loss,
        "global_accuracy": score.global_accuracy,
        "s_accuracy": score.s_accuracy,
        "g_accuracy": score.g_accuracy,
        **score.further,
        "n_val": data.sizes("val"),
        "rounds_asked": asked,
        "rounds_failed": failed,
        "name": data.client_names,
    }


def main_figures(score: "Score", test_sizes: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """What methods are compared by, and the accuracies, in the selected round."""
    main = metrics.summarise(score.main)
    return {
        "mean": main["mean"],
        "std": main["std"],
        "worst5": main["worst5"],
        "top5": main["top5"],
        "gm_acc": _pooled(score.global_accuracy, test_sizes),
        "l_acc": _mean_or_none(score.accuracy),
        "s_acc": _mean_or_none(score.s_accuracy),
        "g_acc": _mean_or_none(score.g_accuracy),
    }


def further_figures(score: "Score", lines: Sequence[Line], target: float | None, malicious: int) -> dict[str, Any]:
    """The further metrics in the selected round, each with its own count of clients without it; rounds to a target.

    Malicious clients are not scored, and not counted.
    """
    figures: dict[str, Any] = {
        "metric": score.main_metric,
        "clients_without_test": int(np.isnan(score.main).sum()) - malicious,
    }
    for name, average in metrics.averages(score.further).items():
        figures |= {name: average.mean, f"{name}{LEFT_OUT}": average.left_out - malicious}
    if target is not None:
        curve = {line["round"]: line["mean"] for line in lines if line["mean"] is not None}
        needed = metrics.rounds_to_target(list(curve.values()), target, rounds=list(curve))
        figures |= {"target": target, "rounds_to_target": needed}
    return figures


def untrained(lines: Sequence[Line], clients: Iterable[int], until: int) -> int:
    """How many of the clients have answered in no round until this one: they hold what a method gives to such."""
    answered = {c for line in lines if line["round"] <= until for c in line["clients"] if str(c) not in line["failed"]}
    return len(set(clients) - answered)


def meanings(figures: Mapping[str, Any], score: "Score", who: str, clients: int, s_fraction: float) -> dict[str, str]:
    """In words, of which model, clients, data and round each figure is; ``who`` are the ``clients`` that are scored."""
    own = f"personal models of {who}, each on its own test data, round {score.round}"
    name = score.main_metric
    texts = {
        "mean": f"mean {name} over clients; {own}",
        "std": f"standard deviation over clients (ddof 0) of the {name}; {own}",
        "worst5": f"mean {name} of the lowest 5 % of the clients; {own}",
        "top5": f"mean {name} of the highest 5 % of the clients; {own}",
        "l_acc": f"mean accuracy over clients; {own}",
        "s_acc": f"mean accuracy over clients; personal models, each on equally many test samples of its client and "
        f"of {s_fraction:g} of the others, round {score.round}",
        "g_acc": f"mean accuracy over clients; personal models, each on the test data of {who}, round {score.round}",
        "gm_acc": f"accuracy of the global model on the test data of {who} together, round {score.round}",
        "rounds_to_target": f"first evaluated round in which the mean {name} of all personal models on their own test "
        f"data is at least {figures.get('target')}; null: none",
    }
    for metric in score.further:
        missing = figures[f"{metric}{LEFT_OUT}"]
        texts[metric] = f"mean over the {clients - missing} clients that have it; {own}"
    return {key: text for key, text in texts.items() if key in figures}


def _mean_or_none(values: npt.NDArray[np.float64]) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _pooled(accuracy: npt.NDArray[np.float64], rows: npt.NDArray[np.int64]) -> float | None:
    """The accuracy on the union of all test rows, from that on each client's."""
    tested = ~np.isnan(accuracy)
    return float((accuracy[tested] * rows[tested]).sum() / rows[tested].sum()) if tested.any() else None
