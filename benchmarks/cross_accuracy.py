"""Every personal model on every client's test data (G-accuracy): how long it takes.

    python benchmarks/cross_accuracy.py
    python benchmarks/cross_accuracy.py --model fedavg-cnn --clients 100 --images 15000 --device cuda

Random images and models: speed does not depend on what is in them. Printed are the median of some evaluations and how
many images a second went through a model. The first evaluation, in which programs are traced, is printed apart.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from bespokefl import models
from bespokefl.algorithms import build_algorithm
from bespokefl.core import Task
from bespokefl.data import FederatedData
from bespokefl.engines import Vectorized, pick_device
from bespokefl.experiments.bench import CLASSES
from bespokefl.experiments.selection import g_rows
from bespokefl.federation import Federation


def federation(model: str, clients: int, images: int, device: torch.device) -> Federation:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((images, 3, 32, 32), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, images))
    test = tuple(np.array_split(np.arange(images), clients))
    few = tuple(rows[:1] for rows in (*test[1:], test[0]))  # no client's own test sample
    none = tuple(np.arange(0) for _ in test)
    names = tuple(str(i) for i in range(clients))
    data = FederatedData(x, y, {"train": few, "val": none, "test": test}, tuple("0123456789"), names, {})
    torch.manual_seed(0)
    algorithm = build_algorithm("local", {"lr": 0.1, "local_epochs": 1})
    task = Task(models.build(model, (3, 32, 32), CLASSES))
    return Federation(task, data, algorithm, engine=Vectorized(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fedavg-cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=15_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = pick_device(given.device)
    run = federation(given.model, given.clients, given.images, device)
    run.round()  # so that every client has a model of its own
    rows = g_rows(run.data.splits["test"])
    seconds = []
    for _ in range(1 + given.repeats):
        start = time.perf_counter()
        scores = run.evaluate(rows=rows)
        seconds.append(time.perf_counter() - start)  # scores are on the CPU: nothing is left to wait for
    assert (scores.n == given.images).all()
    median = statistics.median(seconds[1:])
    print(
        f"{given.clients} models of {given.model} on {given.images} images, {device}, torch {torch.__version__}: "
        f"{median:.3f} s (the first {seconds[0]:.3f} s), {given.clients * given.images / median:,.0f} images a second"
    )


if __name__ == "__main__":
    main()
