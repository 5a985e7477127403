"""Settings of Nebula, from the arguments of `init` and the environment; storage paths as uris.

The environment:

* NEBULA_PERSISTENT_STORAGE_PATH: uri or directory of the persistent storage.
* NEBULA_PERSISTENT_TIME_INTERVAL: seconds between two checkpoints that are saved there.
* NEBULA_MEMORY_BUFFER_SIZE: bytes of memory of all processes of a node together.
* NEBULA_LOCAL_STORAGE_PATH: a directory of the local disk for the newest checkpoints.
* AIOFLUX_NEBULA_DIR: the directory of the node daemon's socket; only its user may write there.
* AIOFLUX_NEBULA_LINGER_SECONDS: how long memory is kept after the last trainer disconnects.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aioflux._values.uri import local_uri, parse_uri
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = [
    "Settings",
    "credential_variables",
    "parse_settings",
    "parse_storage_path",
    "path_or_uri",
    "socket_path",
    "to_uri",
]

_INTERVAL_SECONDS: Final = 100.0
_LINGER_SECONDS: Final = 600.0
_MAX_SOCKET_PATH_BYTES: Final = 100
"""The path of a socket is limited to 104 to 108 bytes, depending on the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a run."""

    store: Store | None = None
    """The persistent storage; None for memory alone."""
    local: Store | None = None
    """The directory of the local disk; None for none."""
    interval_seconds: float = _INTERVAL_SECONDS
    """Seconds between two checkpoints that are saved to `store`."""
    retention: int = 2
    """Versions to keep in memory, and on the local disk."""
    budget_bytes: int = 0
    """Limit of the memory of a node, in bytes."""
    commit_seconds: float = 600.0
    """Time for which ranks and nodes wait for each other."""
    linger_seconds: float = _LINGER_SECONDS
    """Time for which memory is kept after the last trainer disconnects."""
    server: str = ""
    """Endpoint of `store`; empty for the default of the service."""

    @property
    def identity(self) -> str:
        """Uri and server: equal in all processes that save to the same storage."""
        return "\n".join(filter(None, (self.uri, self.server)))

    @property
    def uri(self) -> str:
        """Uri of the store; empty if there is none."""
        return self.store.uri.rstrip("/") if self.store is not None else ""

    @property
    def is_private(self) -> bool:
        """Return whether the store is visible to this process alone."""
        return self.uri.startswith("memory://")


def parse_settings(
    given: Mapping[str, Any], options: StoreOptions, environ: Mapping[str, str]
) -> Settings:
    """Return settings from arguments and environment.

    Args:
        given: The arguments of `init`; None for one that is missing.
        options: Options with which stores are opened.
        environ: The environment.

    Raises:
        ValueError: A value is not a number, or out of range.
    """

    def number(name: str, variable: str, default: float) -> float:
        value = given.get(name)
        if value is None:
            value, name = environ.get(variable), variable
        try:
            found = float(value) if value not in {None, ""} else default
        except (TypeError, ValueError):
            found = -1.0
        if not 0 <= found < float("inf"):
            raise ValueError(f"{name} must be a number of 0 or more, not {value!r}")
        return found

    path = parse_storage_path(given.get("persistent_storage_path")) or environ.get(
        "NEBULA_PERSISTENT_STORAGE_PATH", ""
    )
    local = parse_storage_path(given.get("local_storage_path")) or environ.get(
        "NEBULA_LOCAL_STORAGE_PATH", ""
    )
    retention = int(number("num_of_version_in_retention", "", 2))
    if retention < 1:
        raise ValueError(f"num_of_version_in_retention must be 1 or more, not {retention}")
    if local and "://" in local and not local.startswith("file://"):
        raise ValueError(f"local_storage_path must be a directory of this node, not {local!r}")
    uri = to_uri(path) if path else ""
    server = _server(uri, options, environ)
    identity = "\n".join(filter(None, (uri, server)))
    default_bytes = _physical_bytes() * 4 // 5
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
        server=server,
    )


_SERVERS: Final = {
    "gs": ("STORAGE_EMULATOR_HOST",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
"""Variables that set another endpoint, by scheme."""


def _server(uri: str, options: StoreOptions, environ: Mapping[str, str]) -> str:
    """Return the endpoint of a store, if arguments or environment set one."""
    server = options.get("endpoint_url") or ""
    scheme = uri.partition("://")[0]
    for variable in _SERVERS.get(scheme, ()):
        server = server or environ.get(variable, "")
    if not server and scheme == "az":
        account = environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
        server = next((part for part in account.split(";") if part.startswith("BlobEndpoint=")), "")
    return server.rstrip("/")


_CLOUDS: Final = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_")


def credential_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which credentials of clouds are read."""
    return {name: value for name, value in environ.items() if name.startswith(_CLOUDS)}


def _short_name(text: str) -> str:
    """Return a short name for a text, the same in all processes."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _socket_directory(environ: Mapping[str, str]) -> str:
    """Return the directory of the socket, created with access for this user only.

    Raises:
        PermissionError: Other users may write there.
    """
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
    """Return the path of the daemon's socket, by `Settings.identity`.

    Raises:
        ValueError: It is too long for a socket.
    """
    path = os.path.join(_socket_directory(environ), f"{_short_name(identity)}.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{path} is too long for a socket; set a shorter AIOFLUX_NEBULA_DIR")
    return path


def parse_storage_path(path: Any) -> str:
    """Return the one path that is given; empty for None.

    Nebula's own example has a comma after the path, which makes it a tuple.

    Raises:
        TypeError: It is not a path.
    """
    if isinstance(path, tuple | list) and len(path) == 1:
        (path,) = path
    if path is None:
        return ""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a storage path is a uri or a path of the local disk, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a storage path is text, not {text!r}")
    return text


def to_uri(path: str) -> str:
    """Return the uri of a storage path: itself, or that of a directory of the local disk."""
    if "://" in path:
        return str(parse_uri(path)).rstrip("/")
    return local_uri(os.path.expanduser(path))


def path_or_uri(uri: str) -> str:
    """Return the local path of an object, for `torch.load`; its uri if it is not on disk."""
    location = parse_uri(uri)
    return location.key if location.scheme == "file" else uri
