import numpy as np
import pytest
import torch

from bespokefl.data.normalisation import normalise
from bespokefl.errors import InputError

ROWS = np.arange(2500)


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3000, 3, 4, 5)).astype(np.uint8)


def test_unit_and_half_of_pixels(pixels):
    assert torch.equal(normalise(pixels, "unit", ROWS), torch.from_numpy((pixels / np.float32(255)).astype(np.float32)))
    half = normalise(pixels, "half", ROWS)
    np.testing.assert_allclose(half, (pixels / 255 - 0.5) / 0.5, atol=1e-6)
    assert half.dtype == torch.float32


def test_channel_uses_the_train_rows_only(pixels):
    pixels[2500:] = 0
    unit = pixels.astype(np.float64) / 255
    mean = unit[:2500].mean(axis=(0, 2, 3), keepdims=True)
    std = unit[:2500].std(axis=(0, 2, 3), keepdims=True)
    np.testing.assert_allclose(normalise(pixels, "channel", ROWS), (unit - mean) / std, atol=1e-5)


def test_tables_are_normalised_per_feature_even_with_large_means_and_constants():
    table = np.random.default_rng(0).normal(1e4, 1, (3000, 3)).astype(np.float32)
    table[:, 2] = 0.1
    out = normalise(table, "channel", ROWS)[ROWS].double()
    np.testing.assert_allclose(out.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(out[:, :2].std(0, unbiased=False), 1, atol=1e-3)
    assert (out[:, 2] == 0).all()


def test_unit_leaves_floating_data_alone_and_does_not_alias_them():
    table = np.full((4, 2), 7, np.float32)
    out = normalise(table, "unit", ROWS[:4])
    assert (out == 7).all()
    out.zero_()
    assert (table == 7).all()


def test_unknown_normalisation_lists_the_known(pixels):
    with pytest.raises(InputError, match=r"data\.normalize = 'chanel'.*Did you mean channel.*unit, half, channel"):
        normalise(pixels, "chanel", ROWS)
