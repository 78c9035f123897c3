from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bespokefl.models import MODELS, build


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "by_layer"),
    [
        ("linear", (1, 8, 8), {"head": 650}),
        ("mlp", (1, 28, 28), {"body.fc1": 157000, "body.fc2": 40200, "head": 2010}),
        ("fedavg-cnn", (3, 32, 32), {"body.conv1": 2432, "body.conv2": 51264, "body.fc1": 819712, "head": 5130}),
        ("fedavg-cnn", (1, 28, 28), {"body.conv1": 832, "body.conv2": 51264, "body.fc1": 524800, "head": 5130}),
        (
            "fedpg-cnn",
            (3, 32, 32),
            {"body.conv1": 4864, "body.conv2": 102464, "body.fc1": 614784, "body.fc2": 73920, "head": 1930},
        ),
        (
            "lenet5",
            (3, 32, 32),
            {"body.conv1": 456, "body.conv2": 2416, "body.fc1": 48120, "body.fc2": 10164, "head": 850},
        ),
        (
            "digit-model",
            (3, 28, 28),
            {
                "body.conv1": 4864,
                "body.bn1": 128,
                "body.conv2": 102464,
                "body.bn2": 128,
                "body.conv3": 204928,
                "body.bn3": 256,
                "body.fc1": 12847104,
                "body.bn4": 4096,
                "body.fc2": 1049088,
                "body.bn5": 1024,
                "head": 5130,
            },
        ),
    ],
)
def test_layers_and_their_parameter_counts(name: str, shape: tuple[int, ...], by_layer: dict[str, int]) -> None:
    with torch.device("meta"):
        model = build(name, shape, 10)
    leaves = {k: count(m) for k, m in model.named_modules() if list(m.parameters(recurse=False))}
    assert leaves == by_layer
    assert list(leaves) == list(by_layer)  # in the order of the forward pass


def test_published_total_of_fedavg_cnn() -> None:
    assert count(build("fedavg-cnn", (3, 32, 32), 10)) == 878_538


@pytest.mark.parametrize(
    ("name", "features"),
    [("linear", 3072), ("mlp", 200), ("fedavg-cnn", 512), ("fedpg-cnn", 192), ("lenet5", 84), ("digit-model", 512)],
)
def test_head_is_linear_on_the_features(name: str, features: int) -> None:
    model = build(name, (3, 32, 32), 7)
    assert isinstance(model.head, nn.Linear)
    assert (model.head.in_features, model.head.out_features) == (features, 7)
    x = torch.randn(4, 3, 32, 32)
    model.eval()
    assert model.body(x).shape == (4, features)
    assert model(x).shape == (4, 7)
    assert torch.equal(model(x), model.head(model.body(x)))


@pytest.mark.parametrize("name", ["fedavg-cnn", "fedpg-cnn", "lenet5", "digit-model", "pfedhn-target"])
def test_smallest_images_and_oblong_ones(name: str) -> None:
    side = MODELS[name].smallest_side
    assert side is not None
    for shape in [(2, side, side), (1, side, side + 5), (4, side + 3, side)]:
        logits = build(name, shape, 3).eval()(torch.randn(2, *shape))
        assert logits.shape == (2, 3) and torch.isfinite(logits).all()
    with torch.no_grad():
        spatial = [m for m in build(name, (1, side, side), 3).body if isinstance(m, nn.Conv2d | nn.MaxPool2d)]
        with pytest.raises(RuntimeError, match="small"):  # the declared minimum is the real one
            nn.Sequential(*spatial)(torch.randn(1, 1, side - 1, side - 1))


def textbook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The papers' order, convolution, (BatchNorm,) ReLU, max-pooling, with the same weights."""
    layers = list(model.body)
    for first, second in pairwise(range(len(layers))):
        if isinstance(layers[first], nn.MaxPool2d) and isinstance(layers[second], nn.ReLU):
            layers[first], layers[second] = layers[second], layers[first]
    assert not any(isinstance(a, nn.MaxPool2d) and isinstance(b, nn.ReLU) for a, b in pairwise(layers))
    return model.head(nn.Sequential(*layers)(x))


@pytest.mark.parametrize("name", ["fedavg-cnn", "fedpg-cnn", "lenet5", "digit-model"])
def test_pooling_before_relu_is_the_textbook_network(name: str) -> None:
    torch.manual_seed(3)
    model = build(name, (2, 17, 18), 5).double()
    x = torch.randn(6, 2, 17, 18, dtype=torch.float64, requires_grad=True)
    x.data[:2] = -1.0  # constant images: every pooling window is a tie
    y = torch.arange(6) % 5
    wrt = [x, *model.parameters()]

    def loss_and_grads(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return logits, *torch.autograd.grad(F.cross_entropy(logits, y), wrt)

    for ours, theirs in zip(loss_and_grads(model(x)), loss_and_grads(textbook(model, x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_fedavg_cnn_computes_what_the_paper_says() -> None:
    torch.manual_seed(0)
    model = build("fedavg-cnn", (3, 32, 32), 10)
    p = dict(model.named_parameters())
    x = torch.randn(2, 3, 32, 32)
    h = F.max_pool2d(F.relu(F.conv2d(x, p["body.conv1.weight"], p["body.conv1.bias"])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, p["body.conv2.weight"], p["body.conv2.bias"])), 2).flatten(1)
    assert h.shape == (2, 1600)
    h = F.relu(F.linear(h, p["body.fc1.weight"], p["body.fc1.bias"]))
    torch.testing.assert_close(model(x), F.linear(h, p["head.weight"], p["head.bias"]))


def test_digit_model_normalises_after_every_layer() -> None:
    model = build("digit-model", (3, 28, 28), 10)
    kinds = [type(m).__name__ for m in model.body]
    block = ["Conv2d", "BatchNorm2d"]
    pooled = [*block, "MaxPool2d", "ReLU"]
    dense = ["Linear", "BatchNorm1d", "ReLU"]
    assert kinds == [*pooled, *pooled, *block, "ReLU", "Flatten", *dense, *dense]
    assert model.body.fc1.in_features == 6272


def test_fedpg_dropout_is_off_unless_asked_for() -> None:
    plain = build("fedpg-cnn", (3, 32, 32), 10)
    dropping = build("fedpg-cnn", (3, 32, 32), 10, dropout=[0.2, 0.5])
    assert not any(isinstance(m, nn.Dropout) for m in plain.modules())
    assert [(k, m.p) for k, m in dropping.named_modules() if isinstance(m, nn.Dropout)] == [
        ("body.drop1", 0.2),
        ("body.drop2", 0.5),
    ]
    assert list(plain.state_dict()) == list(dropping.state_dict())  # the same tree either way


def test_the_callers_seed_decides_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build("lenet5", (1, 28, 28), 10).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
