"""The trials of a method, and the file that keeps them: written whole after each one, or several at once."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bespokefl.errors import InputError
from bespokefl.experiments.resuming import differences
from bespokefl.experiments.schema import Document
from bespokefl.results.files import read_json, write_atomically
from bespokefl.results.tomlfile import dumps
from bespokefl.tuning.space import Parameters, Space


@dataclass(frozen=True)
class Trial:
    """One choice of values, and how it did on validation samples; figures are None unless it is complete."""

    parameters: Parameters
    state: Literal["complete", "pruned", "failed"]
    value: float | None  # what trials are compared by
    mean: float | None  # over clients, then over seeds
    worst5: float | None
    rounds: int  # that were run, of all seeds together
    seconds: float  # of training
    curve: list[tuple[int, float]]  # of the value, by rounds run so far
    reason: str | None = None  # why it failed


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the highest value; the first of equals."""
    complete = [trial for trial in trials if trial.value is not None]
    return max(complete, key=lambda trial: trial.value or 0.0, default=None)


class TrialFile:
    """A method's trials on disk. They stay when the space changes; only those inside it count."""

    def __init__(self, path: Path, label: str, setting: Document) -> None:
        """``setting`` is all that a trial depends on beside its values: a file with another one is refused."""
        self.path = path
        self._head = {"label": label, "setting": tomllib.loads(dumps(setting))}  # without None, as TOML has it
        self.trials: list[Trial] = []
        if path.exists():
            self._read()

    def within(self, space: Space) -> list[Trial]:
        return [trial for trial in self.trials if trial.parameters in space]

    def append(self, *trials: Trial) -> None:
        """All of them or, if somebody pulls the plug, none."""
        self.trials += trials
        lines = ",\n".join(f"  {_dump(asdict(trial))}" for trial in self.trials)
        head = ",\n".join(f" {json.dumps(key)}: {_dump(value)}" for key, value in self._head.items())
        write_atomically(self.path, f'{{\n{head},\n "trials": [\n{lines}\n ]\n}}\n')

    def _read(self) -> None:
        try:
            content = read_json(self.path)
            stored, trials = content["setting"], [_trial(entry) for entry in content["trials"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} cannot be read ({error!r}); remove it to tune this method afresh.") from None
        if differing := sorted(differences(stored, self._head["setting"])):  # type: ignore[arg-type]
            raise InputError(
                f"{self.path} holds trials of another configuration, so --resume cannot go on with it: "
                f"{'; '.join(differing)}. Use the same configuration, or give another --out."
            )
        self.trials = trials


def _trial(entry: dict[str, Any]) -> Trial:
    return Trial(**entry | {"curve": [(int(rounds), float(value)) for rounds, value in entry["curve"]]})


def _dump(content: object) -> str:
    return json.dumps(content, allow_nan=False)
