"""What must hold of clients' rows is refused with client and place, however the data were made."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms import build_algorithm
from bespokefl.data import FederatedData
from bespokefl.errors import InputError
from bespokefl.federation import Federation


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def federated(train: list, val: list, test: list, x: torch.Tensor | None = None, y: torch.Tensor | None = None):
    x = torch.arange(24.0).reshape(12, 2) if x is None else x
    y = torch.arange(12) % 2 if y is None else y
    names = ("north", "south")
    splits = {"train": tuple(train), "val": tuple(val), "test": tuple(test)}
    return FederatedData(x, y, splits, ("0", "1"), names, {})


NONE = [rows(), rows()]


@pytest.mark.parametrize(
    ("train", "val", "test", "message"),
    [
        ([rows(0, 1), rows(4, 5, 4)], NONE, [rows(2), rows(6)], "Client south has the row 4 twice in train"),
        ([rows(0, 1), rows(4, 5)], NONE, [rows(2), rows(5)], "Client south has the row 5 in train and in test"),
        ([rows(0, 1), rows(4)], [rows(1), rows()], [rows(2), rows(5)], "north has the row 1 in train and in val"),
        ([rows(0, 1), rows(4)], NONE, [rows(2, 2), rows(5)], "Client north has the row 2 twice in test"),
        ([rows(0, 1), rows(12)], NONE, [rows(2), rows(5)], "splits names rows 0 to 12, but x and y have 12 rows"),
        ([rows(0, 1), rows(-1)], NONE, [rows(2), rows(5)], "splits names rows -1 to 5"),
    ],
)
def test_a_client_has_each_row_once(train: list, val: list, test: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        federated(train, val, test)


@pytest.mark.parametrize("wrong", [np.array([4.2, 5.0]), np.array([True, False])])
def test_rows_are_whole_numbers(wrong: np.ndarray) -> None:
    """A mask would be read as the rows 0 and 1."""
    with pytest.raises(
        InputError, match=rf"splits\['train'\] of client south has the dtype {wrong.dtype}.*row numbers"
    ):
        federated([rows(0, 1), wrong], NONE, [rows(2), rows(6)])


def test_clients_may_share_rows_and_validate_on_what_they_are_tested_on() -> None:
    data = federated([rows(0, 1), rows(1, 2)], [rows(2), rows(0)], [rows(2), rows(0)])
    assert data.sizes("train").tolist() == [2, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(bad: float) -> None:
    parts = ([rows(0, 1), rows(4, 5, 7)], NONE, [rows(2), rows(6)])
    x, y = torch.zeros(12, 2), torch.zeros(12)
    x[7, 1] = y[6] = bad
    with pytest.raises(InputError, match=r"Client south, split 'train', sample 2 \(row 7\): x holds NaN or infinity"):
        federated(*parts, x=x)
    good = FederatedData(torch.zeros(12, 2), torch.zeros(12), federated(*parts).splits, (), ("north", "south"), {})
    with pytest.raises(InputError, match=r"Client south, split 'test', sample 0 \(row 6\): y holds NaN or infinity"):
        replace(good, y=y)
    with pytest.raises(InputError, match="row 7, which no client has"):
        federated([rows(0), rows(1)], NONE, [rows(2), rows(3)], x=x)


@pytest.mark.parametrize("label", [2, -1, -100])
def test_labels_that_are_no_classes(label: int) -> None:
    y = torch.zeros(12, dtype=torch.int64)
    y[5] = label
    with pytest.raises(InputError, match=rf"south, split 'train', sample 1 \(row 5\): y holds the label {label}"):
        federated([rows(0), rows(4, 5)], NONE, [rows(2), rows(6)], y=y)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_without_train_samples(engine: str) -> None:
    data = federated([rows(0), rows()], NONE, [rows(2), rows(6)])
    with pytest.raises(InputError, match=r"1 of 2 clients have no samples to train on: south \(number 1\)"):
        Federation(nn.Linear(2, 2), data, build_algorithm("fedavg", {}, {}), engine=engine)


def test_arrays_name_client_and_sample() -> None:
    x, y = np.zeros((6, 2)), np.arange(6) % 2
    broken = x.copy()
    broken[4, 1] = np.nan
    with pytest.raises(InputError, match="Client b, split 'test', sample 4: x holds NaN or infinity"):
        FederatedData.from_arrays({"a": (x, y), "b": {"train": (x, y), "test": (broken, y)}})
    for label in (-3, 10**12):
        wrong = np.where(np.arange(6) == 3, label, y)
        with pytest.raises(InputError, match=f"Client b, sample 3: y holds the label {label}"):
            FederatedData.from_arrays({"a": (x, y), "b": (x, wrong)})
    with pytest.raises(InputError, match="Client b, sample 3: y holds the label 2, but classes has 2"):
        FederatedData.from_arrays({"a": (x, y), "b": (x, np.where(np.arange(6) == 3, 2, y))}, classes=["no", "yes"])
