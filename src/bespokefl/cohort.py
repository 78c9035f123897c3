"""The clients of a round as the server sees them: programs go out, stacked uploads of those that answered come back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl import trees
from bespokefl.attacks import Attacker
from bespokefl.engines.base import Engine, Job, Resident, Result, Splits
from bespokefl.errors import RunError
from bespokefl.program import Program, Rows
from bespokefl.sent import LastSent
from bespokefl.states import ClientStates
from bespokefl.task import Task
from bespokefl.trees import Tree

BYTES_PER_SCALAR = 4  # traffic is counted as float32, whatever the precision of the simulation


@dataclass
class Ledger:
    """What happened in a round: traffic, padding, and who dropped out why."""

    bytes_down: int = 0
    bytes_up: int = 0
    samples_computed: int = 0
    samples_useful: int = 0
    exchanges: int = 0
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where programs run: all that a cohort needs beside its ids."""

    task: Task
    data: Resident
    splits: Splits
    train_sizes: Rows
    engine: Engine
    states: ClientStates
    seed: int
    attacker: Attacker | None = None
    sent: LastSent | None = None  # where models before aggregation are scored, too


class Cohort:
    """Some clients in one round."""

    def __init__(
        self,
        site: Site,
        ids: Rows,
        round: int,
        *,
        silent: Collection[int] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self.site, self.ids, self.round = site, np.asarray(ids, dtype=np.int64), round
        self.silent = silent
        self.ledger = ledger if ledger is not None else Ledger()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n(self) -> Tensor:
        """n_i, the clients' numbers of training samples."""
        return torch.as_tensor(self.site.train_sizes[self.ids], dtype=torch.float64)

    def weights(self, kind: str) -> Tensor:
        """p_i: ``sample`` is n_i over the cohort's total, ``uniform`` is one over its size."""
        n = self.n
        return n / n.sum() if kind == "sample" else torch.full_like(n, 1 / len(n))

    def everyone(self) -> "Cohort":
        """All clients of the federation in this round, sampled or not."""
        return self.only(range(len(self.site.train_sizes)))

    def only(self, ids: Sequence[int] | Rows) -> "Cohort":
        """Some of these clients, for an exchange with them alone; what happens is written to the same ledger."""
        return Cohort(self.site, np.asarray(ids), self.round, silent=self.silent, ledger=self.ledger)

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
        self.ledger.bytes_down += BYTES_PER_SCALAR * (len(self.ids) * trees.numel(shared) + trees.numel(own))
        job, asked = self.job(program, shared, own, self.site.splits), np.arange(len(self.ids))
        if self.silent:
            asked = asked[[int(c) not in self.silent for c in self.ids]]
            job = job.select(asked)
        result = self.site.engine.run(job) if len(asked) else Result(asked, {}, {}, {})
        if self.site.attacker is not None:
            uploads = self.site.attacker.received(job, result, held or {}, self.ledger.exchanges)
            result = result._replace(uploads=uploads)
        self.ledger.exchanges += 1
        good = self._usable(result, job.clients)
        rows = asked[result.positions][good]
        uploads, states = _choose((result.uploads, result.states), good, len(result.positions))
        self.ledger.samples_computed += result.computed
        self.ledger.samples_useful += result.useful
        self.ledger.bytes_up += BYTES_PER_SCALAR * trees.numel(uploads)
        if not len(rows):
            raise RunError(self._nobody_left()) from next(iter(result.failed.values()), None)
        if write:
            self.site.states.scatter(self.ids[rows], states)
            if self.site.sent is not None:
                self.site.sent.note(self.ids[rows], uploads)
        return Uploads(self.only(self.ids[rows]), uploads, rows)

    def job(self, program: Program, shared: Mapping[str, Tree], per_client: Mapping[str, Tree], splits: Splits) -> Job:
        """A program on these clients, with their states."""
        site = self.site
        states = site.states.gather(self.ids)
        return Job(site.task, site.data, splits, program, self.ids, shared, per_client, states, site.seed, self.round)

    def _usable(self, result: Result, asked: Rows) -> NDArray[np.bool_]:
        """Which answers are finite; the others are recorded beside the failures of the engine."""
        finite = trees.finite_rows((result.uploads, result.states), len(result.positions)).numpy()
        for client, error in result.failed.items():
            self.ledger.failed[client] = f"{type(error).__name__}: {error}"
        for position in result.positions[~finite]:
            self.ledger.failed[int(asked[position])] = "answered with values that are not finite"
        return finite

    def _nobody_left(self) -> str:
        reasons = [f"client {c}: {why}" for c, why in list(self.ledger.failed.items())[:3]]
        said = "; ".join(reasons) if reasons else "all were silent"
        return f"round {self.round + 1}: none of the {len(self.ids)} clients gave a usable answer ({said})"


class Uploads:
    """Stacked uploads, by attribute, of the clients that answered; rows in the order of ``ids``."""

    def __init__(self, cohort: Cohort, uploads: dict[str, Tree], rows: Rows) -> None:
        self.cohort, self.ids, self._values = cohort, cohort.ids, uploads
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the program's upload has no {name!r}; it has {sorted(self._values)}") from None

    def align(self, stacked: Tree) -> Tree:
        """The rows of a per-client tree of the asked cohort that belong to those who answered."""
        return trees.tree_map(lambda v: v[torch.as_tensor(self._rows, device=v.device)], stacked)

    def weights(self, kind: str) -> Tensor:
        return self.cohort.weights(kind)


def _choose(tree: Tree, good: NDArray[np.bool_], n: int) -> Tree:
    if good.all():
        return tree
    choose: Callable[[Tensor], Tensor] = lambda v: v[torch.as_tensor(good, device=v.device)]  # noqa: E731
    return trees.tree_map(choose, tree) if n else tree
