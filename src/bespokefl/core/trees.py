"""Algebra on trees of tensors (dicts, tuples and named tuples of them, to any depth).

The first half is written for one client: the same lines run one client at a time or stacked under ``vmap``, because no
shape and no client axis is named. The second half is the server's: trees whose leaves have a leading client axis.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any  # a Tensor, or a dict / tuple / list / NamedTuple of trees
Model = dict[str, Tensor]  # parameters and float buffers by their state-dict name


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` leaf by leaf to trees of one structure."""
    return pytree.tree_map(fn, tree, *rest)


def leaves(tree: Tree) -> list[Tensor]:
    return pytree.tree_leaves(tree)


def structure(tree: Tree) -> Any:
    return pytree.tree_structure(tree)


# one client ------------------------------------------------------------------------------------------
def add(a: Tree, b: Tree) -> Tree:
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return tree_map(torch.sub, a, b)


def scale(s: float | Tensor, a: Tree) -> Tree:
    return tree_map(lambda v: s * v, a)


def axpy(s: float | Tensor, a: Tree, b: Tree) -> Tree:
    """s a + b."""
    return tree_map(lambda u, v: s * u + v, a, b)


def shift(x: Model, s: float | Tensor, d: Mapping[str, Tensor]) -> Model:
    """x + s d on the names of ``d`` (a gradient has fewer names than a model); the rest of x is kept."""
    return {**x, **{k: x[k] + s * v for k, v in d.items()}}


def zeros(a: Tree) -> Tree:
    return tree_map(torch.zeros_like, a)


def dot(a: Tree, b: Tree) -> Tensor:
    products = leaves(tree_map(lambda u, v: (u * v).sum(), a, b))
    return torch.stack(products).sum() if products else torch.zeros(())


def squared_norm(a: Tree) -> Tensor:
    return dot(a, a)


def norm(a: Tree) -> Tensor:
    return squared_norm(a).sqrt()


def clipped(a: Tree, limit: float | None) -> Tree:
    """a, shortened to the given norm if it is longer."""
    return a if limit is None else scale((limit / norm(a)).clamp(max=1.0), a)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """``condition`` is a scalar of one client."""
    return tree_map(lambda u, v: torch.where(condition, u, v), a, b)


def pick(a: Mapping[str, Tensor], names: Iterable[str]) -> Model:
    return {k: a[k] for k in names}


def drop(a: Mapping[str, Tensor], names: Collection[str]) -> Model:
    return {k: v for k, v in a.items() if k not in names}


# the server: a leading axis of clients ------------------------------------------------------------------------------
def mean(stacked: Tree, weights: Tensor) -> Tree:
    """sum_i p_i x_i, in float64 accumulators and ascending row order; float leaves only."""

    def one(v: Tensor) -> Tensor:
        total = torch.zeros(v.shape[1:], dtype=torch.float64, device=v.device)
        for row, p in zip(v.unbind(), weights.tolist(), strict=True):  # no float64 copy of all rows
            total.add_(row, alpha=p)
        return total.to(v.dtype)

    return tree_map(one, stacked)


def combine(matrix: Tensor, stacked: Tree) -> Tree:
    """Row r of the result is sum_j matrix[r, j] x_j."""
    return tree_map(lambda v: torch.einsum("rc,c...->r...", matrix.to(v.dtype), v), stacked)


def rows(stacked: Tree, index: int | Tensor) -> Tree:
    """One row, or a copy of several."""
    if isinstance(index, Tensor):
        return tree_map(lambda v: v.index_select(0, index.to(v.device)), stacked)
    return tree_map(lambda v: v[index], stacked)


def repeat(a: Tree, n: int) -> Tree:
    return tree_map(lambda v: v.expand(n, *v.shape), a)


def stack(trees: Sequence[Tree]) -> Tree:
    return tree_map(lambda *v: torch.stack(v), *trees)


def concat(trees: Sequence[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else tree_map(lambda *v: torch.cat(v), *trees)


def flat(stacked: Tree) -> Tensor:
    """One row per client: all leaves side by side."""
    return torch.cat([v.reshape(v.shape[0], -1) for v in leaves(stacked)], 1)


def like(vector: Tensor, a: Mapping[str, Tensor]) -> Model:
    """The inverse of ``flat`` for a flat vector (or rows of them): a model shaped as ``a``."""
    out, k = {}, 0
    for name, v in a.items():
        out[name] = vector[..., k : k + v.numel()].reshape((*vector.shape[:-1], *v.shape))
        k += v.numel()
    return out


def finite_rows(stacked: Tree, n: int) -> Tensor:
    """For each of n rows: whether every float in it is finite."""
    ok = torch.ones(n, dtype=torch.bool)
    for v in leaves(stacked):
        if v.is_floating_point() and v.numel():
            flat = v.reshape(n, -1)
            found = torch.isfinite(flat.sum(1)).cpu()  # isfinite on every element takes many times as long
            ok = ok & (found if bool(found.all()) else torch.isfinite(flat).all(1).cpu())  # the sum may overflow
    return ok


def is_finite(v: Tensor) -> bool:
    """Whether every number in a tensor is finite."""
    return bool(finite_rows(v[None], 1))


def numel(tree: Tree) -> int:
    return sum(v.numel() for v in leaves(tree))


def nbytes(tree: Tree) -> int:
    return sum(v.numel() * v.element_size() for v in leaves(tree))
