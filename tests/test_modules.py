"""Stand-ins against the modules they replace; what padded rows hold never matters."""

import pytest
import torch
from torch import Tensor, nn

from bespokefl.errors import InputError
from bespokefl.nn.stand_ins import KeyedDropout, MaskedBatchNorm, with_stand_ins

SHAPES = [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 5)), (nn.BatchNorm2d, (4, 3, 2, 5))]


def batch_norm(kind: type[nn.Module], **options: object) -> nn.Module:
    """In float64, with affine parameters and statistics that are not the initial ones."""
    torch.manual_seed(0)
    norm = kind(3, **options).double()
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(3) + 0.5)
    return norm


def padded(x: Tensor, rows: int, garbage: float) -> tuple[Tensor, Tensor]:
    """x with rows of garbage behind it, and the sample weights."""
    weights = torch.cat([torch.ones(len(x)), torch.zeros(rows)]).to(x.dtype)
    return torch.cat([x, torch.full((rows, *x.shape[1:]), garbage, dtype=x.dtype)]), weights


def with_gradients(norm: nn.Module, x: Tensor, rows: int) -> list[Tensor]:
    """The first rows' output, and the gradients of a scalar of it in the input and the parameters."""
    x = x.clone().requires_grad_()
    out = norm(x)[:rows]
    parameters = list(norm.parameters())
    scalar = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    d_x, *d_params = torch.autograd.grad(scalar, [x, *parameters])
    return [out.detach(), d_x[:rows], *d_params]


def assert_all_close(a: list[Tensor], b: list[Tensor]) -> None:
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-10, atol=1e-12)


# BatchNorm -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7}])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("by_hand", [False, True])  # as in a stack of clients on a GPU
def test_batch_norm_equals_torchs(
    kind: type[nn.Module],
    shape: tuple[int, ...],
    options: dict[str, object],
    train: bool,
    padding: int,
    by_hand: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_hand:
        monkeypatch.setattr("bespokefl.nn.stand_ins._torch_asks_for_a_layout", lambda x: True)
        monkeypatch.delattr(torch, "native_batch_norm")  # torch's own module has another way to it
    reference = batch_norm(kind, **options).train(train)
    mine = MaskedBatchNorm(batch_norm(kind, **options)).train(train)
    x = 3 * torch.randn(shape, dtype=torch.float64) + 1
    data = x
    if padding:
        data, mine.sample_weights = padded(x, padding, 1e6)
    for _ in range(2):  # the second time from statistics that have moved
        assert_all_close(with_gradients(mine, data, len(x)), with_gradients(reference, x, len(x)))
        own = mine.state_dict()
        for name, value in reference.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(own[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("garbage", [1e15, -7.0])
def test_garbage_in_padded_rows_changes_nothing(garbage: float) -> None:
    x = torch.randn(5, 3, 4, 4)
    outcomes = []
    for value in (0.0, garbage):
        norm = MaskedBatchNorm(nn.BatchNorm2d(3))
        data, norm.sample_weights = padded(x, 3, value)
        outcomes.append([*with_gradients(norm, data, 5), norm.running_mean, norm.running_var])
    for u, v in zip(*outcomes, strict=True):
        assert torch.equal(u, v)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_batch_of_one_gives_the_bias_and_finite_statistics(padding: int) -> None:
    norm = MaskedBatchNorm(batch_norm(nn.BatchNorm1d))
    assert norm.running_mean is not None and norm.running_var is not None and norm.bias is not None
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    x = torch.randn(1, 3, dtype=torch.float64)
    data = x
    if padding:
        data, norm.sample_weights = padded(x, padding, 99.0)
    torch.testing.assert_close(norm(data)[0], norm.bias.detach())
    torch.testing.assert_close(norm.running_mean, 0.9 * mean + 0.1 * x[0])
    torch.testing.assert_close(norm.running_var, 0.9 * variance)


def test_statistics_are_replaced_and_not_overwritten() -> None:
    norm = MaskedBatchNorm(nn.BatchNorm1d(3))
    before = norm.running_mean
    assert before is not None
    norm(torch.randn(4, 3) + 5)
    assert norm.running_mean is not before and (before == 0).all()


def test_a_cumulative_average_is_refused() -> None:
    with pytest.raises(InputError, match="momentum=None"):
        with_stand_ins(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))
    MaskedBatchNorm(nn.BatchNorm1d(3, momentum=None, track_running_stats=False))  # has no average


# dropout ---------------------------------------------------------------------------------------------
def dropped(
    x: Tensor, key: int = 1, *, p: float = 0.5, layer: int = 1, whole_channels: bool = False, train: bool = True
) -> Tensor:
    module = KeyedDropout(p, layer, whole_channels).train(train)
    module.key = torch.tensor(key)
    return module(x)


def test_the_mask_is_a_function_of_key_and_layer() -> None:
    x = torch.ones(20, 50)
    assert torch.equal(dropped(x, 7), dropped(x, 7))
    masks = [dropped(x, key, layer=layer) > 0 for key in (1, 2, 3) for layer in (1, 2)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6  # as independent ones


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_share_that_is_dropped_and_the_scale_of_the_rest(p: float) -> None:
    x = torch.rand(200, 100, dtype=torch.float64) + 1
    shares = []
    for key in range(5):
        out = dropped(x, 1000 * key, p=p)
        kept = out != 0
        torch.testing.assert_close(out[kept], x[kept] / (1 - p))
        shares.append((~kept).double().mean())
    assert abs(float(torch.stack(shares).mean()) - p) < 0.01
    per_column, per_row = (dropped(x, 3, p=p) == 0).double().mean(0), (dropped(x, 3, p=p) == 0).double().mean(1)
    assert (per_column - p).abs().max() < 0.2 and (per_row - p).abs().max() < 0.25  # no stripes


def test_rows_behind_the_samples_do_not_shift_their_masks() -> None:
    x = torch.randn(6, 3, 4)
    longer = torch.cat([x, torch.randn(5, 3, 4)])
    for whole in (False, True):
        assert torch.equal(dropped(longer, whole_channels=whole)[:6], dropped(x, whole_channels=whole))


def test_channel_dropout_drops_whole_channels() -> None:
    out = dropped(torch.ones(50, 40, 3, 3), p=0.3, whole_channels=True)
    per_channel = out.flatten(2)
    assert ((per_channel == per_channel[..., :1]).all(-1)).all()
    assert abs(float((per_channel[..., 0] == 0).float().mean()) - 0.3) < 0.03
    torch.testing.assert_close(out.max(), torch.tensor(1 / 0.7))


def test_evaluation_and_the_extreme_rates() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(dropped(x, train=False), x)
    assert torch.equal(dropped(x, p=0.0), x)
    assert torch.equal(dropped(x, p=1.0), nn.Dropout(1.0)(x))


def test_under_vmap_every_client_has_the_mask_of_its_own_key() -> None:
    x, keys = torch.randn(3, 6, 4), torch.tensor([5, 6, 5])

    def one(x: Tensor, key: Tensor) -> Tensor:
        module = KeyedDropout(0.5, 1, whole_channels=False)
        module.key = key
        return module(x)

    stacked = torch.func.vmap(one)(x, keys)
    for r in range(3):
        assert torch.equal(stacked[r], dropped(x[r], int(keys[r])))


def test_training_dropout_without_a_key_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside a Task"):
        KeyedDropout(0.5, 1, whole_channels=False)(torch.ones(2))


# replacement -----------------------------------------------------------------------------------------
def test_replaces_at_any_depth_and_keeps_names_and_values() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))
    module = nn.Sequential(inner, nn.ModuleList([nn.BatchNorm2d(2), nn.Dropout2d(0.4)]), nn.BatchNorm3d(1))
    before = {k: v.clone() for k, v in module.state_dict().items() if v.is_floating_point()}
    out = with_stand_ins(module)
    assert out is module
    kinds = [type(m) for m in out.modules()]
    assert kinds.count(MaskedBatchNorm) == 3 and kinds.count(KeyedDropout) == 2
    assert list(out.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in out.state_dict().items())
    first, second = [m for m in out.modules() if isinstance(m, KeyedDropout)]
    assert (first.p, first.whole_channels, second.p, second.whole_channels) == (0.2, False, 0.4, True)
    assert first.layer != second.layer


def test_a_module_that_is_itself_replaced() -> None:
    assert isinstance(with_stand_ins(nn.BatchNorm1d(3)), MaskedBatchNorm)
    assert isinstance(with_stand_ins(nn.Dropout(0.1)), KeyedDropout)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_that_cannot_be_keyed_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__}.*use nn\.Dropout"):
        with_stand_ins(nn.Sequential(nn.Linear(2, 2), kind(0.1)))


def test_instance_norm_with_running_statistics_is_refused() -> None:
    with pytest.raises(InputError, match="InstanceNorm1d with track_running_stats=True"):
        with_stand_ins(nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)))
