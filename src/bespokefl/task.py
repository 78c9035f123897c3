"""A module and a loss as pure functions of one tree: what a client's program may ask of its model.

The tree ``x`` holds parameters and float buffers by their state-dict names. Nothing here writes to the module: new
buffers come back beside the gradient and are merged (``x | p.buffers``) or dropped by the program.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from bespokefl.errors import InputError
from bespokefl.modules import KeyedDropout, MaskedBatchNorm, with_stand_ins
from bespokefl.trees import Model, pick

PerSample = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value per sample


class Batch(NamedTuple):
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
        return values.mean(0) if self.weights is None else self.sum(values) / self.n.clamp(min=1)


class Pass(NamedTuple):
    loss: Tensor
    grad: Model
    buffers: Model  # new values, to be merged: x | p.buffers
    h: Tensor  # the head's input


class Layer(NamedTuple):
    name: str  # the module's dotted name
    params: tuple[str, ...]  # its own parameters


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """log sum exp(logits) - logits[y]: for few classes several times faster on a CPU than F.cross_entropy's kernel."""
    return torch.logsumexp(logits, -1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((outputs - y.view_as(outputs)) ** 2).reshape(len(outputs), -1).sum(1)


LOSSES: dict[str, PerSample] = {"cross_entropy": cross_entropy, "squared_error": squared_error}


def hit(logits: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is the label's (ties to the lowest index)."""
    return (logits.argmax(-1) == y).to(logits.dtype)


class Task:
    """Pure functions of a model for one client; ``initial`` is the tree the module came with.

    Args:
        module: any ``nn.Module``; it is copied, never changed.
        loss: a name of ``LOSSES`` or a function of (outputs, targets) that returns one value per sample.
        head: dotted name of the last layer; default: the module's ``head`` or else its last layer with parameters.
        classifies: whether the largest output is a predicted label, so that there is an accuracy; default: with the
            cross-entropy loss.
        dtype: of parameters and computation.
        bf16: run forward and backward in bfloat16 autocast (parameters stay in their own type).
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
        self.per_sample: PerSample = LOSSES[loss] if isinstance(loss, str) else loss
        self.classifies = loss == "cross_entropy" if classifies is None else classifies
        self.dtype, self.bf16 = dtype, bf16
        net = with_stand_ins(copy.deepcopy(module)).to(dtype)
        self.initial: Model = {k: v.detach().clone() for k, v in _float_tensors(net).items()}
        self.names = [k for k, p in net.named_parameters() if p.requires_grad]
        self.buffer_names = [k for k in self.initial if k not in set(self.names)]
        if not self.names:
            raise InputError(f"the model {type(module).__name__} has no parameters to train")
        with_params = [(k, m) for k, m in net.named_modules() if next(m.parameters(recurse=False), None) is not None]
        self.layers = [
            Layer(k, tuple(_join(k, n) for n, _ in m.named_parameters(recurse=False))) for k, m in with_params
        ]
        self.head_name = head if head is not None else _head_of(net, self.layers)
        self.head = [k for k in self.names if k.startswith(_join(self.head_name, ""))]
        if not self.head:
            raise InputError(
                f"model.head = {self.head_name!r} names no layer with parameters; layers: "
                + ", ".join(layer.name for layer in self.layers)
            )
        self.size = sum(self.initial[k].numel() for k in self.names)
        self.has_convolutions = any(isinstance(m, _ConvNd) for m in net.modules())
        self.body = [k for k in self.names if k not in set(self.head)]
        norms = (MaskedBatchNorm, nn.GroupNorm, nn.LayerNorm, _InstanceNorm)
        self.norm_names = [
            _join(k, n) for k, m in net.named_modules() if isinstance(m, norms) for n in _float_tensors(m)
        ]
        self._nets = {True: _Net(net, self.head_name, train=True), False: _Net(net, self.head_name, train=False)}

    def params(self, x: Model) -> Model:
        """The trainable part of a model."""
        return pick(x, self.names)

    def to(self, device: torch.device | str) -> "Task":
        """Moves what the module holds beside its tree (constants, integer buffers)."""
        self.initial = {k: v.to(device) for k, v in self.initial.items()}
        for net in self._nets.values():
            net.module.to(device)
        return self

    def apply(self, x: Model, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor, Model]:
        """Outputs, the head's input, and the buffers after the pass."""
        out, h, buffers = self._nets[train](x, batch, self.buffer_names, self.bf16)
        return (out.to(self.dtype), h.to(self.dtype), buffers) if self.bf16 else (out, h, buffers)

    def losses(self, x: Model, batch: Batch) -> Tensor:
        """Per-sample losses in evaluation mode."""
        return self.per_sample(self.apply(x, batch)[0], batch.y)

    def loss(self, x: Model, batch: Batch) -> Tensor:
        """Mean loss in evaluation mode."""
        return batch.mean(self.losses(x, batch))

    def features(self, x: Model, batch: Batch, *, train: bool = False) -> Tensor:
        """The head's input."""
        return self.apply(x, batch, train=train)[1]

    def grad(self, x: Model, batch: Batch, wrt: Sequence[str] | None = None, *, train: bool = True) -> Pass:
        """Mean loss over the batch and its gradient with respect to the named parameters (all by default)."""

        def objective(p: Model) -> tuple[Tensor, tuple[Model, Tensor]]:
            out, h, buffers = self.apply({**x, **p}, batch, train=train)
            return batch.mean(self.per_sample(out, batch.y)), (buffers, h)

        g, (loss, (buffers, h)) = grad_and_value(objective, has_aux=True)(pick(x, wrt or self.names))
        return Pass(loss, g, buffers, h)

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

    def __init__(self, module: nn.Module, head: str, *, train: bool) -> None:
        self.module = copy.deepcopy(module).train(train)
        self._norms = [m for m in self.module.modules() if isinstance(m, MaskedBatchNorm)]
        self._dropouts = [m for m in self.module.modules() if isinstance(m, KeyedDropout)]
        replaced = {id(v) for m in self._norms for v in m.buffers()}
        self._written_in_place = [k for k, v in self.module.named_buffers() if id(v) not in replaced]
        self._head_input: list[Tensor] = []
        head_module = dict(self.module.named_modules()).get(head, self.module)
        head_module.register_forward_pre_hook(lambda _, args: self._head_input.append(args[0]))

    def __call__(self, x: Model, batch: Batch, buffer_names: Sequence[str], bf16: bool) -> tuple[Tensor, Tensor, Model]:
        values = dict(x)
        for k in self._written_in_place:  # a user's module may write to its buffers; x must stay as it is
            if k in values:
                values[k] = values[k].clone()
        with (
            self._during(batch),
            torch.autocast(batch.x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False),
        ):
            out = functional_call(self.module, values, (batch.x,))
        h = self._head_input[-1] if self._head_input else out
        self._head_input.clear()
        return out, h, {k: values[k] for k in buffer_names}

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
