"""The same federation with Flower's own commands and the app in the package."""

import ast
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from flwr.cli.build import build_fab_from_disk
from tests.flower.commands import ROOT, wait_until
from tests.flower.test_federate import assert_same_numbers, simulated, written

from bespokefl.flower.transport.certs import make_certificates
from bespokefl.flower.transport.control import APP
from bespokefl.flower.transport.host import LOCAL, free_port


@contextlib.contextmanager
def started(folder: Path, env: dict[str, str], *command: object) -> Iterator[None]:
    with (folder / f"{Path(str(command[0])).name}-{command[-1]!s:.10}.log".replace("/", "_")).open("wb") as log:
        process = subprocess.Popen([*map(str, command)], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_app_is_small_and_only_imports() -> None:
    assert len(build_fab_from_disk(APP)) < 20_000
    for name in ("server_app", "client_app"):
        tree = ast.parse((APP / "bespoke_app" / f"{name}.py").read_text())
        _, imported, assigned = (ast.unparse(part) for part in tree.body)
        assert imported == f"from bespokefl.flower.apps import {name}" and assigned == f"app = {name}"


@pytest.mark.slow
def test_flowers_own_commands_give_the_same_numbers(tmp_path: Path) -> None:
    """`flower-superlink`, `flower-supernode`, `flwr run`: slow, as Flower starts a process for every message."""
    path, out, port = written(tmp_path, ["pgfedmo"], 2), tmp_path / "federation", free_port()
    files = make_certificates(tmp_path / "certs", ["localhost", LOCAL], ["a", "b"])
    patient = '[federation]\ncohort = "seed"\ndeadline = 300'  # Flower starts a process for every message
    path.write_text(path.read_text().replace("[federation]\ndeadline = 60", patient))
    scripts, home = Path(sys.executable).parent, tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "{LOCAL}:{port}"\n'
        f'root-certificates = "{files.ca}"\n'
    )
    env = os.environ | {
        "FLWR_HOME": str(home),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }

    def flwr(*arguments: object) -> None:
        done = subprocess.run(["flwr", *map(str, arguments)], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    with contextlib.ExitStack() as stack:
        tls = ("--ssl-ca-certfile", files.ca, "--ssl-certfile", files.server, "--ssl-keyfile", files.server_key)
        options = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
        stack.enter_context(started(tmp_path, env, "flower-superlink", "--host", LOCAL, *tls, *options, "--port", port))
        wait_until(lambda: _listens(port), 60)
        for name, clients in (("a", "0-1"), ("b", "2-3")):
            flwr("supernode", "register", files.folder / f"{name}.pub", "mine")
            config = f'folder="{tmp_path / name}" experiment="{path}" clients="{clients}" device="cpu"'
            stack.enter_context(
                started(
                    tmp_path,
                    env,
                    *("flower-supernode", "--superlink", f"{LOCAL}:{port}", "--root-certificates", files.ca),
                    *("--auth-supernode-private-key", files.node_key(name), "--node-config", config),
                    *("--port", free_port()),
                )
            )
        app = shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
        flwr("run", app, "mine", "--run-config", f'experiment="{path}" out="{out}" nodes=2')
        logs = sorted(tmp_path.glob("*.log"))
        wait_until(
            lambda: (out / "pgfedmo/seed-0/summary.json").is_file(),
            900,
            lambda: "\n".join(log.read_text(errors="replace")[-3000:] for log in logs),
        )
    simulated(path, tmp_path / "simulation")
    assert_same_numbers(out, tmp_path / "simulation", ["pgfedmo"])


def _listens(port: int) -> bool:

    with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), timeout=1):
        return True
    return False
