"""What a run asks of Nebula: by arguments of `init`, by the environment where they are left out.

The environment:

* NEBULA_PERSISTENT_STORAGE_PATH: where checkpoints are kept.
* NEBULA_PERSISTENT_TIME_INTERVAL: seconds between two that are kept there.
* NEBULA_MEMORY_BUFFER_SIZE: bytes of memory, of all processes of a node together.
* NEBULA_LOCAL_STORAGE_PATH: a directory of the local disk that keeps the newest, too.
* AIOFLUX_NEBULA_DIR: where processes of a node meet, a directory of the user's own.
* AIOFLUX_NEBULA_LINGER_SECONDS: how long memory is kept when the last trainer is gone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aioflux.compat.nebula._uris import place_of, to_uri
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["Settings", "meeting_path", "settings_of", "signing_variables"]

_INTERVAL_SECONDS: Final = 100.0
_LINGER_SECONDS: Final = 600.0
_MAX_SOCKET_PATH_BYTES: Final = 100
"""A socket's path has 104 to 108 bytes, by system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How checkpoints of a run are kept."""

    store: Store | None = None
    """Where they are kept; None for memory alone."""
    local: Store | None = None
    """Where on the local disk; None for nowhere."""
    interval_seconds: float = _INTERVAL_SECONDS
    """Between two that are saved to `store`."""
    retention: int = 2
    """Versions in memory, and on the local disk."""
    budget_bytes: int = 0
    """Most memory of a node."""
    commit_seconds: float = 600.0
    """How long ranks and nodes wait for each other."""
    linger_seconds: float = _LINGER_SECONDS
    """How long memory is kept when the last trainer is gone."""
    server: str = ""
    """Which server `store` is on; empty for the service itself."""

    @property
    def place(self) -> str:
        """What is the same for all who save at one place: two servers may have equal uris."""
        return "\n".join(filter(None, (self.uri, self.server)))

    @property
    def uri(self) -> str:
        """Uri of the store; empty without one."""
        return self.store.uri.rstrip("/") if self.store is not None else ""

    @property
    def is_private(self) -> bool:
        """Whether no other process can see the store."""
        return self.uri.startswith("memory://")


def settings_of(
    given: Mapping[str, Any], options: StoreOptions, environ: Mapping[str, str]
) -> Settings:
    """Return settings by arguments and environment.

    Args:
        given: The arguments of `init`; None for what was left out.
        options: What stores are opened with.
        environ: The environment.

    Raises:
        ValueError: A number is none, or out of its range.
    """

    def number(name: str, variable: str, default: float) -> float:
        value = given.get(name)
        told, what = (value, name) if value is not None else (environ.get(variable), variable)
        try:
            found = float(told) if told not in {None, ""} else default
        except (TypeError, ValueError):
            found = -1.0
        if not 0 <= found < float("inf"):
            raise ValueError(f"{what} must be a number of 0 or more, not {told!r}")
        return found

    path = place_of(given.get("persistent_storage_path")) or environ.get(
        "NEBULA_PERSISTENT_STORAGE_PATH", ""
    )
    local = place_of(given.get("local_storage_path")) or environ.get(
        "NEBULA_LOCAL_STORAGE_PATH", ""
    )
    retention = int(number("num_of_version_in_retention", "", 2))
    if retention < 1:
        raise ValueError(f"num_of_version_in_retention must be 1 or more, not {retention}")
    if local and "://" in local and not local.startswith("file://"):
        raise ValueError(f"local_storage_path is a directory of this node, not {local!r}")
    uri = to_uri(path) if path else ""
    server = _server(uri, options, environ)
    place = "\n".join(filter(None, (uri, server)))
    default_bytes = _physical_bytes() * 4 // 5
    return Settings(
        store=open_store(uri, **options) if uri else None,
        local=open_store(f"{to_uri(local)}/{_short_name(place)}") if local else None,
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
"""Variables that name another server, by scheme."""


def _server(uri: str, options: StoreOptions, environ: Mapping[str, str]) -> str:
    """Return the server that a store will be on, as far as arguments and environment say."""
    told = options.get("endpoint_url") or ""
    scheme = uri.partition("://")[0]
    for variable in _SERVERS.get(scheme, ()):
        told = told or environ.get(variable, "")
    if not told and scheme == "az":
        account = environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
        told = next((part for part in account.split(";") if part.startswith("BlobEndpoint=")), "")
    return told.rstrip("/")


_CLOUDS: Final = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_")


def signing_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that clouds find credentials by."""
    return {name: value for name, value in environ.items() if name.startswith(_CLOUDS)}


def _short_name(text: str) -> str:
    """Return a name of what has a long one, the same in all processes."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meeting_directory(environ: Mapping[str, str]) -> str:
    """Return the directory where processes of a node meet, made for this user alone.

    Raises:
        PermissionError: It is somebody else's.
    """
    path = environ.get("AIOFLUX_NEBULA_DIR", "")
    if not path:
        runtime = environ.get("XDG_RUNTIME_DIR", "")
        base = runtime if os.path.isdir(runtime) else tempfile.gettempdir()
        path = os.path.join(base, f"aioflux-nebula-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    told = os.stat(path)
    if told.st_uid != os.getuid() or told.st_mode & 0o022:
        raise PermissionError(
            f"{path} is where the processes of a node meet, and others may write there; remove it, "
            "or name another directory in AIOFLUX_NEBULA_DIR"
        )
    return path


def meeting_path(place: str, environ: Mapping[str, str]) -> str:
    """Return the path of the socket of all processes that save at a place.

    Raises:
        ValueError: It is too long for a socket.
    """
    path = os.path.join(_meeting_directory(environ), f"{_short_name(place)}.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{path} is too long for a socket; name a shorter AIOFLUX_NEBULA_DIR")
    return path
