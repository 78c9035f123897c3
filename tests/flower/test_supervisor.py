"""A node's process is started again when it dies, and not when that cannot help."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from tests.flower.federations import loopback

from bespokefl.errors import InputError, RunError
from bespokefl.flower.silo import supervisor
from bespokefl.flower.silo.silo_spec import Place
from bespokefl.flower.silo.worker import Assignment
from bespokefl.flower.transport.certs import make_certificates

WORKER = """
import os, signal, sys
from pathlib import Path
starts = Path(os.environ["STARTS"])
with starts.open("a") as file:
    file.write("x")
how = os.environ["HOW"].split(",")[len(starts.read_text()) - 1]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the worker: a process that ends as it is told."""
    package = tmp_path / "bespokefl_worker.py"
    package.write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(supervisor, "WORKER", "bespokefl_worker")
    monkeypatch.setattr(supervisor, "SHORTEST", 0.01)
    return tmp_path / "starts"


assignment = Assignment(Place("silo", data="d.npz"), "127.0.0.1:1")


def test_what_dies_is_started_again(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW", "kill,1,0")
    said: list[str] = []
    supervisor.supervise(assignment, said.append)
    assert starts.read_text() == "xxx"
    assert "ended (signal 9)" in said[0] and "ended (exit status 1)" in said[1]


@pytest.mark.parametrize(("how", "error"), [("2", InputError), ("3", RunError)])
def test_what_is_refused_is_not(how: str, error: type, starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW", how)
    with pytest.raises(error, match="see above"):
        supervisor.supervise(assignment, print)
    assert starts.read_text() == "x"


def test_a_real_node_is_told_why_it_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through all layers: the supervisor, its worker's process, Flower's answer."""
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % 2)
    with loopback(tmp_path, ("known",)) as link:
        strange = make_certificates(tmp_path / "strange", ["127.0.0.1"], ["node"])
        place = Place(str(tmp_path / "silo"), data=str(tmp_path / "d.npz"))
        own, theirs = link.certificates.ca, strange.ca
        for ca, words in ((own, "it is not registered there"), (theirs, "not signed by the authority in --ca")):
            with pytest.raises(RunError, match="the server refused this node"):
                supervisor.supervise(Assignment(place, link.address, str(ca), str(strange.node_key("node"))), print)
            assert words in capfd.readouterr().out
