"""The deep networks against published sizes and against the same computation written out."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bespokefl.core import Batch, InputError, Task, layers_of
from bespokefl.data import FederatedData
from bespokefl.experiments.reading import parse_experiment
from bespokefl.experiments.resolve import make_module
from bespokefl.models import MODELS, build
from bespokefl.models.nfresnet import RELU_GAIN, NormFreeBlock, StandardisedConv2d

DEEP = ["resnet18", "resnet50", "wrn28-10", "nfresnet18", "densenet121"]
NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 4},
    "resnet50": {"width": 4},
    "wrn28-10": {"width": 1},
    "nfresnet18": {"width": "sibling"},
    "densenet121": {"growth": 4},
    "unet": {"width": 4},
}


def on_meta(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, shape, classes, **options)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# sizes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("name", "shape", "classes", "total"),
    [
        ("resnet18", (3, 224, 224), 1000, 11_689_512),  # torchvision's
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("densenet121", (3, 224, 224), 1000, 7_978_856),
        ("resnet18", (3, 32, 32), 10, 11_173_962),  # as usual for CIFAR-10
        ("resnet50", (3, 32, 32), 10, 23_520_842),
        ("wrn28-10", (3, 32, 32), 10, 36_479_194),
        ("wrn28-10", (3, 32, 32), 100, 36_536_884),
        ("unet", (3, 256, 256), 1, 7_763_041),  # that of the well-known brain segmentation
    ],
)
def test_published_totals(name: str, shape: tuple[int, ...], classes: int, total: int, norm: str) -> None:
    assert count(on_meta(name, shape, classes, norm=norm)) == total


def test_wrn_by_its_formula() -> None:
    def block(a: int, b: int) -> int:
        return 2 * a + 9 * a * b + 2 * b + 9 * b * b + (a * b if a != b else 0)

    widths = [16, 160, 320, 640]
    stages = sum(block(a, b) + 3 * block(b, b) for a, b in pairwise(widths))
    assert count(on_meta("wrn28-10", (3, 32, 32), 10)) == 9 * 3 * 16 + stages + 2 * 640 + 640 * 10 + 10


@pytest.mark.parametrize(
    ("width", "widths", "stem"), [("standard", (64, 128, 256, 512), 64), ("sibling", (16, 32, 64), 64)]
)
def test_nfresnet_by_its_formula(width: str, widths: tuple[int, ...], stem: int) -> None:
    def conv(a: int, b: int, side: int) -> int:
        return side * side * a * b + 2 * b  # a bias and a gain for each output channel

    total, a = conv(3, stem, 3), stem
    for b in widths:
        total += conv(a, b, 3) + 3 * conv(b, b, 3) + (conv(a, b, 1) if a != b else 0)
        a = b
    assert count(on_meta("nfresnet18", (3, 32, 32), 100, width=width)) == total + a * 100 + 100


def test_pfedhn_target_and_tangent_mlp() -> None:
    target = on_meta("pfedhn-target", (3, 32, 32), 10)
    leaves = {k: count(m) for k, m in target.named_modules() if list(m.parameters(recurse=False))}
    assert leaves == {"body.conv1": 1216, "body.conv2": 12832, "body.fc1": 96120, "body.fc2": 10164, "head": 850}
    assert target.body.fc1.in_features == 800
    widths = [m.out_features for m in on_meta("tangent-mlp", (253,), 2).modules() if isinstance(m, nn.Linear)]
    assert widths == [256, 256, 2]


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet18_has_41_layers_for_plgu_or_21(norm: str) -> None:
    task = Task(build("resnet18", (3, 8, 8), 10, norm=norm, width=4))
    assert len(layers_of(task)) == 41
    assert len(layers_of(task, "conv_norm")) == 21
    assert [layer.kind for layer in task.layers].count("convolution") == 20
    assert task.head_name == "head" and task.head == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("name", "convolutions", "features"),
    [
        ("resnet18", 20, 512),
        ("resnet50", 53, 2048),
        ("wrn28-10", 28, 640),
        ("nfresnet18", 20, 512),
        ("densenet121", 120, 1024),
    ],
)
def test_layers_and_features(name: str, convolutions: int, features: int) -> None:
    model = on_meta(name, (3, 32, 32), 7)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == convolutions
    assert isinstance(model.head, nn.Linear) and (model.head.in_features, model.head.out_features) == (features, 7)


def test_the_sizes_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(MODELS)
    for row in rows:
        spec = MODELS[row[0].strip("`")]
        assert int(row[-1].replace(",", "")) == count(on_meta(spec.name, (3, 32, 32), 10)), spec.name
        side = spec.smallest_side
        assert row[-2] == ("any input" if side is None else f"{side}x{side}"), spec.name


def test_a_segmentation_network_is_refused_for_labels_of_whole_images() -> None:
    images = np.zeros((4, 1, 16, 16)), np.arange(4) % 2
    data = FederatedData.from_arrays([{"train": images, "test": images}], classes=["a", "b"])
    experiment = parse_experiment({"algorithms": ["fedavg"], "model": {"name": "unet", "width": 4}})
    with pytest.raises(InputError, match=r"model\.name is 'unet'.*one label per sample"):
        make_module(experiment, 0, data)


# shapes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DEEP)
def test_smallest_and_oblong_images(name: str) -> None:
    side = MODELS[name].smallest_side
    assert side is not None
    for shape in [(2, side, side), (1, side, side + 5), (4, side + 3, side)]:
        model = build(name, shape, 3, **NARROW[name]).eval()
        with torch.no_grad():
            logits = model(torch.randn(2, *shape))
            maps = nn.Sequential(*list(model.body)[:-1])(torch.randn(2, *shape))
        assert logits.shape == (2, 3) and torch.isfinite(logits).all()
        assert min(maps.shape[2:]) == 1  # the declared minimum leaves one pixel


@pytest.mark.parametrize(
    ("name", "side", "stem", "last"),
    [
        ("resnet18", 32, "auto", 4),
        ("resnet18", 63, "auto", 8),
        ("resnet18", 64, "auto", 2),  # from 64x64 on the stem divides by 4
        ("resnet18", 64, "cifar", 8),
        ("resnet18", 32, "imagenet", 1),
        ("resnet18", 224, "auto", 7),
        ("densenet121", 96, "auto", 3),
        ("densenet121", 32, "auto", 4),
        ("nfresnet18", 32, "auto", 4),
        ("nfresnet18", 64, "auto", 2),
    ],
)
def test_stems_and_the_last_map(name: str, side: int, stem: str, last: int) -> None:
    model = on_meta(name, (3, side, side), 10, stem=stem)
    maps = nn.Sequential(*list(model.body)[:-1]).eval()(torch.empty(1, 3, side, side, device="meta"))
    assert maps.shape[2:] == (last, last)


@pytest.mark.parametrize(
    ("name", "shape", "options", "parts"),
    [
        ("resnet18", (3, 7, 32), {}, ["'resnet18'", "8x8", "(3, 7, 32)"]),
        ("resnet18", (3, 28, 28), {"stem": "imagenet"}, ["model.stem", "32x32", "(3, 28, 28)"]),
        ("resnet18", (3, 32, 32), {"stem": "big"}, ["model.stem is 'big'", "'auto', 'cifar', 'imagenet'"]),
        ("resnet50", (3, 32, 32), {"norm": "layer"}, ["model.norm is 'layer'", "'group', 'batch'"]),
        ("resnet18", (3, 32, 32), {"width": 0}, ["model.width is 0", "64"]),
        ("wrn28-10", (3, 32, 32), {"width": 2.5}, ["model.width is 2.5", "WRN-28-10"]),
        ("wrn28-10", (3, 3, 32), {}, ["'wrn28-10'", "4x4"]),
        ("nfresnet18", (3, 32, 32), {"width": 64}, ["model.width is 64", "'standard', 'sibling'"]),
        ("densenet121", (3, 32, 32), {"growth": True}, ["model.growth is True", "32"]),
        ("unet", (3, 40, 32), {}, ["'unet'", "(3, 40, 32)", "multiples of 16"]),
        ("unet", (3, 8, 32), {}, ["'unet'", "(3, 8, 32)", "multiples of 16"]),
        ("unet", (3, 32, 32), {"depth": 5}, ["model.depth is 5", "from 1 to 4"]),
        ("unet", (3, 5, 4), {"depth": 1}, ["halves images 1 times", "multiples of 2"]),
    ],
)
def test_wrong_options_are_explained(
    name: str, shape: tuple[int, ...], options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        build(name, shape, 10, **options)
    for part in parts:
        assert part in str(caught.value)


def test_groups() -> None:
    groups = {m.num_channels: m.num_groups for m in on_meta("wrn28-10", (3, 32, 32), 10).modules() if is_group(m)}
    assert groups == {16: 16, 160: 32, 320: 32, 640: 32}
    narrow = on_meta("resnet18", (3, 32, 32), 10, width=12)
    assert {m.num_channels: m.num_groups for m in narrow.modules() if is_group(m)} == {12: 4, 24: 8, 48: 16, 96: 32}
    assert not any(is_group(m) for m in on_meta("resnet18", (3, 32, 32), 10, norm="batch").modules())


def is_group(module: nn.Module) -> bool:
    return isinstance(module, nn.GroupNorm)


# what they compute -----------------------------------------------------------------------------------
class Written:
    """A network in functions, by the names of its parameters, with BatchNorm on the batch's own statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.p = dict(model.named_parameters())
        self.used: set[str] = set()

    def get(self, name: str) -> Tensor | None:
        self.used |= {name} & self.p.keys()
        return self.p.get(name)

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = self.get(f"{name}.weight")
        assert weight is not None
        return F.conv2d(x, weight, self.get(f"{name}.bias"), stride, padding=weight.shape[-1] // 2)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.get(f"{name}.weight"), self.get(f"{name}.bias"), training=True)

    def head(self, x: Tensor) -> Tensor:
        weight = self.get("head.weight")
        assert weight is not None
        return F.linear(x.mean((2, 3)), weight, self.get("head.bias"))


def assert_equal(model: nn.Module, written: Written, x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    assert written.used == written.p.keys()  # nothing was left out


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_written_out(name: str, stem: str) -> None:
    torch.manual_seed(0)
    model = build(name, (3, 32, 32), 5, norm="batch", stem=stem, width=4).double()
    f, x = Written(model), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    h = F.relu(f.norm("body.norm1", f.conv("body.conv1", x, 2 if stem == "imagenet" else 1)))
    h = F.max_pool2d(h, 3, 2, 1) if stem == "imagenet" else h
    convs = 2 if name == "resnet18" else 3
    for s, blocks in enumerate((2, 2, 2, 2) if name == "resnet18" else (3, 4, 6, 3), start=1):
        for b in range(1, blocks + 1):
            at, stride = f"body.stage{s}.block{b}", 2 if s > 1 and b == 1 else 1
            g = h
            for c in range(1, convs + 1):
                strided = c == (1 if name == "resnet18" else 2)
                g = f.norm(f"{at}.branch.norm{c}", f.conv(f"{at}.branch.conv{c}", g, stride if strided else 1))
                g = F.relu(g) if c < convs else g
            if f"{at}.shortcut.conv.weight" in f.p:
                h = f.norm(f"{at}.shortcut.norm", f.conv(f"{at}.shortcut.conv", h, stride))
            h = F.relu(g + h)
    assert_equal(model, f, x, f.head(h))


def test_wrn_written_out() -> None:
    torch.manual_seed(0)
    model = build("wrn28-10", (3, 8, 8), 5, norm="batch", width=1).double()
    f, x = Written(model), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    h = f.conv("body.conv1", x)
    for s in (1, 2, 3):
        for b in (1, 2, 3, 4):
            at, stride = f"body.stage{s}.block{b}", 2 if s > 1 and b == 1 else 1
            a = F.relu(f.norm(f"{at}.norm1", h))
            g = f.conv(f"{at}.conv2", F.relu(f.norm(f"{at}.norm2", f.conv(f"{at}.conv1", a, stride))))
            h = g + (f.conv(f"{at}.shortcut", a, stride) if f"{at}.shortcut.weight" in f.p else h)
    assert_equal(model, f, x, f.head(F.relu(f.norm("body.norm", h))))


def test_densenet_written_out() -> None:
    torch.manual_seed(0)
    blocks = (6, 12, 24, 16)
    model = build("densenet121", (3, 32, 32), 5, stem="imagenet", growth=2).double()
    f, x = Written(model), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    h = F.max_pool2d(F.relu(f.norm("body.norm1", f.conv("body.conv1", x, 2))), 3, 2, 1)
    for b, layers in enumerate(blocks, start=1):
        for k in range(1, layers + 1):
            at = f"body.block{b}.layer{k}"
            g = f.conv(f"{at}.conv1", F.relu(f.norm(f"{at}.norm1", h)))
            h = torch.cat([h, f.conv(f"{at}.conv2", F.relu(f.norm(f"{at}.norm2", g)))], 1)
        if b < 4:
            at = f"body.transition{b}"
            h = F.avg_pool2d(f.conv(f"{at}.conv", F.relu(f.norm(f"{at}.norm", h))), 2)
    assert_equal(model, f, x, f.head(F.relu(f.norm("body.norm", h))))


def test_unet_written_out() -> None:
    torch.manual_seed(0)
    model = build("unet", (2, 32, 16), 3, width=4).double()
    f, x = Written(model), torch.randn(2, 2, 32, 16, dtype=torch.float64)

    def two(at: str, h: Tensor) -> Tensor:
        for c in (1, 2):
            h = F.relu(f.norm(f"{at}.norm{c}", f.conv(f"{at}.conv{c}", h)))
        return h

    h, beside = x, []
    for level in range(4):
        h = two(f"down.{level}", h)
        beside.append(h)
        h = F.max_pool2d(h, 2)
    h = two("bottom", h)
    for level in range(4):
        weight = f.get(f"up.{level}.grow.weight")
        assert weight is not None
        h = F.conv_transpose2d(h, weight, f.get(f"up.{level}.grow.bias"), stride=2)
        h = two(f"up.{level}.convs", torch.cat([h, beside[3 - level]], 1))
    assert_equal(model, f, x, f.conv("head", h))


def test_unets_head_sees_the_last_decoders_map() -> None:
    """What LG-Mix takes for h, and what the head alone makes of it."""
    task = Task(build("unet", (3, 32, 16), 2, width=4), loss=lambda out, y: out.mean((1, 2, 3)), classifies=False)
    assert task.head_name == "head" and task.head == ["head.weight", "head.bias"]
    batch = Batch(torch.randn(5, 3, 32, 16), torch.zeros(5), None, torch.zeros((), dtype=torch.int64))
    out, h, _ = task.apply(task.initial, batch)
    assert out.shape == (5, 2, 32, 16) and h.shape == (5, 4, 32, 16)
    torch.testing.assert_close(task.head_outputs(task.initial, h), out)


# the network without norms ---------------------------------------------------------------------------
def test_the_scaled_relu_keeps_a_normals_variance() -> None:
    assert math.isclose(RELU_GAIN, math.sqrt(2 / (1 - 1 / math.pi)), rel_tol=1e-3)  # the authors' estimate of it


def test_standardised_kernels() -> None:
    torch.manual_seed(0)
    conv = StandardisedConv2d(5, 4, 3, padding=1).double()
    conv.gain.data = torch.tensor([1.0, 2.0, -0.5, 0.0], dtype=torch.float64)
    conv.weight.data = 7 * conv.weight.data + 3
    raw = conv.weight.detach().numpy().reshape(4, -1)
    wanted = (raw - raw.mean(1, keepdims=True)) / (raw.std(1, keepdims=True) * math.sqrt(45))
    kernel = torch.tensor(wanted).reshape(4, 5, 3, 3) * conv.gain.detach()[:, None, None, None]
    x = torch.randn(2, 5, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(conv(x), F.conv2d(x, kernel, conv.bias, padding=1), rtol=1e-12, atol=1e-12)
    assert torch.allclose(kernel.flatten(1).norm(dim=1), conv.gain.detach().abs())


def test_signals_keep_the_variance_that_blocks_expect() -> None:
    """Over many random networks; borders are padded with zeros, which costs a little."""
    means = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = build("nfresnet18", (3, 32, 32), 10)
        blocks = [m for m in model.modules() if isinstance(m, NormFreeBlock)]
        seen: list[float] = []
        for block in blocks:
            block.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(float(args[0].var())))
        with torch.no_grad():
            model(torch.randn(8, 3, 32, 32))
        means.append([v / block.std**2 for v, block in zip(seen, blocks, strict=True)])
    ratios = torch.tensor(means).mean(0)
    assert ((ratios > 0.6) & (ratios < 1.4)).all(), ratios


def test_expected_variances() -> None:
    model = on_meta("nfresnet18", (3, 32, 32), 10)
    variances = [m.std**2 for m in model.modules() if isinstance(m, NormFreeBlock)]
    wanted = [1.0, 1.04, 1.08, 1.04, 1.04 + 0.04, 1.04, 1.08, 1.04]
    assert variances == pytest.approx(wanted)


# initialisation --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "layer", "fan"),
    [
        ("resnet18", "body.stage2.block1.branch.conv2", 128 * 9),
        ("resnet18", "body.stage2.block1.branch.conv1", 128 * 9),  # fan-out
        ("wrn28-10", "body.stage1.block1.conv1", 32 * 9),
        ("densenet121", "body.block1.layer6.conv1", 64 + 5 * 32),  # fan-in
        ("unet", "down.1.conv1", 32 * 9),
        ("unet", "up.0.grow", 512),
    ],
)
def test_kernels_start_with_the_variance_of_he(name: str, layer: str, fan: int) -> None:
    torch.manual_seed(0)
    model = build(name, (3, 32, 32), 10, **({"width": 2} if name == "wrn28-10" else {}))
    weight = model.get_submodule(layer).weight
    assert float(weight.detach().std()) == pytest.approx(math.sqrt(2 / fan), rel=0.05)
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm | nn.BatchNorm2d)]
    assert norms and all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)


def test_a_flat_unet() -> None:
    model = build("unet", (3, 6, 4), 2, width=4, depth=1)
    assert model(torch.zeros(2, 3, 6, 4)).shape == (2, 2, 6, 4)
    shapes = [tuple(weight.shape) for weight in model.parameters() if weight.ndim == 4]
    down, bottom, up = [(4, 3, 3, 3), (4, 4, 3, 3)], [(8, 4, 3, 3), (8, 8, 3, 3)], [(4, 8, 3, 3), (4, 4, 3, 3)]
    assert shapes == [*down, *bottom, (8, 4, 2, 2), *up, (2, 4, 1, 1)]
