"""Streams are told apart by what they are for, and by nothing else."""

import zlib

import numpy as np
import pytest

from bespokefl.core import derived_seed, stream
from bespokefl.core.rng import step_keys

MASK = 2**64 - 1


def splitmix64(z: int) -> int:
    """The output function of splitmix64 (Steele et al., 2014), in exact integers."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draws(*key: int, seed: int = 0, purpose: str = "batch") -> list[int]:
    return stream(seed, purpose, *key).integers(0, 2**62, 4).tolist()


def test_a_stream_depends_on_its_name_and_not_on_other_draws() -> None:
    first = draws(1, 2)
    stream(0, "batch", 1, 3).random(1000)
    assert draws(1, 2) == first


@pytest.mark.parametrize(
    "other",
    [draws(1, 3), draws(2, 2), draws(2, 1), draws(1), draws(1, 2, 0), draws(1, 2, seed=1), draws(1, 2, purpose="init")],
)
def test_every_part_of_the_name_counts(other: list[int]) -> None:
    assert other != draws(1, 2)


def test_trailing_zeros_make_another_stream() -> None:
    assert len({tuple(draws(*key)) for key in [(), (0,), (0, 0), (0, 0, 0)]}) == 4


def test_numpy_integers_name_the_same_stream() -> None:
    assert draws(np.int64(1), np.int32(2)) == draws(1, 2)  # type: ignore[arg-type]


def test_derived_seeds_fit_torch_and_differ() -> None:
    seeds = {derived_seed(s, purpose, k) for s in range(5) for purpose in ("init", "x") for k in range(20)}
    assert len(seeds) == 200 and all(0 <= s < 2**63 for s in seeds)
    assert derived_seed(3, "init", 1) == derived_seed(3, "init", 1)


def test_step_keys_are_a_chain_of_splitmix64() -> None:
    clients = np.array([0, 7, 3], dtype=np.int64)
    keys = step_keys(5, 2, clients, 1, 4)
    for step in range(4):
        for column, client in enumerate(clients):
            z = splitmix64(zlib.crc32(b"dropout"))
            for part in (5, 2, 1, int(client), step):
                z = splitmix64((z + part) & MASK)
            assert keys[step, column] == z >> 33


def test_step_keys_do_not_depend_on_who_else_runs() -> None:
    everyone = step_keys(0, 0, np.arange(10), 0, 6)
    np.testing.assert_array_equal(step_keys(0, 0, np.array([8, 2]), 0, 3), everyone[:3, [8, 2]])


def test_step_keys_are_scattered_31_bit_numbers() -> None:
    keys = np.concatenate([step_keys(s, r, np.arange(20), p, 20) for s in (0, 1) for r in (0, 1) for p in (0, 1)])
    assert keys.min() >= 0 and keys.max() < 2**31
    assert len(np.unique(keys)) == keys.size
    assert abs(keys.mean() / 2**30 - 1) < 0.05
    assert step_keys(0, 0, np.arange(3), 0, 0).shape == (0, 3)
