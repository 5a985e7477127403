"""Copies that the service makes in the background."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflux._services.azure import wire
from aioflux.errors import PreconditionFailedError, TransientError

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.azure.sender import AzureSender

__all__ = ["wait_for_copy"]

_LOOK_SECONDS = (0.05, 2.0)
"""Time between two looks at a copy: first and longest."""


async def wait_for_copy(
    sender: AzureSender, path: bytes, response: Response, *, action: str, key: str, uri: str
) -> Response:
    """Wait until a copy is done, and return the answer that tells it.

    Args:
        sender: Asks how far it is.
        path: Of what is made.
        response: The answer to the request that began it.
        action: What was asked, as a verb; errors say it.
        key: Name of what is made.
        uri: Its whole uri.

    Raises:
        PreconditionFailedError: Somebody else wrote it meanwhile.
        TransientError: It failed.
    """
    seconds, most = _LOOK_SECONDS
    copy_id = response.headers.get(b"x-ms-copy-id")
    while (state := response.headers.get(b"x-ms-copy-status")) == b"pending":
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, most)
        response = await sender.send(b"HEAD", path, action, key)
    if response.headers.get(b"x-ms-copy-id") != copy_id:
        raise PreconditionFailedError(
            f"could not {action} {uri}: somebody else wrote it meanwhile", uri=uri
        )
    if state != b"success" or not wire.etag_of(response.headers):
        told = response.headers.get(b"x-ms-copy-status-description", b"").decode("latin-1")
        said = (state or b"of no status").decode("latin-1")
        raise TransientError(
            f"could not {action} {uri}: the copy is {said} {told}".rstrip(),
            uri=uri,
            maybe_done=True,
        )
    return response
