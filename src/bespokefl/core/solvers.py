"""The small convex problems of gradient geometry, solved exactly from a Gram matrix in float64.

Two of them are least squares over non-negative weights with one extra row, so that one active-set method (Lawson and
Hanson, Solving Least Squares Problems, ch. 23) serves both: it ends by solving the equality system on its active set,
and an iterative method's error of the square root of its tolerance never arises. Columns are brought to unit length
first, so their scales (1e-12 beside 1e12) do not matter, and only the Gram matrix's rounding does. The third has upper
bounds too, and an active-set method of its own.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lstsq
from scipy.optimize import nnls

from bespokefl.core.trees import Tree, leaves

Floats = NDArray[np.float64]

CHUNK = 2**22  # entries of the columns that are held in float64 at once
EPS = float(np.finfo(np.float64).eps)


def gram(stacked: Tree) -> Floats:
    """The inner products of a stacked tree's rows, in float64 whatever the type of its leaves."""
    total: torch.Tensor | None = None
    for wide in _chunks(stacked):
        total = wide @ wide.T if total is None else total.addmm_(wide, wide.T)
    if total is None:
        raise ValueError("gram needs a tree with at least one tensor")
    products: Floats = total.cpu().numpy()
    return (products + products.T) / 2


def squared_distances(stacked: Tree, some: NDArray[np.int64]) -> Floats:
    """|x_i - x_j|^2 of some rows i of a stacked tree from all its rows j, in float64 whatever the type of its leaves.

    By inner products: a matrix product instead of a difference per pair. Rows are measured from their mean, so that
    what cancels is as large as the spread of the rows, not as the rows.
    """
    found = np.zeros((len(some), leaves(stacked)[0].shape[0]))
    for wide in _chunks(stacked):
        wide = wide - wide.mean(0)
        squares, index = (wide * wide).sum(1), torch.as_tensor(some, device=wide.device)
        found += (squares[index, None] + squares - 2 * wide[index] @ wide.T).cpu().numpy()
    found[np.arange(len(some)), some] = 0.0
    return np.maximum(found, 0)


def _chunks(stacked: Tree) -> Iterator[torch.Tensor]:
    """The rows of a stacked tree in float64, some columns at a time."""
    for leaf in leaves(stacked):
        rows = leaf.reshape(leaf.shape[0], -1)
        width = max(1, CHUNK // max(1, len(rows)))
        for k in range(0, rows.shape[1], width):
            yield rows[:, k : k + width].double()


def factor(correlations: Floats) -> Floats:
    """R with R'R = C for a positive semi-definite C; directions that are rounding noise are left out."""
    values, vectors = np.linalg.eigh(correlations)
    kept = values > len(values) * EPS * values[-1]
    root: Floats = np.sqrt(values[kept])[:, None] * vectors[:, kept].T
    return root


def min_norm(products: Floats) -> Floats:
    """Weights of the shortest vector in the convex hull of columns q, given their Gram matrix.

    argmin |Q lam|^2 over lam >= 0, sum lam = 1. With u_j = lam_j |q_j| up to a common factor it is the non-negative
    least-squares problem |Q^ u|^2 + (a.u - 1)^2, a_j = min|q| / |q_j|, Q^ the unit columns: for any ray of u its best
    point has the value v / (1 + v), v = |Q^ u|^2 / (a.u)^2.
    """
    lengths = np.sqrt(products.diagonal())
    if not lengths.all():  # a zero column is the shortest vector
        alone: Floats = np.eye(len(lengths))[int(lengths.argmin())]
        return alone
    u = _weights(factor(_unit(products, lengths)), lengths.min() / lengths)
    weights = u * (lengths.min() / lengths)
    weights = weights / weights.sum()
    return _polished(products, weights)


def min_norm_near(products: Floats, p: Floats, epsilon: float) -> Floats:
    """Weights of the shortest Q lam with lam >= 0, sum lam = 1 and |lam_j - p_j| <= epsilon; columns of like length.

    A primal active-set method that starts at p, which is such weights itself. It solves the equality system on the
    weights that are not at a bound. A weight that meets its bound on the way stays there, until at an optimum of the
    others its multiplier has the wrong sign. With epsilon = 0 the answer is p, with epsilon = 1 that of ``min_norm``.
    """
    low, high = np.maximum(0, p - epsilon), np.minimum(1, p + epsilon)
    lam = np.array(p, dtype=np.float64)
    noise = 8 * EPS * float(np.sqrt(len(lam)) * products.diagonal().max(initial=0))
    if not noise:
        return lam
    free = (low < lam) & (lam < high)
    for _ in range(20 * len(lam)):
        step = _balanced_step(products, lam, free, noise)
        moves = np.abs(step) > EPS**2
        room = np.where(step < 0, low - lam, high - lam) / np.where(moves, step, 1)
        share = min(1.0, float(room[moves].min(initial=1)))
        met = moves & (room <= share)
        lam = np.where(met, np.where(step < 0, low, high), np.clip(lam + share * step, low, high))
        free &= (low < lam) & (lam < high)
        if share < 1:
            continue
        slopes = products @ lam
        falls, rises = np.where(lam > low, slopes, -np.inf), np.where(lam < high, slopes, np.inf)
        i, j = int(falls.argmax()), int(rises.argmin())
        if not falls[i] - rises[j] > noise:
            break
        if free.any():  # one at a time: only then has its step surely the right sign
            level = slopes[free].mean()
            free[i if falls[i] - level > level - rises[j] else j] = True
        else:
            free[[i, j]] = True
    return lam


def _balanced_step(products: Floats, lam: Floats, free: NDArray[np.bool_], noise: float) -> Floats:
    """The free weights' step of sum 0 to where Q lam is shortest; no curvature below the noise is believed."""
    step = np.zeros_like(lam)
    if free.any():
        block, slopes = products[np.ix_(free, free)], (products @ lam)[free]
        block = block - block.mean(0) - block.mean(1)[:, None] + block.mean()
        values, vectors = np.linalg.eigh(block)
        found = vectors @ (vectors.T @ (slopes.mean() - slopes) / np.maximum(values, noise))
        step[free] = found - found.mean()
    return step


def nearest_directions(products: Floats, clients: Iterable[int], gamma: float) -> Floats:
    """For each client i the nu >= 0 of d_i = -(g_i + sum_j nu_j g_j), a row each, all from one Gram matrix.

    d_i is the vector nearest to -g_i with g_j.d <= gamma max(0, -g_j.g_i) for all j != i. Its dual is
    min over nu >= 0 of |g_i + sum nu_j g_j|^2 / 2 + sum nu_j gamma max(0, -g_j.g_i), a least-distance programme:
    for z = (d + g_i) / |g_i| the smallest |z| with -g^_j.z >= h_j. Since d = 0 is feasible, |z| <= 1 and the
    programme is well conditioned for any gradients.
    """
    lengths = np.sqrt(products.diagonal())
    some = np.flatnonzero(lengths)
    cosines = _unit(products[np.ix_(some, some)], lengths[some]) if len(some) else np.zeros((0, 0))
    root = factor(cosines) if len(some) else cosines
    rows = []
    for i in clients:
        nu = np.zeros(len(lengths))
        if lengths[i] > 0:
            place = int(np.searchsorted(some, i))
            others = np.delete(np.arange(len(some)), place)
            c = cosines[others, place]
            h = -c - gamma * np.maximum(0, -c)
            if (h > 0).any():
                u = _weights(root[:, others], h)
                nu[some[others]] = u / (1 - h @ u) * (lengths[i] / lengths[some[others]])
        rows.append(nu)
    return np.stack(rows)


def gap(products: Floats, weights: Floats) -> float:
    """How far weights are from optimal for ``min_norm``: |d|^2 + max_q q.d, zero at the solution, d = -Q lam."""
    slopes = products @ weights
    return float(weights @ slopes - slopes.min())


def _unit(products: Floats, lengths: Floats) -> Floats:
    """The Gram matrix of the columns divided by their lengths."""
    cosines: Floats = products / lengths[:, None] / lengths[None, :]
    np.fill_diagonal(cosines, 1.0)
    return cosines


def _weights(root: Floats, row: Floats) -> Floats:
    """argmin over u >= 0 of |R u|^2 + (row.u - 1)^2."""
    matrix, target = np.vstack([root, row]), np.zeros(len(root) + 1)
    target[-1] = 1.0
    tolerance = 8 * EPS * float(np.sqrt(len(row)))  # of the dual; columns are no longer than sqrt(2)
    try:
        u: Floats = nnls(matrix, target)[0]
    except RuntimeError:  # too many iterations
        u = np.zeros(len(row))
    # scipy 1.17 answers some degenerate problems (an exactly opposite column) wrongly, so it is not taken on trust.
    pull = matrix.T @ (target - matrix @ u)
    good = u.any() and pull.max() <= tolerance and np.abs(pull[u > 0]).max() <= tolerance
    return u if good else active_set(matrix, target, tolerance)


def active_set(matrix: Floats, target: Floats, tolerance: float) -> Floats:
    """argmin over u >= 0 of |A u - b|: Lawson and Hanson's method, a column entering only if its pull is not noise."""
    u = np.zeros(matrix.shape[1])
    free = np.zeros(len(u), dtype=bool)
    refused = np.zeros(len(u), dtype=bool)  # columns that would have left again at once, since the last progress
    for _ in range(10 * len(u)):
        pull = np.where(free | refused, -np.inf, matrix.T @ (target - matrix @ u))
        entering = int(pull.argmax())
        if not pull[entering] > tolerance:
            break
        free[entering] = True
        best = _least_squares(matrix, target, free)
        if best[entering] <= 0:
            free[entering], refused[entering] = False, True
            continue
        while (best[free] <= 0).any():
            leaving = free & (best <= 0)
            step = (u[leaving] / (u[leaving] - best[leaving])).min()
            u = np.where(free, np.maximum(0, u + step * (best - u)), 0)
            u[leaving & (u <= EPS * u.max())] = 0
            free &= u > 0
            best = _least_squares(matrix, target, free)
        u, refused = best, np.zeros(len(u), dtype=bool)
    return u


def _least_squares(matrix: Floats, target: Floats, free: NDArray[np.bool_]) -> Floats:
    """Over the free columns; zero elsewhere. By QR with pivoting, three times faster than by singular values."""
    out = np.zeros(len(free))
    if free.any():
        noise = EPS * max(len(matrix), int(free.sum()))
        out[free] = lstsq(matrix[:, free], target, cond=noise, lapack_driver="gelsy", check_finite=False)[0]
    return out


def _polished(products: Floats, weights: Floats) -> Floats:
    """The equality system on the support, from the Gram matrix itself rather than its factor, where that is nearer."""
    support = np.flatnonzero(weights)
    scale = products.diagonal()[support].max()
    n = len(support)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = products[np.ix_(support, support)] / scale
    system[n, n] = 0.0
    solved = np.linalg.lstsq(system, np.eye(n + 1)[n], rcond=None)[0][:n]
    if (solved < 0).any() or not solved.sum() > 0:
        return weights
    better = np.zeros_like(weights)
    better[support] = solved / solved.sum()
    return better if gap(products, better) < gap(products, weights) else weights
