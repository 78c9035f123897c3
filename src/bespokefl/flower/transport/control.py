"""The server's line to its SuperLink: registers nodes, starts a run, and takes the run's ServerApp task itself.

Flower would start the ServerApp in a process of its own; here the process of `bespoke server` is that process, so
that progress, Ctrl-C and errors reach whoever started it. What this module imports lies below Flower's public surface
(`version.py` checks the release).
"""

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

from bespokefl.errors import RunError
from bespokefl.flower.transport.fleet import NotAccepted, in_words

APP = (
    Path(__file__).parents[1] / "app"
)  # the bundle that a Flower user can `flwr run`; our nodes never ask for its code
HEARTBEAT = 10.0  # seconds; Flower takes a task for dead after a minute
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
GIVE_UP = 30.0  # seconds after which a SuperLink that does not answer is given up


class Control:
    """One SuperLink, as its operator sees it from the same machine."""

    def __init__(self, address: str, ca: Path | None, secret: bytes) -> None:
        self.address, self._secret = address, secret
        self._ca = None if ca is None else ca.read_bytes()

    def register(self, key: ec.EllipticCurvePublicKey) -> int | None:
        """Lets a node with this key in and returns its number; None where it was known before."""
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        with ControlHttpClient.from_server_address(self.address, self._ca is None, self._ca, [version]) as client:
            try:
                return client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key))).node_id
            except httpx.HTTPError as error:
                told = in_words(error, self.address)
                if not isinstance(told, NotAccepted):
                    raise told from error
                return None

    @contextlib.contextmanager
    def grid(self) -> Iterator[Grid]:
        """A run of the bundle, and the Grid of its ServerApp; says at the end how it went."""
        logging.getLogger("flwr").setLevel(logging.ERROR)  # its lines about every attempt to connect again
        self._start_run()
        token = self._acquire()
        # Flower waits a second, then two, for the parts of an answer that is being uploaded
        quick = functools.partial(pull_objects, initial_backoff=0.02, backoff_cap=0.5)
        setattr(http_grid, "pull_objects", quick)  # noqa: B010  it is not exported, and has no other handle
        grid = http_grid.HttpGrid(self.address, self._ca is None, self._ca, token=token)
        grid._retry_invoker.max_time = GIVE_UP
        client, over = grid._runtime_client, threading.Event()
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        threading.Thread(target=_beat, args=(client, over), daemon=True).start()
        outcome = SubStatus.FAILED
        try:
            yield grid
            outcome = SubStatus.COMPLETED
        finally:
            over.set()
            grid._retry_invoker.max_tries = 1
            with contextlib.suppress(Exception):  # of a SuperLink that is gone
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=outcome, details=""))
            grid.close()

    def _start_run(self) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        with ControlHttpClient.from_server_address(self.address, self._ca is None, self._ca, [version]) as client:
            try:
                client.StartRun(StartRunRequest(fab=Fab(content=_bundle())))
            except httpx.HTTPError as error:
                raise in_words(error, self.address) from error

    def _acquire(self) -> str:
        """The right to be the ServerApp of the run; only who has the secret gets it."""
        signed = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods={ACQUIRE})
        both: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            signed,
        ]
        with RuntimeHttpClient.from_server_address(self.address, self._ca is None, self._ca, both) as client:
            deadline = time.monotonic() + GIVE_UP
            while time.monotonic() < deadline:
                answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if answer.token:
                    return str(answer.token)
                time.sleep(0.05)
        raise RunError(f"the SuperLink at {self.address} did not start the run")


def _bundle() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a package that Flower uses: nothing a user can do
        return build_fab_from_disk(APP)


def _beat(client: RuntimeHttpClient, over: threading.Event) -> None:
    while not over.wait(HEARTBEAT):
        with contextlib.suppress(Exception):  # a SuperLink that is gone is said by whoever waits for an answer
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
