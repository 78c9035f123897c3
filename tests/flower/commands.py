"""`bespoke` commands as processes whose output can be waited for, and what they leave behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Command:
    """A running `bespoke` command."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.output = folder / f"{arguments[0]}-{time.monotonic_ns()}.txt"
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bespokefl", *map(str, arguments)],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def until(self, true: Callable[[], object], seconds: float = 240.0) -> None:
        wait_until(true, seconds, lambda: f"{self.process.poll()}\n{self.text}")

    def until_said(self, words: str, seconds: float = 240.0) -> None:
        self.until(lambda: words in self.text, seconds)

    def finished(self, seconds: float = 300.0) -> int:
        self.until(lambda: self.process.poll() is not None, seconds)
        return int(self.process.returncode)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


def wait_until(true: Callable[[], object], seconds: float, why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {why()}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, *arguments: object) -> Iterator[Command]:
    command = Command(folder, *arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.kill()


def processes(mention: Path) -> dict[int, str]:
    """Those whose command line mentions a path."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(mention) in line:
                    found[int(entry.name)] = line
    return found


def nothing_left(mention: Path, seconds: float = 15.0) -> None:
    wait_until(lambda: not processes(mention), seconds, lambda: str(processes(mention)))
