"""A short description of data by which a run knows, when it is resumed, that they are the same."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from bespokefl.data.federated import FederatedData

SAMPLED = 256  # rows whose inputs are looked at: all of a large dataset would take seconds


def data_digest(data: "FederatedData") -> dict[str, str]:
    """By part: the inputs (their shape, type and `SAMPLED` rows), the labels, the partition, the clients' names."""
    rows = torch.linspace(0, len(data.x) - 1, min(SAMPLED, len(data.x))).long()
    found = {
        "inputs": f"{tuple(data.x.shape)} {data.x.dtype} {_hash([_bytes(data.x[rows.to(data.x.device)])])}",
        "labels": f"{tuple(data.y.shape)} {data.y.dtype} {_hash([_bytes(data.y)])}",
        "partition": _hash(
            part
            for split, rows_of in sorted(data.splits.items())
            for rows_ in rows_of
            for part in (split.encode(), len(rows_).to_bytes(8), np.asarray(rows_, dtype=np.int64).tobytes())
        ),
        "clients": digest_of_names(data.client_names),
    }
    if data.held_out is not None:
        found["clients held out"] = _hash(text.encode() for text in data_digest(data.held_out).values())
    return found


def digest_of_names(names: Iterable[str]) -> str:
    """Of the clients' names in their order."""
    return _hash(part for name in names for part in (name.encode(), b"\0"))


def _bytes(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous()
    return raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""


def _hash(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:32]
