"""JSON API: batches of requests (cloud.google.com/storage/docs/batch)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._delivery import Delivery, merge_deliveries, shift_delivery
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._messages import Request, Response, error_response
from aioflux.testing.gcs_server._mime import BodyPart, split_body
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._app import App
    from aioflux.testing.gcs_server._state import State

_MAX_CALLS = 100
_MEDIA_ROOTS = (b"/upload/", b"/download/", b"/batch")


def batch_routes(app: App) -> tuple[Route, ...]:
    """Return the routes of batches. The application handles the requests of a batch in order."""

    def batch(state: State, request: Request) -> Response:
        """Handle the requests of a batch in order, even if some fail."""
        parts = split_body(request)
        if len(parts) > _MAX_CALLS:
            raise invalid(f"The batch has {len(parts)} calls; at most {_MAX_CALLS} are allowed.")
        boundary = f"batch_{secrets.token_urlsafe(24)}"
        body = bytearray()
        plans: list[Delivery] = []
        for part in parts:
            _handle_part(part, request, app, boundary, body, plans)
        body += f"--{boundary}--\r\n".encode()
        content_type = ("Content-Type", f"multipart/mixed; boundary={boundary}")
        return Response(headers=(content_type,), body=bytes(body), delivery=merge_deliveries(plans))

    return tuple(
        Route("POST", pattern, "storage.batch", batch)
        for pattern in ("/batch/storage/v1", "/batch/storage/v1/")
    )


def _handle_part(
    part: BodyPart,
    outer: Request,
    app: App,
    boundary: str,
    body: bytearray,
    plans: list[Delivery],
) -> None:
    """Handle one request of a batch. Append its response to `body` and its delivery to `plans`."""
    try:
        request = _parse_request(part, outer)
    except APIError as exc:
        response = error_response(exc, xml=False)
    else:
        response = app.handle(request)
        response.sent_bytes = response.size
        app.finished(request, response)
    content_id = part.headers.get("content-id", "")
    id_line = f"Content-ID: {_response_id(content_id)}\r\n" if content_id else ""
    head = f"--{boundary}\r\nContent-Type: application/http\r\n{id_line}\r\n".encode()
    start = len(body)
    body += head
    body += response.head()
    if response.delivery is not None:
        plans.append(shift_delivery(response.delivery, start, len(body)))
    for piece in response.pieces():
        body += piece
    body += b"\r\n"


def _response_id(content_id: str) -> str:
    """Return the Content-ID of a response: `<response-x>` if the request has `<x>`."""
    bare_id = content_id.removeprefix("<")
    return f"{content_id[: len(content_id) - len(bare_id)]}response-{bare_id}"


def _parse_request(part: BodyPart, outer: Request) -> Request:
    """Parse the request in a MIME part. Raise APIError (400) for uploads and downloads."""
    head, body = _split_message(bytes(part.data))
    line, *lines = head.splitlines() or [b""]
    words = line.split()
    if part.headers.get("content-type", "").split(";")[0] != "application/http" or len(words) < 2:
        raise APIError(400, "badRequest", "Failed to parse batch request: no request in a part.")
    target = words[1]
    if b"://" in target:
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    if target.startswith(_MEDIA_ROOTS) or b"alt=media" in target:
        raise APIError(400, "badRequest", "Uploads and downloads are not supported in batches.")
    pairs = [line.partition(b":")[::2] for line in lines]
    headers = [(name.strip(), value.strip()) for name, value in pairs]
    if not any(name.lower() == b"host" for name, _ in headers):
        headers.append((b"Host", outer.headers.get("host", "localhost").encode("latin-1")))
    method = words[0].decode("ascii", "replace").upper()
    request = Request(method, target, headers, [body] if body else [], scheme=outer.scheme)
    request.in_batch = True
    return request


def _split_message(data: bytes) -> tuple[bytes, bytes]:
    """Split a request into head and body. Lines may end in CRLF or LF."""
    ends = [(end, blank) for blank in (b"\r\n\r\n", b"\n\n") if (end := data.find(blank)) >= 0]
    end, blank = min(ends, default=(len(data), b""))
    return data[:end], data[end + len(blank) :]
