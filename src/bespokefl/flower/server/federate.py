"""An experiment as a federation: with the nodes that come, or with nodes on this machine, as a try-out."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flwr.serverapp import Grid

from bespokefl.errors import InputError
from bespokefl.experiments.reading import parse_setting, read_experiment
from bespokefl.experiments.resolve import load_data
from bespokefl.experiments.running import Outcome
from bespokefl.experiments.schema import Experiment
from bespokefl.flower.server.monitor import NodeReporter, WatchedTransport
from bespokefl.flower.server.serve import serve
from bespokefl.flower.silo.silo_spec import Place, shares
from bespokefl.flower.silo.worker import Assignment
from bespokefl.flower.transport.certs import make_certificates
from bespokefl.flower.transport.host import LOCAL, Hosting, SuperLink, free_port, hosted
from bespokefl.flower.transport.link import GridTransport
from bespokefl.flower.transport.processes import Child, check_alive
from bespokefl.progress import Reporter

TRY_OUT = Path(__file__).parents[1] / "tryout.toml"
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
    _check_folder(out, resume)
    with hosted(hosting, keys) as link, link.control.grid() as grid:
        reporter.note(f"the SuperLink listens on {hosting.host}:{hosting.port}; waiting for {nodes} nodes")
        transport = _watched(grid, link, [link.child])
        watched = NodeReporter(reporter, transport)
        outcome = serve(experiment, out, transport, nodes=nodes, resume=resume, reporter=watched)
        for line in transport.summary():
            reporter.note(line)
        return outcome


def federate(
    path: Path, settings: Sequence[str], nodes: int, out: Path, *, resume: bool, reporter: Reporter
) -> Outcome:
    """The experiment as a federation of this many nodes on this machine, each with its share of the clients."""
    _check_folder(out, resume)
    experiment = read_experiment(path, [parse_setting(text) for text in settings])
    experiment = _trusting(experiment)
    clients = load_data(experiment, experiment.seeds[0]).clients
    if clients < nodes:
        raise InputError(
            f"--nodes {nodes} is more than the {clients} clients of the experiment; allowed: 1 to {clients}."
        )
    home, port = out / FOLDER, free_port()
    names = [f"node-{number + 1}" for number in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="bespoke-") as private, contextlib.ExitStack() as stack:
        files = make_certificates(Path(private) / "certs", ["localhost", LOCAL], names)
        reporter.note("starting the SuperLink, with TLS and node authentication")
        link = stack.enter_context(hosted(Hosting(home / "superlink", LOCAL, port, files), files.public_keys()))
        reporter.note(f"starting {nodes} nodes; their logs are in {home}")
        children = []
        for name, share in zip(names, shares(clients, nodes), strict=True):
            device = experiment.engine.device
            place = Place(str(home / name), "", str(path), tuple(settings), share, device)
            assignment = Assignment(place, f"{LOCAL}:{port}", str(files.ca), str(files.node_key(name)))
            children.append(stack.enter_context(_start(assignment, home / f"{name}.log", nodes)))
        grid = stack.enter_context(link.control.grid())
        transport = _watched(grid, link, [link.child, *children])
        watched = NodeReporter(reporter, transport)
        outcome = serve(experiment, out, transport, nodes=nodes, resume=resume, reporter=watched)
        for child in children:  # all at once; the stack waits for each
            child.ask_to_stop()
        for line in transport.summary():
            reporter.note(line)
        return outcome


def _watched(grid: Grid, link: SuperLink, children: Sequence[Child]) -> WatchedTransport:
    return WatchedTransport(GridTransport(grid, partial(check_alive, children)), link.names, children)


def _trusting(experiment: Experiment) -> Experiment:
    """All is on this machine and nobody lies: cohorts and weights are those of `bespoke run`, unless they are set."""
    section = experiment.federation
    ours = {"cohort": "seed", "max_share": 1.0}
    update = {key: value for key, value in ours.items() if key not in section.model_fields_set}
    return replace(experiment, federation=section.model_copy(update=update))


def _check_folder(out: Path, resume: bool) -> None:
    """Said again by the run itself, but only after processes have been started and waited for."""
    if not resume and (earlier := sorted(out.glob("*/seed-*"))):
        raise InputError(f"{earlier[0]} is there already; add --resume to go on with it, or give another --out.")


def _start(assignment: Assignment, log: Path, nodes: int) -> Child:
    """A node that shares this machine's cores with the others."""
    threads = str(max(1, (os.cpu_count() or 1) // nodes))
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    return Child("bespokefl.flower.silo.supervisor", [assignment.to_json()], log, env)
