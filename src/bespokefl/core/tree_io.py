"""Trees as named tensors and plain JSON, and back, without pickle."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bespokefl.core.trees import Tree
from bespokefl.errors import RunError

Structure = Any  # JSON
OURS = "bespokefl."  # how names of this package's modules begin


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
            return {"named": full_name(type(value)), "items": items}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [encode(v, f"{path}.{k}") for k, v in enumerate(value)]}
        raise TypeError(
            f"{path} holds a {type(value).__name__}; server and client state are tensors, numbers and strings"
        )

    return encode(tree, prefix), tensors


def unpack(structure: Structure, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Tree:
    """The inverse of ``pack``; ``classes`` holds the named tuples that may occur, by their full names."""
    kind, content = next(iter(structure.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {k: unpack(v, tensors, classes) for k, v in content}
    if kind == "named":
        items = [unpack(v, tensors, classes) for v in structure["items"]]
        return _class_of(content, len(items), classes)(*items)
    items = [unpack(v, tensors, classes) for v in content]
    return tuple(items) if kind == "tuple" else items


def full_name(cls: type) -> str:
    """Which class it is, among others of its name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_of(name: str, values: int, classes: Mapping[str, type]) -> type:
    """The class that a stored name means.

    Of before there were full names, it is the only one that is called so; so it is of ours whose file has moved since.
    """
    same = [k for k, cls in classes.items() if k == name or (":" not in name and cls.__name__ == name)]
    if not same and name.startswith(OURS):
        same = [k for k in classes if k.startswith(OURS) and k.partition(":")[2] == name.partition(":")[2]]
    if not same:
        raise RunError(
            f"a stored state holds a {name!r}, which none of the method's files defines: its code was moved or renamed "
            "after the state was written. Use the code that wrote it, or start afresh"
        )
    if len(same) > 1:
        raise RunError(
            f"a stored state of an earlier version holds a {name!r}, which may be {' or '.join(sorted(same))}; go on "
            "with the version that wrote it, or start afresh"
        )
    fields: tuple[str, ...] = classes[same[0]]._fields  # type: ignore[attr-defined]
    if len(fields) != values:
        raise RunError(
            f"a stored state holds a {name!r} of {values} values; now its fields are {', '.join(fields)}. Use the code "
            "that wrote it, or start afresh"
        )
    return classes[same[0]]
