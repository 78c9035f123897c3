"""What counts as a layer of a model: a module with parameters, or a convolution together with its normalisation."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from bespokefl.core.task import Layer, Task

Grouping = Literal["module", "conv_norm"]


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
