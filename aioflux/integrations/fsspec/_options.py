"""Translation of fsspec's storage options to options of `open_store`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from aioflux.options import (
    ANONYMOUS,
    GCSAccess,
    RetryPolicy,
    S3Access,
    Timeouts,
    TransferOptions,
)

if TYPE_CHECKING:
    from aioflux.options import StoreOptions

FILE_CACHE_KEYWORDS = frozenset(
    {"cache_options", "cache_type", "default_cache", "fill_cache", "size"}
)
"""Keywords of fsspec's own files. Libraries pass them to every filesystem; they have no effect."""

_POLICIES = {"transfer": TransferOptions, "retry": RetryPolicy, "timeouts": Timeouts}
_STORE_OPTIONS = ("credentials", "endpoint_url", "ssl_context", "progress")
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
"""Options of gcsfs, s3fs and adlfs without effect on stores: for caches of files and listings, for
checks of writes, and block sizes (see `block_size_option`). aioflux does not cache listings, and
checks all writes."""

_REPLACEMENTS = {
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
"""Options of gcsfs, s3fs and adlfs that are rejected, and the option of aioflux to use instead."""


def block_size_option(storage_options: Mapping[str, Any]) -> int | None:
    """Return the default block size of `open` in bytes, or None if no option sets it."""
    values = [storage_options.get(name) for name in _BLOCK_SIZES]
    sizes = [value for value in values if value is not None]
    return int(sizes[0]) if sizes else None


def store_options(scheme: str, storage_options: Mapping[str, Any]) -> StoreOptions:
    """Return the options of `open_store` for storage options of fsspec.

    A policy may be a mapping of its fields, as read from a configuration file.

    Args:
        scheme: Scheme of the stores.
        storage_options: Options of aioflux and of gcsfs, s3fs or adlfs.

    Raises:
        TypeError: The scheme has no such option, or a policy has no such field.
        ValueError: `use_listings_cache` is true, or an option or a policy rejects a value.
    """
    options: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    foreign_names, map_foreign = _FOREIGN_OPTIONS[scheme]
    for name, value in storage_options.items():
        if name in _POLICIES:
            options[name] = _policy(_POLICIES[name], value)
        elif name in _STORE_OPTIONS:
            options[name] = value
        elif name in foreign_names:
            if value is not None:
                foreign[name] = value
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(_unknown(scheme, name))
        elif name == "use_listings_cache" and value:
            raise ValueError("aioflux caches no listings; leave use_listings_cache out")
    for name, value in map_foreign(foreign).items():
        if options.get(name) is not None:
            others = ", ".join(f"{foreign_name}=" for foreign_name in foreign)
            raise TypeError(f"give {name}= or {others}, but not both")
        options[name] = value
    result: StoreOptions = options  # type: ignore[assignment]  # a dictionary with its keys
    return result


def _policy(policy_class: type[Any], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    unknown = sorted(set(value) - set(get_type_hints(policy_class)))
    if unknown:
        raise TypeError(f"{policy_class.__name__} has no field {unknown[0]!r}")
    return policy_class(**value)


def _unknown(scheme: str, name: str) -> str:
    owners = [f"{owner}://" for owner, (names, _) in _FOREIGN_OPTIONS.items() if name in names]
    if owners:
        return f"the storage option {name!r} is for {' and '.join(owners)}, not for {scheme}://"
    known = ", ".join((*_POLICIES, *_STORE_OPTIONS, *sorted(_FOREIGN_OPTIONS[scheme][0])))
    instead = f"; instead of {name}= give {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
    return f"aioflux has no storage option {name!r}; the options are {known}{instead}"


def _only_one(options: Mapping[str, Any], *names: str) -> Any:
    """Return the only value that is set among the options `names`, or None; reject several."""
    present = [name for name in names if options.get(name)]
    if len(present) > 1:
        raise TypeError(f"give only one of {', '.join(f'{name}=' for name in present)}")
    return options[present[0]] if present else None


# --- gs: options of gcsfs ----------------------------------------------------------------


def _map_gcsfs(foreign: Mapping[str, Any]) -> dict[str, Any]:
    token = _only_one(foreign, "token", "anon")
    is_default = token is None or token == "google_default"  # noqa: S105  # a name of gcsfs
    credentials = None if is_default else _google_credentials(token)
    if payer := foreign.get("requester_pays"):
        # gcsfs also uses `project` to create and list buckets, which aioflux cannot do.
        project = foreign.get("project") if payer is True else payer
        if not project:
            raise ValueError("requester_pays=True needs project=, the project that is billed")
        credentials = GCSAccess(credentials=credentials, user_project=project)
    return {} if credentials is None else {"credentials": credentials}


def _google_credentials(token: Any) -> Any:
    """Return the `credentials` of `open_store` for a `token` of gcsfs."""
    if token is True or token == "anon":  # noqa: S105  # a name of gcsfs
        return ANONYMOUS
    if not isinstance(token, str):
        return token
    if token in {"browser", "cache", "cloud"}:
        raise ValueError(
            f"aioflux does not authenticate with token={token!r}; leave token out to use the "
            "Application Default Credentials (gcloud auth application-default login, "
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
            # `from None`, because the JSON error contains the key and a traceback would show it.
            raise ValueError("the file given as token= is not a key file: it is not JSON") from None
    if token.endswith(".json") or token.startswith(("/", "~", ".")):
        # The message does not contain the value: an access token may look like a path.
        raise FileNotFoundError("there is no key file with the name given as token=")

    def provide_token() -> str:
        return token

    return provide_token


# --- s3: options of s3fs -----------------------------------------------------------------


def _map_s3fs(foreign: Mapping[str, Any]) -> dict[str, Any]:
    client_kwargs = dict(foreign.get("client_kwargs") or {})
    options: dict[str, Any] = {}
    if (endpoint_url := client_kwargs.pop("endpoint_url", None)) is not None:
        options["endpoint_url"] = endpoint_url
    region = client_kwargs.pop("region_name", None)
    keys = [
        foreign.get(s3fs_name) or client_kwargs.pop(boto_name, None)
        for s3fs_name, boto_name in (
            ("key", "aws_access_key_id"),
            ("secret", "aws_secret_access_key"),
            ("token", "aws_session_token"),
        )
    ]
    for name in client_kwargs:
        raise TypeError(
            f"client_kwargs has {name!r}, but aioflux uses only its endpoint_url, region_name and "
            "access keys; give certificates as ssl_context="
        )
    if bool(keys[0]) != bool(keys[1]) or (keys[2] and not keys[0]):
        raise TypeError("key= and secret= must be given together, and token= only with both")
    access: dict[str, Any] = {
        "anonymous": bool(foreign.get("anon")),
        "profile": foreign.get("profile") or "",
        "region": region or "",
        "requester_pays": bool(foreign.get("requester_pays")),
    }
    if keys[0]:
        given_keys = tuple(key for key in keys if key)

        def provide_keys() -> tuple[str, ...]:
            return given_keys

        access["credentials"] = provide_keys
    if any(access.values()):
        options["credentials"] = S3Access(**access)
    return options


# --- az: options of adlfs ----------------------------------------------------------------


def _map_adlfs(foreign: Mapping[str, Any]) -> dict[str, Any]:
    # `AiofluxFileSystem` compares `account_name` with the account of each path.
    names = ("account_key", "sas_token", "connection_string", "credential", "anon")
    credentials = _only_one(foreign, *names)
    if credentials is None:
        return {}
    return {"credentials": ANONYMOUS if credentials is True else credentials}


_FOREIGN_OPTIONS: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "gs": ({"anon", "project", "requester_pays", "token"}, _map_gcsfs),
    "s3": (
        {"anon", "client_kwargs", "key", "profile", "requester_pays", "secret", "token"},
        _map_s3fs,
    ),
    "az": (
        {"account_key", "account_name", "anon", "connection_string", "credential", "sas_token"},
        _map_adlfs,
    ),
    "file": (set(), dict),
    "memory": (set(), dict),
}
"""By scheme: the accepted options of gcsfs, s3fs or adlfs, and the function that maps them to
options of `open_store`."""
