"""Normalisation in few passes, against torch's own and against finite differences."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from bespokefl.engines.graphs import Graph
from bespokefl.nn.batch_statistics import mean_and_variance, normalised

CASES = [((5, 8, 3, 4), 4), ((5, 8), 2), ((4, 6, 7), 3), ((5, 8, 3, 4), None), ((5, 8), None)]
every_case = pytest.mark.parametrize(("shape", "groups"), CASES)
EPS = 1e-5


def torchs(x: Tensor, w: Tensor, b: Tensor, groups: int | None) -> Tensor:
    if groups is None:
        return F.batch_norm(x, None, None, w, b, training=True, eps=EPS)
    return F.group_norm(x, groups, w, b, EPS)


def tensors(shape: tuple[int, ...], *clients: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Input, weight and bias; the input's mean is not its origin."""
    torch.manual_seed(0)
    x = 2 * torch.randn(*clients, *shape, dtype=dtype) + 3
    return [x, *(torch.randn(*clients, shape[1], dtype=dtype) for _ in range(2))]


def loss(x: Tensor, w: Tensor, b: Tensor, groups: int | None, by: str) -> Tensor:
    out = normalised(x, w, b, groups, EPS) if by == "ours" else torchs(x, w, b, groups)
    return (out**3 + out.sin()).sum()


@every_case
def test_it_is_torchs(shape: tuple[int, ...], groups: int | None) -> None:
    args = tensors(shape)
    torch.testing.assert_close(normalised(*args, groups, EPS), torchs(*args, groups), rtol=1e-12, atol=1e-12)


@every_case
def test_first_and_second_derivatives_by_differences(shape: tuple[int, ...], groups: int | None) -> None:
    args = [v.requires_grad_() for v in tensors(shape)]
    assert torch.autograd.gradcheck(lambda *a: normalised(*a, groups, EPS), args)
    assert torch.autograd.gradgradcheck(lambda *a: normalised(*a, groups, EPS), args)


@every_case
@pytest.mark.parametrize("shared", ["", "x", "parameters"])
def test_a_stack_of_clients_is_each_alone(shape: tuple[int, ...], groups: int | None, shared: str) -> None:
    x, w, b = tensors(shape, 3)
    dims = (None if shared == "x" else 0, *(None if shared == "parameters" else 0 for _ in range(2)))
    args = [v[0] if d is None else v for v, d in zip((x, w, b), dims, strict=True)]
    found = vmap(grad(lambda *a: loss(*a, groups, "ours"), argnums=(0, 1, 2)), in_dims=dims)(*args)
    for r in range(3):
        own = [v if d is None else v[r] for v, d in zip(args, dims, strict=True)]
        expected = grad(lambda *a: loss(*a, groups, "torch's"), argnums=(0, 1, 2))(*own)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[r], theirs, rtol=1e-10, atol=1e-10)


@every_case
def test_hessians_of_a_stack(shape: tuple[int, ...], groups: int | None) -> None:
    x, w, b = tensors(shape, 2)

    def turned(x: Tensor, w: Tensor, b: Tensor, by: str) -> Tensor:
        """The gradient's derivative along w, a reverse over a reverse."""
        inner = grad(lambda x, w: loss(x, w, b, groups, by), argnums=1)
        return grad(lambda x: (inner(x, w) * w).sum())(x)

    found = vmap(lambda *a: turned(*a, "ours"))(x, w, b)
    for r in range(2):
        torch.testing.assert_close(found[r], turned(x[r], w[r], b[r], "torch's"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [4, None])
def test_half_precision_stays_so(groups: int | None) -> None:
    x, w, b = tensors((16, 8, 9, 9), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = normalised(x.bfloat16(), w, b, groups, EPS)
        dx, dw = grad(lambda *a: loss(*a, b, groups, "ours").float(), argnums=(0, 1))(x.bfloat16(), w)
    assert (out.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), torchs(x, w, b, groups), rtol=0.05, atol=0.05)


def test_half_precision_has_moments_of_float32() -> None:
    x, _, _ = tensors((16, 8, 9, 9), dtype=torch.float32)
    half = (x + 5).bfloat16()  # with a mean of 8 and squares in bfloat16 the variance of 4 would be lost
    mean, variance = mean_and_variance(half, (0, 2, 3))
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(variance, half.float().var((0, 2, 3), correction=0), rtol=1e-3, atol=0)


def test_a_traced_gradient_has_the_moments_once() -> None:
    args = tensors((5, 8, 3, 4))
    graph = Graph(grad(lambda *a: loss(*a, 4, "ours"), argnums=(0, 1, 2)), args, carry=False)
    assert [graph.operations.count(name) for name in ("var_mean", "rsqrt")] == [1, 1]


def test_a_stack_keeps_the_layout_of_convolutions() -> None:
    """Samples first, clients' channels side by side: what the next convolution would otherwise copy into."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, 4, 3, 8).permute(3, 0, 4, 1, 2)  # (N, B, C, H, W) of memory (B, H, W, N, C)
    w = torch.ones(3, 8)
    out = vmap(lambda *a: normalised(*a, 4, EPS))(x, w, w)
    back = vmap(grad(lambda *a: (normalised(*a, 4, EPS) ** 2).sum()))(x, w, w)
    assert out.stride() == back.stride() == x.stride()
