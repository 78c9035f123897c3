"""Which shapes a ragged cohort is run in: few sizes, little padding.

Clients hold different numbers of samples, so they need different numbers of steps and their last batches have different
lengths. A stacked step has one shape for all its clients; each new shape must be traced anew. So stacks shrink only at
the sizes of a coarse series, batches are padded to the sizes of a finer one, and a cohort in which padding would be
more than a fifth of the work is cut into groups of alike clients.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bespokefl.core.program import Rows

Plan = list[list[Rows]]  # per phase the batches of one client, or per client those of one phase

TARGET_WASTE = 1.2


def stack_width(active: int, largest: int) -> int:
    """The smallest size of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds the active clients, at most the stack's own."""
    return min(largest, _in_series(active, steps_per_octave=2))


def padded_length(n: int, size: int | None) -> int:
    """The length to which a batch of n samples is padded: a full one stays, others go up by less than a quarter."""
    if n == size:
        return n
    padded = _in_series(n, steps_per_octave=4)
    return padded if size is None else min(size, padded)


def _in_series(n: int, steps_per_octave: int) -> int:
    if n <= steps_per_octave:
        return max(n, 1)
    step = (1 << ((n - 1).bit_length() - 1)) // steps_per_octave
    return -(-n // step) * step


class Shape:
    """The steps and the longest batch of some clients in one phase."""

    def __init__(self, plan: Sequence[Sequence[Rows]], size: int | None) -> None:
        self.steps = np.array([len(batches) for batches in plan], dtype=np.int64)
        self.longest = np.array([max((len(b) for b in batches), default=0) for batches in plan], dtype=np.int64)
        self.size = size

    def computed(self, members: NDArray[np.int64]) -> int:
        """Samples that a stack of these clients computes, padding included."""
        steps = np.sort(self.steps[members])
        if not len(steps) or not steps[-1]:
            return 0
        active = len(steps) - np.searchsorted(steps, np.arange(steps[-1]), side="right")
        width = sum(
            stack_width(int(a), len(steps)) * int(n)
            for a, n in zip(*np.unique(active, return_counts=True), strict=True)
        )
        return width * padded_length(int(self.longest[members].max()), self.size)


def group(shapes: Sequence[Shape], useful: int) -> list[NDArray[np.int64]]:
    """Cuts clients into groups of alike ones until padding is at most a fifth (or nothing more can be cut)."""
    work = sum(s.steps * np.maximum(s.longest, 1) for s in shapes)
    order = np.argsort(-np.asarray(work), kind="stable")
    groups = [order]
    costs = [_cost(shapes, order)]
    while sum(costs) > TARGET_WASTE * useful:
        cuts = [_best_cut(shapes, g) for g in groups]
        gains = [costs[k] - cut[0] if cut is not None else 0 for k, cut in enumerate(cuts)]
        k = int(np.argmax(gains))
        best = cuts[k]
        if best is None or gains[k] <= 0:
            break
        parts = [groups[k][: best[1]], groups[k][best[1] :]]
        groups[k : k + 1], costs[k : k + 1] = parts, [_cost(shapes, p) for p in parts]
    return groups


def _cost(shapes: Sequence[Shape], members: NDArray[np.int64]) -> int:
    return sum(s.computed(members) for s in shapes)


def _best_cut(shapes: Sequence[Shape], members: NDArray[np.int64]) -> tuple[int, int] | None:
    """The cheapest cut of a group in two, as (cost, position)."""
    positions = np.unique(np.linspace(1, len(members) - 1, num=min(len(members) - 1, 32)).astype(np.int64))
    costs = [
        (_cost(shapes, members[:p]) + _cost(shapes, members[p:]), int(p)) for p in positions if 0 < p < len(members)
    ]
    return min(costs, default=None)
