"""A SuperLink and nodes as real processes on loopback, for the tests."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bespokefl.flower.silo.silo_spec import Place
from bespokefl.flower.silo.worker import Assignment
from bespokefl.flower.transport.certs import Certificates, make_certificates
from bespokefl.flower.transport.control import Control
from bespokefl.flower.transport.host import LOCAL, Hosting, free_port, hosted
from bespokefl.flower.transport.link import GridTransport
from bespokefl.flower.transport.processes import Child


@dataclass
class Loopback:
    """A running SuperLink, and what is needed to add nodes."""

    folder: Path
    certificates: Certificates
    port: int
    child: Child
    control: Control
    names: dict[int, str]  # of the nodes, by the numbers that the SuperLink gave them
    stack: contextlib.ExitStack
    nodes: dict[str, Child] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{LOCAL}:{self.port}"

    def start(self, name: str, address: str | None = None, *, mute: bool = False) -> Child:
        """An echo node with a folder and a key of its own; or one that never answers."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        key, ca = self.certificates.node_key(name), self.certificates.ca
        arguments = [address or self.address, str(ca), str(key), str(folder), *(["mute"] if mute else [])]
        return self._started(name, "tests.flower.echo_node", arguments)

    def host(self, name: str, experiment: Path, clients: str, *settings: str) -> Child:
        """A silo of some clients of an experiment, as `bespoke node` runs it."""
        place = Place(str(self.folder / name), experiment=str(experiment), settings=settings, clients=clients)
        ca, key = self.certificates.ca, self.certificates.node_key(name)
        assignment = Assignment(place, self.address, str(ca), str(key))
        return self._started(name, "bespokefl.flower.silo.worker", [assignment.to_json()])

    def _started(self, name: str, module: str, arguments: list[str]) -> Child:
        self.nodes[name] = self.stack.enter_context(Child(module, arguments, log=self.folder / f"{name}.log"))
        return self.nodes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")


@contextlib.contextmanager
def loopback(folder: Path, names: tuple[str, ...], port: int | None = None) -> Iterator[Loopback]:
    place = folder / "certs"
    certificates = Certificates(place) if place.exists() else make_certificates(place, ["localhost", LOCAL], names)
    chosen = port or free_port()
    with contextlib.ExitStack() as stack:
        hosting = Hosting(folder / "superlink", LOCAL, chosen, certificates)
        link = stack.enter_context(hosted(hosting, certificates.public_keys()))
        yield Loopback(folder, certificates, chosen, link.child, link.control, link.names, stack)


def connected(transport: GridTransport, count: int, seconds: float = 30.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while len(nodes := transport.nodes()) != count:
        assert time.monotonic() < deadline, f"{len(nodes)} nodes instead of {count} after {seconds} s"
        time.sleep(0.1)
    return nodes


class Proxy:
    """Passes bytes on between a port and another, until it is told to cut every connection."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server((LOCAL, 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._cut.is_set():
                    near.close()
                    continue
                far = socket.create_connection((LOCAL, self._target))
                self._open |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
