"""What goes on around the rounds of a run: callbacks, and the run as they see it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bespokefl.errors import EndedEarly
from bespokefl.evaluation.scoring import Evaluation

if TYPE_CHECKING:
    from bespokefl.federation.loop import RoundLoop, RoundRecord


@dataclass
class Rounds:
    """A run that goes on: what callbacks are given, and where they leave word for one another."""

    federation: "RoundLoop"
    until: int  # the last round
    callbacks: Sequence["Callback"]
    record: "RoundRecord | None" = None  # of the newest round
    scores: dict[str, Evaluation] = field(default_factory=dict)  # of that round, by what was scored; empty if nothing
    done: int = 0  # rounds that all callbacks have met
    stop: bool = False  # set by whoever wants no further round
    ended_early: EndedEarly | None = None  # why there will be none, if one failed

    @property
    def newest(self) -> "RoundRecord":
        """The round that callbacks are told of."""
        assert self.record is not None, "no round has been run"
        return self.record

    @property
    def is_last(self) -> bool:
        return self.newest.round >= self.until


class Callback:
    """Meets a run where it wants to: a subclass writes the methods that it needs.

    In each round those of ``on_evaluation`` come first (in evaluated rounds), then those of ``on_round``, in the order
    of the list. What must survive a kill is handed over by ``state`` and taken back by ``restore``; it is part of every
    checkpoint. Whoever sets ``run.until`` to the newest round in ``on_evaluation`` ends the run there as finished.
    """

    @property
    def name(self) -> str:
        """Under which its state is kept, so different for each callback of a run that has one."""
        return type(self).__name__

    def resume(self, run: Rounds) -> None:
        """Before all else: go on from an earlier process, where there is something to go on from."""

    def on_start(self, run: Rounds) -> None:
        """Before the first round of this process."""

    def on_evaluation(self, run: Rounds) -> None:
        """In an evaluated round: ``run.scores["test"]`` is there, and further scores may be added."""

    def on_round(self, run: Rounds) -> None:
        """After every round."""

    def on_end(self, run: Rounds) -> None:
        """After the last round, or when one ended the run early (``run.ended_early``); not when somebody stopped it."""

    def flush(self) -> None:
        """Before a checkpoint: what was written so far must be on the disk."""

    def close(self) -> None:
        """The rounds are over, however they ended."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, and what JSON can hold, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what ``state`` gave."""
