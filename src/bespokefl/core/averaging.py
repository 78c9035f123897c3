"""What methods share whose server averages its clients' models: the choice of the average."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from bespokefl.core.acting import unless, when
from bespokefl.core.algorithm import Algorithm, Setup
from bespokefl.core.hyper import hyper
from bespokefl.core.robust import clipped_mean, krum, mean_of_rows, median, trimmed_mean
from bespokefl.core.task import Task
from bespokefl.core.trees import Tree, mean
from bespokefl.errors import InputError, RunError


@dataclass(frozen=True)
class ModelAveraging(Algorithm):
    """``average`` stands where a method's paper has the mean of models; all but the mean resist some bad ones."""

    acts: ClassVar = {"weights": when(aggregation=("mean", "clip")) | when(aggregation="krum") & unless(krum_keep=1)}

    aggregation: Literal["mean", "median", "trimmed", "krum", "clip"] = hyper(
        "mean", "how models are averaged: by p_i; per coordinate, all alike; those of Krum; with updates clipped"
    )
    trim: float = hyper(
        0.1,
        'share of clients cut at each end of a coordinate (aggregation="trimmed")',
        low=0,
        below=0.5,
        when=when(aggregation="trimmed"),
    )
    krum_f: int | None = hyper(
        None,
        "f: attackers that Krum reckons with among n clients; nothing: floor((n - 3) / 2), the most it can",
        low=0,
        when=when(aggregation="krum"),
    )
    krum_keep: int = hyper(
        1,
        "models that Krum keeps, averaged by p_i; more than 1 is multi-Krum",
        low=1,
        when=when(aggregation="krum"),
    )
    clip_norm: float | None = hyper(
        None,
        'largest norm of an update w_i - w (aggregation="clip"); nothing: the median norm of the round',
        above=0,
        when=when(aggregation="clip"),
    )

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        if self.aggregation in ("trimmed", "krum"):
            for n in setup.cohort_sizes or (setup.cohort_size,):
                self._check_size(n)

    def _check_size(self, n: int) -> None:
        """Refuses what makes no sense in a round of n clients."""
        if self.aggregation == "trimmed" and self.trim > 0 and not self._cut(n):
            allowed = f"at least {1 / n:.3g} and below 0.5" if n > 2 else "0, or other clients take part"
            raise InputError(
                f"algorithm.trim = {self.trim:g} ({self.name}) cuts none of the {n} clients of a round; it must be "
                f"{allowed}"
            )
        if self.aggregation == "krum":
            f = self._attackers(n)
            if n < 2 * f + 3:
                raise InputError(
                    f"algorithm.krum_f = {f} ({self.name}): Krum needs at least 2 f + 3 = {2 * f + 3} clients in a "
                    f"round, and there are {n}"
                )
            if self.krum_keep > n - f:
                raise InputError(
                    f"algorithm.krum_keep = {self.krum_keep} ({self.name}): of {n} clients in a round, {f} of them "
                    f"attackers, Krum can keep at most {n - f}"
                )

    def averaged(self) -> tuple[str, ...]:
        return super().averaged() if self.aggregation == "mean" else ()

    def average(self, models: Tree, start: Tree | None, weights: Tensor) -> Tree:
        """The stacked models as one; ``start`` is what all of them started from, nothing if they are differences."""
        n = len(weights)
        if self.aggregation == "median":
            return median(models)
        if self.aggregation == "trimmed":
            return trimmed_mean(models, self._cut(n))
        if self.aggregation == "krum":
            f = self._attackers(n)
            if n < 2 * f + 3:
                raise RunError(f"only {n} clients answered; Krum with f = {f} needs {2 * f + 3} (algorithm.krum_f)")
            return mean_of_rows(models, krum(models, start, f, self.krum_keep), weights)
        if self.aggregation == "clip":
            return clipped_mean(models, start, weights, self.clip_norm)
        return mean(models, weights)

    def _cut(self, n: int) -> int:
        return min(int(self.trim * n + 1e-9), (n - 1) // 2)  # 0.29 of 100 is 29 in spite of rounding

    def _attackers(self, n: int) -> int:
        return max(0, (n - 3) // 2) if self.krum_f is None else self.krum_f
