"""No process outlives the one that started it; the operator's side of the SuperLink is closed to other machines."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

import httpx
from starlette.responses import PlainTextResponse

from bespokefl.flower.transport.processes import Child
from bespokefl.flower.transport.superlink import OperatorIsLocal

CHILD = """
import time
from bespokefl.flower.transport.processes import end_with_parent
end_with_parent()
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import signal, sys, time
from pathlib import Path
from bespokefl.flower.transport.processes import Child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
child = Child("sleeper", [], log=Path("log"))
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    """Whether it runs; one that has ended but that nobody has asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(true: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_child_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(path or os.getcwd() for path in sys.path)])}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            eventually(lambda: "up" in (tmp_path / "log").read_text())
            parent.send_signal(number)
            parent.wait(10)
            eventually(lambda: not is_there(child))
        finally:
            parent.kill()


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("bespokefl.flower.transport.processes.GRACE", 0.5)
    with Child("stubborn", [], log=tmp_path / "log") as child:
        eventually(lambda: "up" in (tmp_path / "log").read_text())
        assert child.poll() is None
    assert child.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("client", "path", "status"),
    [
        ("192.0.2.7", "/v1/fleet/pull-messages", 200),
        ("192.0.2.7", "/v1/control/start-run", 403),
        ("192.0.2.7", "/v1/control/register-node", 403),
        ("192.0.2.7", "/v1/runtime/acquire-task", 403),
        ("192.0.2.7", "/v1/fleet/../control/start-run", 403),
        ("192.0.2.7", "/docs", 403),
        ("2001:db8::1", "/v1/control/start-run", 403),
        ("::ffff:192.0.2.7", "/v1/control/start-run", 403),
        ("127.0.0.1", "/v1/control/start-run", 200),
        ("::1", "/v1/control/start-run", 200),
        ("::ffff:127.0.0.1", "/v1/control/start-run", 200),
    ],
)
def test_only_nodes_come_from_other_machines(client: str, path: str, status: int) -> None:
    app = OperatorIsLocal(PlainTextResponse("inside"))

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app, client=(client, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as session:
            return (await session.post(path)).status_code

    assert asyncio.run(ask()) == status
