"""The uris and local paths that commands take as arguments, and how to open them."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.uri import Location, join_uri, parse_uri, split_at_bucket, suggest_uri
from aioflux.cli._event_loop import resources
from aioflux.cli._settings import ENDPOINT_URL, settings
from aioflux.cli._text import format_count, one_line
from aioflux.errors import NotFoundError, StorageError
from aioflux.options import ANONYMOUS, RetryPolicy, TransferOptions

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

Objects = Annotated[
    list[str], typer.Argument(metavar="URI...", help="Objects, or patterns such as gs://b/*.txt.")
]
Prefixes = Annotated[
    list[str], typer.Argument(metavar="URI...", help="Prefix, bucket, object, directory, pattern.")
]
Human = Annotated[bool, typer.Option("-h", "--human-readable", help="Sizes such as 1.5 GiB.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line; its fields are above.")
]


_SERVICES = {
    "az": "aioflux._services.azure.service",
    "gs": "aioflux._services.gcs.service",
    "s3": "aioflux._services.s3.service",
}
"""Module of the service for each scheme, imported before the event loop starts."""

_MISTYPED = re.compile(r"(az|file|gs|s3):/[^/]")
PATTERN = re.compile(r"[*?[{]")
"""The first special character of a pattern."""

LIST_BELOW = "use aioflux ls -r to list them"
"""Advice of commands that take no prefixes."""

_MAX_COUNTED = 1000
"""Most objects that the message for a prefix counts; more take a second request."""


@dataclass(frozen=True, slots=True)
class UriOrPath:
    """One parsed argument."""

    text: str
    """The argument as given."""
    location: Location
    """The parsed uri. For a path, the scheme is `file` and the key is the absolute path."""
    meta: ObjectMeta | None = None
    """Metadata of the object, if a pattern found it."""

    @property
    def is_local(self) -> bool:
        """Return whether the argument is a local path or a `file://` uri."""
        return self.location.scheme == "file"

    @property
    def path(self) -> str:
        """The local path, relative if the argument is relative."""
        return self.location.key if "://" in self.text else self.text

    def is_directory(self) -> bool:
        """Return whether the argument is a bucket, or ends in `/`, or is a local directory."""
        key = self.location.key
        if self.is_local:
            return self.path.endswith("/") or os.path.isdir(self.path)
        return not key or key.endswith("/")

    def is_file(self) -> bool:
        return self.is_local and os.path.isfile(self.path)

    def is_link(self) -> bool:
        return self.is_local and os.path.islink(self.path)

    def may_be_object(self) -> bool:
        """Return whether an object can have this name; the key of an object may end in `/`."""
        return not self.is_directory() if self.is_local else bool(self.location.key)

    def require_object(self, command: str) -> None:
        """Check that an object can have this name.

        Raises:
            ValueError: The argument is a bucket or a directory.
        """
        if not self.may_be_object():
            raise ValueError(f"{self.text} is a bucket or directory; {command} takes objects")

    def is_missing(self) -> bool:
        """Return whether the argument names a local directory that does not exist."""
        return self.is_local and self.is_directory() and not os.path.isdir(self.path)

    def hint(self, default: str = "check the spelling") -> str:
        """Return what was probably meant if nothing has this name; `default` if that is unknown."""
        if "://" not in self.text and (meant := suggest_uri(self.text)).startswith("gs:"):
            return f"did you mean {one_line(meant)}?"
        if PATTERN.search(self.text):
            return "patterns are not expanded here; use --include, or a command that takes them"
        return default

    async def explain_missing(self, store: Store, key: str, advice: str) -> str:
        """Return why no object has this name; empty if that is unknown. Requests a listing.

        Args:
            store: The store that `open` yielded.
            key: The key in it.
            advice: How to address all objects below a prefix.
        """
        uri = one_line(join_uri(store.uri, key))
        num_objects, is_more = 0, False
        if not self.is_local:
            try:
                pages = store.list_pages(as_prefix(key), page_size=_MAX_COUNTED)
                async with aclosing(pages):
                    async for page in pages:
                        if is_more := num_objects > 0:
                            break
                        num_objects = len(page)
            except NotFoundError as exc:
                return exc.message  # there is no bucket
            except StorageError:
                return ""  # listing may be denied
        if num_objects:
            count = format_count(num_objects, "object") + (" or more" if is_more else "")
            verb = "is" if num_objects == 1 else "are"
            return f"{uri} is not an object; {count} {verb} below it: {advice}"
        hint = self.hint("")
        return hint and f"there is no object {uri}; {hint}"

    def split(self, *, follow: bool = False) -> tuple[str, str]:
        """Return the uri of the store to open, and the key or prefix in it.

        The store of an object is its bucket. The store of a local directory is the directory, and
        that of a local file is the parent directory.

        Args:
            follow: If the path is a symbolic link, return store and key of its target.
        """
        if not self.is_local:
            return split_at_bucket(self.location)
        path = self.location.key
        if follow and self.is_link():
            path = os.path.realpath(path)
        if self.is_directory():
            return str(Location("file", "", path)), ""
        parent, name = os.path.split(path)
        return str(Location("file", "", parent)), name

    def open(self, *, follow: bool = False) -> tuple[Store, str]:
        """Open the store that `split` returns, and return the store and the key or prefix."""
        root, key = self.split(follow=follow)
        return self.open_root(root), key

    @asynccontextmanager
    async def open_object(
        self, advice: str, *, follow: bool = False
    ) -> AsyncIterator[tuple[Store, str | ObjectMeta]]:
        """Open as `open`, with the metadata instead of the key if a pattern found the object.

        A NotFoundError of the body is explained; see `explain_missing`.
        """
        store, key = self.open(follow=follow)
        try:
            yield store, self.meta or key
        except NotFoundError as exc:
            if text := await self.explain_missing(store, key, advice):
                raise NotFoundError(text, uri=exc.uri) from exc
            raise

    def open_root(self, root: str) -> Store:
        """Return the store `root`, which is opened once, and closed at the end of the command."""
        from aioflux.store import open_store

        opened = resources.get()
        if (store := opened.stores.get(root)) is None:
            store = opened.stores[root] = open_store(root, **self.store_options())
            opened.push_async_exit(store)
        return store

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of `open_store` that the options of the command set."""
        options: dict[str, Any] = {}
        if self.location.scheme in _SERVICES:
            options = {
                "retry": RetryPolicy(connect_deadline_seconds=settings.connect_deadline),
                "endpoint_url": endpoint_url() or None,
                "credentials": ANONYMOUS if settings.anonymous else None,
            }
        if settings.max_in_flight:
            options["transfer"] = TransferOptions(max_in_flight=settings.max_in_flight)
        return options


def endpoint_url() -> str:
    """Return the endpoint of the option or its variable; empty if neither is given."""
    return settings.endpoint_url or os.environ.get(ENDPOINT_URL, "")


def _parse_location(text: str) -> Location:
    if not text:
        raise ValueError("a uri or path must not be empty")
    if "://" in text:
        return parse_uri(text)
    if _MISTYPED.match(text) and not os.path.lexists(text):
        scheme, _, rest = text.partition(":/")
        raise ValueError(f"there is no file {text!r}; did you mean {scheme}://{rest}?")
    # Not normalized: after a symbolic link, `..` is the parent of the link's target.
    return Location("file", "", os.path.join(os.getcwd(), text))


def parse_arguments(texts: Iterable[str]) -> list[UriOrPath]:
    """Parse arguments, and import the modules of the services that they name.

    An argument that contains `://` is a uri, any other is a path. The imports take most of the
    time of a short command. They run before the event loop starts, while Ctrl-C still ends the
    process immediately.

    Raises:
        ValueError: An argument is not valid, or an option has no effect on any of the arguments.
    """
    arguments = [UriOrPath(text, _parse_location(text)) for text in texts]
    schemes = {argument.location.scheme for argument in arguments} & set(_SERVICES)
    for name, is_given in (
        ("--endpoint-url", settings.endpoint_url),
        ("--anonymous", settings.anonymous),
    ):
        if is_given and not schemes:
            raise ValueError(f"{name} needs a gs://, s3:// or az:// uri")
    if endpoint_url() and len(schemes) > 1:
        name = "--endpoint-url" if settings.endpoint_url else ENDPOINT_URL
        raise ValueError(
            f"{name} is for uris of one service; for several, set STORAGE_EMULATOR_HOST or "
            "AWS_ENDPOINT_URL_S3"
        )
    import_module("aioflux.store")
    for scheme in sorted(schemes):
        import_module(_SERVICES[scheme])
    return arguments


def parse_root_argument(text: str) -> UriOrPath:
    """Parse one argument that names a bucket, a prefix or an existing local directory.

    Raises:
        NotFoundError: The local directory does not exist.
        ValueError: The argument is not valid.
    """
    [root] = parse_arguments([text])
    if root.is_local and not os.path.isdir(root.path):
        text = f"there is no directory {root.text}; {root.hint()}"
        raise NotFoundError(text, uri=str(root.location))
    return root


def as_prefix(key: str) -> str:
    """Return the prefix of all keys below `key`: it ends in `/`, or is empty for a bucket."""
    return key if not key or key.endswith("/") else f"{key}/"


async def find(store: Store, key: str) -> ObjectMeta | None:
    """Return the metadata of an object, or None if it does not exist."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None
