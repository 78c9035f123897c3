"""What a silo was asked for in the last rounds of a run: so that it gives no more than a round of the method needs.

The same request has the same answer, so it may come again at any time. Another one counts: a program comes in its
place of a round, as often as a round has it and some repeats; a model is scored once in a round that the run evaluates.
Rounds only go forward, to the last one that the run was opened with. It is written down before an answer leaves, so a
silo that is stopped and started again knows it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bespokefl.core.exchange import Exchange
from bespokefl.flower.refusal import Refused
from bespokefl.flower.silo.terms import Limits
from bespokefl.results.files import read_json, write_atomically

ASKED = "asked.json"
ROUNDS_KEPT = 2  # as of states: a restarted server goes back to its last round, or the one before


class Asked:
    """Of one run, by round."""

    def __init__(self, folder: Path, limits: Limits, *, rounds: int, every: int) -> None:
        self._file, self._limits, self._last, self._every = folder / ASKED, limits, rounds, every
        stored = read_json(self._file) if self._file.is_file() else {}
        # By kind and round: name and number of each request, and its clients, the newest last.
        self._rounds: dict[str, dict[int, list[tuple[str, int, list[int]]]]] = {
            kind: {int(r): [(name, number, ids) for name, number, ids in asked] for r, asked in rounds.items()}
            for kind, rounds in stored.items()
        }

    def check_upload(self, uploads: Mapping[str, Exchange], name: str, round: int, ids: Sequence[int], no: int) -> None:
        """Refuses a program out of its place in the round, or once too often."""
        self._check_round("run", round, round + 1)
        if self._is_known("run", round, no):
            return
        exchange, most = uploads[name], uploads[name].most * (1 + self._limits.repeats)
        for client in ids:
            asked = [program for program, _, _ in self._of("run", round, client)]
            if exchange.after and (not asked or asked[-1] not in exchange.after):
                before = "nothing" if not asked else repr(asked[-1])
                raise Refused(
                    f"{name!r} out of its place: in a round it follows {' or '.join(map(repr, exchange.after))}, and "
                    f"client {client} was asked for {before} before it in round {round + 1}"
                )
            if asked.count(name) >= most:
                raise Refused(
                    f"client {client} has answered {name!r} with {most} different downloads in round {round + 1}, as "
                    f"often as this silo does (--repeats {self._limits.repeats})"
                )

    def check_score(self, uploads: Mapping[str, Exchange], what: str, round: int, ids: Sequence[int], no: int) -> None:
        """Refuses scores of another model than the round's, unless the round itself was repeated."""
        self._check_round("score", round, round)
        if self._limits.evaluations is None:
            return
        if not round or (round % self._every and round != self._last):
            raise Refused(
                f"scores after round {round}: this run was opened to be evaluated after every {self._every} of its "
                f"{self._last} rounds, and the silo tells none in between (--evaluations any)"
            )
        if self._is_known("score", round, no):
            return
        for client in ids:
            begun = [name for name, _, _ in self._of("run", round - 1, client) if not uploads[name].after]
            most = self._limits.evaluations * max(1, len(begun))
            if sum(name == what for name, _, _ in self._of("score", round, client)) >= most:
                raise Refused(
                    f"client {client} has told scores of {most} models ({what}) after round {round}, as often as this "
                    f"silo does (--evaluations {self._limits.evaluations})"
                )

    def note(self, kind: str, name: str, round: int, ids: Sequence[int], no: int) -> None:
        """A request that is answered; older rounds are forgotten."""
        rounds = self._rounds.setdefault(kind, {})
        if rounds.get(round, [("", -1, [])])[-1][1] == no:
            return
        asked = [entry for entry in rounds.get(round, []) if entry[1] != no]
        rounds[round] = [*asked, (name, no, list(ids))]
        self._rounds[kind] = {r: rounds[r] for r in sorted(rounds)[-ROUNDS_KEPT:]}
        write_atomically(self._file, json.dumps(self._rounds))

    def _of(self, kind: str, round: int, client: int) -> Iterator[tuple[str, int, list[int]]]:
        return (entry for entry in self._rounds.get(kind, {}).get(round, []) if client in entry[2])

    def _is_known(self, kind: str, round: int, no: int) -> bool:
        return any(number == no for _, number, _ in self._rounds.get(kind, {}).get(round, []))

    def _check_round(self, kind: str, round: int, nth: int) -> None:
        newest = max(self._rounds.get(kind, {}), default=0)
        if nth > self._last:
            raise Refused(f"round {nth}: this run was opened with {self._last} rounds")
        if round <= newest - ROUNDS_KEPT:
            raise Refused(f"round {nth} is over: this silo was asked for round {nth - round + newest}")
