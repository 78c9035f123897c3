"""The common descent direction of FedPG: the shortest vector in the hull of gradients and a fairness gradient.

Pure geometry on the server: stacked trees of gradients, their Gram matrix in float64, and weights.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.core.solvers import Floats, gram, min_norm
from bespokefl.core.trees import Model, Tree, concat, leaves, mean, rows, scale, stack, zeros

Length = Literal["none", "mean", "median", "unit"]

ZERO_GRADIENT = 1e-6  # shorter gradients are left out: one of them in the hull would force d = 0
STATIONARY = 1e-6  # d this much shorter than the mean gradient is rounding noise
NO_LOSS = 1e-12  # a vector of losses shorter than this has no angle
NO_FAIRNESS = 1e-8  # a fairness column this much shorter than the gradients: all losses are equal


class Columns(NamedTuple):
    """The vectors of a round, their inner products computed once."""

    z: Model  # stacked: the online clients' gradients, the absent ones' (newest first), the fairness column
    products: Floats  # their Gram matrix
    losses: Floats  # of the online clients
    kept: NDArray[np.bool_]  # which online gradients do not vanish
    h: Floats  # of the fairness column; zeros where there is none
    r: float | None  # the common length; None: as they are


class Direction(NamedTuple):
    d: Model  # d' = sigma d
    sigma: float
    slopes: Floats  # g_i.d' of the online clients
    fair: bool  # whether the fairness column took part
    fair_dropped: bool
    moves: bool  # False: the model is stationary, d' = 0


def unfairness(losses: Floats) -> float:
    """F = -cos(L, 1); -1 where all losses are 0."""
    size = float(np.linalg.norm(losses))
    return -float(losses.sum()) / (size * np.sqrt(len(losses))) if size > 0 else -1.0


def fairness_weights(losses: Floats) -> Floats:
    """h with grad F = sum_i h_i g_i."""
    size, root = np.linalg.norm(losses), np.sqrt(len(losses))
    h: Floats = (losses.sum() * losses / (root * size**2) - 1 / root) / size
    return h


def lengths(stacked: Tree) -> Floats:
    """The rows' norms, in float64."""
    parts = [torch.linalg.vector_norm(v.reshape(v.shape[0], -1), dim=1, dtype=torch.float64) for v in leaves(stacked)]
    found: Floats = torch.linalg.vector_norm(torch.stack(parts), dim=0).cpu().numpy()
    return found


def columns_of(g: Model, losses: Floats, absent: Sequence[Model], length: Length, least_angle: float) -> Columns:
    """Q of FedPG's supplement, unscaled but for the fairness column sum_i h_i g^_i.

    ``g`` are the online clients' gradients, stacked; the fairness column takes part if the angle of the losses and 1
    exceeds so many degrees (0: always).
    """
    norms = lengths(g)
    kept = norms >= ZERO_GRADIENT
    r = _common_length(norms[kept], length) if kept.any() else None
    h = np.zeros(len(losses))
    if kept.sum() > 1 and np.linalg.norm(losses[kept]) >= NO_LOSS and _matters(losses[kept], least_angle):
        h[kept] = fairness_weights(losses[kept])
    size = np.ones_like(norms) if r is None else r / np.where(kept, norms, 1)
    fair = mean(g, torch.as_tensor(h * size))
    z = concat([g, *([stack(absent)] if absent else []), stack([fair])])
    return Columns(z, gram(z), losses, kept, h, r)


def _common_length(norms: Floats, length: Length) -> float | None:
    if length == "none":
        return None
    return {"mean": float(norms.mean()), "median": float(np.median(norms)), "unit": 1.0}[length]


def _matters(losses: Floats, least_angle: float) -> bool:
    angle = np.degrees(np.arccos(np.clip(-unfairness(losses), -1, 1)))
    return least_angle == 0 or bool(angle > least_angle)


def common_direction(c: Columns) -> Direction:
    """d' = sigma d, d = -Q lam the shortest vector of the hull."""
    norms, m = np.sqrt(c.products.diagonal()), len(c.losses)
    size = np.ones_like(norms) if c.r is None else c.r / np.where(norms > 0, norms, 1)
    online = np.flatnonzero(c.kept)
    absent = m + np.flatnonzero(norms[m:-1] >= ZERO_GRADIENT)
    if not len(online):
        return _stay(c)
    # The fairness column has been summed from scaled gradients: its own length tells whether losses differ.
    fair = c.h.any() and norms[-1] > NO_FAIRNESS * (size * norms)[online].max()
    plain = np.zeros_like(norms)
    plain[online] = size[online] / len(online)
    reference = lengths(stack([weighted_sum(plain, c.z)]))[0]  # |d_r|, d_r the averaged direction
    last, dropped = [len(norms) - 1] if fair else [], False
    while True:
        chosen = np.concatenate([online, absent, last]).astype(np.int64)
        scaled = c.products[np.ix_(chosen, chosen)] * size[chosen, None] * size[None, chosen]
        weights = np.zeros_like(norms)
        weights[chosen] = min_norm(scaled) * size[chosen]
        d = scale(-1.0, weighted_sum(weights, c.z))
        found = lengths(stack([d]))[0]
        if found > STATIONARY * reference:
            sigma = max(1.0, reference / found)
            slopes = -sigma * (c.products @ weights)[:m]
            return Direction(scale(sigma, d), sigma, slopes, bool(last), dropped, True)
        if last:
            last, dropped = [], True
        elif len(absent):
            absent = absent[:-1]
        else:
            return _stay(c)


def _stay(c: Columns) -> Direction:
    return Direction(zeros(rows(c.z, 0)), 1.0, np.zeros(len(c.losses)), False, False, False)


def weighted_sum(weights: Floats, stacked: Model) -> Model:
    """The sum of a stacked tree's rows, each by its weight."""
    total: Model = mean(stacked, torch.as_tensor(weights))
    return total
