"""Averages of models that a few bad ones cannot move far. Trees are stacked: a row per client.

Buffers (running statistics) are tensors like any others here.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespokefl.core.common_direction import lengths
from bespokefl.core.solvers import gram
from bespokefl.core.trees import Tree, leaves, mean, rows, sub, tree_map


def median(stacked: Tree) -> Tree:
    """The median of each coordinate, the mean of the middle two of an even number; no weights."""
    return trimmed_mean(stacked, (count(stacked) - 1) // 2)


def trimmed_mean(stacked: Tree, cut: int) -> Tree:
    """The mean of each coordinate without its ``cut`` smallest and its ``cut`` largest values; no weights."""
    left = count(stacked) - 2 * cut
    alike = torch.full((left,), 1 / left, dtype=torch.float64)
    return tree_map(lambda v: mean(v.sort(0).values[cut : cut + left], alike), stacked)


def krum(stacked: Tree, start: Tree | None, f: int, keep: int = 1) -> NDArray[np.int64]:
    """The rows of the ``keep`` models that are nearest to their n - f - 2 nearest neighbours (Blanchard et al., 2017).

    ``start`` is a model among them: distances are computed from there, so that a model far away spoils those of the
    others by no rounding error. Of equals the first is taken.
    """
    n = count(stacked)
    products = gram(stacked if start is None else sub(stacked, start))
    squares = products.diagonal()
    distances = np.maximum(squares[:, None] + squares - 2 * products, 0)
    np.fill_diagonal(distances, np.inf)
    scores = np.sort(distances, axis=1)[:, : n - f - 2].sum(1)
    return np.sort(np.argsort(scores, kind="stable")[:keep])


def mean_of_rows(stacked: Tree, chosen: NDArray[np.int64], weights: Tensor) -> Tree:
    """The mean of some rows by their weights, which are brought to the sum 1."""
    index = torch.as_tensor(chosen)
    return mean(rows(stacked, index), weights[index] / weights[index].sum())


def clipped_mean(stacked: Tree, start: Tree | None, weights: Tensor, limit: float | None) -> Tree:
    """start + sum_i p_i d_i, d_i = x_i - start being shortened to the norm ``limit`` (nothing: the median norm)."""
    norms = lengths(stacked if start is None else sub(stacked, start))
    limit = float(np.median(norms)) if limit is None else limit
    shares = weights * torch.as_tensor(np.where(norms > limit, limit / np.where(norms > 0, norms, 1.0), 1.0))
    moved = mean(stacked, shares)
    if start is None:
        return moved
    rest = float(weights.sum() - shares.sum())  # 0 where nothing is clipped
    return tree_map(lambda v, w: v + rest * w, moved, start)


def count(stacked: Tree) -> int:
    return leaves(stacked)[0].shape[0]
