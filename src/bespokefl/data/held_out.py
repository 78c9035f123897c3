"""Clients that are kept out of the training, to come as new ones afterwards."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bespokefl.core.rng import stream
from bespokefl.data.dataset import IntArray
from bespokefl.errors import InputError


@dataclass(frozen=True)
class HoldOut:
    """Which clients: so many, or a share of all; the last ones, or some at random."""

    count: int | None = None
    share: float | None = None
    choose: Literal["last", "random"] = "last"

    def ids(self, clients: int, seed: int) -> IntArray:
        """Their numbers, ascending."""
        count = self.count if self.count is not None else int((self.share or 0) * clients + 1e-9)
        if not 0 < count < clients:
            key, value = ("count", self.count) if self.count is not None else ("share", self.share)
            raise InputError(
                f"new_clients.{key} = {value}: that is {count} of the {clients} clients; at least one must be held "
                "out, and at least one must stay to train."
            )
        if self.choose == "last":
            return np.arange(clients - count, clients, dtype=np.int64)
        return np.sort(stream(seed, "held_out").choice(clients, count, replace=False)).astype(np.int64)
