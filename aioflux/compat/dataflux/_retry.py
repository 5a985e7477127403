"""Conversion of google.api_core's Retry objects to `RetryPolicy`."""

from __future__ import annotations

import sys
from typing import Any

from aioflux.options import RetryPolicy

_MIN_SECONDS = 0.001
"""Smallest delay and deadline: RetryPolicy rejects 0."""

DEFAULT_POLICY = RetryPolicy(
    max_attempts=sys.maxsize,
    initial_seconds=1.0,
    multiplier=1.5,
    max_seconds=30.0,
    deadline_seconds=100_000.0,
)
"""The values of `modified_retry`, for use without google-cloud-storage."""


def modified_retry() -> Any:
    """Return the default retry setting of the old library, a google.api_core object."""
    from google.cloud.storage.retry import (  # type: ignore[import-untyped]
        DEFAULT_RETRY,
    )

    return DEFAULT_RETRY.with_deadline(DEFAULT_POLICY.deadline_seconds).with_delay(
        initial=DEFAULT_POLICY.initial_seconds,
        multiplier=DEFAULT_POLICY.multiplier,
        maximum=DEFAULT_POLICY.max_seconds,
    )


def policy_of(retry: Any) -> RetryPolicy:
    """Return the policy of a retry setting of the old library.

    Args:
        retry: A `google.api_core.retry.Retry`. Its delays and deadline are used, and the number of
            attempts is not limited. Its predicate is ignored: aioflux decides which errors are
            retried. None for a single attempt. A RetryPolicy is returned unchanged.

    Raises:
        TypeError: `retry` has another type.
    """
    if isinstance(retry, RetryPolicy):
        return retry
    if retry is None:
        return RetryPolicy(max_attempts=1)
    # A ConditionalRetryPolicy of google.cloud.storage wraps a Retry.
    inner = getattr(retry, "retry_policy", retry)
    try:
        # These fields have public setters (`with_delay`, `with_timeout`) but no public getters.
        initial, maximum = inner._initial, inner._maximum  # noqa: SLF001
        multiplier, deadline = inner._multiplier, inner._timeout  # noqa: SLF001
    except AttributeError as exc:
        raise TypeError(
            "list_retry_config and download_retry_config take a google.api_core.retry.Retry, an "
            f"aioflux.RetryPolicy or None, not {type(retry).__name__}"
        ) from exc
    if deadline is None:  # RetryPolicy requires a deadline; use a year
        deadline = 365 * 86_400.0
    return RetryPolicy(
        max_attempts=sys.maxsize,
        initial_seconds=max(initial, _MIN_SECONDS),
        multiplier=max(multiplier, 1.0),
        max_seconds=max(maximum, _MIN_SECONDS),
        deadline_seconds=max(deadline, _MIN_SECONDS),
    )
