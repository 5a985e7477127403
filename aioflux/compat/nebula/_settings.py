"""Settings of Nebula from the arguments of `init` and from environment variables.

The environment variables:

* NEBULA_PERSISTENT_STORAGE_PATH: uri or directory of the persistent storage.
* NEBULA_PERSISTENT_TIME_INTERVAL: minimum seconds between two saves to the persistent storage.
* NEBULA_MEMORY_BUFFER_SIZE: maximum memory for checkpoints of all processes of a node, in bytes.
* NEBULA_LOCAL_STORAGE_PATH: directory of the local disk for the newest checkpoints.
* AIOFLUX_NEBULA_DIR: directory of the node daemon's socket; other users must not have write access.
* AIOFLUX_NEBULA_LINGER_SECONDS: seconds to keep the memory after the last trainer disconnects.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aioflux._values.uri import local_uri, parse_uri
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_INTERVAL_SECONDS: Final = 100.0
_LINGER_SECONDS: Final = 600.0
_MAX_SOCKET_PATH_BYTES: Final = 100
"""Systems limit the path of a socket to between 104 and 108 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one training run."""

    store: Store | None = None
    """The persistent storage; None to keep checkpoints only in memory."""
    local: Store | None = None
    """A directory of the local disk; None to not use the disk."""
    interval_seconds: float = _INTERVAL_SECONDS
    """Minimum time between two saves to `store`."""
    retention: int = 2
    """Number of versions to keep in memory and on the local disk."""
    budget_bytes: int = 0
    """Maximum memory for checkpoints on the node."""
    commit_seconds: float = 600.0
    """Maximum time that ranks and nodes wait for each other."""
    linger_seconds: float = _LINGER_SECONDS
    """Time to keep the memory after the last trainer disconnects."""
    endpoint: str = ""
    """Endpoint of `store`; empty for the default endpoint of the service."""

    @property
    def identity(self) -> str:
        """Uri and endpoint, which are equal in all processes that save to the same storage."""
        return "\n".join(filter(None, (self.uri, self.endpoint)))

    @property
    def uri(self) -> str:
        """Uri of `store`; empty if `store` is None."""
        return self.store.uri.rstrip("/") if self.store is not None else ""

    @property
    def is_private(self) -> bool:
        """Return whether other processes cannot read `store`."""
        return self.uri.startswith("memory://")


def parse_settings(
    arguments: Mapping[str, Any], options: StoreOptions, environ: Mapping[str, str]
) -> Settings:
    """Build settings from the arguments of `init` and from environment variables.

    Args:
        arguments: Arguments of `init`. For a missing argument, or None, the variable is used.
        options: Options of the persistent store.
        environ: Environment variables.

    Raises:
        ValueError: A value is not a number, or out of range.
    """

    def number(name: str, variable: str, default: float) -> float:
        value = arguments.get(name)
        if value is None:
            value, name = environ.get(variable), variable
        try:
            parsed = float(value) if value not in {None, ""} else default
        except (TypeError, ValueError):
            parsed = -1.0
        if not 0 <= parsed < float("inf"):
            raise ValueError(f"{name} must be a number of 0 or more, not {value!r}")
        return parsed

    path = parse_storage_path(arguments.get("persistent_storage_path")) or environ.get(
        "NEBULA_PERSISTENT_STORAGE_PATH", ""
    )
    local = parse_storage_path(arguments.get("local_storage_path")) or environ.get(
        "NEBULA_LOCAL_STORAGE_PATH", ""
    )
    retention = int(number("num_of_version_in_retention", "", 2))
    if retention < 1:
        raise ValueError(f"num_of_version_in_retention must be 1 or more, not {retention}")
    if local and "://" in local and not local.startswith("file://"):
        raise ValueError(f"local_storage_path must be a directory of this node, not {local!r}")
    uri = to_uri(path) if path else ""
    endpoint = _endpoint(uri, options, environ)
    identity = "\n".join(filter(None, (uri, endpoint)))
    default_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
    return Settings(
        store=open_store(uri, **options) if uri else None,
        local=open_store(f"{to_uri(local)}/{_short_name(identity)}") if local else None,
        interval_seconds=number(
            "persistent_time_interval", "NEBULA_PERSISTENT_TIME_INTERVAL", _INTERVAL_SECONDS
        ),
        retention=retention,
        budget_bytes=int(number("memory_buffer_size", "NEBULA_MEMORY_BUFFER_SIZE", default_bytes)),
        commit_seconds=number("commit_seconds", "", 600.0),
        linger_seconds=number("", "AIOFLUX_NEBULA_LINGER_SECONDS", _LINGER_SECONDS),
        endpoint=endpoint,
    )


_ENDPOINT_VARIABLES: Final = {
    "gs": ("STORAGE_EMULATOR_HOST",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
"""Environment variables that change the endpoint, by scheme."""


def _endpoint(uri: str, options: StoreOptions, environ: Mapping[str, str]) -> str:
    """Return the endpoint that an option or an environment variable sets for a store, or ""."""
    endpoint = options.get("endpoint_url") or ""
    scheme = uri.partition("://")[0]
    for variable in _ENDPOINT_VARIABLES.get(scheme, ()):
        endpoint = endpoint or environ.get(variable, "")
    if not endpoint and scheme == "az":
        fields = environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
        endpoint = next((field for field in fields if field.startswith("BlobEndpoint=")), "")
    return endpoint.rstrip("/")


_PREFIXES: Final = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_")


def credential_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables from which credentials are read."""
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}


def _short_name(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _socket_directory(environ: Mapping[str, str]) -> str:
    """Return the directory of the socket; create it with access for this user only."""
    path = environ.get("AIOFLUX_NEBULA_DIR", "")
    if not path:
        runtime = environ.get("XDG_RUNTIME_DIR", "")
        base = runtime if os.path.isdir(runtime) else tempfile.gettempdir()
        path = os.path.join(base, f"aioflux-nebula-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.stat(path)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{path} is for the socket of the node daemon, but other users may write there; remove "
            "it, or set AIOFLUX_NEBULA_DIR to another directory"
        )
    return path


def socket_path(identity: str, environ: Mapping[str, str]) -> str:
    """Return the path of the socket of the daemon for a `Settings.identity`."""
    path = os.path.join(_socket_directory(environ), f"{_short_name(identity)}.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{path} is too long for a socket; set a shorter AIOFLUX_NEBULA_DIR")
    return path


def parse_storage_path(path: Any) -> str:
    """Return a storage path as text; "" for None.

    A tuple of one path is accepted: an example of Nebula's manual has a comma after the path.

    Raises:
        TypeError: `path` is neither a uri nor a path.
    """
    if isinstance(path, tuple | list) and len(path) == 1:
        (path,) = path
    if path is None:
        return ""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a storage path must be a uri or a local path, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a storage path must be text, not {text!r}")
    return text


def to_uri(path: str) -> str:
    """Convert a storage path, which is a uri or a local directory, to a uri."""
    if "://" in path:
        return str(parse_uri(path)).rstrip("/")
    return local_uri(os.path.expanduser(path))


def path_or_uri(uri: str) -> str:
    """Return the local path of an object on disk, for `torch.load`; otherwise its uri."""
    location = parse_uri(uri)
    return location.key if location.scheme == "file" else uri
