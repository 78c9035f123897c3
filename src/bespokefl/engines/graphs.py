"""A client's step as a flat graph of tensor operations: traced once per shape, then run without Python's overhead.

``torch.func`` transforms, module calls and tree handling all happen while tracing; what is left is a straight list of
operations (forward, backward and optimiser), which is cleaned up, updates the carry in place, and is safe to run from
several threads, since no module and no autograd engine takes part any more.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from bespokefl.trees import Tree

aten = torch.ops.aten

# View operations that change nothing when the shape stays the same.
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
# Operations that read only the shape of their operand, by what they fill the result with.
_FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.new_ones.default: 1}
_LARGEST_CONSTANT = 2**16  # elements
# Element-wise operations whose first operand may be overwritten.
_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.lerp.Scalar: aten.lerp_.Scalar,
}
# Operations that may return their input's memory although their schemas do not say so.
_VIEWS_BY_STEALTH = {
    aten._unsafe_view.default,
    aten.contiguous.default,
    aten.reshape.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


class Graph:
    """``fn(*args)`` for one set of shapes. With ``carry`` the leaves of the first argument are overwritten."""

    def __init__(self, fn: Callable[..., Tree], args: Sequence[Tree], *, carry: bool, compiled: bool = False) -> None:
        flat, spec = pytree.tree_flatten(tuple(args))
        donated = len(pytree.tree_leaves(args[0])) if carry else 0
        out_spec: list[Any] = []

        def flat_fn(tensors: list[Tensor]) -> list[Tensor]:
            result = fn(*pytree.tree_unflatten(tensors, spec))
            # A new carry has its leaves in the old one's order, whatever the order in which a step wrote its dicts.
            structure = pytree.tree_structure(args[0] if carry else result)
            out = structure.flatten_up_to(result)
            out_spec.append(structure)
            return [in_layout_of(tensors[i], v) if i < donated else v for i, v in enumerate(out)]

        # Clones, because two leaves that are one tensor would become one input of the graph.
        examples = [v.clone() for v in flat]
        with _default_device(examples[0].device):
            module = make_fx(flat_fn)(examples)
        _drop_idle_views(module.graph)
        _fold_constants(module)
        module.graph.eliminate_dead_code()
        _separate_outputs(module.graph, donated)
        self.peak_bytes = _peak_bytes(module.graph)
        if not compiled:  # the compiler plans memory itself
            _update_in_place(module.graph, donated)
        module.graph.set_codegen(fx.graph.CodeGen())  # positional tensors in, a list out: no tree handling per call
        module.graph.lint()
        module.recompile()
        self._out_spec = out_spec[0]
        self._run: Callable[..., list[Tensor]] = module.forward
        if compiled:
            self._run = torch.compile(module, dynamic=False, fullgraph=True)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """From flat leaves to flat leaves."""
        return self._run(*tensors)

    def tree(self, tensors: list[Tensor]) -> Tree:
        """The result's leaves in the structure that ``fn`` returned."""
        return pytree.tree_unflatten(tensors, self._out_spec)


def _default_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Programs name no device: what they create lands on this one."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.device(device)


def in_layout_of(reference: Tensor, value: Tensor) -> Tensor:
    """``value`` in the memory layout of ``reference``, so that the next step meets the same one."""
    if value.shape == reference.shape and _is_channels_last(reference):
        return value.contiguous(memory_format=torch.channels_last)
    return value.contiguous()


def _is_channels_last(v: Tensor) -> bool:
    return v.ndim == 4 and not v.is_contiguous() and v.is_contiguous(memory_format=torch.channels_last)


def _meta(node: fx.Node) -> Any:
    """Shape, type, strides and device of a node's result, as they were when traced; a tuple for several results."""
    return node.meta.get("val")


def _drop_idle_views(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target in _RESHAPES:
            before, after = _meta(source), _meta(node)
            if before is not None and (before.shape, before.stride()) == (after.shape, after.stride()):
                node.replace_all_uses_with(source)
        elif node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(source)
        elif node.target == aten.transpose.int and source.target == aten.transpose.int:
            dims = _meta(node).shape
            pairs = [{d % len(dims) for d in n.args[1:] if isinstance(d, int)} for n in (node, source)]
            if pairs[0] == pairs[1]:
                node.replace_all_uses_with(source.args[0])


def _fold_constants(module: fx.GraphModule) -> None:
    """Computes beforehand what depends on shapes alone, such as the seed 1/n of a mean's gradient."""
    values: dict[fx.Node, Tensor] = {}
    for node in list(module.graph.nodes):
        meta = _meta(node)
        if node.op != "call_function" or not isinstance(meta, Tensor) or meta.numel() > _LARGEST_CONSTANT:
            continue
        if node.target in _FILLS:
            values[node] = torch.full(meta.shape, _FILLS[node.target], dtype=meta.dtype, device=meta.device)
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


def _separate_outputs(graph: fx.Graph, donated: int) -> None:
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


def _update_in_place(graph: fx.Graph, donated: int) -> None:
    order = {n: k for k, n in enumerate(graph.nodes)}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = _results(graph.output_node())
    overwritten: set[fx.Node] = set()
    for i, node in enumerate(results[:donated]):
        if node.target not in _IN_PLACE or not isinstance(node.args[0], fx.Node) or node.kwargs.get("out") is not None:
            continue
        target, mine = node.args[0], inputs[i]
        same = _meta(target) is not None and (_meta(target).shape, _meta(target).dtype) == (
            _meta(node).shape,
            _meta(node).dtype,
        )
        is_free = target is mine or (target.op == "call_function" and _is_fresh(target))
        if not same or not is_free or target in overwritten or target in results:
            continue
        readers = _users_of_memory(target)
        same_memory = {target, *(n for n in readers if not _is_fresh(n))}
        if any(order[n] > order[node] for n in readers) or any(v in same_memory for v in node.args[1:]):
            continue
        node.target = _IN_PLACE[node.target]
        overwritten.add(target)


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


def _peak_bytes(graph: fx.Graph) -> int:
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


class GraphCache:
    """The graphs traced so far, by function and shapes; the least recently used leave first."""

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        name: Hashable,
        fn: Callable[..., Tree],
        args: Sequence[Tree],
        *,
        carry: bool = False,
        compiled: bool = False,
    ) -> Graph:
        """The graph of ``fn`` for the shapes of ``args``; ``name`` tells functions apart."""
        flat, spec = pytree.tree_flatten(tuple(args))
        key = (name, spec, tuple((v.shape, v.dtype, v.stride()) for v in flat))
        with self._lock:  # tracing goes through the one shared module
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = Graph(fn, args, carry=carry, compiled=compiled)
                if len(self._graphs) > self.limit:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            return graph
