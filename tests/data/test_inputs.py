"""What an input is: images, numbers, tokens, from arrays and files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms import build_algorithm
from bespokefl.data import Dataset, FederatedData, federate, load
from bespokefl.errors import InputError
from bespokefl.federation import Federation

Y = np.arange(12) % 2
WHOLE = np.arange(36).reshape(12, 3) % 7


def x_of(x: Any, inputs: Any = None) -> torch.Tensor:
    return FederatedData.from_arrays([(x, Y)], inputs=inputs).x


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.int64, np.uint16])
def test_whole_numbers_are_what_is_said(dtype: Any) -> None:
    x = WHOLE.astype(dtype)
    tokens, numbers = x_of(x, "tokens"), x_of(x, "numbers")
    assert tokens.dtype == torch.int64 and tokens.tolist() == WHOLE.tolist()
    assert numbers.dtype == torch.float32 and numbers.tolist() == WHOLE.tolist()
    assert x_of(x).dtype == torch.int64  # nothing said: the model decides
    if dtype is np.uint8:
        torch.testing.assert_close(x_of(x, "image"), numbers / 255)
    else:
        with pytest.raises(InputError, match=f"has dtype {x.dtype}, but inputs = 'image'"):
            x_of(x, "image")


def test_pixels_and_truth_values() -> None:
    pixels = np.full((12, 1, 2, 2), 51, np.uint8)
    torch.testing.assert_close(x_of(pixels), torch.full((12, 1, 2, 2), 0.2))
    assert x_of(pixels, "numbers").unique().tolist() == [51] and x_of(pixels, "tokens").dtype == torch.int64
    assert x_of(WHOLE > 3).unique().tolist() == [0, 1] and x_of(WHOLE > 3).dtype == torch.float32
    assert x_of(WHOLE * 1.0, "image").dtype == torch.float64


@pytest.mark.parametrize(
    ("x", "inputs", "message"),
    [
        (WHOLE * 1.0, "tokens", "dtype float64, but inputs = 'tokens'"),
        (WHOLE > 3, "tokens", "dtype bool, but inputs = 'tokens'"),
        (WHOLE.astype(complex), None, "x has dtype complex128"),
        (WHOLE.astype(object), None, "x has dtype object"),
        (WHOLE.astype(str), "tokens", "x has dtype <U"),
        (WHOLE.astype("datetime64[s]"), None, "x has dtype datetime64"),
        (WHOLE.astype(np.uint64) + np.uint64(2**63), "tokens", "x holds 9223372036854775814"),
        (WHOLE, "token", r"inputs = 'token' is not known\. Did you mean tokens"),
        (WHOLE[:, :0], None, r"x has shape \(12, 0\)"),
    ],
)
def test_what_fits_nothing_is_refused(x: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        x_of(x, inputs)


def test_tensors_of_other_types_are_refused() -> None:
    splits = {"train": (np.arange(6),), "val": (np.arange(0),), "test": (np.arange(6, 12),)}
    y = torch.from_numpy(Y)
    for x in (torch.ones(12, 2, dtype=torch.uint8), torch.ones(12, 2, dtype=torch.complex64)):
        with pytest.raises(InputError, match="it is floating, or int64 for tokens"):
            FederatedData(x, y, splits, ("0", "1"), ("0",), {})
    with pytest.raises(InputError, match="but inputs = 'numbers'; tokens alone are int64"):
        FederatedData(torch.ones(12, 2, dtype=torch.int64), y, splits, ("0", "1"), ("0",), {}, inputs="numbers")


def federated(module: nn.Module, x: Any, inputs: Any = None) -> Federation:
    data = FederatedData.from_arrays({"north": (x, Y), "south": (x, Y)}, inputs=inputs)
    return Federation(module, data, build_algorithm("fedavg", {"batch_size": 4}, {}), engine="sequential")


def words(rows: int = 7) -> nn.Module:
    return nn.Sequential(nn.Embedding(rows, 4), nn.Flatten(), nn.Linear(12, 2))


def test_an_embedding_says_that_whole_numbers_are_tokens() -> None:
    federated(words(), WHOLE).round()
    federated(words(), WHOLE.astype(np.uint8)).round()


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_without_one_it_must_be_said(dtype: Any) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 0.5)  # would take anything

    for module in (nn.Linear(3, 2), Scaled(3, 2)):
        with pytest.raises(InputError, match=r"has no embedding that takes them: say what they are, inputs = 'tokens'"):
            federated(module, WHOLE.astype(dtype))
    federated(nn.Linear(3, 2), WHOLE.astype(dtype), "numbers").round()
    federated(Scaled(3, 2), WHOLE.astype(dtype), "tokens").round()
    with pytest.raises(InputError, match=r"dtype torch.int64: RuntimeError: .*If x are no tokens, say so"):
        federated(nn.Linear(3, 2), WHOLE.astype(dtype), "tokens")
    with pytest.raises(InputError, match="The model has an embedding, which takes whole numbers"):
        federated(words(), WHOLE.astype(dtype), "numbers")


def test_tokens_that_an_embedding_does_not_have() -> None:
    x = WHOLE.copy()
    x[5, 1] = 7
    with pytest.raises(
        InputError, match=r"Client \w+, split '\w+', sample \d \(row (5|17)\): x holds the token 7.* has 7 rows.*0 to 6"
    ):
        federated(words(), x)
    federated(words(8), x).round()
    x[5, 1] = -1
    with pytest.raises(InputError, match="x holds the token -1"):
        federated(words(8), x)


def test_archives(tmp_path: Path) -> None:
    path = tmp_path / "texts.npz"
    for dtype, image_shape in ((np.int64, (12, 3)), (np.uint8, (12, 3)), (np.uint8, (12, 3, 3))):
        x = np.resize(WHOLE, image_shape).astype(dtype)
        np.savez(path, x=x, y=Y)
        for inputs in (None, "tokens", "numbers", "image"):
            said = {} if inputs is None else {"inputs": inputs}
            if inputs == "image" and dtype is np.int64:
                with pytest.raises(InputError, match="has dtype int64, but inputs = 'image'"):
                    load("npz", 2, "iid", root=str(path), **said)
                continue
            data = load("npz", 2, "iid", root=str(path), **said)
            pixels = inputs == "image" or (inputs is None and dtype is np.uint8 and x.ndim == 3)
            expected = torch.float32 if pixels or inputs == "numbers" else torch.int64
            assert data.x.dtype == expected and data.inputs == inputs
            assert data.x.max() == (6 if not pixels else torch.tensor(6) / 255)
            assert data.input_shape == ((1, 3, 3) if pixels and x.ndim == 3 else image_shape[1:])
    np.savez(path, x=WHOLE, y=Y)
    with pytest.raises(InputError, match=r"data.normalize = 'channel' is for numbers, and x holds tokens"):
        load("npz", 2, "iid", root=str(path), normalize="channel")
    with pytest.raises(InputError, match=r"data.inputs = 'words'"):
        load("npz", 2, "iid", root=str(path), inputs="words")


def test_tokens_in_memory() -> None:
    data = federate(Dataset("texts", WHOLE.astype(np.int64), Y, ("a", "b"), inputs="tokens"), 2, "iid")
    assert data.x.dtype == torch.int64 and data.inputs == "tokens"
