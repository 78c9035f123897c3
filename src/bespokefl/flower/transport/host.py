"""The server's side: a SuperLink as a child process, and this process as the ServerApp of its run."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bespokefl.errors import InputError, RunError
from bespokefl.flower.transport.certs import Certificates, read_public_key
from bespokefl.flower.transport.control import Control
from bespokefl.flower.transport.processes import Child

START_UP = 60.0  # seconds; three on a quiet machine
LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Hosting:
    """Where the SuperLink listens, and with what."""

    folder: Path  # for its log and its own files
    host: str
    port: int
    certificates: Certificates | None  # None: plain text, and every node is let in


class SuperLink(NamedTuple):
    """A running SuperLink."""

    child: Child
    control: Control
    names: dict[int, str]  # of the nodes that it lets in, by the numbers that it gave them


@contextlib.contextmanager
def hosted(hosting: Hosting, keys: Iterable[Path]) -> Iterator["SuperLink"]:
    """A running SuperLink that lets nodes with these public keys in."""
    public = {path: read_public_key(path) for path in keys}
    check_port(hosting.host, hosting.port)
    hosting.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = secrets.token_bytes(32)
    secret_file = hosting.folder / "executor.secret"
    secret_file.unlink(missing_ok=True)
    with os.fdopen(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    environment = {"FLWR_HOME": str(hosting.folder)}
    log = hosting.folder / "superlink.log"
    try:
        with Child("bespokefl.flower.transport.superlink", _arguments(hosting, secret_file), log, environment) as child:
            _wait_until_up(child, hosting.port)
            ca = None if hosting.certificates is None else hosting.certificates.ca
            control = Control(f"{LOCAL}:{hosting.port}", ca, secret)
            numbers = {path.stem: control.register(key) for path, key in public.items()}
            yield SuperLink(child, control, {number: name for name, number in numbers.items() if number is not None})
    finally:
        secret_file.unlink(missing_ok=True)


def _arguments(hosting: Hosting, secret_file: Path) -> list[str]:
    common = [
        *("--host", hosting.host, "--port", str(hosting.port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret_file)),
        "--disable-runtime-dependency-installation",
    ]
    files = hosting.certificates
    if files is None:
        return [*common, "--insecure"]
    return [
        *common,
        "--enable-supernode-auth",
        *("--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.server)),
        *("--ssl-keyfile", str(files.server_key)),
    ]


def check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"--port {port} on {host} cannot be used ({error.strerror}); give another one.") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


def _wait_until_up(child: Child, port: int) -> None:
    deadline = time.monotonic() + START_UP
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RunError(f"the SuperLink ended at once; the end of {child.log}:\n{child.last_words()}")
        with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), timeout=1):
            return
        time.sleep(0.05)
    raise RunError(f"the SuperLink did not start within {START_UP:.0f} s; its log is {child.log}")
