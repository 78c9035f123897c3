"""Programs, and pieces of them, whose upload is a model: what scoring and newcomers start from."""

from collections.abc import Callable

from torch import Tensor

from bespokefl.core.program import Down, Program
from bespokefl.core.task import Batch, Task
from bespokefl.core.trees import Model, Tree

Outputs = Callable[[Task, Model, Batch], Tensor]


def network_outputs(task: Task, model: Model, batch: Batch) -> Tensor:
    """What the network itself answers."""
    return task.apply(model, batch)[0]


def hand_over(task: Task, down: Down, model: Model) -> tuple[dict[str, Tree], Tree]:
    """The finish of a program whose carry is the model itself."""
    return {"model": model}, {}


def received(task: Task, down: Down, state: Tree) -> Model:
    """The begin of a program whose model is the download ``w``."""
    w: Model = down.w
    return w


GLOBAL_MODEL = Program(received, (), hand_over)
