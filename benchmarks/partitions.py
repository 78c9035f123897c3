"""How much of a table is the partition: the same data, dealt out by several seeds, to clients that learn alone.

    python benchmarks/partitions.py --data DIR
    python benchmarks/partitions.py --experiment experiments/pgfed-table1.toml --setting cifar10-100 --seeds 8

For every seed: the share of a client's largest class and the number of classes in effect (exp of the entropy), means
over clients, and the mean test accuracy of a logistic regression that each client fits to its own train samples (the
first 100 principal components of the pixels). It takes seconds where a network takes minutes, and says which seeds make
local learning easy.
"""

import argparse
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from bespokefl.data import FederatedData
from bespokefl.experiments import resolve
from bespokefl.experiments.reading import read_parts

COMPONENTS = 100


def features(data: FederatedData) -> np.ndarray:
    pixels = data.x.reshape(len(data.y), -1).numpy()
    return PCA(min(COMPONENTS, pixels.shape[1]), whiten=True, random_state=0).fit_transform(pixels)


def alone(data: FederatedData, z: np.ndarray) -> float:
    y, accuracies = data.y.numpy(), []
    for train, test in zip(data.splits["train"], data.splits["test"], strict=True):
        if len(np.unique(y[train])) == 1:
            accuracies.append(float(np.mean(y[test] == y[train][0])))
        else:
            model = LogisticRegression(C=0.01, max_iter=200).fit(z[train], y[train])
            accuracies.append(float(model.score(z[test], y[test])))
    return float(np.mean(accuracies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=Path("experiments/pgfed-table1.toml"))
    parser.add_argument("--setting", default="cifar10-100")
    parser.add_argument("--data", type=Path, help="the folder with all data sets")
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    experiment = next(part for part in read_parts(given.experiment) if part.name == given.setting).experiment
    if given.data:
        root = os.path.join(given.data, experiment.data.root or "")
        experiment = replace(experiment, data=experiment.data.model_copy(update={"root": root}))
    z = None
    print("seed  largest class %  classes in effect  alone, logistic regression %")
    for seed in range(given.seeds):
        data = resolve.load_data(experiment, seed)
        if z is None:  # a seed deals the samples out; they are the same
            z = features(data)
        counts = [np.bincount(data.y.numpy()[rows], minlength=len(data.classes)) for rows in data.splits["train"]]
        shares = np.array([count / count.sum() for count in counts])
        entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(1)
        largest, effective = 100 * shares.max(1).mean(), np.exp(entropy).mean()
        print(f"{seed:4d}  {largest:15.1f}  {effective:17.2f}  {100 * alone(data, z):29.2f}", flush=True)


if __name__ == "__main__":
    main()
