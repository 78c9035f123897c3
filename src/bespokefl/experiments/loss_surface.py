"""The loss around a model: its mean over some samples on a grid w + a d1 + b d2 (PLGU's figure 7).

d1 and d2 are drawn at random and normalised filter by filter (Li et al., "Visualizing the loss landscape of neural
nets", 2018): each row of a weight (a neuron of a linear layer, a filter of a convolution) has the length of the same
row of w; biases and the parameters of normalisation layers do not move. A seed draws the same noise for every model, so
that flat and sharp are seen in the same directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from bespokefl.core import trees
from bespokefl.core.model_programs import Outputs, network_outputs
from bespokefl.core.program import Rows
from bespokefl.core.rng import stream
from bespokefl.core.task import Batch, Task
from bespokefl.core.trees import Model
from bespokefl.engines.base import numerics
from bespokefl.evaluation.scorer import batch_size
from bespokefl.federation import Federation
from bespokefl.results.surfaces import Surface

STEPS = np.linspace(-1, 1, 21)  # of a and of b
MOST_ROWS = 512  # samples that a surface is computed on
BYTES = 2**28  # of moved parameters and inputs at a time
INPUT_COPIES = 64  # a network's activations, in sizes of its input


def directions(model: Model, still: set[str], seed: int) -> tuple[Model, Model]:
    """Two random directions with the lengths of the model's filters; ``still`` names tensors that stay (buffers)."""
    first, second = (_direction(model, still, seed, which) for which in range(2))
    return first, second


def _direction(model: Model, still: set[str], seed: int, which: int) -> Model:
    rng, found = stream(seed, "surface", which), {}
    for name, w in model.items():
        if name in still:
            continue
        noise = torch.as_tensor(rng.standard_normal(tuple(w.shape))).to(w)  # drawn for biases too: one order for all
        if w.ndim < 2:
            continue
        lengths, drawn = (v.flatten(1).norm(dim=1) for v in (w, noise))
        found[name] = noise * (lengths / drawn).view(-1, *[1] * (w.ndim - 1))
    return found


def loss_surface(
    task: Task,
    model: Model,
    batches: list[Batch],
    along: tuple[Model, Model],
    a: NDArray[np.float64] = STEPS,
    b: NDArray[np.float64] = STEPS,
    *,
    outputs: Outputs = network_outputs,
    at_once: int | None = None,
) -> NDArray[np.float64]:
    """Mean losses, a row per value of a and a column per value of b; ``at_once`` grid points are computed together."""
    first, second = along
    device = batches[0].x.device
    points = torch.as_tensor(np.stack(np.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)).to(device, task.dtype)

    def total(batch: Batch, step: Tensor) -> Tensor:
        moved = {name: model[name] + step[0] * d + step[1] * second[name] for name, d in first.items()}
        return task.per_sample(outputs(task, {**model, **moved}, batch), batch.y).double().sum()

    sums = torch.zeros(len(points), dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches:
            size = at_once or _at_once(first, batch)
            sums += torch.cat([_each(partial(total, batch), some) for some in torch.split(points, size)])
    mean = sums.cpu().numpy() / sum(len(batch.x) for batch in batches)
    return mean.reshape(len(a), len(b))


def _each(total: "partial[Tensor]", points: Tensor) -> Tensor:
    """The sums at some points, stacked; one by one for a network that vmap cannot take."""
    try:
        return vmap(total)(points)
    except (RuntimeError, ValueError):  # a wrong network fails again in the loop
        return torch.stack([total(point) for point in points])


def _at_once(moving: Model, batch: Batch) -> int:
    return max(1, BYTES // (3 * trees.nbytes(moving) + INPUT_COPIES * trees.nbytes(batch.x)))


# of a federation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    name: str
    client: int | None  # None: the global model
    model: Model
    rows: Rows
    outputs: Outputs


def surfaces(
    federation: Federation, a: NDArray[np.float64] = STEPS, b: NDArray[np.float64] = STEPS
) -> dict[str, Surface]:
    """The loss around the global model, on all clients' test data, and around some personal ones, on their own.

    These are of the clients that score worst, at the median, and best now, by accuracy (masks: Dice). At most
    ``MOST_ROWS`` samples each, drawn by the federation's seed; `about` says how many there were.
    """
    task, scores, found = federation.task, federation.evaluate(), {}
    engine = federation.engine
    for wanted in _wanted(federation, scores.main):
        rows = np.sort(stream(federation.seed, "surface-rows").permutation(wanted.rows)[:MOST_ROWS])
        along = directions(wanted.model, set(task.buffer_names), federation.seed)
        with numerics(task.dtype, engine.device, tf32=getattr(engine, "tf32", True)):
            loss = loss_surface(task, wanted.model, _batches(federation, rows), along, a, b, outputs=wanted.outputs)
        about = {
            "model": "global" if wanted.client is None else "personal",
            "client": wanted.client,
            "round": federation.rounds_done,
            "metric": scores.main_metric,
            "score": None if wanted.client is None else float(scores.main[wanted.client]),
            "data": "test data of all clients" if wanted.client is None else "the client's own test data",
            "rows": len(rows),
            "rows_available": len(wanted.rows),
            "seed": federation.seed,
        }
        found[wanted.name] = Surface(a, b, loss, about)
    return found


def _wanted(federation: Federation, scores: NDArray[np.float64]) -> Iterator[_Wanted]:
    test = federation.data.splits["test"]
    w, union = federation.global_model(), np.concatenate([test[client] for client in federation.honest])
    if w is not None and len(union):
        yield _Wanted("global", None, w, union, network_outputs)
    order = np.argsort(scores, kind="stable")[: int((~np.isnan(scores)).sum())]  # NaN comes last
    places = {"worst": 0, "median": (len(order) - 1) // 2, "best": len(order) - 1}
    for name, place in places.items() if len(order) else ():
        client = int(order[place])
        yield _Wanted(name, client, federation.client_model(client), test[client], federation.algorithm.outputs)


def _batches(federation: Federation, rows: Rows) -> list[Batch]:
    device, size = federation.engine.device, batch_size(federation.data)
    key = torch.zeros((), dtype=torch.int64, device=device)
    parts = [torch.as_tensor(rows[k : k + size], device=device) for k in range(0, len(rows), size)]
    return [Batch(*federation.clients.data.gather(part), None, key) for part in parts]
