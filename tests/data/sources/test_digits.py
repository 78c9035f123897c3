"""The tasks that can be made of scikit-learn's digits."""

import numpy as np
import pytest
from scipy.ndimage import uniform_filter
from sklearn.datasets import load_digits

from bespokefl.data.sources import load_dataset
from bespokefl.data.sources.digits import STYLES
from bespokefl.errors import InputError


def test_domains_show_the_same_digits_in_other_styles() -> None:
    plain, styled = load_dataset("digits"), load_dataset("digits", domains=6)
    assert styled.domains == STYLES and (styled.y == plain.y).all()
    sizes = np.bincount(styled.domain)
    assert sizes.sum() == 1797 and sizes.max() - sizes.min() <= 1
    x = load_digits().images / 16
    expected = {
        "plain": x,
        "inverted": 1 - x,
        "turned": np.rot90(x, axes=(1, 2)),
        "blurred": uniform_filter(x, (0, 3, 3), mode="constant"),
        "faint": 0.3 * x,
    }
    for number, style in enumerate(STYLES):
        rows = styled.domain == number
        if style == "noisy":
            assert 0.1 < np.abs(styled.x[rows, 0] - x[rows]).mean() < 0.3 and styled.x[rows].max() <= 1
        else:
            np.testing.assert_allclose(styled.x[rows, 0], expected[style][rows], atol=1e-6)


def test_parity_has_two_classes() -> None:
    data = load_dataset("digits", parity=True)
    assert data.classes == ("even", "odd") and (data.y == load_digits().target % 2).all()


def test_too_many_domains() -> None:
    with pytest.raises(InputError, match=r"data\.domains = 7"):
        load_dataset("digits", domains=7)
