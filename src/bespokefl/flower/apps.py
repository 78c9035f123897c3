"""The ServerApp and the ClientApp of the bundle in `app/`, for those who run Flower's own commands.

Flower starts a new process for every message, so a silo is opened anew for each: its folder holds all that lasts.
"""

import functools
from pathlib import Path

from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from bespokefl.errors import InputError, RunError
from bespokefl.flower.silo.silo_spec import Place
from bespokefl.flower.transport.envelope import Handler
from bespokefl.flower.transport.link import GridTransport
from bespokefl.flower.transport.records import from_record, to_record

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Runs the experiment that the run's configuration names."""
    from bespokefl.experiments.reading import read_experiment
    from bespokefl.flower.server import serve
    from bespokefl.progress import LineReporter, make_console

    config = context.run_config
    experiment, out, nodes = (config.get(key) for key in ("experiment", "out", "nodes"))
    if not experiment or not out or not nodes:
        raise InputError('give --run-config \'experiment="FILE" out="DIR" nodes=N\', with paths on the server.')
    outcome = serve.serve(
        read_experiment(Path(str(experiment))),
        Path(str(out)),
        GridTransport(grid),
        nodes=int(nodes),
        resume=bool(config.get("resume", False)),
        reporter=LineReporter(make_console(stderr=True)),
    )
    if lost := outcome.failed + outcome.diverged:
        raise RunError(f"failed: {', '.join(map(str, lost))}")


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """What the node's silo has to say to a request."""
    return Message(to_record(_silo(_place(context.node_config)).handle(from_record(message.content))), reply_to=message)


@functools.lru_cache(maxsize=1)
def _silo(place: Place) -> Handler:
    return place.open()


def _place(config: UserConfig) -> Place:
    if not config.get("folder"):
        raise InputError('start the node with --node-config \'folder="DIR" data="PATH"\'.')
    return Place(
        folder=str(config["folder"]),
        data=str(config.get("data", "")),
        experiment=str(config.get("experiment", "")),
        clients=str(config.get("clients", "")),
        device=str(config.get("device", "auto")),
        limits=tuple(str(config.get("limits", "")).split()),
    )
