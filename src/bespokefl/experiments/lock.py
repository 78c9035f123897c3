"""One process at a time in the folder of a run."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bespokefl.errors import InputError


@contextlib.contextmanager
def working_in(folders: Iterable[Path]) -> Iterator[None]:
    """Keeps other processes out of these run folders until the block is left; refuses those that somebody works in.

    The operating system holds the lock for the process, so that of a process that died is free. Who has it stands in
    the lock's file, beside the run's folder.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(_locked(folder))
        yield


def clear(folder: Path) -> None:
    """Removes what a killed process left beside a run that it had finished; leaves the lock that somebody holds."""
    if _file(folder).exists():
        with contextlib.suppress(InputError), _locked(folder):
            pass


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = _file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{folder} is in use{_owner(path)}: two processes would spoil each other's files. "
            "Wait for it to end and add --resume, or give another --out."
        ) from None
    try:
        me = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        path.write_text(json.dumps(me) + "\n", encoding="utf-8")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever opened it meanwhile sees that it has no name any more
        lock.release()


def _file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _owner(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f" by process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return " by another process"
