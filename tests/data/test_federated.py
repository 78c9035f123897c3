import json
import time

import numpy as np
import pytest
import torch

from bespokefl.data import FederatedData
from bespokefl.errors import InputError


def client(n, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(dtype), rng.integers(0, 4, n)


def test_plain_pairs_are_split_and_keep_their_rows():
    pairs = [client(20, 0), client(40, 1)]
    data = FederatedData.from_arrays(pairs, test=0.25, val=0.1, seed=2)
    assert data.clients == 2 and data.input_shape == (3,) and data.x.dtype == torch.float64
    assert data.sizes("train").tolist() == [13, 26]
    assert data.sizes("val").tolist() == [2, 4]
    assert data.sizes("test").tolist() == [5, 10]
    for index, (x, y) in enumerate(pairs):
        rows = np.sort(np.concatenate([data.splits[split][index] for split in data.splits]))
        np.testing.assert_array_equal(data.x[rows], x)
        np.testing.assert_array_equal(data.y[rows], y)
    json.dumps(data.record)


def test_given_splits_are_kept_and_names_come_from_a_mapping():
    train, test, val = client(6, 0), client(3, 1), client(2, 2)
    plain = client(8, 3)
    data = FederatedData.from_arrays({"north": {"test": test, "train": train, "val": val}, "south": plain})
    assert data.client_names == ("north", "south")
    np.testing.assert_array_equal(data.x[data.splits["train"][0]], train[0])
    np.testing.assert_array_equal(data.y[data.splits["test"][0]], test[1])
    np.testing.assert_array_equal(data.x[data.splits["val"][0]], val[0])
    assert data.sizes("val").tolist() == [2, 0] and data.sizes("train").tolist() == [6, 6]


def test_counts_equal_a_plain_count():
    pairs = [client(30, seed) for seed in range(5)]
    data = FederatedData.from_arrays(pairs, classes=["a", "b", "c", "d", "never"])
    for split in data.splits:
        for index in range(5):
            labels = data.y[data.splits[split][index]].tolist()
            assert data.counts(split)[index].tolist() == [labels.count(k) for k in range(5)]
    assert data.classes[4] == "never"
    with pytest.raises(InputError, match=r"split = 'trian' is not known\. Did you mean train"):
        data.counts("trian")


def test_dtypes():
    x, y = client(8)
    for given, expected in ((np.float32, torch.float32), (np.float16, torch.float32), (np.int64, torch.int64)):
        assert FederatedData.from_arrays([(x.astype(given), y)]).x.dtype == expected
    tensors = (torch.from_numpy(x).bfloat16(), torch.from_numpy(y).to(torch.int32))
    data = FederatedData.from_arrays([tensors])
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    pixels = np.full((4, 1, 2, 2), 51, np.uint8)
    torch.testing.assert_close(FederatedData.from_arrays([(pixels, y[:4])]).x, torch.full((4, 1, 2, 2), 0.2))
    assert FederatedData.from_arrays([(x, y > 1)]).classes == ("0", "1")


def test_data_are_copied():
    x, y = client(8)
    data = FederatedData.from_arrays([(x, y)])
    before = data.x.clone()
    x[:] = 0
    assert torch.equal(data.x, before)


def test_regression_targets_stay_numbers():
    x, _ = client(8, dtype=np.float32)
    y = np.linspace(0, 1, 8)
    data = FederatedData.from_arrays([(x, y)])
    assert data.y.dtype == torch.float32 and data.classes == ()
    torch.testing.assert_close(data.y, torch.from_numpy(y).float())
    with pytest.raises(InputError, match="regression"):
        data.counts("train")
    with pytest.raises(InputError, match="classes is given, but y is floating"):
        FederatedData.from_arrays([(x, y)], classes=["a"])


X, Y = client(8)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "clients is empty"),
        ([(X, Y), (X[:, :2], Y)], r"same feature shape: client 0 has \(3,\), client 1 has \(2,\)"),
        ([(X, Y), (X.astype(np.float32), Y)], "same dtype of x: client 0 has float64, client 1 has float32"),
        ([(X, Y), (X, Y.astype(float))], "same kind of y: client 0 has labels, client 1 has numbers"),
        ([(X, Y), (X, Y[:7])], r"Client 1: x has 8 rows but y has shape \(7,\)"),
        ({"a": (X, Y), "b": (X[:0], Y[:0])}, "Client b has no samples"),
        ([(X, Y), (X[:1], Y[:1])], r"Client 1 has 1 sample\(s\) but needs at least 2"),
        ([(X[:, 0], Y)], r"Client 0: x has shape \(8,\)"),
        ([(X, Y[:, None])], r"integer labels y have shape \(8, 1\)"),
        ([(X, Y - 5)], "y holds the label -"),
        ([(X * np.nan, Y)], "Client 0, sample 0: x holds NaN"),
        ([(X, Y * np.inf)], "y holds NaN or infinity"),
        ([([[1.0, 2.0], [3.0]], [0, 1])], "Client 0: x is ragged"),
        ([(X.astype(str), Y)], "Client 0: x has dtype <U"),
        ([X], "expected a pair"),
        ([{"train": (X, Y)}], r"splits \['train'\]; allowed: 'train' and 'test'"),
        ([{"train": (X, Y), "test": (X[:0], Y[:0])}], "Client 0, split 'test' has no samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_wrong_arrays_are_explained(clients, message):
    with pytest.raises(InputError, match=message):
        FederatedData.from_arrays(clients)


def test_too_few_class_names():
    with pytest.raises(InputError, match="Client 0, sample 2: y holds the label 2, but classes has 2 names"):
        FederatedData.from_arrays([(X, np.arange(8) % 4)], classes=["a", "b"])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": (np.array([0]),)}, "it needs exactly train, val, test"),
        ({"train": (np.array([0]),), "val": (), "test": (np.array([1]),)}, r"splits\['val'\] has 0 clients"),
        ({split: (np.array([9]),) for split in ("train", "val", "test")}, "rows 9 to 9, but x and y have 4 rows"),
    ],
)
def test_inconsistent_splits_are_refused(splits, message):
    with pytest.raises(InputError, match=message):
        FederatedData(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), splits, ("0",), ("0",), {})


def test_ten_thousand_clients_take_seconds():
    x, y = np.zeros((20, 2), np.float32), np.arange(20) % 5
    start = time.process_time()
    data = FederatedData.from_arrays([(x, y)] * 10_000)
    assert data.counts("train").sum() == 150_000
    assert time.process_time() - start < 10
