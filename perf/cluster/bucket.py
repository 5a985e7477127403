"""Model of a bucket: objects, request rates, latency, network links, outages and prices.

    request -> counted -> outage or rate exceeded: 503 or 429 after the latency
                       -> its bytes over the link of the node -> latency -> effect and response

Sources of the figures: docs/scale.md.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aioflux.errors import TransientError
from aioflux.testing.gcs_server._network import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aioflux._services.base import ListRequest, Page
    from aioflux._values.meta import ObjectMeta

__all__ = ["GCS", "READS", "S3", "Bucket", "Link", "Profile", "Stored", "longest_excess"]

READS: Final = frozenset({"get", "head", "list"})
"""Operations that count as reads; all others count as writes."""
_FREE: Final = frozenset({"delete", "abort"})
_MIN_LINKED_BYTES: Final = 64 * 1024
"""Smaller bodies take no time on a link: they fit into about one congestion window."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Documented limits and prices of a service."""

    name: str
    reads_per_second: float
    writes_per_second: float
    doubling_seconds: float
    """Time after which a bucket that is in use serves twice the rate; infinity for never."""
    status: int
    """Status of a rejected request."""
    page_size: int
    delete_page_size: int = 0
    dollars_per_1000: Mapping[str, float]
    """Price of 1,000 requests by operation; "" for every other. Deletes are free."""
    prices_of: str
    """Date and region of the prices."""

    def dollars(self, requests: Mapping[str, int]) -> float:
        """Return the price of requests, given their number by operation."""
        prices = self.dollars_per_1000
        return sum(
            number * prices.get(operation, prices[""]) / 1000
            for operation, number in requests.items()
            if operation not in _FREE
        )


GCS: Final = Profile(
    name="GCS",
    reads_per_second=5_000,
    writes_per_second=1_000,
    doubling_seconds=20 * 60,
    status=429,
    page_size=5_000,
    dollars_per_1000={"": 0.005, "get": 0.0004, "head": 0.0004},
    prices_of="us-east1, Standard, November 2026",
)
S3: Final = Profile(
    name="S3",
    reads_per_second=5_500,
    writes_per_second=3_500,
    doubling_seconds=float("inf"),
    status=503,
    page_size=1_000,
    delete_page_size=1_000,
    dollars_per_1000={"": 0.005, "get": 0.0004, "head": 0.0004},
    prices_of="us-east-1, Standard, November 2026",
)


class Link:
    """Network link of one node, shared equally by the bodies in flight.

    Fair queueing: `_share` is the number of bytes that a body would have sent if it had been in
    flight since the beginning.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.is_dead = False
        """Whether the processes were killed: their requests are never sent."""
        self._bytes_per_second = bytes_per_second
        self._share = 0.0
        self._updated = 0.0
        self._flows: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def transfer(self, num_bytes: float) -> None:
        """Wait until a body has been sent."""
        if num_bytes < _MIN_LINKED_BYTES:
            return
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        done: asyncio.Future[None] = loop.create_future()
        flow = (self._share + num_bytes, next(self._numbers), done)
        heapq.heappush(self._flows, flow)
        self._set_timer(loop)
        try:
            await done
        except asyncio.CancelledError:
            if flow in self._flows:
                self._advance(loop.time())
                self._flows.remove(flow)
                heapq.heapify(self._flows)
                self._set_timer(loop)
            raise

    def _advance(self, now: float) -> None:
        if self._flows:
            self._share += (now - self._updated) * self._bytes_per_second / len(self._flows)
        self._updated = now

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flows:
            missing = max(0.0, self._flows[0][0] - self._share)
            seconds = missing * len(self._flows) / self._bytes_per_second
            self._timer = loop.call_later(seconds, self._finish, loop)

    def _finish(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._advance(loop.time())
        while self._flows and self._flows[0][0] <= self._share + 1.0:
            done = heapq.heappop(self._flows)[2]
            if not done.done():
                done.set_result(None)
        self._set_timer(loop)


@dataclass(slots=True)
class Stored:
    """One object. The key of `meta` is relative to the prefix of the stores that use the object."""

    data: bytes
    meta: ObjectMeta


@dataclass(kw_only=True, eq=False)
class Bucket:
    """A bucket, and the record of all requests to it."""

    profile: Profile
    latency_seconds: float = 0.02
    """Median time to the first byte of a response."""
    latency_spread: float = 0.25
    """Sigma of the log-normal distribution of the latency."""
    has_limits: bool = True
    burst_seconds: float = 1.0
    """Seconds of the rate that are accepted at once after a pause."""
    rate: float | None = None
    """One rate for reads and writes together, as in the embedded server, instead of the profile's.
    """
    retry_after: bool = False
    """Whether a rejection has a Retry-After, as in the embedded server."""
    outages: tuple[tuple[float, float], ...] = ()
    """Times `[start, end)` in which every request gets a 503."""
    scale_of: Callable[[str], float] = lambda _: 1.0
    """Function of the key of an object: bytes that one of its stored bytes represents."""
    objects: dict[str, Stored] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by operation, rejected ones included."""
    rejected: Counter[str] = field(default_factory=Counter)
    sent: dict[str, Counter[int]] = field(
        default_factory=lambda: {"reads": Counter(), "writes": Counter()}
    )
    """Number of requests by second, rejected ones included."""
    written_at: dict[str, float] = field(default_factory=dict)
    """Time of the last write of each object, also of deleted ones."""
    num_generations: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(7)  # noqa: S311  no secret
        self._buckets = {
            "reads": self._token_bucket(self.profile.reads_per_second),
            "writes": self._token_bucket(self.profile.writes_per_second),
        }
        if self.rate is not None:
            one = TokenBucket(self.rate, max(1.0, self.rate * self.burst_seconds))
            self._buckets = {"reads": one, "writes": one}

    def _token_bucket(self, rate: float) -> TokenBucket:
        return TokenBucket(rate, rate * self.burst_seconds)

    async def exchange(self, operation: str, uri: str, link: Link, num_bytes: float = 0) -> None:
        """Count one request and wait for its time; the caller applies its effect afterwards.

        Raises:
            TransientError: The request was rejected.
        """
        loop = asyncio.get_running_loop()
        if link.is_dead:
            await loop.create_future()
        now = loop.time()
        kind = "reads" if operation in READS else "writes"
        self.requests[operation] += 1
        self.sent[kind][int(now)] += 1
        latency = self.latency_seconds
        if self.latency_spread:
            latency *= self._rng.lognormvariate(0.0, self.latency_spread)
        status, wait = 0, 0.0
        if any(start <= now < end for start, end in self.outages):
            status = 503
        elif self.has_limits:
            doublings = now // self.profile.doubling_seconds
            wait = self._buckets[kind].try_acquire(0.5**doublings, now)
            status = self.profile.status if wait else 0
        if status:
            self.rejected[operation] += 1
            await asyncio.sleep(latency)
            raise TransientError(
                f"could not {operation} {uri}: {status}",
                uri=uri,
                status=status,
                retry_after_seconds=-(-wait // 1) if self.retry_after and wait else None,
            )
        if num_bytes:
            await link.transfer(num_bytes)
        await asyncio.sleep(latency)

    def add(self, name: str, data: bytes, meta: ObjectMeta) -> None:
        """Store an object."""
        self.written_at[name] = asyncio.get_running_loop().time()
        if name not in self.objects:
            insort(self.keys, name)
        self.objects[name] = Stored(data, meta)

    def remove(self, name: str) -> None:
        """Remove an object."""
        del self.objects[name]
        del self.keys[bisect_left(self.keys, name)]

    def find(self, name: str) -> Stored | None:
        """Return an object, or None."""
        return self.objects.get(name)

    def page(self, request: ListRequest, limit: int) -> Page | None:
        """Return a page without a search in `names`, or None."""
        return None

    def names(self, start: str) -> Iterator[str]:
        """Yield the names from `start` on, sorted. The bucket must not change meanwhile."""
        return itertools.islice(self.keys, bisect_left(self.keys, start), None)

    def excess_seconds(self) -> dict[str, int]:
        """Return the longest time for which more requests were sent than the documented rate."""
        profile = self.profile
        limits = {"reads": profile.reads_per_second, "writes": profile.writes_per_second}
        return {
            kind: longest_excess(self.sent[kind], limit, profile.doubling_seconds)
            for kind, limit in limits.items()
        }


def longest_excess(sent: Mapping[int, int], limit: float, doubling_seconds: float) -> int:
    """Return the length of the longest run of seconds with more than `limit` requests."""
    longest = run = 0
    last = None
    for second in sorted(sent):
        if sent[second] <= limit * 2 ** (second // doubling_seconds):
            run, last = 0, None
            continue
        run = run + 1 if last == second - 1 else 1
        last = second
        longest = max(longest, run)
    return longest
