"""An experiment as a federation: with the nodes that come, or with nodes on this machine, as a try-out."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bespokefl.assembly import load_data
from bespokefl.config import Experiment
from bespokefl.config_file import parse_setting, read_experiment
from bespokefl.errors import InputError
from bespokefl.experiment import Outcome
from bespokefl.flower.certs import Certificates, make_certificates
from bespokefl.flower.host import LOCAL, Hosting, free_port, hosted
from bespokefl.flower.place import Place, shares
from bespokefl.flower.processes import Child
from bespokefl.flower.server import serve
from bespokefl.flower.transport import GridTransport
from bespokefl.flower.watched import NodeReporter, WatchedTransport
from bespokefl.flower.worker import Assignment
from bespokefl.progress import Reporter

TRY_OUT = Path(__file__).parent / "tryout.toml"
FOLDER = "federation"  # below the output folder: what the nodes keep, and the logs


def run_server(
    experiment: Experiment,
    out: Path,
    hosting: Hosting,
    keys: Iterable[Path],
    *,
    nodes: int,
    resume: bool,
    reporter: Reporter,
) -> Outcome:
    """The experiment, with whichever nodes come; waits for so many of them first."""
    with hosted(hosting, keys) as link, link.control.grid() as grid:
        reporter.note(f"the SuperLink listens on {hosting.host}:{hosting.port}; waiting for {nodes} nodes")
        transport = WatchedTransport(GridTransport(grid), link.names, [link.child])
        watched = NodeReporter(reporter, transport)
        outcome = serve(experiment, out, transport, nodes=nodes, resume=resume, reporter=watched)
        for line in transport.summary():
            reporter.note(line)
        return outcome


def federate(
    path: Path, settings: Sequence[str], nodes: int, out: Path, *, resume: bool, reporter: Reporter
) -> Outcome:
    """The experiment as a federation of this many nodes, each with its share of the clients."""
    experiment = read_experiment(path, [parse_setting(text) for text in settings])
    clients = load_data(experiment, experiment.seeds[0]).clients
    if clients < nodes:
        raise InputError(
            f"--nodes {nodes} is more than the {clients} clients of the experiment; allowed: 1 to {clients}."
        )
    with tempfile.TemporaryDirectory(prefix="bespoke-") as private, contextlib.ExitStack() as stack:
        names = [f"node-{number + 1}" for number in range(nodes)]
        files = make_certificates(Path(private) / "certs", ["localhost", LOCAL], names)
        hosting = Hosting(out / FOLDER / "superlink", LOCAL, free_port(), files)
        reporter.note("starting the SuperLink, with TLS and node authentication")
        link = stack.enter_context(hosted(hosting, files.public_keys()))
        children = [
            stack.enter_context(child) for child in _nodes(path, settings, experiment, out, hosting, names, clients)
        ]
        reporter.note(f"starting {nodes} nodes; their logs are in {out / FOLDER}")
        grid = stack.enter_context(link.control.grid())
        transport = WatchedTransport(GridTransport(grid), link.names, [link.child, *children])
        outcome = serve(
            experiment, out, transport, nodes=nodes, resume=resume, reporter=NodeReporter(reporter, transport)
        )
        for child in children:  # all at once; the stack waits for each
            child.ask_to_stop()
        for line in transport.summary():
            reporter.note(line)
        return outcome


def _nodes(
    path: Path,
    settings: Sequence[str],
    experiment: Experiment,
    out: Path,
    hosting: Hosting,
    names: Sequence[str],
    clients: int,
) -> Iterator[Child]:
    files = hosting.certificates
    assert isinstance(files, Certificates)
    threads = str(max(1, (os.cpu_count() or 1) // len(names)))
    for name, share in zip(names, shares(clients, len(names)), strict=True):
        place = Place(
            folder=str(out / FOLDER / name),
            experiment=str(path),
            settings=tuple(settings),
            clients=share,
            device=experiment.engine.device,
        )
        assignment = Assignment(place, f"{LOCAL}:{hosting.port}", str(files.ca), str(files.node_key(name)))
        log = out / FOLDER / f"{name}.log"
        yield Child(
            "bespokefl.flower.supervisor",
            [assignment.to_json()],
            log,
            env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
        )
