"""Your own data: one pair of arrays per client, three methods, every client's accuracy.

Five clinics measure the same 20 values, and each has a rule of its own by which somebody is ill: mostly the common one.
Run it with ``python examples/own_data.py``.
"""

import numpy as np
import torch
from torch import nn

from bespokefl.algorithms import build_algorithm
from bespokefl.data import FederatedData
from bespokefl.federation import Federation

PATIENTS = {"north": 120, "east": 60, "south": 300, "west": 80, "centre": 200}
VALUES = 20
TRAINING = {"lr": 0.1, "local_epochs": 2, "batch_size": 16}


def make_clinics(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=VALUES)
    clinics = {}
    for name, n in PATIENTS.items():
        rule = common + 0.5 * rng.normal(size=VALUES)
        x = rng.normal(size=(n, VALUES)).astype(np.float32)
        clinics[name] = x, (x @ rule > 0).astype(np.int64)
    return clinics


def main() -> None:
    data = FederatedData.from_arrays(make_clinics(), test=0.5, classes=["healthy", "ill"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(VALUES, 16), nn.Tanh(), nn.Linear(16, 2))
    print("client    " + "".join(f"{name:>9}" for name in data.client_names))
    for name, hyper in (("local", {}), ("fedavg", {"personal": "global"}), ("ditto", {"lam": 0.5})):
        federation = Federation(model, data, build_algorithm(name, TRAINING, hyper))
        accuracy = federation.run(rounds=20, evaluate_every=0).accuracy[-1]
        print(f"{name:<10}" + "".join(f"{100 * a:8.1f}%" for a in accuracy))


if __name__ == "__main__":
    main()
