"""What clients keep between rounds: one row per client that ever took part, allocated when it first does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bespokefl.core import trees
from bespokefl.core.program import Rows
from bespokefl.core.trees import Tree


class ClientStates:
    """Rows of a stacked tree by client id. A client without a row has the common initial state."""

    def __init__(self, initial: Tree) -> None:
        self.initial = initial
        self._row: dict[int, int] = {}
        self._slab: Tree = trees.tree_map(lambda v: v.new_empty(0, *v.shape), initial)

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that have a row, in the order they first took part."""
        return list(self._row)

    def gather(self, clients: Rows, otherwise: Tree | None = None) -> Tree:
        """The states of the given clients, stacked; one without a row has ``otherwise``, or the common initial one."""
        initial = self.initial if otherwise is None else otherwise
        if not trees.leaves(initial):
            return initial
        known = [(position, self._row[int(c)]) for position, c in enumerate(clients) if int(c) in self._row]
        if len(known) == len(clients):
            return self._take([row for _, row in known])
        out = trees.tree_map(lambda v: v.expand(len(clients), *v.shape).clone(), initial)
        if known:
            positions, rows = zip(*known, strict=True)
            own = self._take(rows)
            trees.tree_map(lambda v, new: v.index_copy_(0, _index(positions, v), new), out, own)
        return out

    def scatter(self, clients: Rows, states: Tree) -> None:
        """Writes the states of the given clients; new ones get a row."""
        if not trees.leaves(self.initial):
            return
        if trees.structure(states) != trees.structure(self.initial):
            raise TypeError(
                f"a program's finish returned a client state of the structure {trees.structure(states)}; "
                f"init_client's is {trees.structure(self.initial)}, and the two must agree"
            )
        new = dict.fromkeys(int(c) for c in clients if int(c) not in self._row)
        self._reserve(len(self._row) + len(new))
        self._row |= {c: row for row, c in enumerate(new, len(self._row))}
        rows = [self._row[int(c)] for c in clients]
        trees.tree_map(lambda v, new: v.index_copy_(0, _index(rows, v), new.to(v.dtype)), self._slab, states)

    def rows(self) -> Tree:
        """All rows, in the order of ``clients``."""
        return trees.tree_map(lambda v: v[: len(self._row)], self._slab)

    def load(self, clients: Sequence[int], rows: Tree) -> None:
        """Replaces everything by the given rows."""
        self._row = {int(c): k for k, c in enumerate(clients)}
        if trees.leaves(self.initial):
            self._slab = trees.tree_map(
                lambda v, new: new.to(device=v.device, dtype=v.dtype).clone(), self.initial, rows
            )

    def _take(self, rows: Sequence[int]) -> Tree:
        return trees.tree_map(lambda v: v.index_select(0, _index(rows, v)), self._slab)

    def _reserve(self, rows: int) -> None:
        """Grows the slab by at least a quarter, so that growing costs little and not much lies idle."""
        flat, structure = trees.leaves(self._slab), trees.structure(self._slab)
        self._slab = {}  # so that an old leaf goes once its new one is there: only one is twice in memory
        try:
            for k, v in enumerate(flat):
                if v.shape[0] < rows:
                    flat[k] = v.new_empty(max(rows, v.shape[0] * 5 // 4), *v.shape[1:])
                    flat[k][: v.shape[0]] = v
        finally:
            self._slab = structure.unflatten(flat)


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.as_tensor(rows, device=like.device, dtype=torch.int64)
