"""Rewriting traced graphs: fewer operations, less memory, the same numbers."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from bespokefl.errors import InputError

aten = torch.ops.aten

# View operations that change nothing when the shape stays the same.
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
# Operations that read only the shape of their operand, by what they fill the result with.
_FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.new_ones.default: 1}
# Operations that count, by their arguments alone: positions, of which a dropout's mask is a hash.
_COUNTS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_LARGEST_CONSTANT = 2**16  # elements
# Element-wise operations whose first operand may be overwritten.
_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.lerp.Scalar: aten.lerp_.Scalar,
    aten.addcmul.default: aten.addcmul_.default,
}
# Operations that may return their input's memory although their schemas do not say so.
_VIEWS_BY_STEALTH = {
    aten._unsafe_view.default,
    aten.contiguous.default,
    aten.reshape.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
# Matrix products, by the operation that adds one into an existing matrix.
_ACCUMULATING = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def _meta(node: fx.Node) -> Any:
    """Shape, type, strides and device of a node's result, as they were when traced; a tuple for several results."""
    return node.meta.get("val")


def refuse_randomness(graph: fx.Graph) -> None:
    """A draw from torch's own generator would depend on the order in which clients happen to run."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise InputError(
                f"a client's program or model draws from torch's random generator ({node.target}); its numbers would "
                "depend on the order of clients. Derive them from batch.key, as nn.Dropout does here"
            )


def drop_idle_views(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target in _RESHAPES:
            before, after = _layout(source), _layout(node)
            if before is not None and before == after:
                node.replace_all_uses_with(source)
        elif node.target in (aten.detach.default, aten.alias.default) or _keeps_order(node):
            node.replace_all_uses_with(source)
        elif _swapped_dims(node) and _swapped_dims(node) == _swapped_dims(source):  # back and forth
            node.replace_all_uses_with(source.args[0])


def _layout(node: fx.Node) -> tuple[Any, Any] | None:
    """Shape and strides of a node's result; None if it has none: of a view that failed nothing is left but the node."""
    value = _meta(node)
    return None if value is None else (value.shape, value.stride())


def _keeps_order(node: fx.Node) -> bool:
    """Whether the node is a permutation of axes that leaves all where they are."""
    return node.target == aten.permute.default and node.args[1] == list(range(_meta(node).ndim))


def _swapped_dims(node: fx.Node) -> set[int]:
    """The two dimensions that a transposition swaps; empty for any other operation."""
    if node.target == aten.t.default and _meta(node).ndim == 2:
        return {0, 1}
    if node.target == aten.transpose.int:
        return {d % _meta(node).ndim for d in node.args[1:] if isinstance(d, int)}
    return set()


def share_repeated(graph: fx.Graph) -> None:
    """What is computed twice from the same values is computed once (a layer's patches, forward and backward)."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.is_mutable:
                return  # nobody knows what is the same behind it
        elif node.target is not operator.getitem:
            continue
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, spec, tuple(v if isinstance(v, fx.Node) else repr(v) for v in flat))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def fold_constants(module: fx.GraphModule) -> None:
    """Computes beforehand what depends on shapes alone, such as the seed 1/n of a mean's gradient, or positions."""
    values: dict[fx.Node, Tensor] = {}
    for node in list(module.graph.nodes):
        meta = _meta(node)
        if node.op != "call_function" or not isinstance(meta, Tensor) or meta.numel() > _LARGEST_CONSTANT:
            continue
        if node.target in _FILLS:
            values[node] = torch.full(meta.shape, _FILLS[node.target], dtype=meta.dtype, device=meta.device)
        elif node.target in _COUNTS and not node.all_input_nodes:
            values[node] = node.target(*node.args, **node.kwargs)
        elif node.all_input_nodes and all(source in values for source in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for k, (node, value) in enumerate(values.items()):
        if all(user in values for user in node.users):
            continue  # only a step towards another constant
        name = f"constant_{k}"
        module.register_buffer(name, value.clone())
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta["val"] = _meta(node)
        node.replace_all_uses_with(constant)


def separate_outputs(graph: fx.Graph, donated: int) -> None:
    """Every leaf of the new carry gets memory of its own: the next step overwrites it."""
    output = graph.output_node()
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    seen: set[fx.Node] = set()
    separated = []
    for i, node in enumerate(_results(output)):
        own_place = node.op == "placeholder" and i < donated and node is inputs[i]
        if i < donated and not own_place and (node in seen or node.op == "placeholder" or not _is_fresh(node)):
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta.update(node.meta)
            node = copy
        seen.add(node)
        separated.append(node)
    _set_results(output, separated)


def update_in_place(graph: fx.Graph, donated: int) -> None:
    """Lets the new carry overwrite the old one's memory, or that of a value nobody else needs."""
    order = {n: k for k, n in enumerate(graph.nodes)}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = _results(graph.output_node())
    overwritten: set[fx.Node] = set()

    def free(target: fx.Node, node: fx.Node, *others: Any) -> bool:
        """Whether ``node``, which also reads ``others``, may write its result into the memory of ``target``."""
        if target in overwritten or (target in results and results.index(target) != results.index(node)):
            return False
        before, after = _meta(target), _meta(node)
        if not isinstance(before, Tensor) or (before.shape, before.dtype) != (after.shape, after.dtype):
            return False
        readers = _users_of_memory(target)
        same_memory = {target, *(n for n in readers if not _is_fresh(n))}
        return all(order[n] <= order[node] for n in readers) and not any(v in same_memory for v in others)

    for node, mine in zip(results[:donated], inputs, strict=False):
        if node.op != "call_function":
            continue
        product = _accumulated_product(node, mine, set(inputs[:donated]))
        if product is not None and free(mine, node, *product[0].args):
            _accumulate(node, mine, *product)
            overwritten.add(mine)
        elif node.target in _IN_PLACE and isinstance(node.args[0], fx.Node):
            target = node.args[0]
            if (target is mine or _is_fresh(target)) and free(target, node, *node.args[1:]):
                node.target = _IN_PLACE[node.target]
                overwritten.add(target)


def _accumulated_product(node: fx.Node, mine: fx.Node, donated: set[fx.Node]) -> tuple[fx.Node, float, float] | None:
    """(product, beta, alpha) if the node is beta mine + alpha product, for a matrix product that nobody else needs.

    These are the steps of SGD on a linear layer: momentum, or the weights themselves without it. Not in float64, the
    type of exact work: the fused operation rounds once less, and methods that are equal at a limit (FedProx with mu = 0
    and FedAvg) would differ in the last bit.
    """
    if _meta(node).dtype == torch.float64:
        return None
    alpha = node.kwargs.get("alpha", 1)
    if len(node.args) != 2 or not isinstance(alpha, int | float):
        return None
    first, second = node.args
    if node.target == aten.add.Tensor and second is mine:
        found = (first, float(alpha), 1.0)
    elif node.target in (aten.add.Tensor, aten.sub.Tensor) and first is mine:
        found = (second, 1.0, float(alpha if node.target == aten.add.Tensor else -alpha))
    else:
        return None
    product = found[0]
    if not isinstance(product, fx.Node) or product.target not in _ACCUMULATING or len(product.users) != 1:
        return None
    # It will be computed later than it was, when a donated input may have been overwritten.
    late = any(_source(v) in donated for v in product.all_input_nodes)
    return None if late else (product, found[1], found[2])


def _accumulate(node: fx.Node, mine: fx.Node, product: fx.Node, beta: float, alpha: float) -> None:
    """The product adds into ``mine`` as it is computed: no memory for a gradient, no second pass over it."""
    node.target = _ACCUMULATING[product.target]  # type: ignore[index]
    node.args = (mine, *product.args)
    node.kwargs = {"beta": beta, "alpha": alpha}
    product.graph.erase_node(product)


def _source(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while node.op == "call_function" and not _is_fresh(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _users_of_memory(node: fx.Node) -> set[fx.Node]:
    """All that read the memory of a node, through views too."""
    users, todo = set(), [node]
    while todo:
        for user in todo.pop().users:
            users.add(user)
            if user.op == "call_function" and not _is_fresh(user):
                todo.append(user)
    return users


def _is_fresh(node: fx.Node) -> bool:
    """Whether the node's result has memory of its own (a view shares its source's)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _VIEWS_BY_STEALTH:
        return False
    return all(r.alias_info is None for r in node.target._schema.returns)


def peak_bytes(graph: fx.Graph) -> int:
    """The most memory that is alive at once when the graph runs in order, inputs and results included."""
    last_use: dict[fx.Node, list[fx.Node]] = {user: [] for user in graph.nodes}
    order = {n: k for k, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        users = _users_of_memory(node)
        if users:
            last_use[max(users, key=lambda u: order[u])].append(node)
    alive = peak = 0
    for node in graph.nodes:
        if node.op == "placeholder" or _is_fresh(node):
            alive += _bytes(node)
        peak = max(peak, alive)
        alive -= sum(_bytes(n) for n in last_use[node] if _is_fresh(n))
    return peak


def _bytes(node: fx.Node) -> int:
    values = pytree.tree_leaves(_meta(node))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def _results(output: fx.Node) -> list[fx.Node]:
    """The nodes of the result leaves."""
    value: Any = output.args[0]
    return list(value)


def _set_results(output: fx.Node, nodes: list[fx.Node]) -> None:
    output.args = (nodes,)
