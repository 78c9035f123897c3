"""A user's module whatever the order in which its tensors lie in memory.

Engines keep images channels last, and convolutions of a stack answer in an order of their own. A network that flattens
by ``x.view(len(x), -1)``, as most published ones do, relies on the usual order. Here its ``view`` is a ``reshape``: the
same numbers, and no copy where torch's own would have worked. What would then compute something else is refused.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bespokefl.errors import InputError

_BY_ADDRESS = {torch.as_strided, Tensor.as_strided, Tensor.as_strided_}
_OF_SHAPE = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "__get__"}  # they read no number


class AnyLayout(TorchFunctionMode):
    """Where a user's network or loss runs: ``view`` and ``view_as`` take tensors of any layout.

    A view that had to be a copy no longer shares its memory: a network that writes to one of the two, and then uses the
    other, is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copied: list[tuple[Tensor, Tensor]] = []  # a tensor and its view
        self._outdated: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._copied:
            self._watch(func, args, kwargs)
        if func is Tensor.view or func is Tensor.view_as:
            return self._viewed(func, args, kwargs)
        if func in _BY_ADDRESS:
            raise InputError(
                "the model calls as_strided, which counts places in memory; engines choose how images lie there. Use "
                "unfold, reshape or slices"
            )
        return func(*args, **kwargs)

    def _viewed(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values())):  # the same bytes as another type
                raise
            if func is Tensor.view_as:
                found = Tensor.reshape_as(*args, **kwargs)
            else:  # `view` calls its argument size, `reshape` shape
                found = Tensor.reshape(*args, *kwargs.values())
            self._copied.append((args[0], found))
            return found

    def _watch(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = func.__name__
        if self._outdated and name not in _OF_SHAPE:
            for used in _tensors((*args, *kwargs.values())):
                if any(used is one for one in self._outdated):
                    raise InputError(
                        f"the model writes to a view of a tensor, or to a tensor with a view, and uses the other "
                        f"afterwards (in {name}); where the view is a copy, it would not see what was written. Write "
                        "to a clone, or use an operation that is not in place"
                    )
        for written in _written(name, args, kwargs):
            self._outdated += [b if written is a else a for a, b in self._copied if written is a or written is b]


def in_any_layout(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A user's function of tensors whose views may be of any layout."""

    @functools.wraps(fn)
    def run(*args: Tensor) -> Tensor:
        with AnyLayout():
            return fn(*args)

    return run


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a call changes."""
    in_place = kwargs.get("inplace") or name == "__setitem__" or (name.startswith("__i") and name not in _ASKS)
    if in_place or (name.endswith("_") and not name.endswith("__")):
        return list(args[:1])
    return [kwargs["out"]] if kwargs.get("out") is not None else []


_ASKS = {"__index__", "__int__", "__invert__", "__iter__"}  # begin as in-place operators do, and change nothing


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
