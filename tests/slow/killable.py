"""The `bespoke` command in processes that are killed. They are forked from one that has done the imports.

As a program it reads a request in JSON from each line of its input, and answers each with a line of JSON.
"""

import builtins
import collections
import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

PAUSE = 0.01  # seconds, in the middle of a write
IMPORTS = (
    "bespokefl.cli",
    "bespokefl.experiments.running",
    "bespokefl.report.content",
    "torch._dynamo",
    "duckdb",
    "sklearn",
)


class Ended(NamedTuple):
    """How a command ended."""

    status: int  # a signal's number is negative
    writes: int  # that it had made, if it was not killed
    said: str


class Killer:
    """Starts commands, and kills them where that is asked for."""

    def __enter__(self) -> Self:
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)  # no more requests

    def call(
        self,
        *arguments: object,
        after: tuple[int, float] | None = None,
        within: tuple[str, int, float] | None = None,
        report: bool = True,
    ) -> Ended:
        """One command. It is killed so many seconds ``after`` its so manyeth write has begun (0: after its start), or
        ``within`` a write: a file's name, the how manyeth write to it, and how much of it reaches the file. Writes
        pause in the middle. Without a ``report`` the command finds none of the packages for it."""
        arguments = [str(argument) for argument in arguments]
        request = {"arguments": arguments, "after": after, "within": within, "report": report}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))


# in the process that is forked -----------------------------------------------------------------------
class Writes:
    """What becomes of writes."""

    def __init__(self, after: tuple[int, float] | None, within: tuple[str, int, float] | None) -> None:
        self.after, self.within = after, within
        self.seen: collections.Counter[str] = collections.Counter()  # by file
        self.count(0)

    def count(self, number: int) -> None:
        """So many have begun."""
        if self.after and self.after[0] == number:
            clock = threading.Timer(self.after[1], die)
            clock.daemon = True
            clock.start()

    def open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        """As the built-in does, but for files that are written to."""
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return OPEN(file, mode, buffering, *rest, **named)
        if "+" in mode:
            self.again(Path(file))
        raw = Slowly(file, mode.replace("b", "").replace("t", ""), self)
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *rest, **named)

    def again(self, path: Path) -> None:
        """Writes again what a library has written in a language where no write can be slowed."""
        content = path.read_bytes()
        with self.open(path, "wb") as file:
            file.write(content)

    def share(self, name: str) -> float | None:
        """How much of this write to a file reaches it before the process is killed; None for all."""
        plain = name.removeprefix(".").removesuffix(".unfinished")
        self.seen[plain] += 1
        self.count(self.seen.total())
        return self.within[2] if self.within and self.within[:2] == (plain, self.seen[plain]) else None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Slowly(io.FileIO):
    """A file whose writes have a pause in the middle."""

    def __init__(self, file: Any, mode: str, writes: Writes) -> None:
        super().__init__(file, mode)
        self._own_name, self._writes = Path(file).name, writes

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        if (share := self._writes.share(self._own_name)) is not None:
            super().write(content[: int(share * len(content))])
            die()
        half = len(content) // 2
        super().write(content[:half])
        time.sleep(PAUSE)
        super().write(content[half:])
        return len(content)


OPEN = io.open


def slow_down(writes: Writes) -> None:
    """From now on. safetensors writes a checkpoint, and duckdb results.parquet, which is opened to be flushed."""
    from bespokefl.experiments import checkpoint

    save_file = checkpoint.save_file

    @functools.wraps(save_file)
    def saved(tensors: Any, path: Path, *rest: Any) -> None:
        save_file(tensors, path, *rest)
        writes.again(path)

    checkpoint.save_file = saved
    io.open = builtins.open = writes.open  # type: ignore[assignment]


def main() -> None:
    """Answers requests until there are no more."""
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        if (process := os.fork()) == 0:
            for number in (1, 2):
                os.dup2(write, number)
            os.close(read)
            command(request)
        os.close(write)
        with os.fdopen(read, errors="replace") as output:
            said = output.read()
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        made = re.search(r"writes: (\d+)\n$", said)
        print(json.dumps([status, int(made[1]) if made else 0, said]), flush=True)


def command(request: Mapping[str, Any]) -> None:
    from bespokefl.__main__ import main as bespoke

    after, within = ((tuple(request[name]) if request[name] else None) for name in ("after", "within"))
    writes = Writes(after, within)  # type: ignore[arg-type]
    slow_down(writes)
    if not request["report"]:
        sys.modules["altair"] = None  # type: ignore[assignment]
    sys.argv[1:] = request["arguments"]
    status = 1
    try:
        bespoke()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 0
    finally:
        sys.stdout.flush()
        print(f"writes: {writes.seen.total()}", file=sys.stderr, flush=True)
        os._exit(status)


if __name__ == "__main__":
    main()
