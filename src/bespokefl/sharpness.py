"""Layer-wise sharpness: which layers of a model have drifted, and the step that raises the loss most, layer by layer.

LWSAM perturbs every layer l by the step of sharpness-aware minimisation times a score xi_l (Qu et al., How to Prevent
the Poor Performance Clients for Personalized Federated Learning?, CVPR 2023, eq. 5). Everything here is written for one
client: no branch on a tensor, any layer may have a score of 0.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bespokefl.task import Layer, Task
from bespokefl.trees import Model, norm, pick, sub

Grouping = Literal["module", "conv_norm"]
ScoreScale = Literal["sum1", "mean1"]
NormScope = Literal["global", "layer"]

NO_GRADIENT = 1e-12  # a gradient shorter than this has no direction: the perturbation is 0


class Part(NamedTuple):
    """A layer as the scores see it."""

    params: tuple[str, ...]  # trained tensors
    buffers: tuple[str, ...]  # what else the layer holds: running statistics, frozen parameters


def layers_of(task: Task, grouping: Grouping = "module", names: Iterable[str] | None = None) -> tuple[Part, ...]:
    """The layers with trained parameters (among ``names``, all by default), in the model's order.

    A layer is a module that owns parameters; ``conv_norm`` counts a convolution or a linear layer and its
    normalisation as one (a ResNet-18 has 41 layers, or 21). Which norm is whose:

    * by name, that of the same block with the same number, such as ``conv1`` and ``bn1``, if it has as many channels as
      the layer takes in or gives out. So in a pre-activation block (norm1, conv1, norm2, conv2) a norm goes with the
      convolution that it prepares;
    * otherwise, the norm listed right behind a layer that gives out as many channels;
    * a norm that is neither, or comes second, stays a layer of its own: the last one of a pre-activation net, and the
      first one where such a net has no such names (the others then go with the convolution before them).
    """
    wanted = set(task.names if names is None else names)
    layers = [layer for layer in task.layers if wanted & set(layer.params)]
    there = {layer.name for layer in layers}
    owner = _owners_of_norms(task.layers) if grouping == "conv_norm" else {}
    owner = {norm_: its for norm_, its in owner.items() if its in there}
    members = {layer.name: [layer] for layer in layers if layer.name not in owner}
    for layer in layers:
        if layer.name in owner:
            members[owner[layer.name]].append(layer)
    return tuple(_part(group, wanted, task.buffer_names) for group in members.values())


def _part(group: Sequence[Layer], wanted: Collection[str], buffers: Sequence[str]) -> Part:
    params = tuple(k for layer in group for k in layer.params if k in wanted)
    return Part(params, tuple(k for layer in group for k in buffers if k.rpartition(".")[0] == layer.name))


def _owners_of_norms(layers: Sequence[Layer]) -> dict[str, str]:
    """The names of norms that belong to another layer, and that layer's."""
    norms = [(layer, before) for before, layer in pairwise([layers[0], *layers]) if layer.kind == "norm"]
    by_number: dict[tuple[str, str], list[Layer]] = {}
    for layer in layers:
        if layer.kind != "norm" and layer.widths[1]:
            by_number.setdefault(_block_and_number(layer), []).append(layer)
    owner: dict[str, str] = {}
    for norm_, _ in norms:
        block, number = _block_and_number(norm_)
        alike = by_number.get((block, number), []) if number else []
        if len(alike) == 1 and norm_.widths[0] in alike[0].widths and alike[0].name not in owner.values():
            owner[norm_.name] = alike[0].name
    for norm_, before in norms:
        if norm_.name in owner or before.kind == "norm" or before.name in owner.values():
            continue
        if norm_.widths[0] == before.widths[1]:
            owner[norm_.name] = before.name
    return owner


def _block_and_number(layer: Layer) -> tuple[str, str]:
    """Where a layer stands, and the number behind the letters of its own name; "" if it has no letters."""
    block, _, own = layer.name.rpartition(".")
    found = re.fullmatch(r".*\D(\d+)", own)
    return block, found[1] if found else ""


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
