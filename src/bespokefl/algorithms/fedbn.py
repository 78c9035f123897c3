"""FedBN: FedAvg whose normalisation layers stay with their clients (Li et al., ICLR 2021).

Every normalisation layer's scale, shift and running statistics are private; all else is averaged as in FedAvg. Without
such layers it is FedAvg, bit for bit. A client's model is the newest shared part with its own normalisation. One that
never took part has the initial one, whose statistics (mean 0, variance 1) do not fit what it is fed: it needs a round
of its own before its score means much. The server has no model.

* Layers are told by their type, BatchNorm, GroupNorm, LayerNorm and InstanceNorm, wherever they stand; the authors'
  code looks for "bn" in their name, which misses those in the shortcuts of a ResNet.
* The authors' code averages all clients alike (``weights="uniform"``).
"""

from dataclasses import dataclass
from typing import ClassVar

from bespokefl.algorithms.fedper import PartialSharing
from bespokefl.core import Batch, Down, Exchange, InputError, ModelAveraging, Setup, Task, Tree


@dataclass(frozen=True)
class FedBN(PartialSharing):
    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = (
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    )
    exchanges: ClassVar = (Exchange("train", {"phi": "a model after local steps without its normalisation layers"}),)
    stays: ClassVar = {"v": "its normalisation layers with the statistics of its inputs"}

    def private(self, task: Task) -> list[str]:
        return task.norm_names

    def check(self, task: Task, setup: Setup) -> None:
        ModelAveraging.check(self, task, setup)  # not that of PartialSharing: a model may be a head alone
        if not self.shared_params(task):
            raise InputError(
                "algorithm.name = 'fedbn': all trained layers of the model are normalisations, so there is nothing to "
                "share; take another model, or algorithm.name = 'local'"
            )

    def newcomer_step(self, task: Task, down: Down, c: Tree, batch: Batch) -> Tree:
        """Its own normalisation, statistics included; without such layers it is FedAvg, and fine-tunes the model."""
        step = self.private_step_in_training if self.private_params(task) else self.joint_step
        return step(task, down, c, batch)
