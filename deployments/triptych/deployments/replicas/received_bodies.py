# Ray Serve's private modules lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportPrivateImportUsage=false
"""Makes a replica of Ray Serve free the body of a request once the application has read it.

Ray Serve fetches the ASGI messages of a request in a loop until the client disconnects
(``ASGIReceiveProxy.fetch_until_disconnect``, Ray 2.60), and two local variables of that loop keep
the last messages meanwhile: their pickled bytes, which are the whole body, and the last one. Sixty
waiting requests of 512 KiB made an ingress larger by 35 MB.
"""

from collections.abc import Awaitable, Callable
from typing import cast

from ray.serve._private import replica
from ray.serve._private.common import RequestMetadata
from ray.serve._private.http_util import ASGIReceiveProxy
from starlette.types import Message, Scope

Fetch = Callable[[RequestMetadata], Awaitable[bytes]]


def free_received_bodies() -> None:
    """Make the replica of this process receive through ``FreeingReceiveProxy``."""
    replica.ASGIReceiveProxy = FreeingReceiveProxy


class FreeingReceiveProxy(ASGIReceiveProxy):
    """Ray Serve's ``receive``, whose loop keeps empty objects instead of bodies."""

    def __init__(self, scope: Scope, request_metadata: RequestMetadata, fetch: Fetch) -> None:
        super().__init__(scope, request_metadata, cast("Fetch", emptying(fetch)))

    async def __call__(self) -> Message:
        message = await super().__call__()
        if not message.get("body"):
            return message
        taken = dict(message)
        message["body"] = b""
        return taken


def emptying(fetch: Fetch) -> Callable[[RequestMetadata], Awaitable[bytearray]]:
    """``fetch``, each call of which empties what the call before it returned."""
    last = bytearray()

    async def fetch_next(metadata: RequestMetadata) -> bytearray:
        nonlocal last
        last.clear()
        last = bytearray(await fetch(metadata))
        return last

    return fetch_next
