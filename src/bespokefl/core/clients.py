"""The clients of a federation as a cohort reaches them, and what happens to uploads on their way to the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from bespokefl.core.program import Order, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree

NOT_FINITE = "answered with values that are not finite"


@dataclass
class Ledger:
    """What happened in a round: traffic, padding, and who dropped out why."""

    bytes_down: int = 0
    bytes_up: int = 0
    samples_computed: int = 0
    samples_useful: int = 0
    exchanges: int = 0
    releases: int = 0  # means of uploads that noise was added to
    failed: dict[int, str] = field(default_factory=dict)
    cut: dict[int, str] = field(default_factory=dict)  # whose weight was cut, and how


class Transfer(NamedTuple):
    """One exchange of a round, for those who change its uploads."""

    order: Order
    held: Mapping[str, Tree]  # what models started from and was not sent, a row for each client of the federation
    ledger: Ledger  # of the round


class Postprocessor:
    """A change of uploads between clients and server, such as an attack or the noise of differential privacy."""

    def sent(self, transfer: Transfer, result: Result) -> dict[str, Tree]:
        """The uploads as clients send them, before the server checks them."""
        return result.uploads

    def accepted(self, transfer: Transfer, uploads: dict[str, Tree], places: Rows) -> dict[str, Tree]:
        """What the server goes on with: a row for each of the clients at these places of the order."""
        return uploads


class Clients(Protocol):
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
    def postprocessors(self) -> Sequence[Postprocessor]: ...

    def samples(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """All training samples of some clients and how many are whose; RunError where they are on other machines."""
        ...

    def fair(self, clients: Rows, p: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The clients' weights as they may count, and by client what was cut of them."""
        ...

    def run(self, order: Order) -> Result:
        """Runs a program on its clients' newest states, and writes nothing."""
        ...

    def keep(self, clients: Rows, states: Tree, uploads: Mapping[str, Tree]) -> None:
        """Takes rows of a result's states for the newest of these clients; ``uploads`` are what each of them sent."""
        ...
