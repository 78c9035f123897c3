"""A node's line to the SuperLink: Flower's Fleet API, spoken by the process that holds the silo.

Flower's own SuperNode sleeps three seconds between two looks and starts a new Python process, with code that the
server sent, for every message. Here one process keeps the silo in memory, looks often, and never runs code from
outside. What this module imports lies below Flower's public surface and may change with its next release
(`version.py` checks which one is installed).
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from bespokefl.errors import RunError

HEARTBEAT = 10.0  # seconds, the least that Flower allows; after twice as much silence a node counts as lost
KNOCK = 3.0  # seconds to find out whether a server speaks TLS
OBJECT_WAIT = 120.0  # seconds within which all parts of an announced message must have come
LARGEST_MESSAGE = 8 << 30  # bytes: more than this is not downloaded, whatever the server announces

T = TypeVar("T")


class Unreachable(RunError):
    """Nobody answers, for now."""


class Refused(RunError):
    """Trying again will not help; the text says what to do."""


class NotAccepted(RunError):
    """The SuperLink did not take this key: it is not registered, or an earlier session of it still counts."""


class Forgotten(RunError):
    """The SuperLink does not know this session (any more): it was started anew, or the session timed out."""


class RunOver(RunError):
    """The run that the message belongs to has ended."""


class Fleet:
    """One session after another with one SuperLink, as one node."""

    def __init__(self, address: str, ca: Path | None, key: ec.EllipticCurvePrivateKey, insecure: bool = False) -> None:
        self._address, self._insecure = address, insecure
        self._public = public_key_to_bytes(key.public_key())
        signed = NodeAuthHttpInterceptor(key, key.public_key())
        try:
            self._client = FleetHttpClient.from_server_address(
                address,
                insecure,
                None if insecure or ca is None else ca.read_bytes(),
                interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed],
            )
        except (OSError, ValueError) as error:
            raise Refused(f"--ca {ca} cannot be read as certificates ({error})") from None
        self._node = Node()
        self._over = threading.Event()

    # sessions ----------------------------------------------------------------------------------------------

    def begin(self, earlier: int | None) -> int:
        """Starts a session and returns the node's number; ends the earlier one first, should it still count."""
        if self._insecure:
            self._register()
        if earlier is not None:
            self._quietly(self._client.DeactivateNode, DeactivateNodeRequest(node_id=earlier))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
        self._node = Node(node_id=self._call(self._client.ActivateNode, request).node_id)
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(self._over, self._node), daemon=True).start()
        return self._node.node_id

    def end(self) -> None:
        self._over.set()
        self._quietly(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self._node.node_id))

    def close(self) -> None:
        self._over.set()
        self._client.close()

    def _register(self) -> None:
        """Without authentication a node brings its own key; it may be there from an earlier session."""
        with contextlib.suppress(NotAccepted):
            self._call(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=self._public))

    def _beat(self, over: threading.Event, node: Node) -> None:
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
        while not over.wait(HEARTBEAT / 2):
            self._quietly(self._client.SendNodeHeartbeat, request)  # a lost session is noticed at the next look

    # messages ------------------------------------------------------------------------------------------------

    def receive(self) -> Message | None:
        """The next message, whole, if there is one."""
        listed = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not listed.messages_list:
            return None
        run, tree = listed.messages_list[0].metadata.run_id, listed.message_object_trees[0]
        contents = self._call(self._objects, [part.object_id for part in iterate_object_tree(tree)], run)
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=tree.object_id)
        self._call(self._client.ConfirmMessageReceived, confirm)
        try:
            message = inflate_object_from_contents(tree.object_id, contents)
        except Exception as error:  # whatever is wrong with it, this node goes on with the next one
            raise RunOver(f"a message cannot be read ({error})") from None
        if not isinstance(message, Message):
            raise RunOver("something that is no message came")
        message.metadata.__dict__["_message_id"] = tree.object_id  # an object does not hold its own name
        return message

    def send(self, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            bare, tree = message_to_proto(remove_content_from_message(reply)), get_object_tree(reply)
            request = PushMessagesRequest(
                node=self._node, messages_list=[bare], message_object_trees=[tree], clientapp_runtime_list=[0.0]
            )
            taken = self._call(self._client.PushMessages, request)

            def push(name: str, content: bytes) -> None:
                self._client.PushObject(
                    PushObjectRequest(
                        node=self._node,
                        run_id=reply.metadata.run_id,
                        object_id=name,
                        object_content=content,
                        session_id=taken.session_id,
                    )
                )

            self._call(
                lambda objects: push_objects(objects, push, object_ids_to_push=set(taken.objects_to_push)),
                get_all_nested_objects(reply),
            )

    def _objects(self, names: list[str], run: int) -> dict[str, bytes]:
        fetch, lock, total = make_pull_object_fn_protobuf(self._client.PullObject, self._node, run), threading.Lock(), 0

        def measured(name: str) -> bytes:
            nonlocal total
            content = fetch(name)
            with lock:
                total += len(content)
            if total > LARGEST_MESSAGE:
                raise RunOver(f"a message of more than {LARGEST_MESSAGE >> 30} GiB was not downloaded")
            return content

        return pull_objects(
            list(dict.fromkeys(names)), measured, max_time=OBJECT_WAIT, initial_backoff=0.02, backoff_cap=0.5
        )

    # errors in words ---------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except RunError:
            raise
        except Exception as error:
            if self._insecure and isinstance(error, httpx.TransportError) and speaks_tls(self._address):
                raise Refused(
                    f"{self._address} speaks TLS; leave --insecure out, and give --ca and --key of its operator"
                ) from error
            raise in_words(error, self._address) from error

    def _quietly(self, function: Callable[..., object], request: Any) -> None:
        with contextlib.suppress(Exception):  # it is only a courtesy to the SuperLink
            function(request)


def speaks_tls(address: str) -> bool:
    """Whether a server at HOST:PORT shakes hands as TLS does; whose certificate it shows does not matter here."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK) as line, context.wrap_socket(line):
            return True
    except (OSError, ValueError):
        return False


def in_words(error: Exception, address: str) -> RunError:
    """What went wrong between a client of ours and the SuperLink, and whether it may pass."""
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status == httpx.codes.UNAUTHORIZED:
            return Forgotten(f"{address} does not know this session or this key")
        if status == httpx.codes.FORBIDDEN:
            return RunOver("the run of this message is over")
        if status == httpx.codes.PRECONDITION_FAILED:
            return NotAccepted(f"{address} does not accept this key")
        if status >= 500:
            return Unreachable(f"{address} has a problem of its own ({status})")
        return Refused(f"{address} answers {status}; does it run Flower in the same release as this node?")
    if not isinstance(error, httpx.TransportError):
        return RunOver(f"the message was lost ({text})")  # its parts vanished, or could not be stored
    if "certificate has expired" in text:
        return Refused(f"the certificate of {address} has expired; its operator must make a new one")
    if "certificate is not yet valid" in text:
        return Refused(f"the certificate of {address} is not valid yet; is the clock of this machine right?")
    if "mismatch" in text:
        return Refused(f"the certificate of {address} is for another name; use one that it was made for")
    if "certificate verify failed" in text:
        return Refused(f"the certificate of {address} was not signed by the authority in --ca; is it the right file?")
    if "WRONG_VERSION_NUMBER" in text or "wrong version number" in text or "record layer failure" in text:
        return Refused(f"{address} does not speak TLS; is the server running with --insecure?")
    return Unreachable(f"{address} cannot be reached ({text})")
