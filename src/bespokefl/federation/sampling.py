"""Who takes part in a round: a schedule that somebody gave, or uniform samples."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bespokefl.core.program import Rows
from bespokefl.core.rng import stream
from bespokefl.errors import InputError
from bespokefl.federation.secret import chosen

Schedule = Sequence[Iterable[int]] | Callable[[int], Iterable[int]]


class Participation:
    """The clients of each round, and how many they are.

    Args:
        clients: N of the federation.
        share: of the clients, asked in a round; or ``clients_per_round`` their number.
        schedule: who takes part, round by round (a sequence, or a function of the 0-based round). ``clients_per_round``
            beside it is the number for methods that need one, whatever the rounds' sizes are.
        seed: of the samples where there is no schedule; they depend on nothing but it and the round.
        secret: a key in its place, so that nobody else knows who is asked.
    """

    def __init__(
        self,
        clients: int,
        share: float,
        clients_per_round: int | None,
        schedule: Schedule | None,
        seed: int,
        secret: str | None = None,
    ) -> None:
        self._clients, self._seed, self.secret = clients, seed, secret
        self.said = clients_per_round is not None  # the number for methods that need one
        given = _number(clients, share, clients_per_round)
        self._sampled = given if schedule is None else None
        self._function = schedule if callable(schedule) else None
        self._listed = None if schedule is None or callable(schedule) else [self.checked(ids) for ids in schedule]
        if self._listed is not None and not self._listed:
            raise InputError("schedule names the clients of 0 rounds; it has at least one")
        self.sizes: tuple[int, ...]  # that rounds may have, ascending; none: they are not known beforehand
        if self._sampled is not None or self.said:
            self.sizes = (given,)
        else:
            self.sizes = tuple(sorted({len(ids) for ids in self._listed or ()}))

    @property
    def most(self) -> int:
        """Clients of a round, at most."""
        return max(self.sizes, default=self._clients)

    @property
    def drawn(self) -> int:
        """How many of the clients are drawn at random for a round; a schedule draws nobody, so it counts as all."""
        return self._clients if self._sampled is None else self._sampled

    def of(self, round: int) -> Rows:
        """The clients of a round, counted from 0, in ascending order."""
        if self._function is not None:
            return self.checked(self._function(round))
        if self._listed is not None:
            if round >= len(self._listed):
                raise InputError(f"schedule names the clients of {len(self._listed)} rounds; this is round {round + 1}")
            return self._listed[round]
        if self.secret is not None:
            return chosen(self.secret, round, self._clients, self._sampled or 0)
        return np.sort(stream(self._seed, "sample", round).choice(self._clients, self._sampled, replace=False))

    def checked(self, clients: Iterable[int]) -> Rows:
        """Ids without repeats, all of which there are."""
        given = np.asarray(list(clients))
        if len(given) and given.dtype.kind not in "iu":
            raise InputError(
                f"clients = {given.tolist()}: ids of a round are whole numbers, some of 0 to {self._clients - 1} "
                "(np.flatnonzero makes them of a mask)"
            )
        ids = np.unique(given.astype(np.int64))
        if not len(ids) or ids[0] < 0 or ids[-1] >= self._clients:
            raise InputError(f"clients = {ids.tolist()}: ids of a round are some of 0 to {self._clients - 1}")
        return ids


def _number(clients: int, share: float, clients_per_round: int | None) -> int:
    if clients_per_round is not None:
        if not 1 <= clients_per_round <= clients:
            raise InputError(f"clients_per_round = {clients_per_round}: it is a number from 1 to {clients}")
        return clients_per_round
    if not 0 < share <= 1:
        raise InputError(f"train.participation = {share}: it is a share above 0 and at most 1")
    return max(1, int(share * clients + 1e-9))  # 0.29 of 100 is 29 in spite of rounding
