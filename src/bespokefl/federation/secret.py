"""Numbers that nobody can foretell or repeat: from the system's entropy, or from a key that only its owner has.

`rng` is for everything that a run repeats; its generator can be continued by whoever has seen enough of it.
"""

import hashlib
import math
import secrets

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**20  # numbers at once
UNIT = 2.0**-53


def new_key() -> str:
    return secrets.token_hex(32)


def normal_numbers(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Standard normal numbers from the system's cryptographic generator, by Box and Muller."""
    count = math.prod(shape)
    blocks = [_normal(min(BLOCK, count - first)) for first in range(0, count, BLOCK)]
    return np.concatenate([np.empty(0), *blocks]).reshape(shape)


def chosen(key: str, round: int, of: int, count: int) -> NDArray[np.int64]:
    """So many of 0 to ``of`` - 1, ascending: the same for the same key and round, any for those without the key."""
    stream = hashlib.shake_256(f"cohort {round} {key}".encode()).digest(16 * of)
    marks = np.frombuffer(stream, dtype=[("high", "<u8"), ("low", "<u8")])
    return np.sort(np.argsort(marks, order=("high", "low"))[:count]).astype(np.int64)


def _normal(count: int) -> NDArray[np.float64]:
    half = -(-count // 2)
    drawn = np.frombuffer(secrets.token_bytes(16 * half), dtype="<u8") >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((drawn[:half] + np.uint64(1)) * UNIT))
    angle = 2 * np.pi * (drawn[half:] * UNIT)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
