"""Random streams keyed by what they are for, never by call order.

The same run on any engine, chunk size or machine draws the same numbers, because each draw names its own stream:
``stream(seed, "batch", round, client, epoch)``.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator of its own for one purpose (``sample``, ``batch``, ``init``, ``dropout``, ``partition``, ...)."""
    # The key's length is part of the entropy: numpy pads short keys with zeros, so (3,) and (3, 0) would be one stream.
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(key), *(int(k) for k in key)])


def derived_seed(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit integer from a stream, for libraries that take only a seed (``torch.manual_seed``)."""
    return int(stream(seed, purpose, *key).integers(0, 2**63 - 1))


def step_keys(seed: int, round: int, clients: NDArray[np.int64], phase: int, steps: int) -> NDArray[np.int64]:
    """One 31-bit key per (step, client) for randomness inside a client's step (dropout), without a generator each."""
    key = np.full((steps, len(clients)), _mix(np.uint64(zlib.crc32(b"dropout"))), dtype=np.uint64)
    for part in (seed, round, phase):
        key = _mix(key + np.uint64(part))
    key = _mix(key + clients.astype(np.uint64))
    key = _mix(key + np.arange(steps, dtype=np.uint64)[:, None])
    return (key >> np.uint64(33)).astype(np.int64)


def _mix(z: UInt64s | np.uint64) -> UInt64s:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbours."""
    with np.errstate(over="ignore"):
        z = np.asarray(z, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: UInt64s = z ^ (z >> np.uint64(31))
        return mixed
