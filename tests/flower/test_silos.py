"""Silos on their own data, as their operators run them (`bespoke server`, `bespoke node`), and what happens to them."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from sklearn.datasets import load_digits
from tests.flower.commands import Command, nothing_left, processes, running, wait_until

from bespokefl.flower.transport.host import LOCAL, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks into /proc"),
]

NAMES = ("ada", "ben", "cleo")
EXPERIMENT = """
seeds = [0]
algorithm = { name = "ditto" }
[data]
test = 0.25
[model]
name = "mlp"
hidden = [32]
[train]
rounds = 200
local_epochs = 1
batch_size = 20
lr = 0.1
participation = 1.0
[engine]
device = "cpu"
[federation]
deadline = 6
wait = 90
"""


class Silos:
    """Three silos, a server, and what it has written."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.port = folder, stack, free_port()
        self.out = folder / "out"
        (folder / "experiment.toml").write_text(EXPERIMENT)
        x, y = load_digits(return_X_y=True)
        for number, name in enumerate(NAMES):
            mine = np.flatnonzero(np.isin(y % 5, [number, number + 1]))[:240]
            np.savez(folder / f"{name}.npz", x=(x[mine] / 16).astype(np.float32).reshape(-1, 1, 8, 8), y=y[mine])
        nodes = [word for name in NAMES for word in ("--node", name)]
        with running(folder, "certs", folder / "certs", *nodes) as command:
            assert command.finished() == 0, command.text

    def serve(self, *more: object) -> Command:
        arguments = ("--certs", self.folder / "certs", "--host", LOCAL, "--port", self.port, "--out", self.out)
        return self.stack.enter_context(
            running(self.folder, "server", self.folder / "experiment.toml", *arguments, *more)
        )

    def join(self, name: str) -> Command:
        certs = self.folder / "certs"
        trust = ("--ca", certs / "ca.pem", "--key", certs / f"{name}.key")
        return self.stack.enter_context(
            running(
                self.folder,
                *("node", "--superlink", f"{LOCAL}:{self.port}", *trust),
                *("--data", self.folder / f"{name}.npz", "--folder", self.folder / f"silo-{name}"),
            )
        )

    def worker(self, name: str) -> int:
        """The process that holds the silo."""
        (pid,) = [
            pid
            for pid, line in processes(self.folder / f"silo-{name}").items()
            if "bespokefl.flower.silo.worker" in line
        ]
        return pid

    def rounds(self) -> list[dict[str, object]]:
        file = self.out / "ditto" / "seed-0" / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def state_files(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.folder / f"silo-{name}").rglob("*") if path.is_file())


@pytest.fixture
def silos(tmp_path: Path) -> Iterator[Silos]:
    with ExitStack() as stack:
        yield Silos(tmp_path, stack)
    nothing_left(tmp_path)


def test_what_can_happen_to_silos_and_their_server(silos: Silos) -> None:
    """One federation through all of it, as a start takes long: each part ends with everybody taking part again."""
    server = silos.serve()
    server.until_said("waiting for 3 nodes")
    assert "bespoke node --superlink" in server.text
    nodes = {name: silos.join(name) for name in NAMES}
    server.until(lambda: len(silos.rounds()) >= 2, 90)

    def all_take_part(since: int) -> bool:
        return any(len(row["clients"]) == 3 and not row["failed"] for row in silos.rounds()[since:])  # type: ignore[arg-type]

    server.until(lambda: all_take_part(0), 60)

    # a node answers too late: the round ends after the deadline with the others
    since, ben = len(silos.rounds()), silos.worker("ben")
    os.kill(ben, signal.SIGSTOP)
    server.until(lambda: any("no answer within 6 s" in str(row["failed"]) for row in silos.rounds()[since:]), 60)

    # it dies with that request in its hands: it is started again and goes on with its state
    os.kill(ben, signal.SIGKILL)
    nodes["ben"].until_said("starting it again", 30)
    since = len(silos.rounds())
    server.until(lambda: all_take_part(since), 60)

    # a node is gone altogether for a while
    since = len(silos.rounds())
    nodes["ada"].kill(signal.SIGKILL)
    server.until(lambda: any(row["failed"] for row in silos.rounds()[since:]), 60)
    nodes["ada"] = silos.join("ada")
    since = len(silos.rounds())
    server.until(lambda: all_take_part(since), 60)

    # a disk that takes no more: said, nothing half-written, the round goes on with the others
    pid, since = silos.worker("cleo"), len(silos.rounds())
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    server.until(lambda: any("File too large" in str(row["failed"]) for row in silos.rounds()[since:]), 60)
    assert not [name for name in silos.state_files("cleo") if "tmp" in name]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    since = len(silos.rounds())
    server.until(lambda: all_take_part(since), 60)

    # the server is killed and comes back: the nodes wait, find it, and no finished round is done again
    server.kill(signal.SIGKILL)
    done = silos.rounds()
    nodes["ada"].until_said("the line is broken", 30)
    server = silos.serve("--resume")
    server.until_said("resumed after round", 90)
    server.until(lambda: len(silos.rounds()) > len(done) and all_take_part(len(done)), 60)
    assert [row["round"] for row in silos.rounds()] == list(range(1, len(silos.rounds()) + 1))
    assert silos.rounds()[: len(done) - 1] == done[:-1]

    # the operator stops: the round that is going ends, what was done is kept
    server.kill(signal.SIGINT)
    assert server.process.returncode == 130 and "--resume" in server.text
    for name, node in nodes.items():
        node.kill(signal.SIGTERM)
        assert node.process.returncode == 0, f"{name}: {node.text}"


def test_nodes_take_their_personal_models_home(silos: Silos) -> None:
    server = silos.serve("--set", "train.rounds=3")
    nodes = {name: silos.join(name) for name in NAMES}
    assert server.finished() == 0, server.text
    for name, node in nodes.items():
        node.kill(signal.SIGTERM)
        (model,) = (silos.folder / f"silo-{name}").glob("runs/ditto-seed-0-*/personal/client-*.safetensors")
        with running(silos.folder, "predict", model.parents[3], silos.folder / f"{name}.npz") as command:
            assert command.finished() == 0, command.text
    written = "".join(
        path.read_text() for path in silos.out.rglob("*") if path.suffix in (".json", ".jsonl", ".csv", ".toml")
    )
    assert str(silos.folder / "ada.npz") not in written  # where a silo keeps its data is its own business


def test_refusals_are_said(silos: Silos, tmp_path: Path) -> None:
    server = silos.serve()
    server.until_said("waiting for 3 nodes")
    with running(tmp_path, "certs", tmp_path / "others", "--node", "eve") as command:
        assert command.finished() == 0
    own, strange = tmp_path / "certs", tmp_path / "others"
    for ca, words in ((own, "it is not registered there"), (strange, "was not signed by the authority in --ca")):
        with running(
            tmp_path,
            *("node", "--superlink", f"{LOCAL}:{silos.port}", "--ca", ca / "ca.pem", "--key", strange / "eve.key"),
            *("--data", tmp_path / "ada.npz", "--folder", tmp_path / "eve"),
        ) as node:
            assert node.finished() == 1, node.text
            assert words in node.text and "Traceback" not in node.text
    second = silos.serve()
    assert second.finished() == 2
    assert f"--port {silos.port} on {LOCAL} cannot be used" in second.text
    wait_until(lambda: server.process.poll() is None, 1)
