"""Losses of masks against torch's own and against the formula written out with loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bespokefl.core import Batch, Task, cross_entropy
from bespokefl.core.losses import dice_loss, hit

KEY = torch.zeros((), dtype=torch.int64)


def maps(n: int = 4, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, classes, 5, 6, dtype=torch.float64), torch.randint(0, classes, (n, 5, 6))


def test_cross_entropy_of_masks_is_the_mean_over_pixels() -> None:
    logits, y = maps()
    expected = F.cross_entropy(logits, y, reduction="none").mean((1, 2))
    torch.testing.assert_close(cross_entropy(logits, y), expected)


@pytest.mark.parametrize("classes", [2, 4])
def test_dice_loss_is_the_formula(classes: int) -> None:
    logits, y = maps(classes=classes)
    y[1] = 0  # nothing but background
    found = dice_loss(logits, y)
    for sample, truth, loss in zip(logits.numpy(), y.numpy(), found.tolist(), strict=True):
        p = np.exp(sample) / np.exp(sample).sum(0)
        terms = []
        for k in range(1, classes):
            g = (truth == k).astype(float)
            terms.append(1 - (2 * (p[k] * g).sum() + 1) / ((p[k] ** 2).sum() + (g**2).sum() + 1))
        assert loss == pytest.approx(np.mean(terms), rel=1e-12)


def test_dice_loss_pulls_also_where_there_is_nothing_to_find() -> None:
    logits = torch.zeros(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    dice_loss(logits, torch.zeros(1, 4, 4, dtype=torch.int64)).sum().backward()
    assert logits.grad is not None and (logits.grad[:, 1] > 0.005).all()  # towards less foreground
    perfect = torch.zeros(1, 2, 4, 4)
    perfect[:, 0] = 50.0
    assert float(dice_loss(perfect, torch.zeros(1, 4, 4, dtype=torch.int64))) == pytest.approx(0, abs=1e-6)


def test_padding_does_not_count() -> None:
    x, (_, y) = torch.randn(5, 2, 5, 6, dtype=torch.float64), maps(5)
    task = Task(nn.Conv2d(2, 3, 3, padding=1), "dice", dtype=torch.float64)
    assert task.classifies
    alone = task.grad(task.initial, Batch(x[:3], y[:3], None, KEY))
    weights = torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
    padded = task.grad(task.initial, Batch(x, y, weights, KEY))
    torch.testing.assert_close(padded.loss, alone.loss)
    for name, g in alone.grad.items():
        torch.testing.assert_close(padded.grad[name], g)


def test_hits_of_masks_are_shares_of_pixels() -> None:
    logits, y = maps()
    expected = (logits.argmax(1) == y).double().mean((1, 2))
    torch.testing.assert_close(hit(logits, y), expected)
