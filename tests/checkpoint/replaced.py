"""ReplacedOnce: a checkpoint that another save replaces while it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server import Hook

if TYPE_CHECKING:
    from aioflux.testing import GCSServer


class ReplacedOnce(Hook):
    """Replaces the objects below a prefix by those below another one, once.

    Args:
        server: The server, with the bucket `bucket`.
        prefix: Prefix of the checkpoint.
        other: Prefix of the checkpoint that replaces it.
        after: A part of the target of the request after whose response it is replaced.
    """

    def __init__(
        self, server: GCSServer, prefix: str, other: str, *, after: bytes = b".metadata"
    ) -> None:
        self._server = server
        self._prefix, self._other = prefix, other
        self._after = after
        self.is_done = False
        server.app.hooks = (self, *server.app.hooks)

    def after(self, request: Any, response: Any) -> Any:
        if not self.is_done and request.method == "GET" and self._after in request.target:
            self.is_done = True
            for key in self._server.keys("bucket", self._prefix):
                self._server.state.delete("bucket", key)
            for key in self._server.keys("bucket", self._other):
                data = self._server.get("bucket", key)
                self._server.put("bucket", self._prefix + key.removeprefix(self._other), data)
        return response
