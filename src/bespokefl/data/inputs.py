"""What an input is: an image, numbers or tokens. It decides how stored values become what a model is given."""

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from bespokefl.errors import InputError, unknown_name

InputKind = Literal["image", "numbers", "tokens"]
KINDS: tuple[InputKind, ...] = get_args(InputKind)

HOW_TO_SAY = (
    "inputs = 'tokens' (they stay whole numbers, for an nn.Embedding), 'numbers' (they become floating) or 'image' "
    "(uint8 pixels, divided by 255): FederatedData.from_arrays(..., inputs=...), or data.inputs of the source npz"
)


def stored_as(x: npt.NDArray[Any], inputs: InputKind | None, where: str) -> npt.NDArray[Any]:
    """uint8 pixels, floating numbers or int64 tokens, by what was said or else by the dtype.

    Nothing said: floating and bool are numbers, uint8 of the shape (n, C, H, W) is images, and other whole numbers stay
    what they are: the model decides (`bespokefl.evaluation.fit`).
    """
    check_kind(inputs, where)
    kind = x.dtype.kind
    if kind not in "biuf":
        raise InputError(f"{where} has dtype {x.dtype}; allowed: numbers (floating, whole or bool).")
    whole = kind in "iu"
    if inputs == "tokens" and not whole:
        raise InputError(f"{where} has dtype {x.dtype}, but inputs = 'tokens': tokens are whole numbers from 0.")
    if inputs == "image" and kind != "f" and x.dtype != np.uint8:
        raise InputError(
            f"{where} has dtype {x.dtype}, but inputs = 'image': pixels are uint8 (0 to 255, divided by 255) or "
            "floating (as they are); convert it, or say inputs = 'numbers'."
        )
    if kind == "f" or (x.dtype == np.uint8 and (inputs == "image" or (inputs is None and x.ndim == 4))):
        return x
    if kind == "b" or inputs == "numbers":
        return x.astype(np.float32)
    if x.size and int(x.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{where} holds {x.max()}; whole numbers go up to {np.iinfo(np.int64).max}.")
    return x.astype(np.int64)


def kind_of(data: Any) -> InputKind | None:
    """What the inputs of federated data are; None for floating ones of which nothing was said."""
    said: InputKind | None = data.inputs if data.x.is_floating_point() else "tokens"
    return said


def check_kind(inputs: object, where: str) -> None:
    if inputs is not None and inputs not in KINDS:
        raise unknown_name(f"{where}: inputs", inputs, KINDS)
