"""The pull towards another model: as a term of a gradient, and as a part of the way there."""

from collections.abc import Mapping

from torch import Tensor

from bespokefl.core.task import Task
from bespokefl.core.trees import Model, Tree, tree_map


def pulled(grad: Model, strength: float, x: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Model:
    """A gradient at x plus that of strength/2 |x - centre|^2."""
    return {k: g + strength * (x[k] - centre[k]) for k, g in grad.items()}


def part_way(a: Tree, s: float | Tensor, b: Tree) -> Tree:
    """(1 - s) a + s b: exactly a for s = 0 and exactly b for s = 1, which a + s (b - a) is not."""
    return tree_map(lambda u, v: (1 - s) * u + s * v, a, b)


def server_step(task: Task, w: Model, s: float, average: Model) -> Model:
    """The parameters go from w part of the way to the clients' average, or beyond it for s above 1.

    Running statistics are the average's: beyond it a variance could be negative.
    """
    return {**average, **part_way(task.params(w), s, task.params(average))}
