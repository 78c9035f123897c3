"""FedRep: a shared body learned under heads that are fitted anew in each round (Collins et al., ICML 2021).

min over phi of mean_i min_h f_i(phi, h). Algorithm 1: a client first trains its own head h_i for ``head_epochs`` on the
received body phi, then the body for ``body_epochs`` under that head; the server averages the bodies, all clients alike.
A client's model is the newest body with its own head, the initial one if it never took part; the server has no model.

* Each phase has an optimiser of its own. The head is trained with the body in evaluation mode; running statistics are
  part of the body, and move in its epochs only. ``local_epochs`` is not used.
* 10 and 1 epochs, lr 0.01, momentum 0.5 and weight decay 1e-4 are the authors' code's. PGFed's comparison has 5 and 5,
  without momentum.
* In the last round of the authors' code all clients tune their head once more: ``last_head_epochs`` does so at
  evaluation, on a copy, so that every evaluated round shows it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bespokefl.algorithms.fedper import PartialSharing
from bespokefl.core import Call, Cohort, Phase, Program, Tree, hyper, never


@dataclass(frozen=True)
class FedRep(PartialSharing):
    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"

    acts: ClassVar = {"local_epochs": never("head_epochs and body_epochs say how long a client trains")}

    lr: float = hyper(0.01, "eta: step size of local SGD", low=0)
    momentum: float = hyper(0.5, "momentum of local SGD", low=0, below=1)
    weight_decay: float = hyper(1e-4, "weight decay of local SGD", low=0)
    head_epochs: int = hyper(10, "tau: epochs of the head in a round", low=1)
    body_epochs: int = hyper(1, "epochs of the body in a round, after the head's", low=1)
    last_head_epochs: int = hyper(0, "epochs of the head at evaluation, on the newest body; 0: none", low=0)
    weights: Literal["sample", "uniform"] = hyper("uniform", "p_i: aggregation by samples (n_i) or all clients alike")

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.alternately(self.head_epochs, self.body_epochs)

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        call = super().personal_model(server, cohort)
        if not self.last_head_epochs:
            return call
        return call._replace(program=self.tuned)

    @property
    def tuned(self) -> Program:
        return self.tuned_by(self.private_step, self.last_head_epochs)
