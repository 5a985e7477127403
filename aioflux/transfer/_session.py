"""A store opened on one event loop: what every transfer needs, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from aioflux.transfer._retry import with_retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._policy import RetryPolicy, TransferOptions
    from aioflux.service._base import Service
    from aioflux.transfer._limits import Limits

__all__ = ["Session"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """Service, policies and limits; made once for each store and loop."""

    service: Service
    options: TransferOptions
    retry: RetryPolicy
    limits: Limits

    async def call(
        self, key: str, attempt: Callable[[int], Awaitable[T]], *, num_bytes: int = 0
    ) -> T:
        """Run one request, within the limits, until it succeeds or the policy ends.

        Args:
            key: What it asks for; errors name it.
            attempt: Sends the request once; it is given the number of the attempt, from 1.
            num_bytes: Bytes of the bodies that it moves.
        """
        async with self.limits.slot(num_bytes):
            return await with_retry(attempt, self.retry, uri_of=lambda: self.service.uri(key))
