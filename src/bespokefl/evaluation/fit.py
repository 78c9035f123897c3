"""Whether model, loss and data fit together, looked at on two samples before the first round."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.losses import class_logits
from bespokefl.core.task import Answer, Batch, Task
from bespokefl.data.checks import check_token_range
from bespokefl.data.federated import FederatedData
from bespokefl.data.inputs import HOW_TO_SAY
from bespokefl.engines.base import Resident, numerics
from bespokefl.errors import InputError

Found = TypeVar("Found")


def check_fit(task: Task, data: FederatedData, resident: Resident) -> Answer:
    """What the model answers to one sample; InputError where it does not fit these labels and this loss."""
    batch = _two_samples(task, data, resident)
    if not data.x.is_floating_point():
        _check_tokens(task, data, batch)
    out, h = _answer(task, batch)
    shape = tuple(out.shape[1:])
    if task.classifies and not batch.y.is_floating_point():
        _check_masks(data, shape) if data.has_masks else _check_classes(data, shape)
    _check_losses(task, out, batch.y)
    return Answer(shape, _from_head(task, out, h))


def _two_samples(task: Task, data: FederatedData, resident: Resident) -> Batch:
    rows = np.concatenate(data.splits["train"])[:2] if data.clients else np.empty(0, dtype=np.int64)
    rows = np.resize(rows if len(rows) else np.zeros(1, dtype=np.int64), 2)
    device = next(iter(task.initial.values())).device
    index = torch.as_tensor(rows, device=device)
    return Batch(*resident.gather(index), None, torch.zeros((), dtype=torch.int64, device=device))


def _check_tokens(task: Task, data: FederatedData, batch: Batch) -> None:
    """Whole numbers are tokens if that was said, or if the model has an embedding for them."""
    tables = task.embeddings(batch)
    if not tables and data.inputs is None:
        raise InputError(
            f"x holds whole numbers, and the model (first layer {task.layers[0].name!r}) has no embedding that takes "
            f"them: say what they are, {HOW_TO_SAY}"
        )
    for size in {size for size, as_they_are in tables if as_they_are}:
        check_token_range(data.x, data.splits, data.client_names, size)


def _answer(task: Task, batch: Batch) -> tuple[Tensor, Tensor]:
    """The outputs, and what the head was given."""
    try:
        out, h, _ = _numerically(task, batch.x.device, lambda: task.apply(task.initial, batch))
    except Exception as error:
        raise InputError(
            f"the model cannot be run on two samples of the shape {tuple(batch.x.shape[1:])} and dtype "
            f"{batch.x.dtype}: {type(error).__name__}: {error}{_hint(task, batch)}"
        ) from error
    if not isinstance(out, Tensor) or not out.ndim or out.shape[0] != 2:
        seen = f"the shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise InputError(f"the model answers two samples with {seen}; it must be one tensor whose first axis is theirs")
    return out, h


def _from_head(task: Task, out: Tensor, h: Tensor) -> bool:
    """Whether classes are as likely as the head's own outputs have them: a log-softmax behind it changes nothing."""
    try:
        own = _numerically(task, out.device, lambda: task.head_outputs(task.initial, h))
        of_head, of_model = (class_logits(z.reshape(2, -1)).log_softmax(1) for z in (own, out))
    except Exception:  # a head that takes more than one tensor, perhaps
        return False
    return of_head.shape == of_model.shape and torch.allclose(of_head, of_model, rtol=1e-3, atol=1e-6)


def _hint(task: Task, batch: Batch) -> str:
    if not batch.x.is_floating_point():
        return f". If x are no tokens, say so: {HOW_TO_SAY}"
    if task.has_embeddings:
        return f". The model has an embedding, which takes whole numbers: give x as such, and say {HOW_TO_SAY}"
    return ""


def _numerically(task: Task, device: torch.device, compute: Callable[[], Found]) -> Found:
    """As engines do. Only what fails else is tried with their default type, for that is the whole process's."""
    with torch.no_grad(), torch.device(device):
        try:
            return compute()
        except Exception:
            if torch.get_default_dtype() == task.dtype:
                raise
            with numerics(task.dtype, device, tf32=False):
                return compute()


def _check_masks(data: FederatedData, shape: tuple[int, ...]) -> None:
    pixels = tuple(data.y.shape[1:])
    if len(shape) != 3 or shape[0] < len(data.classes) or shape[1:] != pixels:
        raise InputError(
            f"model.name: the labels are masks of {pixels} pixels and {len(data.classes)} classes, and the model "
            f"answers with the shape {shape}; take one for segmentation, with a map for each class"
        )


def _check_classes(data: FederatedData, shape: tuple[int, ...]) -> None:
    outputs, classes = (shape[0] if shape else 1), len(data.classes)
    if len(shape) > 1:
        raise InputError(
            f"the model answers a sample with the shape {shape}, but there is one label a sample: give it an output "
            f"for each of the {classes} classes, or a loss of your own that is no classifier's (classifies=False)"
        )
    if classes > max(2, outputs):
        raise InputError(
            f"the model has {outputs} output{'' if outputs == 1 else 's'}, but the data have {classes} classes; it "
            f"needs at least {classes}"
        )
    if classes == 1 and outputs == 1:
        raise InputError(
            f"the data have one class, {data.classes[0]!r}, and the model one output: there is nothing to tell apart; "
            "name all classes (classes = [...]), or give data in which two occur"
        )
    unnamed = int(data.y.max()) if not classes else 0
    if unnamed >= max(2, outputs):
        raise InputError(f"the data hold the label {unnamed}, but the model has {outputs} outputs; they must be more")


def _check_losses(task: Task, out: Tensor, y: Tensor) -> None:
    """A mean over the batch passes for one value per sample with some methods, and is a wrong number."""
    found = [_losses(task, out[:n], y[:n]) for n in (2, 1)]
    other = torch.stack([torch.zeros_like(out[0]), torch.arange(1, out[0].numel() + 1).view(out[0].shape).to(out)])
    with contextlib.suppress(Exception):  # a loss of probabilities, perhaps, which these are not
        found.append(_numerically(task, out.device, lambda: task.per_sample(out + other, y)))
    of_first = torch.stack([losses[0].double() for losses in found])
    if not torch.allclose(of_first, of_first[0], rtol=1e-3, atol=1e-6, equal_nan=True):
        raise InputError(
            "the loss, given two samples: what it returns for the first depends on the second, "
            f"{', '.join(f'{float(v):.6g}' for v in of_first)} with the second, without it and with another one; it "
            "must be of one sample alone. Usual causes: a mean over samples that is spread again, or targets of the "
            "shape (n,) beside outputs of the shape (n, 1)"
        )


def _losses(task: Task, out: Tensor, y: Tensor) -> Tensor:
    """One floating value per sample; InputError if the loss returns anything else."""
    n = len(out)
    shapes = f"outputs {tuple(out.shape)} and targets {tuple(y.shape)}"
    told = f"the loss, given the {shapes} of {n} sample{'s' if n > 1 else ''}"
    try:
        losses: object = _numerically(task, out.device, lambda: task.per_sample(out, y))
    except Exception as error:
        numbers = y.is_floating_point() and task.classifies
        hint = ". Floating targets are numbers to be predicted; class labels are whole numbers" if numbers else ""
        raise InputError(f"{told}, fails: {type(error).__name__}: {error}{hint}") from error
    if isinstance(losses, Tensor) and losses.shape == (n,) and losses.is_floating_point():
        return losses
    if not isinstance(losses, Tensor):
        seen = f"a {type(losses).__name__}"
    else:
        seen = f"{'one number' if not losses.ndim else f'the shape {tuple(losses.shape)}'} ({losses.dtype})"
    raise InputError(
        f"{told}, returns {seen}; it must be one floating value per sample, the shape ({n},): "
        'take no mean or sum over samples (reduction="none" in torch\'s losses)'
    )
