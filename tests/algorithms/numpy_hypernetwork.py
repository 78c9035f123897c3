"""A hypernetwork in numpy for one embedding: linear layers with ReLU between them, then a linear head per tensor."""

from collections.abc import Mapping

import numpy as np
from tests.algorithms.small import Array, Weights
from torch import Tensor


def values(phi: Mapping[str, Tensor]) -> Weights:
    return {k: v.numpy().copy() for k, v in phi.items()}


def write(phi: Weights, v: Array, shapes: Weights) -> Weights:
    """H(v; phi), tensors shaped as those in ``shapes``."""
    z = _layers(phi, v)[-1]
    heads = enumerate(shapes.items())
    return {k: (phi[f"heads.{i}.weight"] @ z + phi[f"heads.{i}.bias"]).reshape(s.shape) for i, (k, s) in heads}


def pull(phi: Weights, v: Array, d: Weights) -> tuple[Weights, Array]:
    """J^T d with respect to phi and to v."""
    inputs = _layers(phi, v)
    g: Weights = {}
    d_z = np.zeros_like(inputs[-1])
    for i, value in enumerate(d.values()):
        g[f"heads.{i}.weight"], g[f"heads.{i}.bias"] = np.outer(value.ravel(), inputs[-1]), value.ravel()
        d_z = d_z + phi[f"heads.{i}.weight"].T @ value.ravel()
    for l in reversed(range(len(inputs) - 1)):
        g[f"trunk.{2 * l}.weight"], g[f"trunk.{2 * l}.bias"] = np.outer(d_z, inputs[l]), d_z
        d_z = phi[f"trunk.{2 * l}.weight"].T @ d_z * ((inputs[l] > 0) if l else 1)
    return g, d_z


def _layers(phi: Weights, v: Array) -> list[Array]:
    """The input of each linear layer of the trunk, and the input of the heads."""
    count = sum(k.startswith("trunk.") for k in phi) // 2
    inputs = [v]
    for l in range(count):
        z = phi[f"trunk.{2 * l}.weight"] @ inputs[-1] + phi[f"trunk.{2 * l}.bias"]
        inputs.append(np.maximum(z, 0) if l < count - 1 else z)
    return inputs
