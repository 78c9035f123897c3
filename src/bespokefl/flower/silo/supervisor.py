"""Keeps a node going: its process is started again whenever it dies, until that cannot help.

`python -m bespokefl.flower.silo.supervisor SETTINGS` does so as a process of its own.
"""

import sys
import time
from collections.abc import Callable

from bespokefl.errors import BespokeError, InputError, RunError
from bespokefl.flower.silo.worker import REFUSED, WRONG_INPUT, Assignment
from bespokefl.flower.transport.processes import Child, end_with_parent, stop_on_sigterm

WORKER = "bespokefl.flower.silo.worker"
SHORTEST, LONGEST = 1.0, 30.0  # seconds before the next start: doubled after each early death
LIVED = 60.0  # seconds after which a death does not count as early


def supervise(assignment: Assignment, say: Callable[[str], None]) -> None:
    """Returns when the node stops by itself; raises what makes another start useless."""
    pause = SHORTEST
    while True:
        began = time.monotonic()
        with Child(WORKER, [assignment.to_json()]) as child:
            status = child.wait()
        if status == 0:
            return
        if status == WRONG_INPUT:
            raise InputError("the node cannot start; see above.")
        if status == REFUSED:
            raise RunError("the server refused this node; see above.")
        pause = SHORTEST if time.monotonic() - began > LIVED else pause
        say(f"the node's process ended ({_how(status)}); starting it again in {pause:g} s")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)


def _how(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"


def main() -> int:
    end_with_parent()
    stop_on_sigterm()
    try:
        supervise(Assignment.from_json(sys.argv[1]), say=lambda text: print(text, flush=True))
    except BespokeError:  # the worker has said why
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
