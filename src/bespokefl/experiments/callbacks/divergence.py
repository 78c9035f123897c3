"""The end of a run whose models are lost."""

from bespokefl.errors import REMEDY, Diverged
from bespokefl.evaluation.divergence import what_diverged
from bespokefl.federation.callbacks import Callback, Rounds


class Divergence(Callback):
    """Ends a run that diverged, the same rule for every method; under an attack lost models are what is to be seen."""

    def on_evaluation(self, run: Rounds) -> None:
        why = what_diverged(run.scores["test"], len(run.federation.data.classes))
        if why and not len(run.federation.malicious):
            raise Diverged(f"the models diverged by round {run.newest.round}: {why}; {REMEDY}")
