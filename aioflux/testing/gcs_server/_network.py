"""Simulated network: latency, bandwidth and a rate limit.

On Linux the kernel limits the bandwidth of each connection, without load on the server. A hook
simulates everything else: it delays responses, and rejects requests above the rate limit.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._delivery import PLAIN
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import error_response

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request, Response

PACED_BY_KERNEL = sys.platform == "linux"
_LINK_BURST_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Properties of the simulated network. The default has no latency and no limits."""

    latency_seconds: float = 0.0
    """Delay before the first byte of each response. With `latency_spread` it is the median."""
    latency_spread: float = 0.0
    """Sigma of a log-normal distribution of the latency. With 0.5, one response in 100 takes more
    than 3.2 times the median. With 0, all latencies are equal."""
    page_latency_seconds: float = 0.0
    """Additional latency of each page of a listing."""
    connection_bytes_per_second: int | None = None
    """Download bandwidth of each connection. None means no limit."""
    bytes_per_second: float | None = None
    """Bandwidth that all connections share, separately for uploads and downloads. None means no
    limit. The server receives an upload at full speed and delays only the response."""
    requests_per_second: float | None = None
    """Request rate above which requests are rejected with 429 and Retry-After. None: no limit."""
    request_burst: int = 1
    """Number of requests that are accepted at once after a pause."""
    seed: int = 0
    """Seed of the random latencies."""

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "latency_spread", "page_latency_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name)}")
        for name in ("connection_bytes_per_second", "bytes_per_second", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 or None, is {value}")
        if self.request_burst < 1:
            raise ValueError(f"request_burst must be at least 1, is {self.request_burst}")


class TokenBucket:
    """Token bucket with up to `burst` tokens. The caller passes the time."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = self._tokens = burst
        self._updated = -math.inf

    def acquire(self, amount: float, now: float) -> float:
        """Remove tokens, even more than there are. Return the seconds until none is missing."""
        self._fill(now)
        self._tokens -= amount
        return max(0.0, -self._tokens / self._per_second)

    def try_acquire(self, amount: float, now: float) -> float:
        """Remove tokens and return 0; if there are too few, only return the seconds to wait."""
        self._fill(now)
        if self._tokens >= amount:
            self._tokens -= amount
            return 0.0
        return (amount - self._tokens) / self._per_second

    def _fill(self, now: float) -> None:
        new_tokens = (now - self._updated) * self._per_second
        self._tokens = min(self._burst, self._tokens + new_tokens)
        self._updated = now


class NetworkHook(Hook):
    """Hook that simulates a `Network`: it delays responses and rejects requests.

    Args:
        network: Properties of the simulated network.
        clock: Function that returns monotonic time in seconds.
    """

    def __init__(self, network: Network, clock: Callable[[], float] = time.monotonic) -> None:
        self.network = network
        self._clock = clock
        self._rng = random.Random(network.seed)  # noqa: S311
        self._requests = self._link_in = self._link_out = None
        if network.requests_per_second is not None:
            self._requests = TokenBucket(network.requests_per_second, network.request_burst)
        if network.bytes_per_second is not None:
            burst = network.bytes_per_second * _LINK_BURST_SECONDS
            self._link_in = TokenBucket(network.bytes_per_second, burst)
            self._link_out = TokenBucket(network.bytes_per_second, burst)
        self._rate = None if PACED_BY_KERNEL else network.connection_bytes_per_second
        self._has_no_effect = network == Network(
            connection_bytes_per_second=network.connection_bytes_per_second
        ) and (self._rate is None)

    def before(self, request: Request) -> Response | None:
        """Reject a request above the rate limit with 429."""
        if self._requests is None or _is_exempt(request):
            return None
        wait = self._requests.try_acquire(1, self._clock())
        if not wait:
            return None
        error = APIError(
            429,
            "rateLimitExceeded",
            "The object exceeded the rate limit. Reduce the rate of requests.",
            headers=(("Retry-After", str(math.ceil(wait))),),
        )
        return error_response(error, xml=not request.match.url.is_json)

    def after(self, request: Request, response: Response) -> Response:
        """Add the latency and the bandwidth limits to the delivery of a response."""
        if self._has_no_effect or request.in_batch or _is_exempt(request):
            return response
        delay = self._latency(request)
        if self._link_in is not None and request.pieces:
            delay += self._link_in.acquire(request.size, self._clock())
        plan = response.delivery or PLAIN
        response.delivery = replace(
            plan,
            delay_seconds=plan.delay_seconds + delay,
            bytes_per_second=plan.bytes_per_second or self._rate,
            link=plan.link if self._link_out is None else self._reserve,
        )
        return response

    def _latency(self, request: Request) -> float:
        network = self.network
        latency = network.latency_seconds
        if network.latency_spread:
            latency *= self._rng.lognormvariate(0.0, network.latency_spread)
        if request.match.operation.endswith(".list"):
            latency += network.page_latency_seconds
        return latency

    def _reserve(self, size: int) -> float:
        assert self._link_out is not None
        return self._link_out.acquire(size, self._clock())


def _is_exempt(request: Request) -> bool:
    """Return whether a request configures a test, so that the network must not delay it."""
    return request.match.operation.startswith("retry_tests.")
