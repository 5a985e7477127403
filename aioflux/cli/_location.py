"""What an argument names: a uri, or a plain local path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.uri import Location, parse_uri, quote_path
from aioflux.cli._text import complain_of
from aioflux.errors import AiofluxError
from aioflux.options import S3Access

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aioflux.options import TransferOptions
    from aioflux.store import Store

__all__ = [
    "Access",
    "Anonymous",
    "Endpoint",
    "Place",
    "check_places",
    "each_place",
    "open_place",
    "parse_place",
    "uri_of",
]

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        metavar="URL",
        help="Another endpoint for gs://, s3:// or az://, such as that of an emulator. The "
        "environment variables STORAGE_EMULATOR_HOST and AWS_ENDPOINT_URL_S3 stand in where this "
        "is not given.",
    ),
]
Anonymous = Annotated[
    bool,
    typer.Option(
        "--anonymous",
        help="Ask gs://, s3:// or az:// without credentials, as public buckets allow.",
    ),
]


_SERVICES = {
    "az": "aioflux._services.azure.service",
    "gs": "aioflux._services.gcs.service",
    "s3": "aioflux._services.s3.service",
}
"""Module of the service of each remote scheme."""


@dataclass(frozen=True, slots=True)
class Access:
    """How buckets are reached."""

    endpoint_url: str | None = None
    """Another endpoint; None for the service's own, or what the environment names."""
    anonymous: bool = False
    """Whether to ask without credentials."""


@dataclass(frozen=True, slots=True)
class Place:
    """One argument, read."""

    text: str
    """As it was given."""
    location: Location
    """Where it points; for a plain path the scheme is `file`, and the key the absolute path."""

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine."""
        return self.location.scheme == "file"

    @property
    def path(self) -> str:
        """The local path, as it was given where it was given as a path."""
        return self.location.key if "://" in self.text else self.text

    def is_directory(self) -> bool:
        """Tell whether it can only be a directory or prefix; looks at the disk if it is local."""
        key = self.location.key
        if self.is_local:
            return self.path.endswith("/") or os.path.isdir(self.path)
        return not key or key.endswith("/")

    def is_file(self) -> bool:
        """Tell whether it is a local file."""
        return self.is_local and os.path.isfile(self.path)

    def is_link(self) -> bool:
        """Tell whether it is a symbolic link on a disk, to whatever."""
        return self.is_local and os.path.islink(self.path)

    def may_be_object(self) -> bool:
        """Tell whether one object can have this name; a key may end in a slash."""
        return not self.is_directory() if self.is_local else bool(self.location.key)

    def is_missing(self) -> bool:
        """Tell whether it is named as a local directory that is not there."""
        return self.is_local and self.is_directory() and not os.path.isdir(self.path)

    def split(self, *, follow: bool = False) -> tuple[str, str]:
        """Return the uri of a store that holds it, and its key or prefix there.

        That store is the bucket; on disk the directory itself, or the one that a file is in.

        Args:
            follow: Take what a symbolic link leads to in its place, wherever that is.
        """
        if not self.is_local:
            return str(Location(self.location.scheme, self.location.bucket, "")), self.location.key
        path = self.location.key
        if follow and self.is_link():
            path = os.path.realpath(path)
        if self.is_directory():
            return str(Location("file", "", path)), ""
        parent, name = os.path.split(path)
        return str(Location("file", "", parent)), name


def parse_place(text: str) -> Place:
    """Read an argument: with `://` it is a uri, without it is a local path.

    Raises:
        ValueError: It is empty, or a uri that cannot be opened.
    """
    if not text:
        raise ValueError("a uri or path must not be empty")
    if "://" in text:
        return Place(text, parse_uri(text))
    # Not normalized: where a link is on the way, `..` is for the system to resolve.
    return Place(text, Location("file", "", os.path.join(os.getcwd(), text)))


def open_place(root: str, access: Access, *, transfer: TransferOptions | None = None) -> Store:
    """Open the store that `Place.split` names."""
    from aioflux.store import open_store

    scheme = root.partition(":")[0]
    if scheme not in _SERVICES:
        return open_store(root, transfer=transfer)
    credentials: Any = None
    if access.anonymous and scheme == "s3":
        credentials = S3Access(anonymous=True)
    elif access.anonymous and scheme == "az":
        credentials = "anonymous"
    elif access.anonymous and scheme == "gs":
        from aioflux._auth.google import anonymous_credentials

        credentials = anonymous_credentials()
    return open_store(
        root, transfer=transfer, endpoint_url=access.endpoint_url, credentials=credentials
    )


async def each_place(places: Iterable[Place], act: Callable[[Place], Awaitable[None]]) -> int:
    """Do something with each place, and return the exit status; no failure keeps the others."""
    status = 0
    for place in places:
        try:
            await act(place)
        except (AiofluxError, ValueError) as exc:
            complain_of(exc)
            status = 1
    return status


def uri_of(store: Store, key: str) -> str:
    """Return the whole uri of a key of a store."""
    root = store.uri if store.uri.endswith("/") else f"{store.uri}/"
    return root + (quote_path(key) if root.startswith("file:") else key)


def check_places(places: Iterable[Place], access: Access) -> None:
    """Refuse options that nothing would be asked with, and load what reaches the buckets.

    Loading takes longer than anything else that a short command does. Done here, before there is an
    event loop, Ctrl-C ends it at once.

    Raises:
        ValueError: There is such an option, and no uri of a service that it is for, or of several.
    """
    schemes = {each.location.scheme for each in places} & set(_SERVICES)
    for name, is_given, known in (
        ("--endpoint-url", access.endpoint_url is not None, ("gs", "s3", "az")),
        ("--anonymous", access.anonymous, ("gs", "s3", "az")),
    ):
        if is_given and not schemes & set(known):
            *most, last = (f"{scheme}://" for scheme in known)
            raise ValueError(
                f"{name} has an effect on {', '.join(most)} and {last} uris only, and none is given"
            )
    if access.endpoint_url is not None and len(schemes) > 1:
        raise ValueError(
            "--endpoint-url is of one service, and uris of several are given; set "
            "STORAGE_EMULATOR_HOST or AWS_ENDPOINT_URL_S3"
        )
    import_module("aioflux.store")
    for scheme in sorted(schemes):
        import_module(_SERVICES[scheme])
