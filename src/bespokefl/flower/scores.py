"""Figures of models that silos have scored themselves, as they come in."""

import numpy as np

from bespokefl.flower.envelope import Envelope
from bespokefl.flower.wire import Refused
from bespokefl.program import Rows
from bespokefl.scoring import Evaluation


class Scores:
    """Figures as they come in, by client."""

    def __init__(self, clients: Rows, sizes: Rows) -> None:
        self._clients, self._sizes = clients, sizes
        self._n = np.zeros(len(clients), dtype=np.int64)
        self._floats: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        for name in ("accuracy", "loss"):
            self._column(name)

    def add(self, clients: list[int], answer: Envelope) -> None:
        arrays = answer.arrays
        if answer.header.get("clients") != clients or not {"n", "accuracy", "loss"} <= set(arrays) or len(arrays) > 20:
            raise Refused("they are not those that were asked for")
        for array in arrays.values():
            if array.shape != (len(clients),) or array.dtype.kind not in "if":
                raise Refused("they have another shape than one value per client")
        n, accuracy = arrays["n"].astype(np.int64), arrays["accuracy"].astype(np.float64)
        known = (n == 0) | (n == self._sizes[clients])  # 0 where the model could not be scored
        if not known.all() or (accuracy < 0).any() or (accuracy > 1).any():
            raise Refused("they are of other samples, or no accuracies")
        places = np.searchsorted(self._clients, clients)
        self._n[places] = n
        for name, array in arrays.items():
            if name != "n":
                self._column(name.removeprefix("further."))[places] = array

    def evaluation(self) -> Evaluation:
        further = {name: values for name, values in self._floats.items() if name not in ("accuracy", "loss")}
        return Evaluation(self._clients, self._n, self._floats["accuracy"], self._floats["loss"], further)

    def _column(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return self._floats.setdefault(name, np.full(len(self._clients), np.nan))
