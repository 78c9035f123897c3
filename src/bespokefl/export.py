"""A client's personal model out of a run folder."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from bespokefl import assembly, checkpoint
from bespokefl.config_file import read_experiment
from bespokefl.errors import InputError
from bespokefl.results import files
from bespokefl.results.model_file import write_model
from bespokefl.run import model_note, restore
from bespokefl.trees import Model


def export_model(folder: Path, client: int, path: Path | None = None, *, onnx: bool = False) -> list[Path]:
    """Write a client's model of the newest checkpoint; the files that were written.

    ``folder`` is a run's, or one that holds exactly one run.
    """
    if onnx:
        _need_onnx()
    run = _single_run(folder)
    experiment = read_experiment(run / files.CONFIG)
    (choice,), (seed,) = experiment.algorithms, experiment.seeds
    stored = checkpoint.load_newest(run / files.CHECKPOINT)
    if stored is None:
        raise InputError(f"{run} has no checkpoint yet; let the run go on with `bespoke run ... --resume`.")
    data = assembly.load_data(experiment, seed)
    if not 0 <= client < data.clients:
        raise InputError(f"--client {client}: this run has the clients 0 to {data.clients - 1}.")
    federation = assembly.make_federation(experiment, assembly.make_kit(experiment, choice, data), seed, data)
    restore(federation, stored)
    target = path or Path(f"{choice.label}-seed-{seed}-client-{client}.safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    model = federation.client_model(client)
    write_model(model, model_note(federation, client, choice.label), target)
    if not onnx:
        return [target]
    module = assembly.make_module(experiment, seed, data)
    drawn = target.with_suffix(".onnx")
    _write_onnx(_with_weights(module, model), data.x[:1].to(torch.float32), drawn)
    return [target, drawn]


def _single_run(folder: Path) -> Path:
    if (folder / files.CONFIG).is_file():
        return folder
    runs = sorted(config.parent for config in folder.glob(f"**/seed-*/{files.CONFIG}"))
    if len(runs) != 1:
        found = ", ".join(str(run.relative_to(folder)) for run in runs) or "none"
        raise InputError(f"{folder} must be a run's folder, such as DIR/fedavg/seed-0; runs found in it: {found}.")
    return runs[0]


def _with_weights(module: nn.Module, model: Model) -> nn.Module:
    """The plain module with the client's parameters and buffers; counters of batches keep their zeros."""
    weights = {name: value.detach().cpu() for name, value in model.items()}
    module.load_state_dict(module.state_dict() | weights)
    return module.to(torch.float32).eval()


def _need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx needs the packages onnx and onnxscript; install {' and '.join(missing)} with pip.")


def _write_onnx(module: nn.Module, example: torch.Tensor, path: Path) -> None:
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(module, (example,), dynamo=True, dynamic_shapes=({0: batch},))
    assert program is not None
    program.save(path)
