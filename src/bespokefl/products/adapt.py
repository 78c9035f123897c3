"""A personal model for a client that never took part, from a run folder: `bespoke adapt`, and the same from Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl import __version__
from bespokefl.core import trees
from bespokefl.core.trees import Model
from bespokefl.data import FederatedData
from bespokefl.data.new_client import load_new_client, out_of_range
from bespokefl.errors import InputError, RunError
from bespokefl.experiments.load_run import RestoredRun, load_run
from bespokefl.federation.new_clients import Joined, Joining, OnEpoch, join
from bespokefl.products.export import ROWS, Answers, check_tensors, need_onnx, write_onnx
from bespokefl.results.files import write_json
from bespokefl.results.model_file import write_model

Curve = list[float | None]


@dataclass(frozen=True)
class Adapted:
    """A new client's model and how it came about; curves are over epochs, the first value being the start."""

    model: Model
    how: str
    train_loss: Curve
    train_accuracy: Curve
    loss: Curve  # on test rows; None without any
    accuracy: Curve
    files: list[Path]
    note: str | None  # what somebody should look at


def adapt(
    folder: Path | str,
    data: Path | str,
    joining: Joining | None = None,
    *,
    test: float | None = None,
    out: Path | str | None = None,
    onnx: bool = False,
    device: str | None = None,
    on_epoch: OnEpoch | None = None,
) -> Adapted:
    """Train a model for the client whose samples ``data`` holds, from the newest checkpoint of a run.

    The model is written as safetensors (and ONNX), and a JSON file beside it says what was done. ``out`` is the
    .safetensors file or a folder, the current one by default. The run itself is not changed.
    """
    if onnx:
        need_onnx()
    joining = joining or Joining()
    run = load_run(Path(folder), device)
    new = load_new_client(Path(data), run.federation.data, test, run.seed)
    target = _target(out, run)
    joined = join(run.federation, new, joining, on_epoch=on_epoch)
    if not joined.finite.all():
        raise RunError(
            f"the new client's model is not finite after {joining.epochs} epochs with {joined.settings}; lower --lr."
        )
    model: Model = trees.rows(joined.models, 0)
    written = _write(run, new, model, joined, target, onnx)
    adapted = Adapted(
        model=model,
        how=joined.how,
        train_loss=_curve(joined.train_loss),
        train_accuracy=_curve(joined.train_accuracy),
        loss=_curve(joined.loss),
        accuracy=_curve(joined.accuracy),
        files=[*written, target.with_suffix(".json")],
        note=out_of_range(new, run.federation.data),
    )
    write_json(target.with_suffix(".json"), _account(run, Path(data), new, joining, joined, adapted))
    return adapted


def _target(out: Path | str | None, run: RestoredRun) -> Path:
    """The .safetensors file; its folder is made."""
    name, path = f"{run.choice.label}-seed-{run.seed}-new-client.safetensors", Path(out or ".")
    target = path if path.suffix == ".safetensors" else path / name
    if path.suffix not in ("", ".safetensors") and not path.is_dir():
        raise InputError(f"--out {path}: should be a .safetensors file or a folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write(run: RestoredRun, new: FederatedData, model: Model, joined: Joined, target: Path, onnx: bool) -> list[Path]:
    """The model's files, each read back."""
    note = {"client": new.client_names[0], "algorithm": run.choice.label, "round": str(run.federation.rounds_done)}
    some = new.x[torch.as_tensor(np.concatenate([new.splits["test"][0], new.splits["train"][0]])[:ROWS])]
    write_model(model, note, target)
    check_tensors(target, model, Answers(run.federation.task, joined.outputs), some)
    if not onnx:
        return [target]
    write_onnx(run, model, joined.outputs, some, target.with_suffix(".onnx"))
    return [target, target.with_suffix(".onnx")]


def _curve(values: NDArray[np.float64]) -> Curve:
    return [float(value) if np.isfinite(value) else None for value in values[:, 0]]


def _account(
    run: RestoredRun, data: Path, new: FederatedData, joining: Joining, joined: Joined, adapted: Adapted
) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "algorithm": run.choice.name,
        "label": run.choice.label,
        "seed": run.seed,
        "round": run.federation.rounds_done,
        "data": str(data),
        "n_train": int(new.sizes("train")[0]),
        "n_test": int(new.sizes("test")[0]),
        "how": joined.how,
        "start": joining.start,
        "epochs": joining.epochs,
        **joined.settings,
        "opt_state": joining.opt_state,
        "train_loss": adapted.train_loss,
        "train_accuracy": adapted.train_accuracy,
        "loss": adapted.loss,
        "accuracy": adapted.accuracy,
        "classes": list(new.classes),
        "note": adapted.note,
        "version": __version__,
    }
