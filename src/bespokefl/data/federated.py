"""The clients' data as every engine reads them: one stack of rows, and each client's row numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from bespokefl.data.arrays import ClientArrays, check_named, read_blocks, stack_inputs, stack_targets
from bespokefl.data.checks import check_rows, check_values
from bespokefl.data.dataset import IntArray
from bespokefl.data.digest import data_digest
from bespokefl.data.inputs import InputKind, check_kind
from bespokefl.data.splits import SPLITS, Splits, check_fractions, split_client
from bespokefl.errors import InputError, unknown_name


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The samples of all clients, split into train, validation and test: of `load`, or of your own arrays.

    Rows are stored once; a client is its row numbers per split. Rows may be shared and need no order.

    >>> rng = np.random.default_rng(0)
    >>> clinics = {
    ...     "north": (rng.normal(size=(60, 5)), rng.integers(0, 2, size=60)),
    ...     "south": (rng.normal(size=(40, 5)), rng.integers(0, 2, size=40)),
    ... }
    >>> data = bfl.FederatedData.from_arrays(clinics, test=0.25)
    >>> data.client_names, data.sizes("test").tolist()
    (('north', 'south'), [15, 10])
    """

    x: torch.Tensor  # (rows, ...), floating, normalised; or int64 tokens
    y: torch.Tensor  # (rows,) int64 labels, (rows, H, W) uint8 masks of labels, or floating regression targets
    splits: Splits  # "train", "val", "test": the row numbers of each client; val may be empty for all
    classes: tuple[str, ...]  # empty for regression
    client_names: tuple[str, ...]
    record: dict[str, Any]  # how these clients came about, for the run's files (JSON)
    held_out: "FederatedData | None" = None  # clients apart, that training never sees
    inputs: InputKind | None = None  # what x was said to be; unsaid whole numbers are a matter of the model

    def __post_init__(self) -> None:
        if set(self.splits) != set(SPLITS):
            raise InputError(f"splits has the keys {sorted(self.splits)}; it needs exactly {', '.join(SPLITS)}.")
        for split, rows in self.splits.items():
            if len(rows) != self.clients:
                raise InputError(
                    f"splits[{split!r}] has {len(rows)} clients but client_names has {self.clients}; make them agree."
                )
        if len(self.x) != len(self.y):
            raise InputError(f"x has {len(self.x)} rows and y {len(self.y)}; give one target per row.")
        self._check_kind()
        check_rows(self.splits, self.client_names, len(self.x))
        check_values(self.x, self.y, self.splits, self.client_names, len(self.classes))

    def _check_kind(self) -> None:
        check_kind(self.inputs, "FederatedData")
        floating = self.x.is_floating_point()
        if not floating and self.x.dtype != torch.int64:
            raise InputError(
                f"x has dtype {self.x.dtype}; it is floating, or int64 for tokens (from_arrays brings arrays to that)."
            )
        if self.inputs is not None and floating == (self.inputs == "tokens"):
            raise InputError(f"x has dtype {self.x.dtype}, but inputs = {self.inputs!r}; tokens alone are int64.")

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.client_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def note(self) -> str:
        """What a reader of the results should know of the source; empty if nothing."""
        return str(self.record.get("source", {}).get("note", ""))

    @cached_property
    def digest(self) -> dict[str, str]:
        """By which a resumed run knows its data, part by part."""
        return data_digest(self)

    @property
    def has_masks(self) -> bool:
        """Whether every pixel has a label (segmentation)."""
        return self.y.ndim == 3 and not self.y.is_floating_point()

    def only(self, clients: IntArray) -> "FederatedData":
        """Some of the clients, in the given order, without copies of their samples."""
        splits = {split: tuple(rows[int(i)] for i in clients) for split, rows in self.splits.items()}
        return replace(self, splits=splits, client_names=tuple(self.client_names[int(i)] for i in clients))

    def together_with(self, others: "FederatedData") -> "FederatedData":
        """These clients, then others of the same rows."""
        splits = {split: (*rows, *others.splits[split]) for split, rows in self.splits.items()}
        return replace(self, splits=splits, client_names=self.client_names + others.client_names, held_out=None)

    def sizes(self, split: str) -> IntArray:
        """The number of samples of each client."""
        return np.array([len(rows) for rows in self._rows(split)], dtype=np.int64)

    def counts(self, split: str) -> IntArray:
        """Samples of each client (row) in each class (column)."""
        if not self.classes or self.has_masks:
            what = "masks" if self.has_masks else "regression targets (floating y)"
            raise InputError(f"counts needs class labels, but these data have {what}.")
        sizes = self.sizes(split)
        owner = np.repeat(np.arange(self.clients), sizes)
        labels = self.y.cpu().numpy()[np.concatenate(self._rows(split))]
        cells = np.bincount(owner * len(self.classes) + labels, minlength=self.clients * len(self.classes))
        return cells.reshape(self.clients, len(self.classes)).astype(np.int64)

    def _rows(self, split: str) -> tuple[IntArray, ...]:
        if split not in self.splits:
            raise unknown_name("split", split, SPLITS)
        return self.splits[split]

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[ClientArrays] | Mapping[str, ClientArrays],
        test: float = 0.25,
        val: float = 0.0,
        seed: int = 0,
        classes: Sequence[str] | None = None,
        inputs: InputKind | None = None,
    ) -> "FederatedData":
        """Your own data: per client (x, y), or {"train": (x, y), "test": (x, y)} and optionally "val".

        Arrays or tensors; a mapping names the clients. A plain (x, y) is split at random by the fractions `test` and
        `val`. Integer y are labels 0, 1, ..., one per sample or (samples, H, W) one per pixel; floating y are
        regression targets. `inputs` says what x is: "image" (uint8 is scaled to [0, 1]), "numbers" (whole ones become
        float32) or "tokens" (whole numbers stay such). Unsaid, floating x are numbers (float64 stays, others become
        float32), uint8 x of the shape (samples, C, H, W) are images, and other whole numbers are tokens if the model
        has an embedding for them, else refused.
        """
        names = tuple(clients) if isinstance(clients, Mapping) else tuple(str(i) for i in range(len(clients)))
        entries = list(clients.values()) if isinstance(clients, Mapping) else clients
        if not entries:
            raise InputError("clients is empty; give one entry (x, y) per client.")
        blocks = read_blocks(entries, names, inputs)
        x = stack_inputs(blocks)
        if classes is not None and blocks[0].y.dtype.kind != "f":
            check_named(blocks, names, classes)
        y = stack_targets(blocks, x.dtype if x.is_floating_point() else torch.float32)

        check_fractions(test, val)
        none = np.empty(0, dtype=np.int64)
        parts: dict[str, list[IntArray]] = {split: [none] * len(names) for split in SPLITS}
        starts = np.cumsum([0] + [len(block.x) for block in blocks])
        for block, start in zip(blocks, starts[:-1], strict=True):
            rows = np.arange(start, start + len(block.x), dtype=np.int64)
            if block.split:
                parts[block.split][block.client] = rows
                continue
            drawn = split_client(rows, block.client, names[block.client], test, val, seed)
            for split, own in zip(SPLITS, drawn, strict=True):
                parts[split][block.client] = own
        record = {"source": {"name": "arrays", "inputs": inputs}, "split": {"test": test, "val": val, "seed": seed}}
        splits = {split: tuple(per_client) for split, per_client in parts.items()}
        return cls(x, y, splits, _class_names(y, classes), names, record, inputs=inputs)


def _class_names(y: torch.Tensor, given: Sequence[str] | None) -> tuple[str, ...]:
    """The given names, or the label numbers; none for regression."""
    if y.is_floating_point():
        if given is not None:
            raise InputError("classes is given, but y is floating (regression); give integer labels or leave it out.")
        return ()
    return tuple(given) if given is not None else tuple(str(label) for label in range(int(y.max()) + 1))
