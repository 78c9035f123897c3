"""How strong the features of the clients' personal models are: figures of the head's inputs on their own test data.

LG-Mix's figure 2b draws such values: a feature above 0 is a neuron that the input activates.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.core import trees
from bespokefl.core.program import Rows
from bespokefl.core.task import Batch
from bespokefl.core.trees import Model
from bespokefl.engines.base import numerics
from bespokefl.evaluation.scorer import batch_size
from bespokefl.federation import Federation

NAMES = ("features: mean", "features: median", "features: 95th percentile", "features: share above 0")
CLIENTS_AT_ONCE = 16


def feature_figures(federation: Federation) -> dict[str, NDArray[np.float64]]:
    """By name, a figure per client over all features of all its test samples; NaN without any, or for an attacker."""
    found = np.full((len(NAMES), federation.data.clients), np.nan)
    test = federation.data.splits["test"]
    asked = [client for client in federation.honest.tolist() if len(test[client])]
    for some in (asked[k : k + CLIENTS_AT_ONCE] for k in range(0, len(asked), CLIENTS_AT_ONCE)):
        models = federation.personal_models(some)
        for place, client in enumerate(some):
            found[:, client] = _figures(_features(federation, trees.rows(models, place), test[client]))
    return dict(zip(NAMES, found, strict=True))


def _features(federation: Federation, model: Model, rows: Rows) -> NDArray[np.float64]:
    task, engine, size = federation.task, federation.engine, batch_size(federation.data)
    key = torch.zeros((), dtype=torch.int64, device=engine.device)
    parts = []
    with torch.no_grad(), numerics(task.dtype, engine.device, tf32=getattr(engine, "tf32", True)):
        for k in range(0, len(rows), size):
            own = torch.as_tensor(rows[k : k + size], device=engine.device)
            h = task.features(model, Batch(*federation.clients.data.gather(own), None, key))
            parts.append(h.flatten().double().cpu().numpy())
    return np.concatenate(parts)


def _figures(h: NDArray[np.float64]) -> list[float]:
    return [float(h.mean()), float(np.median(h)), float(np.percentile(h, 95)), float((h > 0).mean())]
