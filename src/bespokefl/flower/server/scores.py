"""Figures of models that silos have scored themselves, as they come in."""

import numpy as np

from bespokefl.core.program import Rows
from bespokefl.evaluation.sample_metrics import UNBOUNDED, Judged
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused
from bespokefl.flower.transport.envelope import Envelope

FURTHER = "further."


class Scores:
    """Figures as they come in, by client: of the names that the task has, fractions where fractions are meant.

    Args:
        clients: those whose scores are wanted.
        sizes: of every client of the federation, how many samples it scores on.
        judged: what the task's answers are; of it the names of further metrics follow.
        closer: whether all of them were asked for.
    """

    def __init__(self, clients: Rows, sizes: Rows, judged: Judged | None, closer: bool) -> None:
        self._clients, self._sizes = clients, sizes
        self._n = np.zeros(len(clients), dtype=np.int64)
        self._floats: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        known = judged is not None and (closer or judged.always)
        self._further = frozenset(judged.names(closer) if judged is not None and known else ())
        for name in ("accuracy", "loss"):
            self._column(name)

    def add(self, clients: list[int], answer: Envelope) -> list[int]:
        """Takes one node's figures, all of them or none."""
        arrays = answer.arrays
        if answer.header.get("clients") != clients:
            raise Refused("they are of other clients")
        further = {name.removeprefix(FURTHER) for name in arrays if name.startswith(FURTHER)}
        if set(arrays) != {"n", "accuracy", "loss", *(FURTHER + name for name in further)}:
            raise Refused("they are not those that were asked for")
        if not further <= self._further:  # none where nothing could be scored
            raise Refused("they have other names than the metrics of this task")
        for array in arrays.values():
            if array.shape != (len(clients),) or array.dtype.kind not in "if":
                raise Refused("they have another shape than one value per client")
        n = arrays["n"]
        if not ((n == 0) | (n == self._sizes[clients])).all():  # 0 where the model could not be scored
            raise Refused("they are of other samples")
        values = {name.removeprefix(FURTHER): array.astype(np.float64) for name, array in arrays.items() if name != "n"}
        for name, column in values.items():
            if name not in UNBOUNDED | {"loss"} and ((column < 0) | (column > 1)).any():
                raise Refused(f"they have no fractions as {name}")
            if (np.abs(column[np.isfinite(column)]) > limits.LARGEST_FIGURE).any():
                raise Refused(f"they have a {name} of more than {limits.LARGEST_FIGURE:g}")
        places = np.searchsorted(self._clients, clients)
        self._n[places] = n
        for name, column in values.items():
            self._column(name)[places] = column
        return clients

    def evaluation(self) -> Evaluation:
        further = {name: values for name, values in self._floats.items() if name not in ("accuracy", "loss")}
        return Evaluation(self._clients, self._n, self._floats["accuracy"], self._floats["loss"], further)

    def _column(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return self._floats.setdefault(name, np.full(len(self._clients), np.nan))
