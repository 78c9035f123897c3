"""What a run is judged by: every client's figures in the round that is selected."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

FURTHER = "further/"  # before the names of further metrics in a checkpoint


@dataclass(frozen=True)
class Score:
    """The federation in one round, a value per client; NaN where a client has no test data or nothing was measured."""

    round: int
    criterion: float  # what the rounds were compared by
    accuracy: Floats  # of the personal model on the client's own test data
    loss: Floats
    global_accuracy: Floats  # of the global model on the same data
    s_accuracy: Floats  # of the personal model on its own and some other clients' test data
    g_accuracy: Floats  # of the personal model on all (honest) clients' test data
    further: Mapping[str, Floats] = field(default_factory=dict)  # of the personal model on its own, by name

    @property
    def main_metric(self) -> str:
        return "dice" if "dice" in self.further else "accuracy"

    @property
    def main(self) -> Floats:
        """What methods are compared by."""
        return self.further.get("dice", self.accuracy)

    def tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, bit for bit."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns |= {FURTHER + name: values for name, values in self.further.items()}
        columns["round, criterion"] = np.array([self.round, self.criterion])
        return {name: torch.from_numpy(value) for name, value in columns.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Score":
        columns = {name: value.numpy() for name, value in tensors.items()}
        round_, criterion = columns.pop("round, criterion")
        further = {n.removeprefix(FURTHER): columns.pop(n) for n in sorted(columns) if n.startswith(FURTHER)}
        return cls(int(round_), float(criterion), **columns, further=further)
