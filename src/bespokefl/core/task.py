"""A module and a loss as pure functions of one tree: what a client's program may ask of its model.

The tree ``x`` holds parameters and float buffers by their state-dict names. Nothing here writes to the module: new
buffers come back beside the gradient and are merged (``x | p.buffers``) or dropped by the program.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from bespokefl.core.layouts import AnyLayout, in_any_layout
from bespokefl.core.losses import CLASSIFYING, LOSSES, PerSample
from bespokefl.core.trees import Model, pick
from bespokefl.errors import InputError
from bespokefl.nn.stand_ins import KeyedDropout, MaskedBatchNorm, differentiated, with_stand_ins

NORMS = (MaskedBatchNorm, nn.GroupNorm, nn.LayerNorm, _InstanceNorm)
Objective = Callable[[Model, Tensor, Tensor], Tensor]  # (x, outputs, h) -> what is minimised on a batch


class Batch(NamedTuple):
    """The samples of one step: inputs and targets, which of them are padding, and a key for random draws."""

    x: Tensor
    y: Tensor
    weights: Tensor | None  # 1 for a sample, 0 for padding (always behind the samples); None: no padding
    key: Tensor  # int64 scalar: the randomness of this client and step

    @property
    def n(self) -> Tensor:
        """The number of samples."""
        if self.weights is None:
            return torch.full((), self.x.shape[0], dtype=_float_dtype(self.x), device=self.x.device)
        return self.weights.sum()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over samples of per-sample values."""
        if self.weights is None:
            return values.sum(0)
        return torch.einsum("b,b...->...", self.weights.to(values.dtype), values)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over samples of per-sample values; padding does not count."""
        return values.mean(0) if self.weights is None else self.sum(values) / self.n.clamp(min=1)

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum over samples of a b^T, of two vectors per sample."""
        return (a if self.weights is None else a * self.weights[:, None]).T @ b

    def one_hot(self, classes: int) -> Tensor:
        """A row per sample with 1 at its label."""
        return (self.y[:, None] == torch.arange(classes, device=self.y.device)).to(_float_dtype(self.x))


class Pass(NamedTuple):
    """What a forward and backward pass over a batch gives: see `Task.grad`."""

    loss: Tensor
    grad: Model
    buffers: Model  # new values, to be merged: x | p.buffers
    h: Tensor  # the head's input
    out: Tensor  # the model's outputs


class HeadSizes(NamedTuple):
    """How many features go into a model's head, and how many outputs come out."""

    features: int  # into the head
    outputs: int  # of it

    @property
    def classes(self) -> int:
        """Those that the outputs tell apart: a single one tells class 1 from class 0."""
        return max(2, self.outputs)


class Answer(NamedTuple):
    """What a model answers to a sample."""

    shape: tuple[int, ...]
    from_head: bool  # its classes are as likely as the head's own outputs have them

    @property
    def outputs(self) -> int:
        """The number of values for one sample."""
        return math.prod(self.shape)


class Layer(NamedTuple):
    """A layer with parameters of its own."""

    name: str  # the module's dotted name
    params: tuple[str, ...]  # its own parameters
    kind: Literal["linear", "convolution", "norm", "other"]
    widths: tuple[int, int] = (0, 0)  # channels, or features, that go in and come out; 0: not known


class Task:
    """Pure functions of a model for one client; ``initial`` is the tree the module came with.

    Args:
        module: any ``nn.Module``; it is copied, never changed.
        loss: a name of ``LOSSES`` or a function of (outputs, targets) that returns one value per sample.
        head: dotted name of the last layer; default: the module's ``head`` or else its last layer with parameters.
        classifies: whether the largest output is a predicted label, so that there is an accuracy; default: with the
            cross-entropy and the Dice loss.
        dtype: of parameters and computation.
        bf16: run forward and backward in bfloat16 autocast (parameters stay in their own type).

    >>> net = torch.nn.Linear(5, 2)
    >>> task = bfl.Task(net, "cross_entropy", dtype=torch.float64)
    >>> task.names, task.size  # what is trained, and how many numbers that is
    (['weight', 'bias'], 12)
    """

    def __init__(
        self,
        module: nn.Module,
        loss: str | PerSample = "cross_entropy",
        *,
        head: str | None = None,
        classifies: bool | None = None,
        dtype: torch.dtype = torch.float32,
        bf16: bool = False,
    ) -> None:
        if isinstance(loss, str) and loss not in LOSSES:
            raise InputError(f"loss = {loss!r} is not known; it is one of {', '.join(LOSSES)} or a function")
        self.per_sample: PerSample = LOSSES[loss] if isinstance(loss, str) else in_any_layout(loss)
        self.classifies = loss in CLASSIFYING if classifies is None else classifies
        self.dtype, self.bf16 = dtype, bf16
        net = with_stand_ins(copy.deepcopy(module)).to(dtype)
        self.initial: Model = {k: v.detach().clone() for k, v in _float_tensors(net).items()}
        self.names = [k for k, p in net.named_parameters() if p.requires_grad]
        self.buffer_names = [k for k in self.initial if k not in set(self.names)]
        if not self.names:
            raise InputError(f"the model {type(module).__name__} has no parameters to train")
        with_params = [(k, m) for k, m in net.named_modules() if next(m.parameters(recurse=False), None) is not None]
        self.layers = [
            Layer(k, tuple(_join(k, n) for n, _ in m.named_parameters(recurse=False)), *_kind_and_widths(m))
            for k, m in with_params
        ]
        self.head_name = head if head is not None else _head_of(net, self.layers)
        self.head = [k for k in self.names if k.startswith(_join(self.head_name, ""))]
        if not self.head:
            raise InputError(
                f"model.head = {self.head_name!r} names no layer with parameters; layers: "
                + ", ".join(layer.name for layer in self.layers)
            )
        self.size = sum(self.initial[k].numel() for k in self.names)
        self.has_embeddings = any(_is_embedding(m) for m in net.modules())
        self._embeddings: list[tuple[int, bool]] | None = None
        self.has_convolutions = any(isinstance(m, _ConvNd) for m in net.modules())
        self.body = [k for k in self.names if k not in set(self.head)]
        self.norm_names = [
            _join(k, n) for k, m in net.named_modules() if isinstance(m, NORMS) for n in _float_tensors(m)
        ]
        self._nets = {train: _Net(net, train=train) for train in (True, False)}
        self._device: torch.device | None = None  # where `to` brought it

    def params(self, x: Model) -> Model:
        """The trainable part of a model."""
        return pick(x, self.names)

    def to(self, device: torch.device | str) -> "Task":
        """Moves what the module holds beside its tree (constants, integer buffers).

        A task that is there already is not touched: runs that share it may come here at the same time.
        """
        device = torch.device(device)
        if device != self._device:
            self.initial = {k: v.to(device) for k, v in self.initial.items()}
            for net in self._nets.values():
                net.module.to(device)
            self._device = device
        return self

    def names_from(self, layer: str) -> list[str]:
        """Parameters and buffers of the named module and of all that the model lists behind it.

        Nothing is behind the head, wherever it is listed.
        """
        modules = list(self._nets[False].module.named_modules())
        start = [k for k, _ in modules].index(layer)
        end = start + 1 if layer == self.head_name else None
        behind = {_join(k, n) for k, m in modules[start:end] for n in _float_tensors(m)}
        return [k for k in self.initial if k in behind]

    def head_sizes(self, method: str) -> HeadSizes:
        """Features into the head and its outputs, for a method that has to know; InputError if nobody can."""
        layers = [layer for layer in self.layers if layer.kind == "linear" and layer.params[0] in self.head]
        linear = [self.initial[layer.params[0]].shape for layer in layers]
        if not self.classifies or not linear:
            why = "has no linear layer" if self.classifies else "does not predict classes"
            raise InputError(
                f"algorithm.name = {method!r} needs a classifier, and the model's head {self.head_name!r} {why}; take "
                "the cross-entropy loss and a head of linear layers (model.head names it)"
            )
        return HeadSizes(linear[0][1], linear[-1][0])

    def apply(
        self, x: Model, batch: Batch, *, train: bool = False, at: str | None = None
    ) -> tuple[Tensor, Tensor, Model]:
        """Outputs, the head's input, and the buffers after the pass.

        ``at`` names another module whose input is wanted. Tensors in ``x`` that are not the model's are left alone.
        """
        at = self.head_name if at is None else at
        out, h, buffers = self._nets[train](x, batch, self.buffer_names, self.bf16, at)
        return (out.to(self.dtype), h.to(self.dtype), buffers) if self.bf16 else (out, h, buffers)

    def embeddings(self, batch: Batch) -> list[tuple[int, bool]]:
        """Of the embeddings that are given whole numbers: their rows, and whether these are all of the batch's inputs.

        Looked at once: a task that several runs share is hooked by nobody but the first.
        """
        if self._embeddings is None:
            found: list[tuple[int, bool]] = []

            def met(module: Any, args: tuple[Any, ...]) -> None:
                ids = args[0] if args else None
                if isinstance(ids, Tensor) and not ids.is_floating_point():
                    found.append((module.num_embeddings, torch.equal(ids.flatten(), batch.x.flatten())))

            hooks = [m.register_forward_pre_hook(met) for m in self._nets[False].module.modules() if _is_embedding(m)]
            with contextlib.suppress(Exception), torch.no_grad():  # ids that are out of range, perhaps
                self.apply(self.initial, batch)
            for hook in hooks:
                hook.remove()
            self._embeddings = found
        return self._embeddings

    def head_outputs(self, x: Model, h: Tensor) -> Tensor:
        """What the head alone answers to given inputs, in evaluation mode."""
        return self._nets[False].part(self.head_name, x, h, self.bf16).to(self.dtype)

    def losses(self, x: Model, batch: Batch) -> Tensor:
        """Per-sample losses in evaluation mode."""
        return self.per_sample(self.apply(x, batch)[0], batch.y)

    def loss(self, x: Model, batch: Batch) -> Tensor:
        """Mean loss in evaluation mode."""
        return batch.mean(self.losses(x, batch))

    def features(self, x: Model, batch: Batch, *, train: bool = False) -> Tensor:
        """The head's input."""
        return self.apply(x, batch, train=train)[1]

    def grad(
        self,
        x: Model,
        batch: Batch,
        wrt: Sequence[str] | None = None,
        *,
        train: bool = True,
        objective: Objective | None = None,
        at: str | None = None,
    ) -> Pass:
        """Mean loss over the batch and its gradient with respect to the named tensors (all parameters by default).

        ``objective`` is minimised in the place of the mean loss; it may use, and ``wrt`` may name, tensors in ``x``
        that are not the model's. ``at`` is that of ``apply``.
        """

        def value(p: Model) -> tuple[Tensor, tuple[Model, Tensor, Tensor]]:
            moved = {**x, **p}
            with differentiated():
                out, h, buffers = self.apply(moved, batch, train=train, at=at)
            loss = batch.mean(self.per_sample(out, batch.y)) if objective is None else objective(moved, out, h)
            return loss, (buffers, h, out)

        g, (loss, (buffers, h, out)) = grad_and_value(value, has_aux=True)(pick(x, wrt or self.names))
        return Pass(loss, g, buffers, h, out)

    def stuck_in(self, fn: Callable[[], Any]) -> str:
        """Runs ``fn``, which is known to raise, and names the module in whose forward it did."""
        inside: list[nn.Module] = []

        def enter(module: nn.Module, args: Any) -> None:
            inside.append(module)

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            inside.pop()

        hooks = torch.nn.modules.module
        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        with contextlib.suppress(Exception):
            fn()
        for handle in handles:
            handle.remove()
        if not inside:
            return "a function outside the model"
        names = {id(m): k for net in self._nets.values() for k, m in net.module.named_modules()}
        return f"{type(inside[-1]).__name__} '{names.get(id(inside[-1]), '')}'"


class _Net:
    """One copy of the module, fixed in train or evaluation mode (a shared one cannot be toggled safely)."""

    def __init__(self, module: nn.Module, *, train: bool) -> None:
        self.module = copy.deepcopy(module).train(train)
        self._named = dict(self.module.named_modules())
        self._tensors = set(_float_tensors(self.module))
        self._norms = [m for m in self.module.modules() if isinstance(m, MaskedBatchNorm)]
        self._dropouts = [m for m in self.module.modules() if isinstance(m, KeyedDropout)]
        replaced = {id(v) for m in self._norms for v in m.buffers()}
        self._written_in_place = {k for k, v in self.module.named_buffers() if id(v) not in replaced}

    def __call__(
        self, x: Model, batch: Batch, buffer_names: Sequence[str], bf16: bool, at: str
    ) -> tuple[Tensor, Tensor, Model]:
        values = self._values(x)
        with self._during(batch), self._input_of(at) as inputs, _autocast(batch.x, bf16), AnyLayout():
            out = functional_call(self.module, values, (batch.x,))
        return out, inputs[-1] if inputs else out, {k: values[k] for k in buffer_names}

    def part(self, name: str, x: Model, h: Tensor, bf16: bool) -> Tensor:
        """What one module of the model answers to ``h``."""
        prefix = _join(name, "")
        values = {k.removeprefix(prefix): v for k, v in self._values(x).items() if k.startswith(prefix)}
        with _autocast(h, bf16), AnyLayout():
            out: Tensor = functional_call(self._named.get(name, self.module), values, (h,))
        return out

    def _values(self, x: Model) -> Model:
        """The module's own tensors; a user's module may write to its buffers, and x must stay as it is."""
        return {k: v.clone() if k in self._written_in_place else v for k, v in x.items() if k in self._tensors}

    @contextlib.contextmanager
    def _input_of(self, name: str) -> Iterator[list[Tensor]]:
        """What the named module is called with, in a list."""
        inputs: list[Tensor] = []
        hook = self._named.get(name, self.module).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            yield inputs
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _during(self, batch: Batch) -> Iterator[None]:
        for norm in self._norms:
            norm.sample_weights = batch.weights
        for dropout in self._dropouts:
            dropout.key = batch.key
        try:
            yield
        finally:
            for norm in self._norms:
                norm.sample_weights = None
            for dropout in self._dropouts:
                dropout.key = None


def _autocast(like: Tensor, enabled: bool) -> torch.autocast:
    return torch.autocast(like.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _kind_and_widths(
    module: nn.Module,
) -> tuple[Literal["linear", "convolution", "norm", "other"], tuple[int, int]]:
    if isinstance(module, nn.Linear):
        return "linear", (module.in_features, module.out_features)
    if isinstance(module, _ConvNd):
        return "convolution", (module.in_channels, module.out_channels)
    if isinstance(module, NORMS):
        size = next(module.parameters(recurse=False)).shape[0]
        return "norm", (size, size)
    filters = [p for p in module.parameters(recurse=False) if p.ndim > 2]  # a convolution of the user's own
    return "other", (filters[0].shape[1], filters[0].shape[0]) if filters else (0, 0)


def _float_tensors(module: nn.Module) -> Model:
    kept = module.state_dict()  # leaves out buffers that are not persistent; the lists below name tied weights once
    named = [*module.named_parameters(), *module.named_buffers()]
    return {k: v for k, v in named if k in kept and v.is_floating_point()}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _head_of(module: nn.Module, layers: Sequence[Layer]) -> str:
    return "head" if isinstance(getattr(module, "head", None), nn.Module) else layers[-1].name


def _float_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
