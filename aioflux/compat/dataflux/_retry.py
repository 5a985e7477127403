"""Retry objects of google.api_core as `RetryPolicy`."""

from __future__ import annotations

import sys
from typing import Any

from aioflux.options import RetryPolicy

__all__ = ["DEFAULT_POLICY", "modified_retry", "policy_of"]

_MIN_SECONDS = 0.001
"""Replaces a delay of 0, which RetryPolicy rejects."""

DEFAULT_POLICY = RetryPolicy(
    max_attempts=sys.maxsize,
    initial_seconds=1.0,
    multiplier=1.5,
    max_seconds=30.0,
    deadline_seconds=100_000.0,
)
"""The policy of `modified_retry`, without google-cloud-storage."""


def modified_retry() -> Any:
    """Return the default of the old library, a google.api_core object."""
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
        retry: A `google.api_core.retry.Retry`, whose delays and deadline are kept: as there, only
            the deadline ends the attempts. Its predicate is ignored: `RetryPolicy` decides which
            errors are retried. None for a single attempt; a RetryPolicy as it is.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(retry, RetryPolicy):
        return retry
    if retry is None:
        return RetryPolicy(max_attempts=1)
    # google.cloud.storage wraps some in a ConditionalRetryPolicy.
    inner = getattr(retry, "retry_policy", retry)
    try:
        # There are setters for these (`with_delay`, `with_timeout`) and no public getters.
        initial, maximum = inner._initial, inner._maximum  # noqa: SLF001
        multiplier, deadline = inner._multiplier, inner._timeout  # noqa: SLF001
    except AttributeError as exc:
        raise TypeError(
            "list_retry_config and download_retry_config take a google.api_core.retry.Retry, an "
            f"aioflux.RetryPolicy or None, not {type(retry).__name__}"
        ) from exc
    if deadline is None:  # RetryPolicy needs one: a year
        deadline = 365 * 86_400.0
    return RetryPolicy(
        max_attempts=sys.maxsize,
        initial_seconds=max(initial, _MIN_SECONDS),
        multiplier=max(multiplier, 1.0),
        max_seconds=max(maximum, _MIN_SECONDS),
        deadline_seconds=max(deadline, _MIN_SECONDS),
    )
