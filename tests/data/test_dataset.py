from dataclasses import replace

import numpy as np
import pytest

from bespokefl.errors import InputError


@pytest.fixture
def toy(make_dataset):
    return make_dataset(
        [0, 1, 2, 0],
        3,
        is_test=np.array([False, True, False, True]),
        domain=np.array([0, 0, 1, 1]),
        domains=("a", "b"),
    )


def test_take_keeps_all_fields_aligned(toy):
    part = toy.take(np.array([3, 1]))
    assert part.x[:, 0].tolist() == [3, 1]
    assert part.y.tolist() == [0, 1]
    assert part.is_test.tolist() == [True, True]
    assert part.domain.tolist() == [1, 0]


def test_sample_is_keyed_distinct_and_ordered(make_dataset):
    data = make_dataset(np.arange(1000) % 7, 7)
    drawn = data.sample(300, seed=5).x[:, 0]
    assert len(drawn) == 300 and (np.diff(drawn) > 0).all()
    assert (data.sample(300, seed=5).x[:, 0] == drawn).all()
    assert (data.sample(300, seed=6).x[:, 0] != drawn).any()
    assert data.sample(1000, seed=5) is data
    with pytest.raises(InputError, match=r"data\.max_samples = 0"):
        data.sample(0, seed=5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("y", np.array([0, 1, 2, 3]), "y holds values from 0 to 3; allowed: 0 to 2"),
        ("y", np.array([0, 1, 2, -1]), "y holds values from -1 to 2"),
        ("y", np.array([0, 1, 2]), r"y has shape \(3,\)"),
        ("y", np.array([0.0, 1, 2, 0]), "dtype float64"),
        ("x", np.zeros((4, 1)), "x has dtype float64"),
        ("x", np.zeros(4, np.float32), r"x has shape \(4,\)"),
        ("x", np.zeros((4, 0), np.float32), r"x has shape \(4, 0\)"),
        ("x", np.array([[1], [2], [np.nan], [4]], np.float32), "NaN or infinity .first in row 2"),
        ("is_test", np.array([True]), "is_test has shape"),
        ("domain", np.array([0, 0, 1, 2]), "domain holds values from 0 to 2; allowed: 0 to 1"),
    ],
)
def test_wrong_fields_are_named(toy, field, value, message):
    with pytest.raises(InputError, match=message):
        replace(toy, **{field: value})
