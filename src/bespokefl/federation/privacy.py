"""Client-level differential privacy for methods that only average their clients' updates (McMahan et al., ICLR 2018).

What a client uploads is shortened so that its update (x_i - w of a model, or the difference itself) has at most the
norm C, and Gaussian noise of standard deviation z C is added to the sum of all updates. So what the server makes of a
round, and all that comes of it, is differentially private: whether one client took part at all can hardly be told.

Not covered: what the server itself sees of single uploads (it is trusted to clip and to add the noise), a client's own
personal model, the scores that clients tell, and sizes.

Not knowing who takes part in a round helps to hide a client (amplification by sampling), but only where nobody knows:
in a real federation cohorts are drawn from a key that the server keeps. A round then samples a fixed number of clients,
and is accounted for as if each took part with the same probability on its own (Poisson sampling), an approximation.
Where cohorts follow from a seed, which runs write down and silos are told, nothing is gained by sampling: every round
counts in which a client took part.
"""

import importlib.util
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bespokefl.core.clients import Postprocessor, Transfer
from bespokefl.core.program import Rows
from bespokefl.core.rng import stream
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree, leaves, tree_map
from bespokefl.errors import InputError
from bespokefl.federation.attacks import start_of
from bespokefl.federation.secret import normal_numbers

NEEDED = "dp_accounting"
NEIGHBOURS = (
    "adding or removing one client with all its samples (not replacing one by another, which moves twice as far)"
)


class PrivacySettings(NamedTuple):
    clip: float
    noise: float
    delta: float = 1e-5


@dataclass(frozen=True)
class Privacy(Postprocessor):
    """The mechanism of a federation.

    Args:
        clip: C, the largest norm of a client's update.
        noise: z, the noise multiplier.
        delta: of the guarantee.
        clients: N of the federation.
        cohort_size: clients asked in a round.
        sends: the algorithm's uploads that hold parameters (``Algorithm.sends``).
        seed: of the noise, for a simulation, which may repeat itself; None draws it from the system's entropy.
        hidden: whether cohorts are drawn from a key that only the server has.
    """

    clip: float
    noise: float
    delta: float
    clients: int
    cohort_size: int
    sends: Mapping[str, str | None]
    seed: int | None
    hidden: bool = False

    def accepted(self, transfer: Transfer, uploads: dict[str, Tree], places: Rows) -> dict[str, Tree]:
        """The uploads of the clients at these places of the order, clipped, with noise in their mean.

        All the noise is in the first row: of the rows nothing but the mean with equal weights is ever used, in which it
        has the standard deviation z C over the number of rows.
        """
        if not leaves(uploads):
            return uploads
        if transfer.ledger.releases:
            raise InputError("privacy.clip: the method averages uploads more than once in a round")
        transfer.ledger.releases += 1
        order, held, _ = transfer
        if unknown := sorted(set(uploads) - set(self.sends)):
            raise InputError(f"privacy.clip: the method uploads {', '.join(unknown)}, and does not say what that is")
        starts = {
            k: None if self.sends[k] is None else start_of(str(self.sends[k]), order, held, places) for k in uploads
        }
        moved = {k: _minus(tree, starts[k]) for k, tree in uploads.items()}
        factor = (self.clip / _norms(moved).clamp(min=1e-300)).clamp(max=1.0)
        draw = normal_numbers if self.seed is None else stream(self.seed, "privacy", order.round).standard_normal

        def one(update: Tensor) -> Tensor:
            shortened = update * factor.to(update).reshape(-1, *(1,) * (update.ndim - 1))
            noise = self.noise * self.clip * draw(tuple(update.shape[1:]))
            shortened[0] += torch.as_tensor(noise).to(update)
            return shortened

        return {k: _plus(tree_map(one, tree), starts[k]) for k, tree in moved.items()}

    @property
    def amplified(self) -> bool:
        """Whether who takes part is drawn, and unknown to all but the server."""
        return self.hidden and self.cohort_size < self.clients

    def epsilon(self, rounds: int, most: int | None = None) -> float:
        """Of the guarantee (epsilon, delta) after so many rounds, by Renyi differential privacy.

        ``most`` is the number of rounds of the client that took part in most of them, all unless given. It counts where
        it is no secret.
        """
        import dp_accounting

        event: Any = dp_accounting.GaussianDpEvent(self.noise)
        if self.amplified:
            event = dp_accounting.PoissonSampledDpEvent(self.cohort_size / self.clients, event)
        elif most is not None:
            rounds = most
        told = logging.getLogger("absl")  # it warns of orders that it leaves out, which only loosen the bound
        level = told.level
        told.setLevel(logging.ERROR)
        try:
            accountant = dp_accounting.rdp.RdpAccountant()
            accountant.compose(event, rounds)
            return float(accountant.get_epsilon(self.delta))
        finally:
            told.setLevel(level)

    def summary(self, cohorts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """For summary.json, after rounds with these clients: epsilon, and in one line what it is and is not."""
        most = max(Counter(client for cohort in cohorts for client in cohort).values(), default=0)
        epsilon = self.epsilon(len(cohorts), most)
        return {
            "epsilon": epsilon,
            "delta": self.delta,
            "privacy_clip": self.clip,
            "privacy_noise": self.noise,
            "privacy_account": f"epsilon {epsilon:.4g} at delta {self.delta:g}, for {NEIGHBOURS}; "
            f"{self._sampling(len(cohorts), most)}; {self._source()}",
        }

    def _sampling(self, rounds: int, most: int) -> str:
        if self.amplified:
            return (
                f"cohorts of {self.cohort_size} of {self.clients} clients, of a fixed size and drawn in secret, are "
                "accounted for as Poisson sampling of the same rate, an approximation"
            )
        return (
            "no amplification by sampling, as everybody may know who takes part: the client that took part most did "
            f"in {most} of {rounds} rounds"
        )

    def _source(self) -> str:
        return (
            "noise from the system's entropy" if self.seed is None else "noise from the public seed, for studies only"
        )


def check_private(settings: PrivacySettings, name: str, weights: str, averaged: bool, task: Task, clients: int) -> None:
    """Refuses what would be no guarantee."""
    if importlib.util.find_spec(NEEDED) is None:
        raise InputError("privacy.noise: the accounting needs dp-accounting; pip install 'bespokefl[privacy]'.")
    if settings.delta >= 1 / clients:
        raise InputError(
            f"privacy.delta = {settings.delta:g}: it should be below one over the number of clients, {clients}"
        )
    if not averaged:
        raise InputError(
            f"privacy.clip: algorithm.name = {name!r} does more with its clients' uploads than take their mean (or "
            "algorithm.aggregation is another one), so noise in that mean would be no guarantee; methods that only "
            "average are listed in docs/federation-protocol.md"
        )
    if weights != "uniform":
        raise InputError(
            f"algorithm.weights = {weights!r} ({name}): under [privacy] all clients count alike; set it to 'uniform'"
        )
    if task.buffer_names:
        raise InputError(
            "privacy.clip: the model has running statistics (BatchNorm), which noise would make invalid; take a model "
            "with GroupNorm or without normalisation"
        )


def _norms(stacked: Tree) -> Tensor:
    """The norm of each row, over all tensors together."""
    return torch.stack([v.double().flatten(1).square().sum(1).cpu() for v in leaves(stacked)]).sum(0).sqrt()


def _minus(stacked: Tree, start: Tree | None) -> Tree:
    return tree_map(torch.clone, stacked) if start is None else tree_map(torch.sub, stacked, start)


def _plus(moved: Tree, start: Tree | None) -> Tree:
    return moved if start is None else tree_map(torch.add, moved, start)
