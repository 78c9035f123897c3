"""`python -m bespokefl.flower.transport.superlink`: Flower's SuperLink, with its operator's side closed to the network.

Takes the arguments of `flower-superlink`. Flower serves nodes (Fleet API) and the operator (Control and Runtime APIs)
on one port, and the operator's side asks nobody who he is: whoever reaches the port could register keys, stop runs
and submit code. So here everything but the Fleet API answers only to this machine. Nor is every request logged, as
nodes ask many times a second.
"""

import ipaddress

import uvicorn
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bespokefl.flower.transport.processes import end_with_parent
from bespokefl.flower.transport.version import require_flower

FOR_NODES = "/v1/fleet/"


class OperatorIsLocal:
    """Turns away whoever asks for more than the Fleet API from another machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(FOR_NODES) or _is_local(scope.get("client")):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("only from the server's own machine\n", status_code=403)(scope, receive, send)


def _is_local(client: tuple[str, int] | None) -> bool:
    if client is None:
        return False
    address = ipaddress.ip_address(client[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def main() -> None:
    require_flower()
    end_with_parent()
    config = _parse_superlink_lifespan_config()
    uvicorn.run(
        OperatorIsLocal(create_app(config, SuperLinkLifespan)),
        host=config.host,
        port=config.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        access_log=False,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
