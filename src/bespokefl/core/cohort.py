"""The clients of a round as the server sees them: programs go out, stacked uploads of those that answered come back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.core import trees
from bespokefl.core.clients import NOT_FINITE, Clients, Ledger, Transfer
from bespokefl.core.program import Order, Program, Result, Rows
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree
from bespokefl.errors import REMEDY, Diverged, RunError

BYTES_PER_SCALAR = 4  # traffic is counted as float32, whatever the precision of the simulation


class Cohort:
    """Some clients in one round."""

    def __init__(
        self,
        clients: Clients,
        ids: Rows,
        round: int,
        *,
        silent: Collection[int] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self.clients, self.ids, self.round = clients, np.asarray(ids, dtype=np.int64), round
        self.silent = silent
        self.ledger = ledger if ledger is not None else Ledger()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def task(self) -> Task:
        """The model and its loss."""
        return self.clients.task

    @property
    def seed(self) -> int:
        """That of the run, for the method's own random streams."""
        return self.clients.seed

    def samples(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """All training samples of some clients and how many are whose, for a study in which they are at hand."""
        return self.clients.samples(clients)

    @property
    def n(self) -> Tensor:
        """n_i, the clients' numbers of training samples."""
        return torch.as_tensor(self.clients.train_sizes[self.ids], dtype=torch.float64)

    def weights(self, kind: str) -> Tensor:
        """p_i: ``sample`` is n_i over the cohort's total, ``uniform`` is one over its size."""
        n = self.n
        p = n / n.sum() if kind == "sample" else torch.full_like(n, 1 / len(n))
        p, cut = self.clients.fair(self.ids, p)
        self.ledger.cut |= cut
        return p

    def everyone(self) -> "Cohort":
        """All clients of the federation in this round, sampled or not."""
        return self.only(range(len(self.clients.train_sizes)))

    def only(self, ids: Sequence[int] | Rows) -> "Cohort":
        """Some of these clients, for an exchange with them alone; what happens is written to the same ledger."""
        return Cohort(self.clients, np.asarray(ids), self.round, silent=self.silent, ledger=self.ledger)

    def run(
        self,
        program: Program,
        shared: Mapping[str, Tree] | None = None,
        per_client: Mapping[str, Tree] | None = None,
        *,
        write: bool = True,
        held: Mapping[str, Tree] | None = None,
    ) -> "Uploads":
        """One exchange: ``shared`` goes to all, ``per_client`` holds a row each; new states are kept if ``write``.

        ``held`` is what uploaded models started from where that is no download of this exchange (a row per client of
        the federation): for attacks, which change models relative to it.
        Clients that are silent, whose program fails, or who answer something that is not finite are left out: their
        state stays as it was, and the ledger says why. Raises RunError if nobody is left.
        """
        shared, own = dict(shared or {}), dict(per_client or {})
        order, asked = Order(program, self.ids, shared, own, self.round, write), np.arange(len(self.ids))
        if self.silent:
            asked = asked[[int(c) not in self.silent for c in self.ids]]
            order = order.select(asked)
        result = self.clients.run(order) if len(asked) else Result(asked, {}, {}, {})
        transfer = Transfer(order, held or {}, self.ledger)
        for one in self.clients.postprocessors:
            result = result._replace(uploads=one.sent(transfer, result))
        self.ledger.exchanges += 1
        good = self._usable(result, order.clients)
        rows = asked[result.positions][good]
        uploads, groups = _choose_uploads(result, good)
        self._count(result, shared, own, uploads)
        if not len(rows):
            raise self._nobody_left() from next(iter(result.failed.values()), None)
        for one in self.clients.postprocessors:
            uploads = one.accepted(transfer, uploads, result.positions[good])
        if write:
            states = _choose(result.states, good, len(result.positions))
            self.clients.keep(self.ids[rows], states, uploads if groups is None else {})
        return Uploads(self.only(self.ids[rows]), uploads, rows, groups)

    def _count(self, result: Result, shared: Tree, own: Tree, uploads: Tree) -> None:
        down = BYTES_PER_SCALAR * (len(self.ids) * trees.numel(shared) + trees.numel(own))
        down, up = result.traffic or (down, BYTES_PER_SCALAR * trees.numel(uploads))
        self.ledger.bytes_down += down
        self.ledger.bytes_up += up
        self.ledger.samples_computed += result.computed
        self.ledger.samples_useful += result.useful

    def _usable(self, result: Result, asked: Rows) -> NDArray[np.bool_]:
        """Which answers are finite; the others are recorded beside the failures of the engine."""
        finite = trees.finite_rows(result.states, len(result.positions)).numpy()
        if result.groups is None:
            finite &= trees.finite_rows(result.uploads, len(result.positions)).numpy()
        else:
            finite &= trees.finite_rows(result.uploads, _rows_of(result.groups)).numpy()[result.groups]
        for client, error in result.failed.items():
            own_words = isinstance(error, RunError)
            self.ledger.failed[client] = str(error) if own_words else f"{type(error).__name__}: {error}"
        for position in result.positions[~finite]:
            self.ledger.failed[int(asked[position])] = NOT_FINITE
        return finite

    def _nobody_left(self) -> RunError:
        reasons = [f"client {c}: {why}" for c, why in list(self.ledger.failed.items())[:3]]
        said = "; ".join(reasons) if reasons else "all were silent"
        text = f"round {self.round + 1}: none of the {len(self.ids)} clients gave a usable answer ({said})"
        if reasons and set(self.ledger.failed.values()) == {NOT_FINITE}:
            return Diverged(f"{text}; {REMEDY}")
        return RunError(text)


class Uploads:
    """Stacked uploads, by attribute, of the clients that answered; rows in the order of ``ids``.

    Where a node has averaged those of its clients already, a row is of several of them, and so is its weight.
    """

    def __init__(self, cohort: Cohort, uploads: dict[str, Tree], rows: Rows, groups: Rows | None = None) -> None:
        self.cohort, self.ids, self._values = cohort, cohort.ids, uploads
        self._rows, self._groups = rows, groups

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the program's upload has no {name!r}; it has {sorted(self._values)}") from None

    def align(self, stacked: Tree) -> Tree:
        """The rows of a per-client tree of the asked cohort that belong to those who answered."""
        return trees.tree_map(lambda v: v[torch.as_tensor(self._rows, device=v.device)], stacked)

    def weights(self, kind: str) -> Tensor:
        """p_i of each row."""
        p = self.cohort.weights(kind)
        if self._groups is None:
            return p
        return torch.zeros(_rows_of(self._groups), dtype=p.dtype).index_add(0, torch.as_tensor(self._groups), p)


def _choose_uploads(result: Result, good: NDArray[np.bool_]) -> tuple[dict[str, Tree], Rows | None]:
    """The uploads of good answers, and to which of them each client belongs where several share one."""
    if result.groups is None:
        return _choose(result.uploads, good, len(result.positions)), None
    kept, groups = np.unique(result.groups[good], return_inverse=True)
    there = _rows_of(result.groups)
    return _choose(result.uploads, np.isin(np.arange(there), kept), there), groups


def _rows_of(groups: Rows) -> int:
    return int(groups.max(initial=-1)) + 1


def _choose(tree: Tree, good: NDArray[np.bool_], n: int) -> Tree:
    if good.all():
        return tree
    choose: Callable[[Tensor], Tensor] = lambda v: v[torch.as_tensor(good, device=v.device)]  # noqa: E731
    return trees.tree_map(choose, tree) if n else tree
