"""A network that writes networks: from an embedding of a client to all weights of its model.

The architecture of pFedHN (Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021): linear
layers with ReLU between them, then one linear head per tensor of the target. The module only holds shapes (it lives on
the meta device); its parameters are a dict of tensors that the caller keeps.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bespokefl.core.rng import stream
from bespokefl.core.trees import Model


class HyperNetwork(nn.Module):
    """``1 + n_hidden`` linear layers of one width, and a head per target tensor (of rank ``head_rank`` if given)."""

    def __init__(
        self, target: Mapping[str, Tensor], embed: int, width: int, n_hidden: int, head_rank: int | None = None
    ) -> None:
        super().__init__()
        self.shapes = {k: v.shape for k, v in target.items()}
        with torch.device("meta"):
            self.trunk = nn.Sequential(_Linear(embed, width))
            for _ in range(n_hidden):
                self.trunk.extend([nn.ReLU(), _Linear(width, width)])
            self.heads = nn.ModuleList(_head(width, v.numel(), head_rank) for v in target.values())

    def forward(self, v: Tensor) -> Model:
        """Models, one per row of embeddings."""
        z = self.trunk(v)
        heads = zip(self.shapes.items(), self.heads, strict=True)
        return {k: head(z).reshape(len(v), *shape) for (k, shape), head in heads}


def initial_parameters(net: nn.Module, seed: int, like: Tensor) -> Model:
    """torch's default for linear layers, uniform within 1 / sqrt(inputs), each layer from a stream of its own."""
    phi = {}
    for index, (name, layer) in enumerate(net.named_modules()):
        if isinstance(layer, nn.Linear):
            draws = stream(seed, "init", index)
            for k, v in layer.named_parameters():
                bound = 1 / math.sqrt(layer.in_features)
                phi[f"{name}.{k}"] = torch.as_tensor(draws.uniform(-bound, bound, tuple(v.shape))).to(like)
    return phi


def generate(net: nn.Module, phi: Model, v: Tensor) -> Model:
    """H(v; phi), stacked over the rows of v."""
    models: Model = functional_call(net, phi, (v,))
    return models


def pull_phi(net: nn.Module, phi: Model, v: Tensor, d: Model) -> Model:
    """sum_i J_phi H(v_i; phi)^T d_i."""
    pulled: Model = vjp(lambda f: generate(net, f, v), phi)[1](d)[0]
    return pulled


def pull_v(net: nn.Module, phi: Model, v: Tensor, d: Model) -> Tensor:
    """Row i: J_v H(v_i; phi)^T d_i."""
    pulled: Tensor = vjp(lambda e: generate(net, phi, e), v)[1](d)[0]
    return pulled


def _head(width: int, size: int, rank: int | None) -> nn.Module:
    if rank is None or rank >= min(width, size):
        return _Linear(width, size)
    return nn.Sequential(_Linear(width, rank, bias=False), _Linear(rank, size))


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Draws nothing: the values are the caller's, and a client's program may make the module while traced."""
