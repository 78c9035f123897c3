"""Which values come next, and which trials end early.

A grid without pruning needs nobody's advice. Values of a range, and pruning, are optuna's part: a study lives for one
trial; it is built from the trials before, and its sampler is seeded by their number, so a resumed tuning goes on
exactly as one that was never disturbed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bespokefl.core.rng import derived_seed
from bespokefl.errors import InputError
from bespokefl.tuning.space import Choices, Parameters, Range, Space
from bespokefl.tuning.trials import Trial

if TYPE_CHECKING:  # imported where it is needed: the package is optional
    import optuna
    from optuna.distributions import BaseDistribution

TRIALS_BEFORE_PRUNING = 3
ROUNDS_BEFORE_PRUNING = 0.25  # share of the rounds of the first seed


def need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise InputError(
            "bespoke tune needs the package optuna for ranges and for tune.prune: give lists of values and no pruning, "
            "or install it with: pip install 'bespokefl[tune]'"
        ) from None


class Proposal:
    """The values of the next trial; told how the trial goes, it says whether to end it."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def should_end(self, value: float, rounds: int) -> bool:
        """``value`` after this many rounds."""
        return False


class _OfOptuna(Proposal):
    def __init__(self, trial: "optuna.trial.Trial") -> None:
        super().__init__(dict(trial.params))
        self._trial = trial

    def should_end(self, value: float, rounds: int) -> bool:
        self._trial.report(value, rounds)
        return self._trial.should_prune()


def propose(
    space: Space, history: Sequence[Trial], *, trials: int | None, seed: int, prune: bool, rounds: int, ahead: int = 0
) -> Proposal:
    """The next point of a grid, or a point so far ahead of it, or what optuna's TPE sampler makes of the history."""
    point: Parameters | None = None
    if space.is_grid:
        tried = [trial.parameters for trial in history]
        point = [other for other in space.points(trials, seed) if other not in tried][ahead]
        if not prune:
            return Proposal(point)
    import optuna

    pruner = optuna.pruners.MedianPruner(TRIALS_BEFORE_PRUNING, int(ROUNDS_BEFORE_PRUNING * rounds))
    sampler = optuna.samplers.TPESampler(seed=derived_seed(seed, "tune", len(history)) % 2**32)
    distributions = {key: _distribution(domain) for key, domain in space.domains.items()}
    with _silenced():
        study = optuna.create_study(
            direction="maximize", sampler=sampler, pruner=pruner if prune else optuna.pruners.NopPruner()
        )
        study.add_trials([_frozen(trial, distributions) for trial in history])
        if point is not None:
            study.enqueue_trial(point)
        return _OfOptuna(study.ask(distributions))


def _distribution(domain: Choices | Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(domain, Choices):
        return CategoricalDistribution(domain.values)
    if isinstance(domain.low, int) and isinstance(domain.high, int):
        return IntDistribution(domain.low, domain.high, log=domain.log)
    return FloatDistribution(domain.low, domain.high, log=domain.log)


def _frozen(trial: Trial, distributions: dict[str, "BaseDistribution"]) -> "optuna.trial.FrozenTrial":
    from optuna.trial import TrialState, create_trial

    # A failed trial counts as accuracy 0: optuna would forget one marked as failed, and try such values again.
    value: Any = {"value": trial.value or 0.0} if trial.state != "pruned" else {}
    return create_trial(
        state=TrialState.PRUNED if trial.state == "pruned" else TrialState.COMPLETE,
        params=trial.parameters,
        distributions=distributions,
        intermediate_values=dict(trial.curve),
        **value,
    )


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Without optuna's own log lines."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
