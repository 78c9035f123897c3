"""FedAlt: the personal part of a model first, then the shared one (Pillutla et al., ICML 2022).

The objective and the server are FedSim's. Algorithm FedAlt: a client first trains v_i for tau_v epochs with the
received u fixed, then u for tau_u epochs with the new v_i fixed, each with an optimiser of its own. With a personal
head, weights alike, tau_v = head_epochs and tau_u = body_epochs it is FedRep, bit for bit.

As in FedRep, v_i is trained in evaluation mode: running statistics, also private ones, move in the epochs of u only,
and dropout is off in those of v_i. In the authors' code the network is in training mode throughout, without momentum,
and both phases have as many epochs: the default here, which is twice the local work of methods with one phase.
"""

from dataclasses import dataclass
from typing import ClassVar

from bespokefl.algorithms.fedsim import FedSim
from bespokefl.core import Phase, hyper, when


@dataclass(frozen=True)
class FedAlt(FedSim):
    name: ClassVar[str] = "fedalt"
    paper: ClassVar[str] = "Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022"

    acts: ClassVar = {"local_epochs": when(v_epochs=None) | when(u_epochs=None)}

    v_epochs: int | None = hyper(None, "tau_v: epochs of the personal part; nothing: local_epochs", low=1)
    u_epochs: int | None = hyper(None, "tau_u: epochs of the shared part; nothing: local_epochs", low=1)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.alternately(self.v_epochs or self.local_epochs, self.u_epochs or self.local_epochs)
