import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bespokefl.data.splits import check_fractions, split_client, split_clients, split_sizes
from bespokefl.errors import InputError


@given(st.integers(3, 10_000), st.floats(0.01, 0.6), st.floats(0, 0.39))
def test_sizes_follow_the_fractions_and_leave_nothing_empty(n, test, val):
    n_train, n_val, n_test = split_sizes(n, test, val)
    assert n_train + n_val + n_test == n
    assert n_train >= 1 and n_test >= 1 and (n_val >= 1) == (val > 0)
    assert abs(n_train - (1 - test - val) * n) <= 2
    assert abs(n_val - val * n) <= 1


@pytest.mark.parametrize(
    ("n", "test", "val", "sizes"),
    [(100, 0.25, 0, (75, 0, 25)), (10, 0.2, 0.2, (6, 2, 2)), (600, 1 / 6, 0, (500, 0, 100)), (2, 0.01, 0, (1, 0, 1))],
)
def test_sizes_in_round_numbers(n, test, val, sizes):
    assert split_sizes(n, test, val) == sizes


def test_splits_are_disjoint_complete_keyed_by_client_and_seed():
    rows = [np.arange(50), np.arange(50, 100)]
    splits = split_clients(rows, ["0", "1"], 0.2, 0.2, seed=3)
    for client, own in enumerate(rows):
        parts = [splits[split][client] for split in ("train", "val", "test")]
        assert sorted(np.concatenate(parts)) == own.tolist()
    alone = split_client(rows[1], 1, "1", 0.2, 0.2, seed=3)
    assert all((splits[split][1] == part).all() for split, part in zip(("train", "val", "test"), alone, strict=True))
    assert (splits["test"][0] != splits["test"][1] - 50).any()
    assert (split_client(rows[1], 1, "1", 0.2, 0.2, seed=4)[2] != alone[2]).any()


def test_stratified_splits_keep_every_class_in_proportion():
    labels = np.repeat([0, 1, 2], [40, 8, 400])
    labels = np.random.default_rng(0).permutation(labels)
    train, val, test = split_client(np.arange(448), 0, "0", 0.25, 0.25, 0, labels)
    assert np.bincount(labels[test]).tolist() == [10, 2, 100]
    assert np.bincount(labels[val]).tolist() == [10, 2, 100]
    assert np.bincount(labels[train]).tolist() == [20, 4, 200]


def test_too_few_samples_and_wrong_fractions_are_named():
    with pytest.raises(InputError, match=r"Client north has 1 sample.*at least 2"):
        split_clients([np.arange(5), np.arange(1)], ["south", "north"], 0.25, 0, 0)
    with pytest.raises(InputError, match="at least 3"):
        split_clients([np.arange(2)], ["0"], 0.25, 0.1, 0)
    for test, val, key in ((0, 0, "test"), (1.0, 0, "test"), (0.5, 0.5, "val"), (0.2, -0.1, "val")):
        with pytest.raises(InputError, match=rf"data\.{key} = "):
            check_fractions(test, val)
