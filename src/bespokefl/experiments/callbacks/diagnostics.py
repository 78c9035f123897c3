"""Diagnostics of the method, written in evaluated rounds."""

from pathlib import Path

from bespokefl.experiments.features import feature_figures
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.results.facts import is_kept, write_facts


class Diagnostics(Callback):
    """What the algorithm shows of its state (PGFed's matrix A, LG-Mix's lambda), and figures of the features."""

    def __init__(self, folder: Path, every: int, features: bool) -> None:
        self._folder, self._every, self._features = folder, every, features

    def on_evaluation(self, run: Rounds) -> None:
        fed, every = run.federation, self._every
        facts = fed.facts()
        if self._features and fed.local is not None:
            facts |= feature_figures(fed.local)
        nth, of = -(-run.newest.round // every) - 1, -(-run.until // every)
        if facts and is_kept(nth, of, sum(value.nbytes for value in facts.values())):
            write_facts(self._folder, run.newest.round, facts, fed.algorithm.layer_names(fed.task))
