"""Losses and hits, one value per sample: of classes, of masks (a class for every pixel), and of numbers.

What a classifier's outputs mean is decided here, for training, scores and predictions: they are logits, and a single
output is the logit of class 1 beside 0 for class 0 (`class_logits`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

PerSample = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value per sample

DICE_SMOOTHING = 1.0  # pixels


def class_logits(outputs: Tensor) -> Tensor:
    """A logit for each class, on axis 1. A model of one output z per sample answers (0, z): sigmoid(z) is class 1's
    probability, and z > 0 is class 1."""
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        return outputs
    z = outputs.unsqueeze(1) if outputs.ndim == 1 else outputs
    return torch.cat([torch.zeros_like(z), z], 1)


def add_to_logits(outputs: Tensor, of_classes: Tensor) -> Tensor:
    """A model's outputs with a number added to the logit of each class; of one output, what changes between its two."""
    if class_logits(outputs) is outputs:
        return outputs + of_classes
    return outputs + (of_classes[1] - of_classes[0])


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """log sum exp(logits) - logits[y]: for few classes several times faster on a CPU than F.cross_entropy's kernel.

    Classes are axis 1; of one output it is the binary cross-entropy. Where labels are masks it is the mean over a
    sample's pixels.
    """
    logits = class_logits(outputs)
    return _over_pixels(torch.logsumexp(logits, 1) - logits.gather(1, y.unsqueeze(1)).squeeze(1))


def dice_loss(logits: Tensor, y: Tensor) -> Tensor:
    """1 - (2 sum p g + s) / (sum p^2 + sum g^2 + s) of each class, the background (class 0) apart, and their mean.

    p is the softmax probability of a pixel, g is 1 where the mask has the class; sums go over one sample's pixels. It
    is V-Net's form (Milletari et al., 2016), as LG-Mix trains with, but for s = 1 pixel: without it, a sample that
    lacks a class has the loss 1 and no gradient, whatever is answered.
    """
    p = torch.softmax(logits, 1)[:, 1:].flatten(2)
    classes = torch.arange(1, logits.shape[1], device=y.device)
    g = (y.flatten(1).unsqueeze(1) == classes[:, None]).to(p.dtype)
    overlap = 2 * (p * g).sum(2) + DICE_SMOOTHING
    return (1 - overlap / ((p**2).sum(2) + g.sum(2) + DICE_SMOOTHING)).mean(1)


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((outputs - y.view_as(outputs)) ** 2).reshape(len(outputs), -1).sum(1)


LOSSES: dict[str, PerSample] = {"cross_entropy": cross_entropy, "squared_error": squared_error, "dice": dice_loss}
CLASSIFYING = ("cross_entropy", "dice")  # losses of models whose largest output is the predicted class


def hit(outputs: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is the label's (ties to the lowest index); of masks, the share of such pixels."""
    return _over_pixels((class_logits(outputs).argmax(1) == y).to(outputs.dtype))


def _over_pixels(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.flatten(1).mean(1)
