"""Clients that attack: some clients' uploads are replaced where the server receives them, or their labels are flipped.

What of an upload is replaced, an algorithm says (``Algorithm.sends``): by name, the uploads that hold parameters, each
either a model, with the name of what it started from, w, or an update (a gradient, a difference of models).

=========  ==========================================  =====================================
kind       a model x becomes                           an update g becomes
=========  ==========================================  =====================================
noise      N(0, sigma^2), in every parameter (A1)      N(0, sigma^2), in every parameter (A1)
scale      w + factor (x - w) (A2)                     factor g (A2)
signs      w - (x - w)                                 -g
labels     what training on flipped labels gave        the same: train labels y are C - 1 - y
=========  ==========================================  =====================================

All else is honest: losses, counts, weights, statistics of classes, and a model's buffers and frozen parameters, whose
replacement (a negative variance) would stop a model rather than mislead it. What a client keeps for itself is what
honest training gave. The server checks what it receives as ever: values that are not finite are left out.

Draws are keyed by seed, round, client and exchange of the round, so engines, chunks and interruptions change nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bespokefl.core.clients import Postprocessor, Transfer
from bespokefl.core.program import Order, Result, Rows
from bespokefl.core.rng import stream
from bespokefl.core.trees import Model, Tree
from bespokefl.data.federated import FederatedData
from bespokefl.errors import InputError, unknown_name

Kind = Literal["none", "noise", "scale", "labels", "signs"]


@dataclass(frozen=True)
class Attack:
    """What malicious clients do, and who they are: ``clients``, or a ``share`` of all that the seed draws."""

    kind: Kind = "none"
    share: float = 0.1
    sigma: float = 1.0  # standard deviation of the noise
    factor: float = 100.0  # of the scaled update
    clients: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name("attack.kind", self.kind, get_args(Kind))
        if not 0 < self.share < 1:
            raise InputError(f"attack.share = {self.share!r}: it is a share of the clients above 0 and below 1")
        if not 0 < self.sigma < math.inf:
            raise InputError(f"attack.sigma = {self.sigma!r}: it is a number above 0")
        if not math.isfinite(self.factor):
            raise InputError(f"attack.factor = {self.factor!r}: it is a finite number")

    def malicious(self, clients: int, seed: int) -> Rows:
        """The ids of the malicious among so many clients, ascending; the same in every round and for every method."""
        if self.kind == "none":
            return np.empty(0, dtype=np.int64)
        if self.clients is None:
            count = max(1, round(self.share * clients))
            ids = stream(seed, "attack").choice(clients, min(count, clients), replace=False)
        else:
            ids = np.asarray(self.clients, dtype=np.int64).reshape(-1)
        ids = np.unique(ids)
        if not len(ids) or ids[0] < 0 or ids[-1] >= clients:
            raise InputError(
                f"attack.clients = {list(self.clients or [])}: it is a list of ids from 0 to {clients - 1}"
            )
        if len(ids) == clients:
            raise InputError(
                f"attack.{'share' if self.clients is None else 'clients'}: all {clients} clients would be malicious; "
                "leave at least one honest client to be scored"
            )
        return ids

    @property
    def replaces_uploads(self) -> bool:
        return self.kind in ("noise", "scale", "signs")

    def poisoned(self, data: FederatedData, malicious: Rows) -> FederatedData:
        """The data as the clients train on them."""
        return flip_labels(data, malicious) if self.kind == "labels" else data


class Attacker(Postprocessor):
    """An attack in a federation: replaces uploads between the clients and the server.

    Args:
        attack: what is done.
        malicious: ids of those who do it.
        sends: the algorithm's uploads that hold parameters (``Algorithm.sends``).
        trained: names of the model's parameters.
        honest: names of a model's tensors that stay as they are.
        seed: the run's.
    """

    def __init__(
        self,
        attack: Attack,
        malicious: Rows,
        sends: Mapping[str, str | None],
        trained: Sequence[str],
        honest: Sequence[str],
        seed: int,
    ) -> None:
        self.attack, self.malicious, self.seed = attack, malicious, seed
        self._sends, self._trained, self._honest = sends, frozenset(trained), frozenset(honest)

    def sent(self, transfer: Transfer, result: Result) -> dict[str, Tree]:
        """The uploads with those of malicious clients replaced."""
        order, held, ledger = transfer
        clients = order.clients[result.positions]
        rows = np.flatnonzero(np.isin(clients, self.malicious))
        self._refuse_unknown(result.uploads)
        if not len(rows):
            return result.uploads
        draws = [stream(self.seed, "attack", order.round, int(c), ledger.exchanges) for c in clients[rows]]
        uploads = dict(result.uploads)
        for name, start in self._sends.items():
            if name in uploads:
                known = None if start is None else start_of(start, order, held, result.positions[rows])
                uploads[name] = self._replaced(name, uploads[name], known, rows, draws)
        return uploads

    def _replaced(
        self, name: str, stacked: Model, start: Model | None, rows: Rows, draws: Sequence[np.random.Generator]
    ) -> Model:
        out = dict(stacked)  # never in place: a client's state may share these tensors
        for k, v in stacked.items():
            if k not in self._honest:
                index = torch.as_tensor(rows, device=v.device)
                bad = self._bad(v[index], None if start is None else start[k], draws)
                out[k] = v.index_copy(0, index, bad)
        return out

    def _bad(self, x: Tensor, start: Tensor | None, draws: Sequence[np.random.Generator]) -> Tensor:
        if self.attack.kind == "noise":
            noise = np.stack([draw.standard_normal(tuple(x.shape[1:])) for draw in draws])
            return torch.as_tensor(self.attack.sigma * noise).to(x)
        factor = -1.0 if self.attack.kind == "signs" else self.attack.factor
        return factor * x if start is None else start + factor * (x - start)

    def _refuse_unknown(self, uploads: Mapping[str, Tree]) -> None:
        """An upload of parameters that the algorithm does not declare would pass for honest."""
        for name, tree in uploads.items():
            if name not in self._sends and isinstance(tree, Mapping) and self._trained & set(tree):
                raise InputError(
                    f"attack.kind = {self.attack.kind!r}: the algorithm uploads parameters under {name!r} and does not "
                    f"say what they are; add {name!r} to its `sends` (what the model started from, or None for an "
                    "update)"
                )


def start_of(name: str, order: Order, held: Mapping[str, Tree], places: Rows) -> Model:
    """What models started from, a row for each of some places in the order (or one for all)."""
    if name in order.shared:
        shared: Model = order.shared[name]
        return shared
    source, rows = (order.per_client, places) if name in order.per_client else (held, order.clients[places])
    if name not in source:
        raise InputError(
            f"`sends` says that a model started from {name!r}, which is neither a download of the exchange nor in the "
            "`held` of Cohort.run"
        )
    own: Model = {k: v[torch.as_tensor(rows, device=v.device)] for k, v in source[name].items()}
    return own


def flip_labels(data: FederatedData, clients: Rows) -> FederatedData:
    """The train labels of some clients y -> C - 1 - y; a row that others use too is copied first."""
    if not data.classes:
        raise InputError("attack.kind = 'labels' flips class labels, but these data have regression targets")
    train = list(data.splits["train"])
    flipped = np.unique(np.concatenate([train[int(c)] for c in clients]))
    honest = [train[c] for c in range(data.clients) if c not in clients]
    elsewhere = np.concatenate([*honest, *data.splits["val"], *data.splits["test"]])
    copied = np.intersect1d(flipped, elsewhere)
    place = np.arange(len(data.x))
    place[copied] = len(data.x) + np.arange(len(copied))
    x = torch.cat([data.x, data.x[torch.as_tensor(copied)]]) if len(copied) else data.x
    y = torch.cat([data.y, data.y[torch.as_tensor(copied)]])
    rows = torch.as_tensor(place[flipped])
    y[rows] = len(data.classes) - 1 - y[rows]
    for c in clients:
        train[int(c)] = place[train[int(c)]]
    splits = {**data.splits, "train": tuple(train)}
    return replace(data, x=x, y=y, splits=splits, held_out=None)
