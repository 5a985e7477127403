"""Storage options: what fsspec is given, as what `open_store` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from aioflux._policy import RetryPolicy, Timeouts, TransferOptions

if TYPE_CHECKING:
    from aioflux._policy import StoreOptions

__all__ = ["store_options"]

_POLICIES = {"transfer": TransferOptions, "retry": RetryPolicy, "timeouts": Timeouts}
_PLAIN = ("credentials", "endpoint_url", "ssl_context", "progress")
_OF_FSSPEC = ("listings_expiry_time", "max_paths", "use_listings_cache")
_ACCESS = "credentials=aioflux.S3Access(...)"
_ELSEWHERE = {
    "token": "credentials",
    "requests_timeout": "timeouts",
    "timeout": "timeouts",
    "retries": "retry",
    "project": "nothing: names of buckets are unique",
    "cache_timeout": "nothing: listings are not cached",
    **dict.fromkeys(("key", "secret", "anon", "profile", "requester_pays"), _ACCESS),
    "client_kwargs": "endpoint_url, and credentials=aioflux.S3Access(region=...)",
    "account_key": "credentials",
    "account_name": "nothing: it is the first part of a path",
    "connection_string": "credentials",
    "sas_token": "credentials",
}
"""Options of gcsfs, s3fs and adlfs, and what says the same here."""


def store_options(given: Mapping[str, Any]) -> StoreOptions:
    """Return what `open_store` takes of storage options.

    Policies may be given as mappings of their fields, which is all that a file of settings holds.

    Raises:
        TypeError: There is no such option, or no such field.
        ValueError: Listings are to be cached, or a policy refuses a value.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in _POLICIES:
            options[name] = _policy(_POLICIES[name], value)
        elif name in _PLAIN:
            options[name] = value
        elif name in _OF_FSSPEC:
            if name == "use_listings_cache" and value:
                raise ValueError("aioflux caches no listings; leave use_listings_cache out")
        else:
            raise TypeError(_unknown(name))
    result: StoreOptions = options  # type: ignore[assignment]  # its keys are those above
    return result


def _policy(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    unknown = sorted(set(value) - set(get_type_hints(kind)))
    if unknown:
        raise TypeError(f"{kind.__name__} has no {unknown[0]!r}")
    return kind(**value)


def _unknown(name: str) -> str:
    known = ", ".join((*_POLICIES, *_PLAIN))
    instead = f"; instead of {name}= give {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    return f"aioflux has no storage option {name!r}; there are {known}{instead}"
