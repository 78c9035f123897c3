"""A node: keeps a silo in memory and answers the server's requests, through breaks of the line and restarts."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message

from bespokefl.errors import BespokeError
from bespokefl.flower.transport.certs import CURVE
from bespokefl.flower.transport.envelope import Handler
from bespokefl.flower.transport.fleet import Fleet, Forgotten, NotAccepted, Refused, RunOver, Unreachable
from bespokefl.flower.transport.records import MessageError, from_record, to_record
from bespokefl.plain import one_line

SESSION = "session.json"  # the number that the SuperLink gave this node, to end that session after a crash
SHORTEST, LONGEST, SHARE = 0.1, 1.0, 0.1  # seconds between two looks: a share of the time since the last message
AGAIN = 1.0  # seconds between two attempts to reach the SuperLink
PATIENCE, LONG_PATIENCE = 6.0, 30.0  # seconds for a key to be accepted, the second where a session may still count
FAILED = 2  # Flower's code for an app that failed


class Node:
    """One silo and its line to the server."""

    def __init__(
        self,
        handler: Handler,
        folder: Path,
        fleet: Fleet,
        say: Callable[[str], None] = print,
    ) -> None:
        self._handler, self._file, self._fleet = handler, folder / SESSION, fleet
        self._say: Callable[[str], None] = lambda text: say(one_line(text))  # the server chose some of it
        self._stopped = threading.Event()

    def run(self) -> None:
        """Until it is told to stop (here or by a signal to the process), or the server refuses this node."""
        try:
            while not self._stopped.is_set():
                try:
                    if self._begin():
                        self._attend()
                except (Unreachable, Forgotten) as error:
                    self._say(f"the line is broken: {error}; trying again")
                    self._stopped.wait(AGAIN)
        finally:
            self._fleet.end()
            self._fleet.close()

    def stop(self) -> None:
        """From another thread: the message at hand is answered, then `run` ends."""
        self._stopped.set()

    # sessions --------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Starts a session; waits for a server that is not there, and a while for one that does not accept us.

        False where the node was stopped before that.
        """
        earlier = self._earlier()
        patience = PATIENCE if earlier is None else LONG_PATIENCE
        refused_since: float | None = None
        silent = False
        while not self._stopped.is_set():
            try:
                self._connected(self._fleet.begin(earlier))
                return True
            except Unreachable as error:
                if not silent:
                    self._say(f"{error}; waiting for it")
                silent = True
            except (NotAccepted, Forgotten) as error:
                refused_since = refused_since or time.monotonic()
                if time.monotonic() - refused_since > patience:
                    raise Refused(
                        f"{error}: it is not registered there, or another node uses it; "
                        "ask the server's operator to register its public part (.pub)"
                    ) from None
            self._stopped.wait(AGAIN)
        return False

    def _connected(self, number: int) -> None:
        with contextlib.suppress(OSError):  # without it, only a restart after a crash takes longer
            self._file.write_text(json.dumps({"node": number}), encoding="utf-8")
        self._say(f"connected as node {number}")

    def _earlier(self) -> int | None:
        try:
            return int(json.loads(self._file.read_text(encoding="utf-8"))["node"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a first start; or unreadable, and then the old session times out by itself

    # messages --------------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        heard = time.monotonic()
        while not self._stopped.is_set():
            try:
                message = self._fleet.receive()
            except RunOver as error:
                self._say(f"skipped: {error}")
                continue
            if message is None:
                self._stopped.wait(min(max(SHARE * (time.monotonic() - heard), SHORTEST), LONGEST))
                continue
            reply = self._answer(message)
            try:
                self._fleet.send(reply)
            except RunOver as error:
                self._say(f"the answer was not wanted any more: {error}")
            heard = time.monotonic()

    def _answer(self, message: Message) -> Message:
        began = time.monotonic()
        try:
            request = from_record(message.content)
            header = request.header
            answer = Message(to_record(self._handler.handle(request)), reply_to=message)
        except (BespokeError, MessageError, OSError) as error:
            self._say(f"refused: {error}")
            return Message(Error(FAILED, str(error)), reply_to=message)
        except Exception as error:  # a bug: the server learns its kind, the node goes on
            self._say(f"failed: {type(error).__name__}: {error}")
            return Message(Error(FAILED, f"{type(error).__name__} on the node"), reply_to=message)
        seconds = time.monotonic() - began
        self._say(f"round {header.get('round', '-')}: answered {header.get('kind', '?')!r} in {seconds:.2f} s")
        return answer


# the line ------------------------------------------------------------------------------------------------------


def make_fleet(superlink: str, ca: Path | None, key: ec.EllipticCurvePrivateKey | None) -> Fleet:
    """The line to a SuperLink; without a key in plain text, under a key made for the occasion."""
    if key is None:
        return Fleet(superlink, None, ec.generate_private_key(CURVE), insecure=True)
    return Fleet(superlink, ca, key)
