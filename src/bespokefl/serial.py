"""Trees as named tensors and plain JSON, and back, without pickle."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bespokefl.trees import Tree

Structure = Any  # JSON


def pack(tree: Tree, prefix: str) -> tuple[Structure, dict[str, Tensor]]:
    """The tree's structure and small values as JSON, its tensors by name.

    Trees hold tensors, numbers, strings, None, and dicts, lists, tuples and named tuples of them.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, path: str) -> Structure:
        if isinstance(value, Tensor):
            path = path if path not in tensors else f"{path}#{len(tensors)}"  # {"a": {"b": ...}, "a.b": ...}
            tensors[path] = value
            return {"tensor": path}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        if isinstance(value, dict):
            return {"dict": [[k, encode(v, f"{path}.{k}")] for k, v in value.items()]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [encode(v, f"{path}.{k}") for k, v in zip(value._fields, value, strict=True)]
            return {"named": type(value).__name__, "items": items}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [encode(v, f"{path}.{k}") for k, v in enumerate(value)]}
        raise TypeError(
            f"{path} holds a {type(value).__name__}; server and client state are tensors, numbers and strings"
        )

    return encode(tree, prefix), tensors


def unpack(structure: Structure, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Tree:
    """The inverse of ``pack``; ``classes`` holds the named tuples that may occur."""
    kind, content = next(iter(structure.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {k: unpack(v, tensors, classes) for k, v in content}
    if kind == "named":
        return classes[content](*(unpack(v, tensors, classes) for v in structure["items"]))
    items = [unpack(v, tensors, classes) for v in content]
    return tuple(items) if kind == "tuple" else items
