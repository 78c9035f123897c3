"""`bespoke certs`, `bespoke federate`, `bespoke server` and `bespoke node`: a real federation, on Flower."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bespokefl.cli.common import Device, Out, Resume, SeedOption, Settings, guarded, leave
from bespokefl.cli.run import show_outcome
from bespokefl.errors import InputError
from bespokefl.interrupts import STOPPED
from bespokefl.progress import make_console

if TYPE_CHECKING:
    from bespokefl.flower.transport.certs import Certificates

PORT = 9092  # where Flower's nodes look by default
CertificateFolder = Annotated[
    Path | None, typer.Option("--certs", metavar="DIR", help="What `bespoke certs` made: ca.pem, server.pem, ...")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text, and whoever comes is let in. Only where nobody else can listen.")
]


@guarded
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    nodes: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NAME", help="A node to make a key pair for; again for each."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name or address of the server; again for each."),
    ] = None,
    days: Annotated[
        float, typer.Option("--days", metavar="N", min=0.01, help="How long the certificates are valid.")
    ] = 365,
) -> None:
    """Make a test authority, a certificate for the server, and a key pair for each node."""
    from bespokefl.flower.transport.version import require_flower

    require_flower()
    from bespokefl.flower.transport.certs import make_certificates, own_names

    names = nodes or ["node-1", "node-2", "node-3"]
    made = make_certificates(folder, [*own_names(), *(hosts or ())], names, days)
    typer.echo(f"{made.ca}: give it to every node")
    typer.echo(f"{made.server}, {made.server_key}: they stay on the server, as does ca.key")
    for name in names:
        typer.echo(f"{made.node_key(name)}: give it to {name} and to nobody else")


@guarded
def federate(
    experiment: Annotated[
        Path | None,
        typer.Argument(metavar="EXPERIMENT.toml", help="The experiment; without one, PGFedMo on handwritten digits."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="How many nodes to start.")] = 3,
    settings: Settings = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    seed: SeedOption = None,
) -> None:
    """Try a real federation on this machine: a server and nodes as processes, with TLS and authentication."""
    from bespokefl.flower.transport.version import require_flower

    require_flower()
    from bespokefl.flower.server.federate import TRY_OUT
    from bespokefl.flower.server.federate import federate as run_federation
    from bespokefl.progress import make_reporter

    path = experiment or TRY_OUT
    folder = out or Path("runs") / ("federation" if experiment is None else experiment.stem)
    given = [] if experiment else [f"data.clients={max(6, nodes)}"]
    given += [*(settings or ()), *([f'engine.device="{device}"'] if device else ())]
    given += [] if seed is None else [f"seeds=[{seed}]"]
    reporter = make_reporter(make_console(stderr=True))
    outcome = run_federation(path, given, nodes, folder, resume=resume, reporter=reporter)
    show_outcome(outcome, folder)
    leave(outcome)


@guarded
def server(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment.")],
    certificates: CertificateFolder = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--register", metavar="KEY.pub", help="A node's public key, beside those in --certs."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Nodes to wait for; all that have a key.")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535)] = PORT,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    seed: SeedOption = None,
    insecure: Insecure = False,
) -> None:
    """Run an experiment between machines: start the server, and say what to run on each silo."""
    from bespokefl.flower.transport.version import require_flower

    require_flower()
    from bespokefl.cli.common import given_settings
    from bespokefl.experiments.reading import read_experiment
    from bespokefl.flower.server.federate import run_server
    from bespokefl.flower.transport.certs import own_names
    from bespokefl.flower.transport.host import Hosting
    from bespokefl.progress import make_reporter

    files = _certificates(certificates, insecure)
    public = [*(files.public_keys() if files else ()), *(keys or ())]
    if files and not public:
        raise InputError(f"--certs {files.folder} holds no node's public key (.pub); give some with --register.")
    if nodes is None and not public:
        raise InputError("--nodes is missing: without keys, say how many nodes to wait for.")
    read = read_experiment(experiment, given_settings(settings, None, None, seed))
    folder = out or Path("runs") / experiment.stem
    address = own_names()[-1] if host in ("0.0.0.0", "::") else host
    reporter = make_reporter(make_console(stderr=True))
    reporter.note(f"Run this on each silo, with its own data, key and folder (the server's address is {address}):")
    reporter.note(f"  {_node_command(f'{address}:{port}', files)}")
    hosting = Hosting(folder / "federation" / "superlink", host, port, files)
    wanted = nodes or len(public)
    outcome = run_server(read, folder, hosting, public, nodes=wanted, resume=resume, reporter=reporter)
    show_outcome(outcome, folder)
    leave(outcome)


@guarded
def node(
    superlink: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="The server.")],
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="For this silo's state and personal model.")],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="PATH", help="Its samples: a .npz file, or a folder of images.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="CA.pem", help="Who signed the server's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="This node's private key.")] = None,
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", metavar="FILE", help="Instead of --data: host simulated clients of it."),
    ] = None,
    clients: Annotated[
        str, typer.Option("--clients", metavar="LIST", help="With --experiment: which of them, such as 0-24.")
    ] = "",
    settings: Settings = None,
    device: Annotated[str, typer.Option("--device", metavar="D", help="auto, cpu, cuda, ...")] = "auto",
    insecure: Insecure = False,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", metavar="LIST", help="Agree to these only, such as fedavg,pgfed; all that there are."
        ),
    ] = None,
    fewest_samples: Annotated[
        int | None, typer.Option("--fewest-samples", metavar="N", min=1, help="To train on, or take no part; 20.")
    ] = None,
    smallest_batch: Annotated[
        int | None, typer.Option("--smallest-batch", metavar="N", min=1, help="Samples of a training step; 4.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", min=0, help="Of a round, with other downloads; 1.")
    ] = None,
    evaluations: Annotated[
        str | None,
        typer.Option("--evaluations", metavar="N", help="Models scored on a split in an evaluated round, or any; 1."),
    ] = None,
    runs: Annotated[
        int | None, typer.Option("--runs", metavar="N", min=1, help="Opened in the folder, all in all; 100.")
    ] = None,
    train_scores: Annotated[bool, typer.Option("--train-scores", help="Tell scores of the train split, too.")] = False,
) -> None:
    """Take part in a federation with this machine's data; the samples and the personal model stay here."""
    from bespokefl.flower.transport.version import require_flower

    require_flower()
    from bespokefl.flower.silo.silo_spec import Place
    from bespokefl.flower.silo.supervisor import supervise
    from bespokefl.flower.silo.terms import Limits, parse_limits
    from bespokefl.flower.silo.worker import Assignment
    from bespokefl.flower.transport.processes import stop_on_sigterm

    limits = {
        "methods": methods,
        "fewest_samples": fewest_samples,
        "smallest_batch": smallest_batch,
        "repeats": repeats,
        "evaluations": evaluations,
        "runs": runs,
        "train_scores": "true" if train_scores else None,
    }
    if insecure and (ca or key):
        raise InputError("--insecure stands beside --ca or --key; leave it out to use them.")
    if not insecure and not (ca and key):
        raise InputError("--ca and --key are needed (`bespoke certs` makes them); or --insecure, for plain text.")
    if (data is None) == (experiment is None):
        raise InputError("a node needs either --data (its own samples) or --experiment (simulated clients).")
    for option, path in (("--ca", ca), ("--key", key), ("--data", data), ("--experiment", experiment)):
        if path is not None and not path.exists():
            raise InputError(f"{option} {path} does not exist.")
    place = Place(
        folder=str(folder),
        data=str(data or ""),
        experiment=str(experiment or ""),
        settings=tuple(settings or ()),
        clients=clients,
        device=device,
        limits=tuple(f"{key}={value}" for key, value in limits.items() if value is not None),
    )
    parse_limits(place.limits, Limits())
    stop_on_sigterm()
    try:
        supervise(Assignment(place, superlink, str(ca or ""), str(key or "")), say=typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on where this silo was", err=True)
        raise typer.Exit(STOPPED) from None


def _certificates(folder: Path | None, insecure: bool) -> "Certificates | None":
    from bespokefl.flower.transport.certs import Certificates

    if insecure:
        if folder is not None:
            raise InputError("--insecure stands beside --certs; leave it out to use them.")
        return None
    if folder is None:
        raise InputError("--certs is missing: make some with `bespoke certs DIR`; or --insecure, for plain text.")
    files = Certificates(folder)
    for path in (files.ca, files.server, files.server_key):
        if not path.is_file():
            raise InputError(f"--certs {folder} holds no {path.name}; `bespoke certs DIR` makes all that is needed.")
    return files


def _node_command(address: str, files: "Certificates | None") -> str:
    trust = ["--ca", "ca.pem", "--key", "NAME.key"] if files else ["--insecure"]
    return shlex.join(["bespoke", "node", "--superlink", address, *trust, "--data", "PATH", "--folder", "DIR"])
