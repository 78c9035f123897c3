"""A client's personal model out of a run folder, as files that other programs read.

Every file is read back and must answer as the model does, on test samples of the client; one that does not is removed.
"""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bespokefl.algorithms import Algorithm
from bespokefl.core.model_programs import Outputs, network_outputs
from bespokefl.core.task import Batch, Task
from bespokefl.core.trees import Model
from bespokefl.errors import InputError, RunError
from bespokefl.experiments import resolve
from bespokefl.experiments.callbacks.results import model_note
from bespokefl.experiments.load_run import RestoredRun, load_run
from bespokefl.results.model_file import write_model

ROWS = 64  # test samples that a file is checked on
TOLERANCE = 1e-4  # of ONNX in float32, in units of the largest answer


@dataclass(frozen=True)
class Written:
    path: Path
    checked: str  # how, and what was found


def export_model(folder: Path, client: int, path: Path | None = None, *, onnx: bool = False) -> list[Written]:
    """Write a client's model of the newest checkpoint; the files that were written.

    ``folder`` is a run's, or one that holds exactly one run.
    """
    if onnx:
        need_onnx()
    run = load_run(folder)
    data = run.federation.data
    if not 0 <= client < data.clients:
        raise InputError(f"--client {client}: this run has the clients 0 to {data.clients - 1}.")
    target = path or Path(f"{run.choice.label}-seed-{run.seed}-client-{client}.safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    model = run.federation.client_model(client)
    answers = Answers(run.federation.task, run.federation.algorithm.outputs)
    some = data.x[torch.as_tensor(data.splits["test"][client][:ROWS])]
    write_model(model, model_note(run.federation, client, run.choice.label), target)
    written = [Written(target, check_tensors(target, model, answers, some))]
    if onnx:
        drawn = target.with_suffix(".onnx")
        written.append(Written(drawn, write_onnx(run, model, answers.outputs, some, drawn)))
    return written


class Answers:
    """What a model of a run answers, as its scores have it."""

    def __init__(self, task: Task, outputs: Outputs) -> None:
        self.task, self.outputs = task, outputs

    def __call__(self, model: Model, x: Tensor) -> Tensor:
        device = self.task.initial[self.task.names[0]].device
        # In the layout of a file: a training's own would round a convolution's sums otherwise.
        on = {name: value.to(device).clone(memory_format=torch.contiguous_format) for name, value in model.items()}
        with torch.no_grad(), torch.device(device):
            x = x.to(device, self.task.dtype) if x.is_floating_point() else x.to(device)
            return self.outputs(self.task, on, as_batch(x)).cpu()


def as_batch(x: Tensor) -> Batch:
    """Inputs alone; whoever asks a model for answers knows no targets."""
    none = x.new_zeros(x.shape[0], dtype=torch.int64)  # len(x) would fix their number when the model is traced
    return Batch(x, none, None, torch.zeros((), dtype=torch.int64, device=x.device))


def check_tensors(path: Path, model: Model, answers: Answers, x: Tensor) -> str:
    loaded = load_file(path)
    if not torch.equal(answers(loaded, x), answers(model, x)):
        path.unlink()
        raise RunError(f"{path} was written, but what is read back answers differently; it was removed.")
    return f"read back, the same answers on {len(x)} test samples"


# ONNX ------------------------------------------------------------------------------------------------
def write_onnx(run: RestoredRun, model: Model, outputs: Outputs, x: Tensor, path: Path) -> str:
    """The network with its weights, for any number of samples at once, checked with onnxruntime where that is there."""
    module = resolve.make_module(run.experiment, run.seed, run.federation.data)
    task = Task(module, head=run.experiment.model.head)  # in float32, whatever the run's precision
    one_network = getattr(outputs, "__func__", outputs) in (Algorithm.outputs, network_outputs)
    module = _with_weights(module, model) if one_network else _Answering(task, outputs, model)
    example = x.float() if x.is_floating_point() else x
    example = example if len(example) > 1 else example.repeat(2, *(1,) * (x.ndim - 1))  # one row would fix that number
    unchecked = path.with_name(f".{path.name}.unchecked")
    try:
        _save_onnx(module.float().eval(), example, unchecked)
        single = {name: value.cpu().float() for name, value in model.items()}
        said = _check_onnx(unchecked, example, Answers(task, outputs)(single, example))
        unchecked.replace(path)
    finally:
        unchecked.unlink(missing_ok=True)
    return said


class _Answering(nn.Module):
    """A personal model that is more than one network: what the method answers with it."""

    def __init__(self, task: Task, outputs: Outputs, model: Model) -> None:
        super().__init__()
        self._task, self._outputs = task, outputs
        self._names = {name: f"w_{number}" for number, name in enumerate(model)}
        for name, value in model.items():
            self.register_buffer(self._names[name], value.detach().cpu().float())

    def forward(self, x: Tensor) -> Tensor:
        model = {name: getattr(self, own) for name, own in self._names.items()}
        return self._outputs(self._task, model, as_batch(x))


def _with_weights(module: nn.Module, model: Model) -> nn.Module:
    """The plain module with the client's parameters and buffers; counters of batches keep their zeros."""
    own = module.state_dict()
    module.load_state_dict(own | {name: value.detach().cpu() for name, value in model.items() if name in own})
    return module


def need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"--onnx needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}: "
            "pip install 'bespokefl[onnx]'"
        )


def _save_onnx(module: nn.Module, example: Tensor, path: Path) -> None:
    batch = torch.export.Dim("batch")
    with _without_torch_s_remarks():
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: batch},),
            input_names=["x"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    program.save(path)


@contextlib.contextmanager
def _without_torch_s_remarks() -> Iterator[None]:
    """The exporter warns of its own internals, and of packages that are not needed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _check_onnx(path: Path, x: Tensor, expected: Tensor) -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        return "not checked: that needs the package onnxruntime"
    import onnxruntime

    try:
        session: Any = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        found = [torch.from_numpy(session.run(None, {"x": part.numpy()})[0]) for part in (x, x[:1])]
    except Exception as error:  # of many types of its own
        raise RunError(f"the ONNX file cannot be used, and was not kept: {error}") from error
    wanted = expected.float()
    difference = max(float((a - b).abs().max()) for a, b in zip(found, (wanted, wanted[:1]), strict=True))
    if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise RunError(
            f"the ONNX file answers differently from the model, by up to {difference:.1e} on {len(x)} test samples; it "
            "was not kept. Please report this with the model's code."
        )
    reader = f"onnxruntime {onnxruntime.__version__}"
    return f"read back by {reader}, largest difference {difference:.1e} on {len(x)} test samples"
