"""The clients whose data are in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bespokefl.core.clients import Postprocessor
from bespokefl.core.program import Order, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree
from bespokefl.engines.base import Engine, Job, Resident, Splits
from bespokefl.federation.last_uploads import LastSent
from bespokefl.federation.states import ClientStates


@dataclass(frozen=True)
class LocalClients:
    """Data and states of all clients, and an engine that runs their programs."""

    task: Task
    data: Resident
    splits: Splits
    train_sizes: Rows
    engine: Engine
    states: ClientStates
    seed: int
    postprocessors: Sequence[Postprocessor] = ()
    sent: LastSent | None = None  # where models before aggregation are scored, too

    def fair(self, clients: Rows, p: Tensor) -> tuple[Tensor, dict[int, str]]:
        return p, {}

    def samples(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        rows = [self.splits["train"][int(client)] for client in clients]
        index = torch.cat([torch.as_tensor(r, device=self.engine.device) for r in rows])
        return *self.data.gather(index), [len(r) for r in rows]

    def run(self, order: Order) -> Result:
        return self.engine.run(self.job(order))

    def keep(self, clients: Rows, states: Tree, uploads: Mapping[str, Tree]) -> None:
        self.states.scatter(clients, states)
        if self.sent is not None:
            self.sent.note(clients, uploads)

    def job(self, order: Order, splits: dict[str, Any] | None = None) -> Job:
        """A program on some clients with their states; ``splits`` beside those of the federation."""
        return Job(
            self.task,
            self.data,
            {**self.splits, **(splits or {})},
            order.program,
            order.clients,
            order.shared,
            order.per_client,
            self.states.gather(order.clients),
            self.seed,
            order.round,
        )
