"""Storage options of fsspec, as options of `open_store`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from aioflux.options import ANONYMOUS, RetryPolicy, S3Access, Timeouts, TransferOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.options import StoreOptions

__all__ = ["FILE_CACHE_KEYWORDS", "block_size_option", "store_options"]

FILE_CACHE_KEYWORDS = frozenset(
    {"cache_options", "cache_type", "default_cache", "fill_cache", "size"}
)
"""Keywords of fsspec's own files: libraries pass them to any filesystem. Without effect here."""

_POLICIES = {"transfer": TransferOptions, "retry": RetryPolicy, "timeouts": Timeouts}
_PLAIN = ("credentials", "endpoint_url", "ssl_context", "progress")
_BLOCK_SIZES = ("default_block_size", "block_size", "blocksize")
_WITHOUT_EFFECT = frozenset(
    {
        *FILE_CACHE_KEYWORDS,
        *_BLOCK_SIZES,
        "cache_timeout",
        "consistency",
        "default_cache_options",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "max_paths",
        "use_listings_cache",
    }
)
"""Options of gcsfs, s3fs and adlfs for the caches of files and listings, and for checks of writes:
listings are not cached here, and all writes are checked."""

_ELSEWHERE = {
    "requests_timeout": "timeouts",
    "timeout": "timeouts",
    "retries": "retry",
    **dict.fromkeys(
        ("client_id", "client_secret", "tenant_id"),
        "credentials=azure.identity.ClientSecretCredential(...)",
    ),
    "config_kwargs": "credentials=aioflux.S3Access(...), timeouts= and retry=",
    "session": "credentials=aioflux.S3Access(credentials=...)",
}
"""Options of gcsfs, s3fs and adlfs that are not mapped, and the option to use instead."""


def block_size_option(given: Mapping[str, Any]) -> int | None:
    """Return the default block size of `open`; None for that of `ReadFile`."""
    sizes = [given[name] for name in _BLOCK_SIZES if given.get(name) is not None]
    return int(sizes[0]) if sizes else None


def store_options(scheme: str, given: Mapping[str, Any]) -> StoreOptions:
    """Return the options of `open_store`.

    Policies may be mappings of their fields, as a configuration file holds them.

    Args:
        scheme: Scheme of the stores.
        given: Storage options, of aioflux and of gcsfs, s3fs or adlfs.

    Raises:
        TypeError: There is no such option with the scheme, or no such field.
        ValueError: Listings are to be cached, or an option or a policy rejects a value.
    """
    options: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    mapped, take = _FAMILIES[scheme]
    for name, value in given.items():
        if name in _POLICIES:
            options[name] = _policy(_POLICIES[name], value)
        elif name in _PLAIN:
            options[name] = value
        elif name in mapped:
            if value is not None:
                foreign[name] = value
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(_unknown(scheme, name))
        elif name == "use_listings_cache" and value:
            raise ValueError("aioflux caches no listings; leave use_listings_cache out")
    for name, value in take(foreign).items():
        if options.get(name) is not None:
            others = ", ".join(f"{each}=" for each in foreign)
            raise TypeError(f"give {name}= or {others}, and not both")
        options[name] = value
    result: StoreOptions = options  # type: ignore[assignment]  # its keys are those above
    return result


def _policy(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    unknown = sorted(set(value) - set(get_type_hints(kind)))
    if unknown:
        raise TypeError(f"{kind.__name__} has no {unknown[0]!r}")
    return kind(**value)


def _unknown(scheme: str, name: str) -> str:
    owners = [f"{each}://" for each, (names, _) in _FAMILIES.items() if name in names]
    if owners:
        return f"the storage option {name!r} is for {' and '.join(owners)}, not for {scheme}://"
    known = ", ".join((*_POLICIES, *_PLAIN, *sorted(_FAMILIES[scheme][0])))
    instead = f"; instead of {name}= give {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    return f"aioflux has no storage option {name!r}; there are {known}{instead}"


def _only_one(given: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the one option that is given, or None.

    Raises:
        TypeError: Several are given.
    """
    found = [name for name in names if given.get(name)]
    if len(found) > 1:
        raise TypeError(f"give one of {', '.join(f'{name}=' for name in found)}, and not several")
    return given[found[0]] if found else None


# --- gs: as gcsfs ------------------------------------------------------------------------


def _of_gcsfs(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("requester_pays"):
        raise ValueError(
            "aioflux does not name a project that pays for requests to gs://; leave "
            "requester_pays out"
        )
    # `project` is for making and listing buckets, which is not done here.
    token = _only_one(given, "token", "anon")
    if token is None or token == "google_default":  # noqa: S105  # a name of gcsfs
        return {}
    return {"credentials": _google_credentials(token)}


def _google_credentials(token: Any) -> Any:
    """Return the `credentials` of `open_store` for a `token` of gcsfs.

    Raises:
        ValueError: It is a way to authenticate that aioflux does not have.
    """
    if token is True or token == "anon":  # noqa: S105  # a name of gcsfs
        return ANONYMOUS
    if not isinstance(token, str):
        return token
    if token in {"browser", "cache", "cloud"}:
        raise ValueError(
            f"aioflux does not authenticate with token={token!r}: leave token out, and the "
            "Application Default Credentials are found (gcloud auth application-default login, "
            "GOOGLE_APPLICATION_CREDENTIALS, the metadata server)"
        )
    path = Path(token).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # an access token may be longer than a path
        is_file = False
    if is_file:
        try:
            return json.loads(path.read_text())
        except ValueError:
            # Not `from` it: a traceback must not show the key.
            raise ValueError("the file given as token= is not JSON, as key files are") from None
    if token.endswith(".json") or token.startswith(("/", "~", ".")):
        # Its name is not shown: it may be an access token that only looks like one.
        raise FileNotFoundError("there is no key file of the name given as token=")

    def provide_token() -> str:
        return token

    return provide_token


# --- s3: as s3fs -------------------------------------------------------------------------


def _of_s3fs(given: Mapping[str, Any]) -> dict[str, Any]:
    client = dict(given.get("client_kwargs") or {})
    options: dict[str, Any] = {}
    if (endpoint_url := client.pop("endpoint_url", None)) is not None:
        options["endpoint_url"] = endpoint_url
    region = client.pop("region_name", None)
    keys = [
        given.get(ours) or client.pop(theirs, None)
        for ours, theirs in (
            ("key", "aws_access_key_id"),
            ("secret", "aws_secret_access_key"),
            ("token", "aws_session_token"),
        )
    ]
    for name in client:
        raise TypeError(
            f"client_kwargs has {name!r}; aioflux takes endpoint_url, region_name and keys of it. "
            "Certificates are ssl_context="
        )
    if bool(keys[0]) != bool(keys[1]) or (keys[2] and not keys[0]):
        raise TypeError("key= and secret= must be given together, and token= only with both")
    access: dict[str, Any] = {
        "anonymous": bool(given.get("anon")),
        "profile": given.get("profile") or "",
        "region": region or "",
        "requester_pays": bool(given.get("requester_pays")),
    }
    if keys[0]:
        triple = tuple(each for each in keys if each)

        def provide_keys() -> tuple[str, ...]:
            return triple

        access["credentials"] = provide_keys
    if any(access.values()):
        options["credentials"] = S3Access(**access)
    return options


# --- az: as adlfs ------------------------------------------------------------------------


def _of_adlfs(given: Mapping[str, Any]) -> dict[str, Any]:
    # `account_name` is compared with the paths.
    found = _only_one(given, "account_key", "sas_token", "connection_string", "credential", "anon")
    if found is None:
        return {}
    return {"credentials": ANONYMOUS if found is True else found}


_FAMILIES: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "gs": ({"anon", "project", "requester_pays", "token"}, _of_gcsfs),
    "s3": (
        {"anon", "client_kwargs", "key", "profile", "requester_pays", "secret", "token"},
        _of_s3fs,
    ),
    "az": (
        {"account_key", "account_name", "anon", "connection_string", "credential", "sas_token"},
        _of_adlfs,
    ),
    "file": (set(), dict),
    "memory": (set(), dict),
}
"""Options of gcsfs, s3fs and adlfs that are mapped, and the functions that map them, by scheme."""
