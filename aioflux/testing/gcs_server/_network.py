"""Simulated network: latency, bandwidth and a limit on requests.

The kernel paces each connection (`Network.connection_bytes_per_second`), at no cost to the server.
The rest is delay that the hook adds to deliveries.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._delivery import PLAIN
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import error_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.testing.gcs_server._messages import Request, Response

PACED_BY_KERNEL = sys.platform == "linux"
_LINK_BURST_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Properties of the network in front of the server. The default adds nothing."""

    latency_seconds: float = 0.0
    """Time to the first byte of each response; the median with `latency_spread`."""
    latency_spread: float = 0.0
    """Sigma of a log-normal distribution of the latency: 0.5 puts one in 100 above 3.2 times the
    median. 0 makes every latency the same."""
    page_latency_seconds: float = 0.0
    """Added to each page of a listing."""
    connection_bytes_per_second: int | None = None
    """Bandwidth of each connection, towards the client; None has no limit."""
    bytes_per_second: float | None = None
    """Bandwidth of all connections together, each way; None has no limit. An upload is received at
    once, and its response delayed by the time that the bytes would have taken."""
    requests_per_second: float | None = None
    """Requests above it are rejected with 429 and Retry-After; None has no limit."""
    request_burst: int = 1
    """Requests that may arrive at once after a pause."""
    seed: int = 0
    """Seed of the random latencies."""

    def __post_init__(self) -> None:
        """Check that values are in range."""
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
    """Tokens that arrive at a rate and are kept up to a burst. It uses no clock."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = self._tokens = burst
        self._updated = -math.inf

    def acquire(self, amount: float, now: float) -> float:
        """Acquire tokens, in advance if there are too few; return the seconds until they arrive."""
        self._fill(now)
        self._tokens -= amount
        return max(0.0, -self._tokens / self._per_second)

    def try_acquire(self, amount: float, now: float) -> float:
        """Acquire tokens and return 0, or none and return the seconds until there are enough."""
        self._fill(now)
        if self._tokens >= amount:
            self._tokens -= amount
            return 0.0
        return (amount - self._tokens) / self._per_second

    def _fill(self, now: float) -> None:
        earned = (now - self._updated) * self._per_second
        self._tokens = min(self._burst, self._tokens + earned)
        self._updated = now


class NetworkHook(Hook):
    """Delays responses and rejects requests as a `Network` describes.

    Args:
        network: Latency, bandwidth and limit on requests.
        clock: Monotonic time in seconds.
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
        self._is_idle = network == Network(
            connection_bytes_per_second=network.connection_bytes_per_second
        ) and (self._rate is None)

    def before(self, request: Request) -> Response | None:
        """Reject a request above the limit."""
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
        """Delay the response and send its body over the shared link."""
        if self._is_idle or request.in_batch or _is_exempt(request):
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
    """Return whether a request sets up the test, and is not itself tested."""
    return request.match.operation.startswith("retry_tests.")
