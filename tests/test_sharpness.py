"""The layer-wise perturbation and the scores of layers, on numbers."""

import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms._plgu.sharpness import equal_scores, largest, lwsam, only, scores
from bespokefl.core import Model, Part, Task, layers_of
from bespokefl.core.trees import norm
from bespokefl.models import build

TWO = (Part(("a",), ()), Part(("b",), ()))
SHAPES = {"l1.w": (4, 3), "l1.b": (4,), "l2.w": (2, 4), "l3.w": (5,)}
THREE = (Part(("l1.w", "l1.b"), ()), Part(("l2.w",), ()), Part(("l3.w",), ()))
XI = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, dtype=torch.float64, generator=generator) for k, s in SHAPES.items()}


def vector(x: Model) -> Tensor:
    return torch.cat([x[k].flatten() for part in THREE for k in part.params])


def spread(xi: Tensor) -> Tensor:
    """Lambda's diagonal."""
    sizes = [sum(torch.Size(SHAPES[k]).numel() for k in part.params) for part in THREE]
    return torch.cat([xi[l].expand(n) for l, n in enumerate(sizes)])


# the perturbation ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("p", "expected"), [(2.0, (0.0075, 0.03)), (3.0, (0.009161955948, 0.031737946397))], ids=["p=2", "p=3"]
)
def test_two_numbers(p: float, expected: tuple[float, float]) -> None:
    out = lwsam({"a": f64(3), "b": f64(4)}, f64(0.25, 0.75), TWO, 0.05, p)
    torch.testing.assert_close(torch.cat([out["a"], out["b"]]), f64(*expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0, 4.0])
def test_it_is_the_best_point_of_its_ball(p: float) -> None:
    """||Lambda^-1 e||_p = rho, and no other point of that sphere has a larger e . Lambda^-1 g."""
    g, rho, diagonal = gradient(), 0.3, spread(XI)
    e = vector(lwsam(g, XI, THREE, rho, p)) / diagonal
    torch.testing.assert_close(e.abs().pow(p).sum() ** (1 / p), f64(rho)[0], rtol=0, atol=1e-12)
    assert torch.dot(e * diagonal, vector(g)) >= 0
    points = torch.randn(20_000, len(e), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points = torch.cat([points, e + 1e-3 * points[:2000]])  # far and near
    points *= rho / points.abs().pow(p).sum(1, keepdim=True) ** (1 / p)
    assert (points @ vector(g)).max() <= torch.dot(e, vector(g)) + 1e-12


def test_with_equal_scores_it_is_the_steepest_point_and_otherwise_not() -> None:
    g, rho = gradient(), 0.3
    equal = f64(1, 1, 1)
    sam = vector(lwsam(g, equal, THREE, rho))
    torch.testing.assert_close(sam, rho * vector(g) / vector(g).norm(), rtol=0, atol=1e-14)
    diagonal = spread(XI)
    steepest = rho * diagonal**2 * vector(g) / (diagonal * vector(g)).norm()  # same ball, larger e . g
    assert torch.dot(steepest, vector(g)) > torch.dot(vector(lwsam(g, XI, THREE, rho)), vector(g)) + 1e-3


@pytest.mark.parametrize("p", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("factor", [1e-9, 7.0, 1e9])
def test_the_length_of_the_gradient_does_not_matter(p: float, factor: float) -> None:
    g = gradient()
    one, other = lwsam(g, XI, THREE, 0.3, p), lwsam({k: factor * v for k, v in g.items()}, XI, THREE, 0.3, p)
    torch.testing.assert_close(vector(one), vector(other), rtol=1e-12, atol=1e-14)


def test_powers_do_not_underflow_in_float32() -> None:
    g = {k: 1e-6 * v.float() for k, v in gradient().items()}
    out = vector(lwsam(g, XI.float(), THREE, 0.3, 1.1))  # q = 11: |g|^q is 0 in float32
    assert out.isfinite().all() and out.norm() > 0.01


def test_the_printed_exponent_would_give_another_length() -> None:
    g = gradient()
    printed = 0.3 * vector(g) / vector(g).norm() ** 2  # (sum |g|^2)^(p - 1)
    right = vector(lwsam(g, f64(1, 1, 1), THREE, 0.3))
    assert abs(printed.norm() - 0.3 / vector(g).norm()) < 1e-12
    assert abs(right.norm() - 0.3) < 1e-12 and (printed - right).norm() > 0.1


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_nothing_to_perturb(scope: str) -> None:
    g = gradient()
    for rho, factor in ((0.0, 1.0), (0.3, 0.0), (0.3, 1e-14)):
        out = lwsam({k: factor * v for k, v in g.items()}, XI, THREE, rho, 2.0, scope)  # type: ignore[arg-type]
        assert not vector(out).any()


def test_a_layer_with_score_0_still_counts_in_the_norm() -> None:
    g, xi = gradient(), f64(0.0, 0.6, 0.4)
    out = lwsam(g, xi, THREE, 0.3)
    assert not out["l1.w"].any() and not out["l1.b"].any()
    rest = torch.cat([out["l2.w"].flatten() / 0.6, out["l3.w"] / 0.4]).norm()
    assert 0 < rest < 0.3 - 1e-3


def test_norm_of_each_layer() -> None:
    g = gradient()
    out = lwsam(g, XI, THREE, 0.3, 2.0, "layer")
    for l, part in enumerate(THREE):
        torch.testing.assert_close(norm({k: out[k] for k in part.params}), 0.3 * XI[l], rtol=0, atol=1e-14)
    one = (Part(tuple(SHAPES), ()),)
    torch.testing.assert_close(
        vector(lwsam(g, f64(1), one, 0.3, 2.0, "layer")), vector(lwsam(g, f64(1), one, 0.3)), rtol=0, atol=0
    )


# scores ----------------------------------------------------------------------------------------------
def test_scores() -> None:
    a, b = gradient(0), gradient(1)
    xi = scores(a, b, THREE, "sum1")
    raw = torch.stack([
        ((a["l1.w"] - b["l1.w"]).pow(2).sum() + (a["l1.b"] - b["l1.b"]).pow(2).sum()).sqrt() / 16,
        (a["l2.w"] - b["l2.w"]).norm() / 8,
        (a["l3.w"] - b["l3.w"]).norm() / 5,
    ])  # fmt: skip
    torch.testing.assert_close(xi, raw / raw.sum(), rtol=0, atol=1e-14)
    torch.testing.assert_close(xi.sum(), f64(1)[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(scores(a, b, THREE, "mean1"), 3 * xi, rtol=0, atol=1e-14)
    for factor in (-2.0, 1e-6, 50.0):
        drifted = {k: b[k] + factor * (a[k] - b[k]) for k in a}
        torch.testing.assert_close(scores(drifted, b, THREE, "sum1"), xi, rtol=1e-8, atol=0)


def test_scores_of_equal_models_are_equal() -> None:
    a = gradient()
    for scale, each in (("sum1", 1 / 3), ("mean1", 1.0)):
        assert torch.equal(scores(a, a, THREE, scale), f64(each, each, each))  # type: ignore[arg-type]
        assert torch.equal(equal_scores(XI, THREE, scale), f64(each, each, each))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0000"), (1, "0100"), (2, "0101"), (3, "1101"), (4, "1111"), (9, "1111")]
)
def test_largest_with_ties_to_the_first(count: int, expected: str) -> None:
    assert "".join(str(int(v)) for v in largest(f64(0.2, 0.3, 0.2, 0.3), count)) == expected


def test_only_keeps_the_sum() -> None:
    chosen = torch.tensor([True, False, True])
    torch.testing.assert_close(only(chosen, XI), f64(2 / 3, 0, 1 / 3), rtol=0, atol=1e-15)
    torch.testing.assert_close(only(chosen, 3 * XI), f64(2, 0, 1), rtol=0, atol=1e-15)
    assert not only(torch.zeros(3, dtype=torch.bool), XI).any()


# layers ----------------------------------------------------------------------------------------------
def test_layers_of_a_model() -> None:
    frozen = nn.Linear(2, 2)
    frozen.requires_grad_(False)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.Flatten(),
        nn.Linear(2, 2), frozen, nn.LayerNorm(2),
    )  # fmt: skip
    task = Task(net)
    bn = ("1.running_mean", "1.running_var")
    conv, norm1 = ("0.weight", "0.bias"), ("1.weight", "1.bias")
    rest = [Part((f"{i}.weight", f"{i}.bias"), ()) for i in (2, 4, 6)]
    assert layers_of(task) == (Part(conv, ()), Part(norm1, bn), *rest)
    assert layers_of(task, "conv_norm") == (Part(conv + norm1, bn), *rest)
    assert layers_of(task, "conv_norm", task.body) == (Part(conv + norm1, bn), *rest[:2])


def paired(net: nn.Module, head: str | None = None) -> list[str]:
    """The modules of each layer with more than one, or with nothing but a norm."""
    task = Task(net, head=head)
    norms = {k.rpartition(".")[0] for k in task.norm_names}
    shown = []
    for part in layers_of(task, "conv_norm"):
        modules = list(dict.fromkeys(k.rpartition(".")[0] for k in part.params))
        assert {k.rpartition(".")[0] for k in part.buffers} <= set(modules)
        if len(modules) > 1 or modules[0] in norms:
            shown.append("+".join(modules))
    assert sorted(k for part in layers_of(task, "conv_norm") for k in part.params) == sorted(task.names)
    return shown


def test_resnet18_counts_each_convolution_with_the_norm_behind_it() -> None:
    task = Task(build("resnet18", (3, 8, 8), 10, width=4))
    parts = layers_of(task, "conv_norm")
    assert len(parts) == 21 and parts[-1].params == ("head.weight", "head.bias")
    shapes = [[task.initial[k].shape for k in part.params] for part in parts[:-1]]
    assert all(len(conv) == 4 and norm == (conv[0],) and bias == norm for conv, norm, bias in shapes)


def test_a_pre_activation_net_counts_a_norm_with_the_convolution_that_it_prepares() -> None:
    """WRN-28-10: by name. The last norm has no namesake, and the convolution before it has a norm."""
    task = Task(build("wrn28-10", (3, 8, 8), 10, width=1))
    parts = layers_of(task, "conv_norm")
    assert len(parts) == sum(layer.kind != "norm" for layer in task.layers) + 1
    block = {part.params[0]: part.params[1:] for part in parts if ".block2." in part.params[0]}
    assert len(block) == 6  # two of each stage
    for conv, rest in block.items():
        norm = conv.replace("conv", "norm").removesuffix(".weight")
        assert rest[:2] == (f"{norm}.weight", f"{norm}.bias")
    assert parts[-2].params == ("body.norm.weight", "body.norm.bias")


def test_networks_without_norms_have_a_layer_a_module() -> None:
    task = Task(build("lenet5", (1, 28, 28), 10))
    assert layers_of(task, "conv_norm") == layers_of(task) and len(layers_of(task)) == len(task.layers)


def test_linear_layers_have_norms_too() -> None:
    mlp = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    assert paired(mlp) == ["0", "1+2"]  # a norm of the inputs belongs to nothing


class ByName(nn.Module):
    """Convolutions first, then their norms, then one of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.bn1, self.bn2, self.extra = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(1, 4)
        self.fc = nn.Linear(4, 2)


class OwnConvolution(nn.Module):
    """A convolution that is no class of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.ones(4, 1, 3, 3))


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (ByName(), ["conv1+bn1", "conv2+bn2", "extra"]),
        (nn.Sequential(OwnConvolution(), nn.BatchNorm2d(4), nn.Linear(4, 2)), ["0+1"]),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(1, 8), nn.Linear(8, 2)), ["1"]),  # of other channels
        (nn.Sequential(nn.ConvTranspose2d(2, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)), ["0+1"]),
        # pre-activation without names: the first norm is alone
        (
            nn.Sequential(
                nn.BatchNorm2d(2), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Linear(4, 2)
            ),
            ["0", "1+2"],
        ),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 1)), nn.BatchNorm2d(4), nn.Linear(4, 2)), ["0.0+1"]),
    ],
)
def test_pairs_in_nets_of_others(net: nn.Module, expected: list[str]) -> None:
    assert paired(net) == expected


def test_no_layer_of_a_densenet_is_lost() -> None:
    assert paired(build("densenet121", (3, 32, 32), 10))[-1] == "body.norm"  # its block gives out 32 channels
