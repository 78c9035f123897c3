"""A client's step as a flat graph of tensor operations: traced once per shape, then run without Python's overhead.

``torch.func`` transforms, module calls and tree handling all happen while tracing; what is left is a straight list of
operations (forward, backward and optimiser), which is cleaned up, updates the carry in place, and is safe to run from
several threads, since no module and no autograd engine takes part any more.
"""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from bespokefl.core.trees import Tree
from bespokefl.engines import graph_passes as passes


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
        with default_device(examples[0].device), _one_fake_mode():
            module = make_fx(flat_fn)(examples)
        passes.refuse_randomness(module.graph)
        passes.drop_idle_views(module.graph)
        module.graph.eliminate_dead_code()
        passes.share_repeated(module.graph)
        passes.fold_constants(module)
        module.graph.eliminate_dead_code()
        passes.separate_outputs(module.graph, donated)
        self.peak_bytes = passes.peak_bytes(module.graph)
        if not compiled:  # the compiler plans memory itself
            passes.update_in_place(module.graph, donated)
        module.graph.set_codegen(fx.graph.CodeGen())  # positional tensors in, a list out: no tree handling per call
        module.graph.lint()
        module.recompile()
        self.calls = 0
        self.operations = [n.target.__name__.split(".")[0] for n in module.graph.nodes if n.op == "call_function"]
        self._out_spec = out_spec[0]
        self._run: Callable[..., list[Tensor]] = module.forward
        if compiled:
            self._run = torch.compile(module, dynamic=False, fullgraph=True)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """From flat leaves to flat leaves."""
        self.calls += 1
        return self._run(*tensors)

    def tree(self, tensors: list[Tensor]) -> Tree:
        """The result's leaves in the structure that ``fn`` returned."""
        return pytree.tree_unflatten(tensors, self._out_spec)


def default_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Programs name no device: what they create lands on this one."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.device(device)


def _one_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Where make_fx notes shapes: without it, it makes a mode for every operation, three quarters of a trace's time."""
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))


def in_layout_of(reference: Tensor, value: Tensor) -> Tensor:
    """``value`` in the memory layout of ``reference``, so that the next step meets the same one."""
    if value.shape == reference.shape and _is_channels_last(reference):
        return value.contiguous(memory_format=torch.channels_last)
    return value.contiguous()


def _is_channels_last(v: Tensor) -> bool:
    return v.ndim == 4 and not v.is_contiguous() and v.is_contiguous(memory_format=torch.channels_last)


class GraphCache:
    """The graphs traced so far, by function and shapes; the least recently used leave first."""

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._met: Counter[Any] = Counter()
        self.module_lock = threading.RLock()  # held by whoever runs the one shared module: to trace, or step by step

    def is_new(self, name: Hashable, args: Sequence[Tree], calls: int) -> bool:
        """Whether ``name`` was called with these shapes less often than ``calls`` times; this call counts."""
        key = _key(name, args)
        with self.module_lock:
            self._met[key] += 1
            return self._met[key] <= calls

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
        key = _key(name, args)
        with self.module_lock:
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = Graph(fn, args, carry=carry, compiled=compiled)
                if len(self._graphs) > self.limit:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            return graph


def _key(name: Hashable, args: Sequence[Tree]) -> Hashable:
    """A function with the shapes, types and layouts of its arguments."""
    flat, spec = pytree.tree_flatten(tuple(args))
    return name, spec, tuple((v.shape, v.dtype, v.stride()) for v in flat)
