"""A task's functions against plain autograd on the module itself."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespokefl.core import Batch, InputError, Task, cross_entropy
from bespokefl.core.losses import hit, squared_error

KEY = torch.tensor(3)


class WithRootParameter(nn.Module):
    """A parameter outside any layer, a head that is not the last child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x * self.scale)))


class Counting(nn.Module):
    """Writes to its buffers in place, as a user's module may."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("offset", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        return self.lin(x) + self.offset


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def mlp_with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def mlp_with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))


def one_layer() -> nn.Module:
    return nn.Linear(6, 3)


def vectors(n: int) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64)


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 5, 5, dtype=torch.float64)


def tokens(n: int) -> Tensor:
    return torch.randint(0, 9, (n, 5))


MODELS = [
    (mlp, vectors),
    (mlp_with_batch_norm, vectors),
    (mlp_with_layer_norm, vectors),
    (cnn, images),
    (words, tokens),
    (one_layer, vectors),
    (WithRootParameter, vectors),
]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batch_of(x: Tensor) -> Batch:
    return Batch(x, torch.arange(len(x)) % 3, None, KEY)


def padded(batch: Batch, rows: int) -> Batch:
    """The batch with other samples behind it that do not count."""
    more = batch.x.flip(0)[:rows] * 5 if batch.x.is_floating_point() else batch.x.flip(0)[:rows]
    weights = torch.cat([torch.ones(len(batch.x)), torch.zeros(rows)]).double()
    return Batch(torch.cat([batch.x, more]), torch.cat([batch.y, batch.y[:rows]]), weights, batch.key)


# gradients -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("make", "inputs"), MODELS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_grad_is_autograds(
    make: Callable[[], nn.Module], inputs: Callable[[int], Tensor], train: bool, padding: int
) -> None:
    plain = build(make).train(train)
    task = Task(build(make), dtype=torch.float64)
    batch = batch_of(inputs(7))
    x0 = {k: v.clone() for k, v in task.initial.items()}
    p = task.grad(task.initial, padded(batch, padding) if padding else batch, train=train)
    loss = F.cross_entropy(plain(batch.x), batch.y)
    loss.backward()
    torch.testing.assert_close(p.loss, loss.detach(), rtol=1e-10, atol=1e-12)
    assert list(p.grad) == [k for k, _ in plain.named_parameters()]
    for k, v in plain.named_parameters():
        torch.testing.assert_close(p.grad[k], v.grad, rtol=1e-9, atol=1e-11)
    buffers = {k: v for k, v in plain.named_buffers() if v.is_floating_point()}
    assert set(p.buffers) == set(buffers)
    for k, v in buffers.items():
        torch.testing.assert_close(p.buffers[k], v, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(v, x0[k]) for k, v in task.initial.items())  # nothing was written


def test_dropout_is_off_in_evaluation_and_keyed_in_training() -> None:
    net = build(lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)))
    task, batch = Task(net, dtype=torch.float64), batch_of(vectors(5))
    F.cross_entropy(net.eval()(batch.x), batch.y).backward()
    p = task.grad(task.initial, batch, train=False)
    torch.testing.assert_close(p.grad["0.weight"], net[0].weight.grad)
    first, again = (task.grad(task.initial, batch).grad["0.weight"] for _ in range(2))
    other = task.grad(task.initial, batch._replace(key=KEY + 1)).grad["0.weight"]
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first, p.grad["0.weight"])
    shorter = padded(batch, 3)
    torch.testing.assert_close(task.grad(task.initial, shorter).grad["0.weight"], first)


def test_grad_with_respect_to_some_parameters() -> None:
    task, batch = Task(build(mlp), dtype=torch.float64), batch_of(vectors(5))
    whole = task.grad(task.initial, batch)
    for names in (task.head, task.body, ["2.bias", "0.weight"]):
        some = task.grad(task.initial, batch, wrt=names)
        assert list(some.grad) == names and torch.equal(some.loss, whole.loss)
        for k in names:
            torch.testing.assert_close(some.grad[k], whole.grad[k], rtol=1e-14, atol=1e-15)


def test_gradients_are_taken_at_x_and_not_at_the_module() -> None:
    task, batch = Task(build(one_layer), dtype=torch.float64), batch_of(vectors(5))
    x = {k: torch.zeros_like(v) for k, v in task.initial.items()}
    p = task.grad(x, batch)
    torch.testing.assert_close(p.loss, torch.log(torch.tensor(3.0, dtype=torch.float64)))
    expected = (torch.full((5, 3), 1 / 3).double() - F.one_hot(batch.y, 3)).mean(0)
    torch.testing.assert_close(p.grad["bias"], expected)


def test_the_callers_module_is_never_touched() -> None:
    net = build(mlp_with_batch_norm)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    task = Task(net, dtype=torch.float64)
    x = {k: v - 0.1 * task.grad(task.initial, batch_of(vectors(4))).grad.get(k, 0) for k, v in task.initial.items()}
    task.apply(x, batch_of(vectors(4)), train=True)
    assert isinstance(net[1], nn.BatchNorm1d) and net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(v.grad is None for v in net.parameters())


def test_a_task_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[nn.Module] = []
    task = Task(build(mlp_with_batch_norm))
    monkeypatch.setattr(nn.Module, "to", lambda module, device: moved.append(module))
    assert task.to("cpu").to(torch.device("cpu")) is task
    assert len(moved) == 2  # in training and in evaluation mode
    task.to("meta")
    assert len(moved) == 4 and task.initial["0.weight"].device.type == "meta"


@pytest.mark.parametrize("train", [True, False])
def test_buffers_written_in_place_come_back_and_x_stays(train: bool) -> None:
    task, batch = Task(build(Counting), dtype=torch.float64), batch_of(vectors(4))
    assert task.buffer_names == ["total", "offset"]
    x = {k: v.clone() for k, v in task.initial.items()}
    for p in (task.grad(x, batch, train=train).buffers, task.apply(x, batch, train=train)[2]):
        torch.testing.assert_close(p["total"], batch.x.sum(0))
        assert (x["total"] == 0).all() and p["offset"] == 1


# parts of the model ----------------------------------------------------------------------------------
def test_layers_head_body_and_norms() -> None:
    task = Task(build(cnn))
    assert [(layer.name, layer.params) for layer in task.layers] == [
        ("0", ("0.weight", "0.bias")),
        ("1", ("1.weight", "1.bias")),
        ("3", ("3.weight", "3.bias")),
        ("5", ("5.weight", "5.bias")),
    ]
    assert task.head == ["5.weight", "5.bias"]
    assert task.body == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert set(task.norm_names) == {
        "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight", "3.bias",
    }  # fmt: skip
    assert task.buffer_names == ["1.running_mean", "1.running_var"]
    assert task.size == sum(v.numel() for v in build(cnn).parameters())
    assert task.has_convolutions and not Task(mlp()).has_convolutions
    assert list(task.params(task.initial)) == task.names
    assert all(v.dtype == torch.float32 for v in task.initial.values())


def test_a_module_named_head_is_the_head() -> None:
    task = Task(WithRootParameter())
    assert (task.head, task.body) == (["head.weight", "head.bias"], ["scale", "body.weight", "body.bias"])
    assert task.layers[0].params == ("scale",)


@pytest.mark.parametrize(("head", "names"), [("0", ["0.weight", "0.bias"]), ("body", ["body.weight", "body.bias"])])
def test_the_head_by_name(head: str, names: list[str]) -> None:
    assert Task(mlp() if head == "0" else WithRootParameter(), head=head).head == names


def test_a_prefix_of_a_name_is_not_the_name() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    assert Task(net, head="1").head == ["1.weight", "1.bias"]  # not the 10th


def test_a_model_of_one_layer_is_all_head() -> None:
    task = Task(one_layer())
    assert (task.head, task.body, task.names) == (["weight", "bias"], [], ["weight", "bias"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": mlp(), "head": "nothing"}, r"model\.head = 'nothing'.*layers: 0, 2"),
        ({"module": mlp(), "head": "1"}, r"model\.head = '1'"),
        ({"module": nn.ReLU()}, "ReLU has no parameters"),
        ({"module": mlp(), "loss": "hinge"}, "loss = 'hinge'.*cross_entropy, squared_error, dice"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Task(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [True, False])
def test_h_is_the_input_of_the_head(train: bool) -> None:
    net, task, batch = build(mlp).train(train), Task(build(mlp), dtype=torch.float64), batch_of(vectors(4))
    expected = net[1](net[0](batch.x)).detach()
    assert torch.equal(task.features(task.initial, batch, train=train), expected)
    assert torch.equal(task.grad(task.initial, batch, train=train).h, expected)
    whole = Task(build(one_layer), dtype=torch.float64)
    assert torch.equal(whole.features(whole.initial, batch), batch.x)
    early = Task(build(mlp), dtype=torch.float64, head="0")
    assert torch.equal(early.features(early.initial, batch), batch.x)


@pytest.mark.parametrize("train", [True, False])
def test_the_input_of_another_module(train: bool) -> None:
    net, task, batch = build(cnn).train(train), Task(build(cnn), dtype=torch.float64), batch_of(images(4))
    expected = net[1](net[0](batch.x)).detach()
    for name, h in (("2", expected), ("3", expected.relu()), ("0", batch.x), ("", batch.x)):
        torch.testing.assert_close(task.apply(task.initial, batch, train=train, at=name)[1], h)
        torch.testing.assert_close(task.grad(task.initial, batch, train=train, at=name).h, h)
    flat = task.apply(task.initial, batch, train=train)[1]
    assert flat.shape == (4, 36) and torch.equal(flat, task.features(task.initial, batch, train=train))


def test_outputs_of_a_gradient_pass() -> None:
    task, batch = Task(build(mlp_with_batch_norm), dtype=torch.float64), batch_of(vectors(5))
    for train in (True, False):
        out = task.apply(task.initial, batch, train=train)[0]
        assert torch.equal(task.grad(task.initial, batch, train=train).out, out)


def test_an_objective_of_model_outputs_and_features() -> None:
    """Over tensors that are not the model's, too: they are differentiated, and the model never sees them."""
    net, task, batch = build(mlp), Task(build(mlp), dtype=torch.float64), batch_of(vectors(5))
    extra = torch.randn(5, dtype=torch.float64)
    x = {**task.initial, "mine.weight": extra}

    def objective(x: dict[str, Tensor], out: Tensor, h: Tensor) -> Tensor:
        return batch.mean(out.square().sum(1) + h @ x["mine.weight"])

    p = task.grad(x, batch, [*task.names, "mine.weight"], objective=objective)
    h = net[1](net[0](batch.x))
    loss = net[2](h).square().sum(1).mean() + (h @ extra).mean()
    loss.backward()
    torch.testing.assert_close(p.loss, loss.detach())
    assert list(p.grad) == [*task.names, "mine.weight"]
    torch.testing.assert_close(p.grad["mine.weight"], h.detach().mean(0))
    for k, v in net.named_parameters():
        torch.testing.assert_close(p.grad[k], v.grad)
    assert torch.equal(task.losses(x, batch), task.losses(task.initial, batch))


def test_the_head_alone() -> None:
    batch = batch_of(vectors(5))
    task = Task(build(mlp), dtype=torch.float64)
    x = {k: 2 * v for k, v in task.initial.items()}
    out, h, _ = task.apply(x, batch)
    assert torch.equal(task.head_outputs(x, h), out)
    assert torch.equal(task.features(x, batch), h)  # a call of the head alone leaves nothing behind
    whole = Task(build(one_layer), dtype=torch.float64)
    assert torch.equal(whole.head_outputs(whole.initial, batch.x), whole.apply(whole.initial, batch)[0])
    deep = Task(build(lambda: nn.Sequential(nn.Linear(6, 5), mlp_with_dropout())), dtype=torch.float64, head="1")
    out, h, _ = deep.apply(deep.initial, batch)
    assert torch.equal(deep.head_outputs(deep.initial, h), out)
    coarse = Task(build(mlp), bf16=True)
    assert coarse.head_outputs(coarse.initial, h.float()).dtype == torch.float32


def mlp_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def test_sizes_of_the_head() -> None:
    assert Task(mlp()).head_sizes("x") == (5, 3)
    assert Task(one_layer()).head_sizes("x") == (6, 3)
    assert Task(nn.Sequential(nn.Linear(6, 5), mlp_with_dropout()), head="1").head_sizes("x") == (5, 3)
    with pytest.raises(InputError, match=r"algorithm\.name = 'x' .*head 'conv' has no linear layer"):
        Task(nn.Sequential(OrderedDict(conv=nn.Conv2d(2, 3, 5), flat=nn.Flatten()))).head_sizes("x")
    with pytest.raises(InputError, match="head '2' does not predict classes"):
        Task(mlp(), "squared_error").head_sizes("x")


def test_names_from_a_layer_on() -> None:
    task = Task(cnn())
    assert [layer.kind for layer in task.layers] == ["convolution", "norm", "norm", "linear"]
    assert task.names_from("1") == [
        "1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias", "1.running_mean", "1.running_var",
    ]  # fmt: skip
    assert task.names_from("2") == ["3.weight", "3.bias", "5.weight", "5.bias"]
    assert task.names_from("") == list(task.initial)
    assert Task(WithRootParameter()).names_from("head") == [
        "head.weight",
        "head.bias",
    ]  # though the body is listed last
    nested = Task(nn.Sequential(nn.Linear(6, 5), mlp_with_dropout()), head="1")
    assert nested.names_from("1") == [k for k in nested.initial if k.startswith("1.")]


# types and losses ------------------------------------------------------------------------------------
def test_bfloat16_computes_coarsely_and_hands_out_the_tasks_type() -> None:
    batch = batch_of(vectors(6).float())
    exact, coarse = Task(build(mlp)), Task(build(mlp), bf16=True)
    p, q = exact.grad(exact.initial, batch), coarse.grad(coarse.initial, batch)
    out, h, _ = coarse.apply(coarse.initial, batch)
    assert {v.dtype for v in (out, h, q.loss, q.h, *q.grad.values(), *coarse.initial.values())} == {torch.float32}
    assert torch.equal(h, h.bfloat16().float()) and torch.equal(out, out.bfloat16().float())
    for k in p.grad:
        torch.testing.assert_close(q.grad[k], p.grad[k], rtol=0.05, atol=0.01)
    assert not torch.equal(q.grad["0.weight"], p.grad["0.weight"])


@pytest.mark.parametrize("train", [True, False])
def test_bfloat16_batch_norm_agrees_with_float32(train: bool) -> None:
    batch = batch_of(images(6).float())
    exact, coarse = Task(build(cnn)), Task(build(cnn), bf16=True)
    p = exact.grad(exact.initial, batch, train=train)
    for some in (batch, padded(batch, 2)._replace(weights=padded(batch, 2).weights.float())):
        q = coarse.grad(coarse.initial, some._replace(x=some.x.float()), train=train)
        for k in p.buffers:
            torch.testing.assert_close(q.buffers[k], p.buffers[k], rtol=0.01, atol=0.01)
        for k in p.grad:
            torch.testing.assert_close(q.grad[k], p.grad[k], rtol=0.1, atol=0.03)


def test_cross_entropy_is_torchs() -> None:
    logits, y = 30 * torch.randn(20, 5, dtype=torch.float64), torch.randint(0, 5, (20,))
    torch.testing.assert_close(cross_entropy(logits, y), F.cross_entropy(logits, y, reduction="none"))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (4, 2, 3)])
def test_squared_error_is_half_the_squared_distance(shape: tuple[int, ...]) -> None:
    outputs, y = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(squared_error(outputs, y), 0.5 * (outputs - y).view(4, -1).norm(dim=1) ** 2)
    if shape == (4, 1):
        torch.testing.assert_close(squared_error(outputs, y[:, 0]), 0.5 * (outputs[:, 0] - y[:, 0]) ** 2)


def test_regression() -> None:
    net = build(lambda: nn.Linear(6, 1))
    task = Task(net, "squared_error", dtype=torch.float64)
    x, y = vectors(5), torch.randn(5, dtype=torch.float64)
    residual = (net(x)[:, 0] - y).detach()
    p = task.grad(task.initial, Batch(x, y, None, KEY))
    torch.testing.assert_close(p.loss, (residual**2).mean() / 2)
    torch.testing.assert_close(p.grad["weight"][0], x.T @ residual / 5)
    assert not task.classifies


def test_a_loss_of_the_users_own() -> None:
    task = Task(build(one_layer), lambda out, y: out[:, 0] * y, dtype=torch.float64)
    batch = batch_of(vectors(5))
    expected = build(one_layer)(batch.x)[:, 0].detach() * batch.y
    torch.testing.assert_close(task.losses(task.initial, batch), expected)
    torch.testing.assert_close(task.loss(task.initial, batch), expected.mean())
    assert not task.classifies


def test_hits_go_to_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert hit(logits, torch.tensor([0, 1, 2])).tolist() == [1, 1, 0]


def test_sums_and_means_leave_padding_out() -> None:
    values = torch.randn(5, 2, dtype=torch.float64)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    batch = Batch(torch.zeros(5, 1, dtype=torch.float64), torch.zeros(5), weights, KEY)
    assert batch.n == 3
    torch.testing.assert_close(batch.sum(values), values[:3].sum(0))
    torch.testing.assert_close(batch.mean(values), values[:3].mean(0))
    nothing = batch._replace(weights=torch.zeros(5, dtype=torch.float64))
    assert (nothing.mean(values) == 0).all()
    others = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(batch.outer(values, others), values[:3].T @ others[:3])
    full = batch._replace(weights=None)
    assert full.n == 5
    torch.testing.assert_close(full.outer(values, others), torch.einsum("sa,sb->ab", values, others))
    torch.testing.assert_close(full.mean(values), values.mean(0))


def test_one_hot_labels() -> None:
    batch = Batch(torch.zeros(3, 1, dtype=torch.float64), torch.tensor([2, 0, 7]), None, KEY)
    hot = batch.one_hot(3)
    assert hot.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]] and hot.dtype == torch.float64


def test_stuck_in_names_the_module_that_raises() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    task = Task(nn.Sequential(nn.Linear(6, 3), Broken()))
    batch = batch_of(vectors(2).float())
    assert task.stuck_in(lambda: task.apply(task.initial, batch)) == "Broken '1'"
    assert task.stuck_in(lambda: 1 / 0) == "a function outside the model"  # type: ignore[arg-type,return-value]
