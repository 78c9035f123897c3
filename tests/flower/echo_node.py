"""A real node around a handler that does as it is told, or that never answers.

`python -m tests.flower.echo_node SUPERLINK CA KEY FOLDER [mute]`
"""

import os
import signal
import sys
import time
from pathlib import Path

from bespokefl.errors import RunError
from bespokefl.flower.silo.node import Node, make_fleet
from bespokefl.flower.transport.certs import read_private_key
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.flower.transport.processes import end_with_parent, stop_on_sigterm


class Echo:
    def handle(self, request: Envelope) -> Envelope:
        match request.header.get("do"):
            case "sleep":
                time.sleep(request.header["seconds"])
            case "fail":
                raise RunError("the disk is full")
            case "bug":
                raise ZeroDivisionError("secret of the silo")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return Envelope({**request.header, "pid": os.getpid()}, {name: 2 * a for name, a in request.arrays.items()})


class Mute:
    def handle(self, request: Envelope) -> Envelope:
        time.sleep(3600)
        raise RunError("the test has gone on without it")


if __name__ == "__main__":
    superlink, ca, key, folder, *mute = sys.argv[1:]
    end_with_parent()
    stop_on_sigterm()
    fleet = make_fleet(superlink, Path(ca), read_private_key(Path(key)))
    Node(Mute() if mute else Echo(), Path(folder), fleet, say=lambda text: print(text, flush=True)).run()
