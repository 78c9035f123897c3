"""The process of a node (`python -m` this module, SETTINGS), which its supervisor starts again if it dies."""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bespokefl.errors import BespokeError, InputError
from bespokefl.flower.silo.silo_spec import Place
from bespokefl.plain import printable

WRONG_INPUT, REFUSED = 2, 3  # exit codes after which another start would not help


@dataclass(frozen=True)
class Assignment:
    """Which silo, and which server it belongs to."""

    place: Place
    superlink: str
    ca: str = ""
    key: str = ""  # empty: plain text, without authentication

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        fields = json.loads(text)
        place = fields.pop("place")
        return cls(place=Place(**{**place, **{key: tuple(place[key]) for key in ("settings", "limits")}}), **fields)


def attend(assignment: Assignment) -> None:
    """Opens the silo and serves it until the process is stopped."""
    from bespokefl.flower.silo.node import Node, make_fleet
    from bespokefl.flower.transport.certs import read_private_key

    key = read_private_key(Path(assignment.key)) if assignment.key else None
    fleet = make_fleet(assignment.superlink, Path(assignment.ca) if assignment.ca else None, key)
    silo = assignment.place.open()
    for line in silo.terms():
        _say(line)
    Node(silo, Path(assignment.place.folder), fleet, say=_say).run()


def main() -> int:
    from bespokefl.flower.transport.fleet import Refused
    from bespokefl.flower.transport.processes import end_with_parent, stop_on_sigterm
    from bespokefl.flower.transport.version import require_flower

    end_with_parent()
    stop_on_sigterm()
    try:
        require_flower()
        attend(Assignment.from_json(sys.argv[1]))
    except BespokeError as error:
        _say(f"error: {error}")
        return REFUSED if isinstance(error, Refused) else WRONG_INPUT if isinstance(error, InputError) else 1
    return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk must not end the node
        print(printable(text), flush=True)


if __name__ == "__main__":
    sys.exit(main())
