"""Layer-wise sharpness: which layers of a model have drifted, and the step that raises the loss most, layer by layer.

LWSAM perturbs every layer l by the step of sharpness-aware minimisation times a score xi_l (Qu et al., How to Prevent
the Poor Performance Clients for Personalized Federated Learning?, CVPR 2023, eq. 5). Everything here is written for one
client: no branch on a tensor, any layer may have a score of 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from bespokefl.core import Model, Part
from bespokefl.core.trees import norm, pick, sub

ScoreScale = Literal["sum1", "mean1"]
NormScope = Literal["global", "layer"]

NO_GRADIENT = 1e-12  # a gradient shorter than this has no direction: the perturbation is 0


def scores(a: Mapping[str, Tensor], b: Mapping[str, Tensor], layers: Sequence[Part], scale: ScoreScale) -> Tensor:
    """xi_l, proportional to ||a_l - b_l|| / dim(l); all alike where a = b.

    They sum to 1 (``sum1``), or to the number of layers (``mean1``), so that equal scores leave the radius as it is.
    """
    raw = torch.stack([norm(sub(pick(a, l.params), pick(b, l.params))) / _size(a, l.params) for l in layers])
    total = raw.sum()
    xi = torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 1 / len(layers))
    return xi * _total(layers, scale)


def equal_scores(like: Tensor, layers: Sequence[Part], scale: ScoreScale) -> Tensor:
    """The scores of layers that have drifted alike, in the type of ``like``."""
    return like.new_full((len(layers),), _total(layers, scale) / len(layers))


def largest(xi: Tensor, count: int) -> Tensor:
    """Which layers have the ``count`` largest scores; of equal ones the first."""
    k = torch.arange(len(xi), device=xi.device)
    before = (xi[None, :] > xi[:, None]) | ((xi[None, :] == xi[:, None]) & (k[None, :] < k[:, None]))
    return before.sum(1) < count


def only(chosen: Tensor, xi: Tensor) -> Tensor:
    """The scores of the chosen layers, blown up to the sum that all had; all 0 if the chosen ones have none."""
    kept = torch.where(chosen, xi, 0.0)
    total = kept.sum()
    return kept * (xi.sum() / torch.where(total > 0, total, 1.0))


def lwsam(
    g: Mapping[str, Tensor],
    xi: Tensor,
    layers: Sequence[Part],
    rho: float,
    p: float = 2.0,
    scope: NormScope = "global",
) -> Model:
    """epsilon = rho Lambda sign(g) |g|^(q-1) / (sum |g|^q)^(1/p), q = p / (p - 1): eq. (5).

    It is the point of the ball ||Lambda^-1 e||_p <= rho with the largest e . (Lambda^-1 g). That is the steepest one,
    with the largest e . g, only where the scores are equal; otherwise the steepest has Lambda g in the place of g.
    One norm over all layers (``global``), or each layer divided by its own (``layer``). The paper prints p - 1 for the
    exponent 1/p of the denominator; for p = 2 that would be a step of length rho / ||g||.
    """
    q = p / (p - 1)
    all_names = [k for layer in layers for k in layer.params]
    out: Model = {}
    for l, layer in enumerate(layers):
        if scope == "layer" or l == 0:
            among = list(layer.params) if scope == "layer" else all_names
            found = norm(pick(g, among)) >= NO_GRADIENT
            # Powers of |g| / max |g|: those of |g| itself underflow for p near 1, and the result does not depend on it.
            top = torch.where(found, torch.stack([g[k].abs().max() for k in among]).max(), 1.0)
            size = torch.stack([((g[k] / top).abs() ** q).sum() for k in among]).sum() ** (1 / p)
            factor = torch.where(found, rho / torch.where(found, size, 1.0), 0.0)
        for k in layer.params:
            out[k] = factor * xi[l] * g[k].sign() * (g[k] / top).abs() ** (q - 1)
    return out


def _size(a: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(a[k].numel() for k in names)


def _total(layers: Sequence[Part], scale: ScoreScale) -> float:
    return float(len(layers)) if scale == "mean1" else 1.0
