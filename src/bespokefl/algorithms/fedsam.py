"""FedSAM: FedAvg whose clients seek flat minima (Qu et al., ICML 2022).

Client i minimises max over |epsilon| <= rho of f_i(x + epsilon) by sharpness-aware minimisation: one batch gives
g = grad f_i(x), epsilon = rho g / |g| (the norm is over all parameters; 0 where g = 0) and the step along
grad f_i(x + epsilon), taken from x. The server moves w by eta_g times the mean change, 1/C each. With rho = 0 and
eta_g = 1 it is FedAvg with uniform weights, bit for bit.

FedSAM has no personal model: ``personal`` is FedAvg's, and fine-tuning takes the same perturbed steps. The default
rho = 0.05 is that of the comparison in the PLGU paper. New running statistics are those of the pass at x, never of the
perturbed one. The momentum variant (MoFedSAM) is not included; ``momentum`` is that of local SGD.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bespokefl.algorithms._plgu.sharpness import equal_scores, lwsam
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Batch, Cohort, Down, Model, Pass, Task, Tree, hyper, layers_of, server_step
from bespokefl.core.trees import shift


@dataclass(frozen=True)
class FedSAM(FedAvg):
    name: ClassVar[str] = "fedsam"
    paper: ClassVar[str] = "Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022"
    averages: ClassVar = ("train",)

    rho: float = hyper(0.05, "rho: radius of the perturbation", low=0)
    eta_g: float = hyper(1.0, "eta_g: step size of the server", above=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        up = cohort.run(self.train, shared={"w": server["w"]})
        average = self.average(up.x, server["w"], up.weights(self.weights))
        return {"w": server_step(cohort.task, server["w"], self.eta_g, average)}

    # one client --------------------------------------------------------------------------------------
    def gradient(self, task: Task, down: Down, x: Model, batch: Batch) -> Pass:
        p = task.grad(x, batch)
        layers = layers_of(task)
        alike = equal_scores(x[task.names[0]], layers, "mean1")  # LWSAM with all scores 1 is SAM
        epsilon = lwsam(p.grad, alike, layers, self.rho)
        return p._replace(grad=task.grad(shift(x, 1.0, epsilon), batch).grad)
