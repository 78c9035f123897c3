"""FedProx: FedAvg whose clients are held near the global model (Li et al., MLSys 2020).

Client i minimises f_i(x) + mu/2 |x - w|^2 (eq. 2), w being the model of the round's start; its gradient adds
mu (x - w). With mu = 0 it is FedAvg, bit for bit. Deviation: the paper lets clients solve to a varying accuracy
(gamma-inexactness); here all run E epochs, as in the comparisons that cite it.
"""

from dataclasses import dataclass
from typing import ClassVar

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Batch, Down, Model, Pass, Task, hyper, pulled


@dataclass(frozen=True)
class FedProx(FedAvg):
    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = hyper(0.1, "mu: weight of the proximal term, eq. (2)", low=0)

    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        p = task.grad(x, batch)
        return p._replace(grad=pulled(p.grad, self.mu, x, down.w))
