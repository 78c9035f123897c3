"""What one node may move: its weight among the others, and how far an upload may be from what it started from.

Neither needs to know who lies. A node's weight is cut to a share of all; a change is held against that of the median
node, which fewer than half of the nodes cannot move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.program import Order
from bespokefl.core.trees import Tree
from bespokefl.federation.attacks import start_of

FEWEST = 3  # nodes: of two nobody can say which is the odd one
ROUNDS = 5  # whose changes are remembered


def capped(p: Tensor, hosts: Sequence[str], share: float) -> Tensor:
    """Weights of clients with no host above a share of their sum: what is cut goes to the others, in proportion.

    Fewer than `FEWEST` hosts are left as they are. Where the hosts are too few for the share, all weigh the same.
    """
    names = sorted(set(hosts))
    if len(names) < FEWEST:
        return p
    place = torch.tensor([names.index(host) for host in hosts])
    total = float(p.sum())
    of_host = torch.zeros(len(names), dtype=p.dtype).index_add(0, place, p) / total
    share = max(share, 1 / len(names))
    wanted, cut = of_host.clone(), torch.zeros(len(names), dtype=torch.bool)
    while bool((over := (wanted > share * (1 + 1e-9)) & ~cut).any()):
        cut |= over
        rest = float(of_host[~cut].sum())
        left = 1 - share * int(cut.sum())
        wanted = torch.where(cut, share, of_host * (left / rest if rest else 0.0))
    if not bool(cut.any()):
        return p
    return p * torch.where(of_host > 0, wanted / of_host, 0.0)[place]


def changes(
    uploads: Mapping[str, Tree], sends: Mapping[str, str | None], order: Order, places: Sequence[int]
) -> Tensor:
    """Of each row, the norm of what it changed: of the uploads that hold parameters, less what they started from.

    Of a method that does not say what they started from, or where it is no download, nothing is counted.
    """
    rows = torch.zeros(len(places), dtype=torch.float64)
    index = np.asarray(places, dtype=np.int64)
    if not len(index):
        return rows
    for name, start in sends.items():
        known = start is None or start in order.shared or start in order.per_client
        if name not in uploads or not known:
            continue
        begun = None if start is None else start_of(start, order, {}, index)
        for key, value in uploads[name].items():
            if value.is_floating_point():
                moved = value if begun is None else value - begun[key].to(value)
                rows += torch.linalg.vector_norm(moved.reshape(len(places), -1), dim=1).double().square()
    return rows.sqrt()  # infinite where a norm does not fit its type: further than any limit


@dataclass
class Seen:
    """How much the nodes changed in the last rounds, by program: what a new change is held against."""

    most: float | None  # times the median node's; None: nothing is refused
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)  # by program: of each round, a value per node

    def limit(self, program: str, now: Sequence[float]) -> float:
        """The largest change that is taken, given those of this exchange's nodes, a value for each."""
        known = [value for values in self.rounds.get(program, ()) for value in values] + list(now)
        if self.most is None or len(known) < FEWEST:
            return float("inf")
        return self.most * float(np.median(known)) or float("inf")

    def note(self, program: str, taken: Sequence[float]) -> None:
        if taken:
            self.rounds[program] = [*self.rounds.get(program, []), list(taken)][-ROUNDS:]

    def copy(self) -> "Seen":
        return Seen(self.most, {program: list(rounds) for program, rounds in self.rounds.items()})
