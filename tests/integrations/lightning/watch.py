"""Record of the keys of a bucket after each request that changed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server import Hook

if TYPE_CHECKING:
    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request, Response


class Watch(Hook):
    """Records each list of keys of a bucket. The server handles one request at a time."""

    def __init__(self, server: GCSServer, bucket: str = "bucket") -> None:
        self._server = server
        self._bucket = bucket
        self.seen = [frozenset(server.keys(bucket))]
        server.app.hooks = (self, *server.app.hooks)

    def after(self, request: Request, response: Response) -> Response:
        keys = frozenset(self._server.keys(self._bucket))
        if keys != self.seen[-1]:
            self.seen.append(keys)
        return response
