"""What FedPG's personal directions cost the server: 100 of them against the local training of the same round.

    python benchmarks/directions.py

100 clients of 600 samples with two of ten labels each, MLP 784-200-10 in float32, 5 epochs of batch 50, gamma = 0.
Measured in one process and in turns: the local training of a round (vectorized engine), the Gram matrix of its 100
gradients (once for all clients), the 100 problems of the nearest direction without conflict, and the combination of the
gradients. Beside it stand the two ways to solve one problem of 200 columns: scipy's solver, and ours for where its
answer is not optimal.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bespokefl import models
from bespokefl.algorithms.fedpg import FedPG
from bespokefl.core import Cohort, gram, min_norm, nearest_directions
from bespokefl.core.solvers import EPS, Floats, active_set, factor
from bespokefl.core.trees import combine
from bespokefl.data import FederatedData
from bespokefl.engines import Vectorized
from bespokefl.experiments.bench import CLASSES
from bespokefl.federation import Federation

CLIENTS, SAMPLES, PIXELS = 100, 600, 784
REPEATS = 5
COLUMNS = 200


def two_labels_each(seed: int = 0) -> FederatedData:
    """Noise around a point per label; gradients of clients with other labels are in conflict."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLASSES, PIXELS), dtype=np.float32)
    clients = []
    for i in range(CLIENTS):
        y = rng.choice([i % CLASSES, (i + 1 + i // CLASSES) % CLASSES], SAMPLES)
        x = 0.3 * centres[y] + rng.standard_normal((SAMPLES, PIXELS), dtype=np.float32)
        clients.append({"train": (x, y), "test": (x[:1], y[:1])})
    return FederatedData.from_arrays(clients, classes=tuple("0123456789"))


@contextmanager
def timed(seconds: dict[str, list[float]], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.setdefault(what, []).append(time.perf_counter() - start)


def rounds(console: Console) -> None:
    torch.manual_seed(0)
    module = models.build("mlp", (PIXELS,), CLASSES, hidden=[200])
    algorithm = FedPG(lr=0.01, momentum=0.9, local_epochs=5, batch_size=50)
    federation = Federation(module, two_labels_each(), algorithm, engine=Vectorized("cpu"))
    federation.round()  # traces the programs
    everyone = np.arange(CLIENTS)
    seconds: dict[str, list[float]] = {}
    for t in range(1, 1 + REPEATS):  # from one model, in other batches each time
        with timed(seconds, "local training"):
            down = algorithm.download(federation.server.w, t)
            g = Cohort(federation.site, everyone, t).run(algorithm.upload, shared=down).g
        with timed(seconds, "Gram matrix"):
            products = gram(g)
        with timed(seconds, f"{CLIENTS} problems"):
            nu = nearest_directions(products, range(CLIENTS), 0.0)
        with timed(seconds, "combination"):
            combine(torch.as_tensor(-nu - np.eye(CLIENTS)), g)
    median = {what: statistics.median(all_of) for what, all_of in seconds.items()}
    training = median["local training"]
    table = Table(title=f"{CLIENTS} clients, median of {REPEATS} rounds; {torch.get_num_threads()} threads")
    for heading in ("", "s", "of the training"):
        table.add_column(heading, justify="right" if heading else "left")
    for what, s in {**median, "directions in all": sum(median.values()) - training}.items():
        table.add_row(what, f"{s:.3f}", f"{s / training:.3f}")
    console.print(table)
    console.print(f"constraints that push, per client: {(nu > 0).sum(1).mean():.1f} of {CLIENTS - 1}")


def one_problem(console: Console) -> None:
    """The shortest vector in the hull of columns that are all needed: the most work for a method of active sets."""
    q = np.random.default_rng(5).standard_normal((5000, COLUMNS))
    products: Floats = q.T @ q
    lengths = np.sqrt(products.diagonal())
    root = factor(products / lengths[:, None] / lengths[None, :])
    matrix, target = np.vstack([root, lengths.min() / lengths]), np.eye(len(root) + 1)[-1]
    seconds: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        with timed(seconds, "scipy's solver"):
            min_norm(products)
        with timed(seconds, "ours"):
            active_set(matrix, target, 8 * EPS * COLUMNS**0.5)
    for what, all_of in seconds.items():
        console.print(f"one problem of {COLUMNS} columns, {what}: {statistics.median(all_of):.3f} s")


if __name__ == "__main__":
    rounds(Console())
    one_problem(Console())
