"""What a fault does to an answer: pure functions from a response to the one that is sent."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._delivery import BEFORE_HEAD, PLAIN
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Response, error_response

if TYPE_CHECKING:
    import random

    from aioflux.testing.gcs_server._faults import Fault
    from aioflux.testing.gcs_server._messages import Request

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_REASONS = {
    401: "authError",
    403: "forbidden",
    404: "notFound",
    408: "requestTimeout",
    412: "conditionNotMet",
    429: "rateLimitExceeded",
    503: "backendError",
}


def refuse(fault: Fault, *, xml: bool) -> Response | None:
    """Return the answer that stands in for the handler's, or None where the handler runs."""
    if fault.kind == "reset":
        return Response(status=503, delivery=replace(PLAIN, cut_at=BEFORE_HEAD, reset=True))
    if fault.status is None:
        return None
    after = fault.retry_after
    headers = () if after is None else (("Retry-After", str(after)),)
    if fault.body is not None:
        return Response(status=fault.status, headers=headers, body=fault.body)
    return refuse_with(fault.status, xml=xml, headers=headers)


def refuse_with(status: int, *, xml: bool, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return the answer that GCS sends with a status; any from 200 on, also one without a name."""
    phrase = _PHRASES.get(status, "Unknown")
    reason = _REASONS.get(status, "internalError" if status >= 500 else "invalid")
    return error_response(APIError(status, reason, phrase, headers=headers), xml=xml)


def touches(fault: Fault, response: Response, size: int) -> bool:
    """Judge whether an answer with a body of `size` bytes is one that the fault can disturb."""
    if fault.lost or fault.delay_seconds is not None:
        return True
    if response.status >= 300:
        return False
    if fault.flip_at == "random":
        return size > 0
    position = next(
        at for at in (fault.truncate_at, fault.flip_at, fault.stall_at) if at is not None
    )
    return position < size


def disturb(
    fault: Fault, response: Response, size: int, rng: random.Random | None = None
) -> Response:
    """Return the answer as the fault leaves it; `touches` has agreed."""
    plan = response.delivery or PLAIN
    if fault.flip_at is not None:
        position = fault.flip_at
        if position == "random":
            assert rng is not None
            position = rng.randrange(size)
        body = bytearray().join(response.pieces())
        body[position] ^= 0xFF
        return replace(response, body=body)
    if fault.lost:
        plan = replace(plan, cut_at=BEFORE_HEAD, reset=fault.reset)
    elif fault.truncate_at is not None:
        plan = replace(plan, cut_at=fault.truncate_at, reset=fault.reset)
    elif fault.stall_at is not None:
        plan = replace(plan, stall_at=fault.stall_at, stall_seconds=fault.stall_seconds)
    elif fault.delay_seconds is not None:
        plan = replace(plan, delay_seconds=plan.delay_seconds + fault.delay_seconds)
    return replace(response, delivery=plan)


def body_size(request: Request, response: Response) -> int:
    """Return how many bytes of body an answer sends."""
    return 0 if request.method == "HEAD" else response.size
