"""Models by name: the shipped ones, and a user's own as ``package.module:factory``."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bespokefl.core.registry import Registry, told
from bespokefl.errors import InputError, unknown_name
from bespokefl.models import blocks, convnets, densenet, nfresnet, perceptrons, resnets, unet


@dataclass(frozen=True)
class ModelSpec:
    """A shipped model: ``factory(input_shape, classes, **options)`` builds it."""

    name: str
    description: str
    factory: Callable[..., nn.Module]
    smallest_side: int | None = None  # of an image (channels, height, width); None: takes inputs of any shape
    segments: bool = False  # answers a map of logits (classes, height, width), not one logit per class

    @property
    def options(self) -> dict[str, Any]:
        """The factory's options with their defaults."""
        parameters = list(inspect.signature(self.factory).parameters.values())
        return {parameter.name: parameter.default for parameter in parameters[2:]}

    def fits(self, input_shape: tuple[int, ...]) -> bool:
        """Whether inputs of this shape leave something to compute with."""
        if self.smallest_side is None:
            return True
        return len(input_shape) == 3 and min(input_shape[1:]) >= self.smallest_side


_TWO_CONVS, _DIGIT = convnets.TWO_CONVS_SMALLEST_SIDE, convnets.DIGIT_MODEL_SMALLEST_SIDE
_DEEP, _WIDE = blocks.SMALLEST_CIFAR_SIDE, resnets.WRN_SMALLEST_SIDE

_OURS = {
    spec.name: spec
    for spec in (
        ModelSpec("linear", "multinomial logistic regression", perceptrons.linear),
        ModelSpec("mlp", "hidden layers of 200 and 200 (FedPG)", perceptrons.mlp),
        ModelSpec("fedavg-cnn", "5x5 convolutions of 32 and 64, 512 (FedAvg, PGFed)", convnets.fedavg_cnn, _TWO_CONVS),
        ModelSpec("fedpg-cnn", "5x5 convolutions of 64 and 64, 384, 192 (FedPG)", convnets.fedpg_cnn, _TWO_CONVS),
        ModelSpec("lenet5", "5x5 convolutions of 6 and 16, 120, 84 (LeNet-5)", convnets.lenet5, _TWO_CONVS),
        ModelSpec("digit-model", "5x5 convolutions, 2048, 512, BatchNorm (LG-Mix)", convnets.digit_model, _DIGIT),
        ModelSpec(
            "pfedhn-target", "5x5 convolutions of 16 and 32, 120, 84 (pFedHN)", convnets.pfedhn_target, _TWO_CONVS
        ),
        ModelSpec("tangent-mlp", "hidden layers of 256 and 256 (LG-Mix, BCI)", perceptrons.tangent_mlp),
        ModelSpec("resnet18", "20 convolutions, GroupNorm (PLGU) or BatchNorm (LG-Mix)", resnets.resnet18, _DEEP),
        ModelSpec("resnet50", "53 convolutions in bottlenecks, GroupNorm (PLGU)", resnets.resnet50, _DEEP),
        ModelSpec("wrn28-10", "wide pre-activation blocks, GroupNorm (PLGU)", resnets.wrn28_10, _WIDE),
        ModelSpec("nfresnet18", "ResNet-18 without norms, standardised kernels (FedPG)", nfresnet.nfresnet18, _DEEP),
        ModelSpec("densenet121", "dense blocks of 6, 12, 24, 16, BatchNorm (LG-Mix)", densenet.densenet121, _DEEP),
        ModelSpec(
            "unet", "a map of logits for segmentation, BatchNorm (LG-Mix)", unet.unet, unet.SMALLEST_SIDE, segments=True
        ),
    )
}


def _adopt(name: str, value: Any) -> ModelSpec | None:
    return ModelSpec(name, (inspect.getdoc(value) or "").partition("\n")[0], value) if callable(value) else None


MODELS: Registry[ModelSpec] = Registry(
    "models",
    "model.name",
    _OURS,
    _adopt,
    "a function or class factory(input_shape, classes, **options) that returns a torch.nn.Module",
)


def build(name: str, input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """A new model for inputs of ``input_shape`` (without the batch axis); the caller seeds torch beforehand.

    ``name`` is one of `bespokefl.list_models`, or ``package.module:function`` for your own.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = bfl.build_model("mlp", (1, 8, 8), 10, hidden=[50])
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    shape = tuple(input_shape)
    if not shape or any(side < 1 for side in shape):
        raise InputError(f"input_shape is {shape}; it must hold at least one size, all of them positive")
    if classes < 1:
        raise InputError(f"classes is {classes}; a model needs at least 1")
    spec = MODELS.find(name)
    if name not in MODELS:
        return _build_own(spec, shape, classes, options)
    for option in options:
        if option not in spec.options:
            owner = f"an option of the model {name!r}"
            raise unknown_name(f"model.{option}", options[option], spec.options, what=owner, seen=option)
    if not spec.fits(shape):
        fitting = ", ".join(
            other.name for other in MODELS.values() if other.fits(shape) and other.segments == spec.segments
        )
        raise InputError(
            f"model.name is {name!r}, which needs images (channels, height, width) of at least "
            f"{spec.smallest_side}x{spec.smallest_side}, but the data has the shape {shape}; models that fit: {fitting}"
        )
    return spec.factory(shape, classes, **options)


def _build_own(spec: ModelSpec, input_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Module:
    """Call a factory that is not ours; whatever it raises is reported with the name that led there."""
    try:
        model = spec.factory(input_shape, classes, **options)
    except Exception as error:
        raise InputError(
            f"model.name is {spec.name!r}, but calling it with input_shape={input_shape}, classes={classes}, "
            f"options={options} failed: {told(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model.name is {spec.name!r}, which returned a {type(model).__name__}, not a torch.nn.Module")
    return model
