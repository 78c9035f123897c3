"""Where clients' programs run: what a cohort asks of such a place, and the place that is this process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bespokefl.attacks import Attacker
from bespokefl.engines.base import Engine, Job, Resident, Result, Splits
from bespokefl.privacy import Privacy
from bespokefl.program import Order, Rows
from bespokefl.sent import LastSent
from bespokefl.states import ClientStates
from bespokefl.task import Task
from bespokefl.trees import Tree


class Site(Protocol):
    """All that a cohort needs beside its ids."""

    @property
    def task(self) -> Task: ...

    @property
    def train_sizes(self) -> Rows:
        """n_i of every client of the federation."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def attacker(self) -> Attacker | None: ...

    @property
    def privacy(self) -> Privacy | None: ...

    def fair(self, clients: Rows, p: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The clients' weights as they may count, and by client what was cut of them."""
        ...

    def run(self, order: Order) -> Result:
        """Runs a program on its clients' newest states, and writes nothing."""
        ...

    def keep(self, clients: Rows, states: Tree, uploads: Mapping[str, Tree]) -> None:
        """Takes rows of a result's states for the newest of these clients; ``uploads`` are what each of them sent."""
        ...


@dataclass(frozen=True)
class LocalSite:
    """Data and states of all clients, and an engine that runs their programs."""

    task: Task
    data: Resident
    splits: Splits
    train_sizes: Rows
    engine: Engine
    states: ClientStates
    seed: int
    attacker: Attacker | None = None
    privacy: Privacy | None = None
    sent: LastSent | None = None  # where models before aggregation are scored, too

    def fair(self, clients: Rows, p: Tensor) -> tuple[Tensor, dict[int, str]]:
        return p, {}

    def run(self, order: Order) -> Result:
        return self.engine.run(self.job(order))

    def keep(self, clients: Rows, states: Tree, uploads: Mapping[str, Tree]) -> None:
        self.states.scatter(clients, states)
        if self.sent is not None:
            self.sent.note(clients, uploads)

    def job(self, order: Order, splits: dict[str, Any] | None = None) -> Job:
        """A program on some clients with their states; ``splits`` beside those of the site."""
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
