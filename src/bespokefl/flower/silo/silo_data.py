"""What a silo has: its own samples, or those of some simulated clients of an experiment. Only counts leave it."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bespokefl.core.program import Rows
from bespokefl.data import Dataset, FederatedData
from bespokefl.data.inputs import KINDS, InputKind, kind_of
from bespokefl.data.normalisation import NORMALISATIONS, Moments, normalise_and_tell
from bespokefl.data.sources import load_dataset
from bespokefl.data.splits import SPLITS, Splits, check_fractions, split_client
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.schema import Experiment
from bespokefl.federation.attacks import Attack
from bespokefl.flower.refusal import Refused
from bespokefl.results.files import write_atomically

DEFAULT_TEST = 0.25


class Placed(NamedTuple):
    """Samples as a federation counts its clients, and how inputs were read (for `bespoke predict`)."""

    data: FederatedData  # of all clients by id; a client that is elsewhere has no rows
    reading: dict[str, Any]


class Holdings(Protocol):
    """The clients that a silo hosts."""

    @property
    def kind(self) -> str:
        """own, or simulated"""
        ...

    def census(self, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the server is told: how many samples, of which shape and classes. JSON."""
        ...

    def fix(self, settings: Mapping[str, Any]) -> None:
        """A run begins: from now on the split stays as it is, whatever settings say."""
        ...

    def place(self, seed: int, settings: Mapping[str, Any], ids: Sequence[int], of: int, classes: list[str]) -> Placed:
        """The samples of the hosted clients, whose ids are these of so many, with the federation's classes."""
        ...


@dataclass(frozen=True)
class Simulated:
    """Some clients of an experiment, the same ones that `bespoke run` would simulate."""

    experiment: Experiment
    clients: tuple[int, ...]
    kind: str = "simulated"
    _loaded: dict[int, FederatedData] = field(default_factory=dict)  # by seed: the last one

    def census(self, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        data = self._load(seed)
        sizes = {split: data.sizes(split).tolist() for split in SPLITS}
        told = [
            {"id": c, "name": data.client_names[c]} | {split: sizes[split][c] for split in SPLITS} for c in self.clients
        ]
        return {"clients": told, "of": data.clients, **_about(data)}

    def place(self, seed: int, settings: Mapping[str, Any], ids: Sequence[int], of: int, classes: list[str]) -> Placed:
        data = self._load(seed)
        if tuple(ids) != self.clients or of != data.clients or list(data.classes) != classes:
            raise Refused(f"the server counts {of} clients and {len(classes)} classes; the experiment here has others")
        attack = Attack(**self.experiment.attack.model_dump())
        data = attack.poisoned(data, attack.malicious(data.clients, seed))
        return Placed(data, _reading(data, data.record["normalize"], data.record["moments"], {}))

    def fix(self, settings: Mapping[str, Any]) -> None:
        """The experiment file on this machine has said it already."""

    def _load(self, seed: int) -> FederatedData:
        if seed in self._loaded:
            return self._loaded[seed]
        data = resolve.load_data(self.experiment, seed)
        outside = [c for c in self.clients if not 0 <= c < data.clients]
        if outside:
            raise InputError(f"clients = {outside}: the experiment has clients 0 to {data.clients - 1}")
        self._loaded.clear()
        self._loaded[seed] = data
        return data


@dataclass(frozen=True)
class Own:
    """Samples of the silo's own: a .npz file, or a folder of images."""

    path: Path
    split: Path  # the file that keeps which samples are for training, once a run has begun
    kind: str = "own"
    _loaded: dict[str, tuple[FederatedData, dict[str, Any]]] = field(default_factory=dict)  # by settings: the last one

    def census(self, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        data, _ = self._load(settings)
        counts = {split: int(data.sizes(split)[0]) for split in SPLITS}
        return {"clients": [{"id": None, "name": self.path.stem} | counts], "of": None, **_about(data)}

    def place(self, seed: int, settings: Mapping[str, Any], ids: Sequence[int], of: int, classes: list[str]) -> Placed:
        data, reading = self._load(settings)
        unknown = [name for name in data.classes if name not in classes]
        if len(ids) != 1 or not 0 <= ids[0] < of or unknown:
            raise Refused(f"this silo is one client with the classes {', '.join(data.classes)}; the server thinks else")
        number = torch.tensor([classes.index(name) for name in data.classes])
        y = number[data.y.long()].to(data.y.dtype)
        none = np.empty(0, dtype=np.int64)
        splits = {
            split: tuple(rows[0] if c == ids[0] else none for c in range(of)) for split, rows in data.splits.items()
        }
        names = tuple(self.path.stem if c == ids[0] else str(c) for c in range(of))
        return Placed(replace(data, y=y, splits=splits, classes=tuple(classes), client_names=names), reading)

    def samples(self) -> int:
        """How many there are; they are read, and fit the split that is kept."""
        return sum(int(self._load({})[0].sizes(split)[0]) for split in SPLITS)

    def fix(self, settings: Mapping[str, Any]) -> None:
        if not self.split.is_file():
            data, _ = self._load(settings)
            train, val, test = (data.splits[split][0] for split in ("train", "val", "test"))
            content = io.BytesIO()
            np.savez(content, labels=np.array(_labels(data.y)), train=train, val=val, test=test)
            write_atomically(self.split, content.getvalue())

    def _kept(self, dataset: Dataset) -> dict[str, Rows] | None:
        """The split of the first run; InputError if it was of other samples."""
        if not self.split.is_file():
            return None
        with np.load(self.split, allow_pickle=False) as stored:
            if str(stored["labels"]) != _labels(torch.from_numpy(dataset.y)):
                raise InputError(
                    f"--data {self.path} holds other samples than in the first run, for which {self.split} keeps the "
                    "split; start with another --folder, or with the samples as they were"
                )
            return {split: stored[split] for split in SPLITS}

    def _load(self, settings: Mapping[str, Any]) -> tuple[FederatedData, dict[str, Any]]:
        """The samples, split here; rows that are marked as test rows are the test split."""
        how, test, val, image, inputs = _checked(settings)
        key = repr((how, test, val, sorted(image.items()), inputs))
        if key not in self._loaded:
            found = self._split(how, test, val, image, inputs)
            self._loaded.clear()
            self._loaded[key] = found
        return self._loaded[key]

    def _split(
        self, how: str, test: float, val: float, image: dict[str, Any], inputs: InputKind | None
    ) -> tuple[FederatedData, dict[str, Any]]:
        dataset = self._read(image, inputs)
        rows = np.arange(len(dataset), dtype=np.int64)
        labels = None if dataset.has_masks else dataset.labels
        if (kept := self._kept(dataset)) is not None:
            train, val_rows, held = (kept[split] for split in ("train", "val", "test"))
        elif dataset.is_test is not None and 0 < dataset.is_test.sum() < len(dataset):
            held, rest = rows[dataset.is_test], rows[~dataset.is_test]
            train, val_rows = rest, rest[:0]
            if val:
                train, _, val_rows = split_client(rest, 0, self.path.stem, val, 0.0, 0, labels)
        else:
            train, val_rows, held = split_client(rows, 0, self.path.stem, test, val, 0, labels)
        x, moments = normalise_and_tell(dataset.x, how, train)
        splits: Splits = {"train": (train,), "val": (val_rows,), "test": (held,)}
        y, names = torch.from_numpy(dataset.y), (self.path.stem,)
        data = FederatedData(x, y, splits, dataset.classes, names, {}, inputs=dataset.inputs)
        return data, _reading(data, how, moments, image if self.path.is_dir() else {})

    def _read(self, image: dict[str, Any], inputs: InputKind | None) -> Dataset:
        if self.path.is_dir():
            return load_dataset("images", str(self.path), **image)
        if self.path.suffix != ".npz" or not self.path.is_file():
            raise InputError(
                f"--data {self.path}: should be a .npz file with x and y, or a folder of images, a folder per class."
            )
        return load_dataset("npz", str(self.path), inputs=inputs)


def _checked(settings: Mapping[str, Any]) -> tuple[str, float, float, dict[str, Any], InputKind | None]:
    """What the server wishes for the reading of samples: known names and fractions, or refused."""
    how, test, val = settings.get("normalize", "unit"), settings.get("test"), settings.get("val")
    image = {key: value for key, value in settings.get("image", {}).items() if key in ("size", "mode")}
    test, val = DEFAULT_TEST if test is None else test, 0.0 if val is None else val
    if how not in NORMALISATIONS or not all(isinstance(value, int | float) for value in (test, val)):
        raise Refused(f"normalize = {how!r}, test = {test!r}, val = {val!r}: not settings that this silo can follow")
    check_fractions(test, val)
    inputs = settings.get("inputs")
    if inputs is not None and inputs not in KINDS:
        raise Refused(f"inputs = {str(inputs)[:40]!r}: not a setting that this silo can follow")
    return how, float(test), float(val), image, inputs


def _labels(y: torch.Tensor) -> str:
    """By which samples are known again: how many there are, and what they are."""
    return f"{len(y)} {hashlib.sha256(y.contiguous().numpy().tobytes()).hexdigest()}"


def _about(data: FederatedData) -> dict[str, Any]:
    target = "masks" if data.has_masks else "numbers" if data.y.is_floating_point() else "labels"
    inputs = "numbers" if data.x.is_floating_point() else "tokens"
    return {"classes": list(data.classes), "input_shape": list(data.input_shape), "target": target, "inputs": inputs}


def _reading(data: FederatedData, how: str, moments: Moments, image: dict[str, Any]) -> dict[str, Any]:
    return {"normalize": how, "moments": dict(moments), "image": image, "inputs": kind_of(data)}
