"""A personal model on new samples: `bespoke predict`, and the same from Python.

The model is one of a run's folder (output.personal = true), or one that a silo keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from bespokefl.core.losses import class_logits
from bespokefl.core.trees import Model
from bespokefl.data.headers import check_size
from bespokefl.data.inputs import InputKind, kind_of
from bespokefl.data.normalisation import Moments, normalise_alike
from bespokefl.data.sources.base import channels_first, read_image
from bespokefl.data.sources.images import SUFFIXES
from bespokefl.data.sources.npz import as_inputs, read_npz
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import read_experiment
from bespokefl.products.export import Answers
from bespokefl.results import files

AT_ONCE = 256  # samples


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one sample."""

    source: str  # the file, and the row of an array of several
    label: str
    probability: float
    probabilities: dict[str, float]  # by class

    def as_json(self) -> dict[str, Any]:
        return {
            "input": self.source,
            "class": self.label,
            "probability": self.probability,
            "probabilities": self.probabilities,
        }


@dataclass(frozen=True)
class PersonalModel:
    """A model with all that it takes to ask it."""

    path: Path
    model: Model
    answers: Answers
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    normalize: str
    moments: Moments
    size: int | None = None  # side of the square to which images were brought
    inputs: InputKind | None = None  # what arrays hold

    def predict(self, inputs: Sequence[Path]) -> list[Prediction]:
        """One for each image, and for each row of each array."""
        return [one for path in inputs for one in self._of_file(path)]

    def _of_file(self, path: Path) -> list[Prediction]:
        x = normalise_alike(self._read(path), self.normalize, self.moments)
        parts = [class_logits(self.answers(self.model, some)).double().softmax(1) for some in torch.split(x, AT_ONCE)]
        found = torch.cat(parts).numpy()
        named = [str(path)] if len(found) == 1 else [f"{path}[{row}]" for row in range(len(found))]
        return [self._prediction(source, values) for source, values in zip(named, found, strict=True)]

    def _prediction(self, source: str, values: npt.NDArray[np.float64]) -> Prediction:
        best = int(values.argmax())
        spare = [f"output {k}" for k in range(len(self.classes), len(values))]  # that no class belongs to
        names = [*self.classes, *spare]
        each = {name: float(value) for name, value in zip(names, values, strict=True)}
        return Prediction(source, names[best], float(values[best]), each)

    def _read(self, path: Path) -> npt.NDArray[Any]:
        """Samples as the model was trained on them, before their normalisation."""
        if not path.is_file():
            raise InputError(f"{path} does not exist; give an image, a .npy or a .npz file.")
        if path.suffix.lower() in SUFFIXES:
            x = self._image(path)
        elif path.suffix == ".npy":
            x = self._array(_read_npy(path), path)
        elif path.suffix == ".npz":
            arrays = read_npz(path)
            x = self._array(arrays["x"] if "x" in arrays else next(iter(arrays.values()), np.empty(0)), path)
        else:
            raise InputError(f"{path}: should be an image ({', '.join(SUFFIXES)}), a .npy or a .npz file.")
        if x.shape[1:] != self.input_shape:
            raise InputError(f"{path} has samples of the shape {x.shape[1:]}; the model takes {self.input_shape}.")
        return x

    def _image(self, path: Path) -> npt.NDArray[Any]:
        if len(self.input_shape) != 3 or self.input_shape[0] not in (1, 3):
            raise InputError(f"{path} is an image; the model takes arrays of the shape {self.input_shape}.")
        image = read_image(path, "L" if self.input_shape[0] == 1 else "RGB")
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return channels_first(image)[None]

    def _array(self, x: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
        """One sample, or several; grey images need no axis of channels."""
        shapes = [self.input_shape, *([self.input_shape[1:]] if self.input_shape[0] == 1 else [])]
        if x.shape in shapes:
            x = x[None]
        if x.shape[1:] in shapes:
            x = x.reshape(len(x), *self.input_shape)
        if x.ndim < 2:
            return x
        x = as_inputs(x, str(path), self.inputs)
        if (x.dtype == np.int64) != (self.inputs == "tokens"):
            raise InputError(f"{path} holds whole numbers; the model takes floating ones, or uint8 pixels.")
        return x


def load_personal_model(folder: Path, client: int | None = None, device: str = "cpu") -> PersonalModel:
    """Of a run's folder with output.personal = true."""
    found = sorted((folder / files.PERSONAL).glob("client-*.safetensors"))
    if not found:
        raise InputError(f"{folder} holds no personal models; run it with output.personal = true, or `bespoke export`.")
    path = chosen(found, client)
    experiment = read_experiment(folder / files.CONFIG, [("engine.device", device)])
    (choice,), (seed,) = experiment.algorithms, experiment.seeds
    data = resolve.load_data(experiment, seed)
    task = resolve.make_task(experiment, seed, data).to(device)
    answers = Answers(task, resolve.make_algorithm(experiment, choice).outputs)
    return PersonalModel(
        path,
        load_model(path),
        classifying(answers, data.has_masks),
        data.classes,
        data.input_shape,
        data.record["normalize"],
        data.record["moments"],
        experiment.data.options.get("size"),
        kind_of(data),
    )


def chosen(found: list[Path], client: int | None) -> Path:
    """The only model, or that of the named client."""
    by_client = {int(path.stem.rpartition("-")[2]): path for path in found}
    if client is None and len(by_client) == 1:
        return next(iter(by_client.values()))
    if client not in by_client:
        asked = "is needed" if client is None else f"{client} is not among them"
        raise InputError(f"--client {asked}: there are models of the clients {', '.join(map(str, sorted(by_client)))}.")
    return by_client[client]


def load_model(path: Path) -> Model:
    try:
        model: Model = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}).") from None
    return model


def _read_npy(path: Path) -> npt.NDArray[Any]:
    try:
        check_size(path)
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as a .npy of plain numbers ({error}).") from None
    return array


def classifying(answers: Answers, masks: bool) -> Answers:
    if masks or not answers.task.classifies:
        raise InputError("the model answers with maps or numbers; `bespoke predict` is for those that predict a class.")
    return answers
