"""The contract between transfers and one storage service: one method, one request, one attempt.

A service is bound to one bucket and prefix. Keys are relative to that prefix in both directions.
Nothing here retries, splits or limits requests; `_transfer/` does. Every failure is one of
`aioflux.errors`; a failure that another attempt may mend is a `TransientError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from aioflux._http import Connection, Response, ResponseFuture
    from aioflux._values.meta import ObjectMeta, OpenUpload
    from aioflux._values.uri import Location
    from aioflux.errors import StorageError
    from aioflux.options import Timeouts

__all__ = [
    "MAX_EMPTY_PAGES",
    "Body",
    "Capabilities",
    "Exchange",
    "Into",
    "ListRequest",
    "Page",
    "Precondition",
    "ReadRequest",
    "Service",
    "ServiceConfig",
    "Source",
    "UploadedPart",
    "WriteRequest",
]

Into: TypeAlias = "memoryview | Callable[[int], memoryview]"
"""Memory for a body, or a function that returns it, called with the length in bytes."""

Exchange: TypeAlias = "tuple[Connection, Any, bool]"
"""A read in flight without a task: its connection, the credentials of its request, and whether it
reads all of the object as a guess (`EncodedRead`)."""

MIB = 1024 * 1024

MAX_EMPTY_PAGES = 10_000
"""Pages in a row without an entry after which a listing ends with an error. Services do send some,
for keys whose objects are deleted or filtered out (github.com/TileDB-Inc/TileDB/pull/1218 saw them
from AWS, Google and MinIO); this many would skip 10,000,000 keys of S3, and 50,000,000 of the
others. A listing on a server whose tokens never end would not end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Capabilities of a service."""

    generations: bool = True
    """Reads can be pinned to a generation."""
    compose: bool = True
    """Objects can be concatenated by the service."""
    max_compose_sources: int = 32
    """Sources of one compose."""
    conditional_create: bool = True
    """A write with `if_absent` is rejected if there is an object; False: the server ignores it."""
    conditional_replace: bool = True
    """A write with `if_generation_match` is rejected if the object has another generation; False:
    the server ignores it."""
    conditional_delete: bool = True
    """Deleting one generation keeps a newer one; False: the server deletes any, so that the
    generation is read before each request."""
    conditional_complete: bool = False
    """Completing a multipart upload honours a precondition."""
    min_part_size_bytes: int = 5 * MIB
    """Smallest part but the last, in bytes."""
    max_part_size_bytes: int = 5 * 1024 * MIB
    """Largest part, in bytes."""
    max_parts: int = 10_000
    """Parts of one multipart upload."""
    page_size: int = 1000
    """Most objects in one page of a listing."""
    list_ranges: bool = True
    """A listing can start at a key without reading those before it."""
    match_glob: bool = False
    """The service filters keys by a pattern."""
    checksums: bool = True
    """Every object has a crc32c, and responses have it. If not, the service module verifies what
    it can."""
    part_checksums: bool = True
    """Parts are sent with their crc32c, which the service compares."""
    delete_page_size: int = 0
    """Objects that one request deletes, at most; 0: one at a time."""
    listed_checksums: bool = True
    """Listings and reads of a range return the crc32c of the whole object; False: only `head` and
    reads of the whole do."""
    guarded_transport: bool = True
    """Bytes cannot change on the way without an error: they come over TLS, or over no network.
    Ranges, for which services return no checksum, are trusted then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precondition:
    """Condition of a write; empty for none."""

    if_generation_match: str | None = None
    """The generation that the object must have."""
    if_absent: bool = False
    """No object of this key may exist."""

    def __bool__(self) -> bool:
        return self.if_absent or self.if_generation_match is not None


@dataclass(slots=True)
class ReadRequest:
    """The bytes `[start, end)` of an object. Not to be changed.

    Not frozen, since each read makes one: a frozen dataclass takes 0.6 microseconds, this 0.2.
    """

    key: str
    """Key of the object."""
    generation: str = ""
    """Generation that is read, and no other; empty for the current one."""
    start: int = 0
    """First byte."""
    end: int | None = None
    """One past the last byte; beyond the end of the object, or None, it means the end."""


_ALWAYS = Precondition()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """An object to write, and the condition of the write."""

    key: str
    """Key of the object."""
    precondition: Precondition = _ALWAYS
    """Precondition of the write."""
    content_type: str = ""
    """Media type; empty for the service's default."""
    metadata: Mapping[str, str] | None = None
    """The user's own metadata, names in lower case."""


@dataclass(frozen=True, slots=True)
class ListRequest:
    """One page of the keys below `prefix`, within `[start_offset, end_offset)`."""

    prefix: str
    """Beginning of all keys."""
    start_offset: str = ""
    """First key."""
    end_offset: str = ""
    """Key before which the listing ends; empty for the end of the bucket."""
    delimiter: str = ""
    """Keys that continue beyond the first one of these are listed as a common prefix."""
    match_glob: str = ""
    """Pattern that keys match; set only for services that declare `match_glob`."""
    page_token: str = ""
    """Token of the page; empty for the first one."""
    page_size: int | None = None
    """Largest number of objects in the page; None for the service's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a compose or copy."""

    key: str
    """Key of the source."""
    generation: str = ""
    """Generation that it must have; empty for any."""


@dataclass(slots=True)
class Body:
    """Bytes of one response to a read, with properties of the whole object."""

    data: bytes | bytearray | memoryview
    """The bytes received, in the caller's memory if that was given."""
    size: int
    """Stored size of the whole object, in bytes."""
    generation: str
    """Generation that was read; empty if the service has none."""
    crc32c: int | None
    """CRC32C of the whole object, or None."""
    meta: Callable[[], ObjectMeta]
    """Builds the metadata that came with the bytes; some services return only a part of it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One response of a listing, sorted by key."""

    objects: Sequence[ObjectMeta]
    """Objects of this page."""
    prefixes: Sequence[str]
    """Common prefixes of this page, if the request has a delimiter."""
    next_token: str
    """Token of the next page; empty at the end."""


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part that a service holds for a multipart upload."""

    number: int
    """Number of the part, from 1."""
    etag: str
    """Entity tag that completes the upload."""
    size: int
    """Bytes in the part."""
    crc32c: int | None = None
    """CRC32C of the bytes that the service holds, if it returned one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Settings with which a service is opened."""

    location: Location
    """Bucket and prefix; the prefix is empty or ends with a slash."""
    timeouts: Timeouts
    """Deadlines of one attempt."""
    max_connections: int
    """Most connections for HTTP requests."""
    credentials: Any = field(default=None, repr=False)
    """As in `open_store`."""
    endpoint_url: str | None = None
    """Url of another endpoint than the service's own."""
    ssl_context: ssl.SSLContext | None = None
    """TLS settings; None for the system's trust store."""
    verify: bool = True
    """Bytes are compared with checksums, those of the service's own kinds included."""


class Service(ABC):
    """One bucket and prefix of one storage service."""

    capabilities: Capabilities
    conditions_known: bool = True
    """Whether `capabilities` say which conditions the server compares. False: a probe finds out
    before the first conditional write (`unprobed_server`, `set_conditions`)."""

    def __init__(self, *, root_uri: str, prefix: str) -> None:
        self._root_uri = root_uri
        self._prefix = prefix

    def uri(self, key: str = "") -> str:
        """Return the whole uri of a key, for errors and metadata."""
        return f"{self._root_uri}{self._prefix}{key}"

    async def unprobed_server(self) -> str:
        """Return endpoint and bucket if they need a probe, else "". Sends nothing."""
        return ""

    def set_conditions(self, *, create: bool, replace: bool, delete: bool) -> None:
        """Set `capabilities` to the results of a probe."""
        raise NotImplementedError

    def refuse_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        """Reject a write whose condition the server ignores, or warn once if the caller allows it.

        Raises:
            UnsupportedError: The caller did not allow it.
        """
        raise NotImplementedError

    async def compares_deletes(self, *, in_pages: bool = False) -> bool:
        """Return whether deleting one generation keeps a newer one. Sends nothing.

        Args:
            in_pages: Return it for `delete_page`.
        """
        return self.capabilities.conditional_delete

    @abstractmethod
    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        """Read the metadata of an object."""

    @abstractmethod
    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        """Read bytes of an object.

        Args:
            request: The bytes.
            into: Memory for the bytes, at least as many as there are. A function is called with
                their number, once at most, in any thread.

        Raises:
            NotFoundError: No such object, or not in this generation.
            TransientError: The body ended early; `num_bytes_received` leading bytes of
                `generation` are in `into`.
        """

    def begin_get(self, request: ReadRequest, waiter: ResponseFuture) -> Exchange | None:
        """Begin what `get(request)` does, without a task.

        The waiter receives the response or the error, and passes it to `end_get` or `fail_get`.
        `abort_get` ends the read before that.

        Args:
            request: The bytes: from the beginning of the object, and with an end.
            waiter: Called when there is a response, or an error.

        Returns:
            None if this cannot be done at once, or not at all; nothing is under way then.

        Raises:
            ValueError: No object can have this key.
        """
        return None

    def end_get(self, request: ReadRequest, exchange: Exchange, response: Response) -> Body | None:
        """Return what `get` returns for a response, or raise what it raises.

        Returns:
            The bytes, of class `bytes`; None if `get` would send another request.
        """
        raise NotImplementedError

    def fail_get(
        self, request: ReadRequest, exchange: Exchange, error: Exception
    ) -> StorageError | None:
        """Return what `get` raises for an error; None if it would send the request again."""
        raise NotImplementedError

    def abort_get(self, exchange: Exchange) -> None:
        """End a read before its response."""
        raise NotImplementedError

    @abstractmethod
    async def put(
        self, request: WriteRequest, data: bytes | memoryview, *, crc32c: int | None
    ) -> ObjectMeta:
        """Write a whole object; the service compares `crc32c` if one is given."""

    @abstractmethod
    async def delete(self, key: str, *, generation: str = "") -> None:
        """Delete an object."""

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        """Delete objects in one request, each in its generation if the service compares that.

        Called only if the service declares a `delete_page_size`.

        Returns:
            The keys that were not deleted, with the reason. A service may report a key that was
            missing or replaced as deleted.
        """
        raise NotImplementedError

    @abstractmethod
    async def list_page(self, request: ListRequest) -> Page:
        """Read one page of a listing."""

    @abstractmethod
    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        """Concatenate objects of this bucket into another, on the service."""

    @abstractmethod
    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        """Copy an object within the bucket, on the service."""

    @abstractmethod
    async def initiate_upload(self, request: WriteRequest) -> str:
        """Begin a multipart upload and return its id; `complete_upload` sends the precondition."""

    @abstractmethod
    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        pieces: Sequence[bytes | memoryview],
        *,
        offset: int,
        crc32c: int | None,
    ) -> UploadedPart:
        """Send one part: the concatenation of `pieces`, at `offset` in the object."""

    @abstractmethod
    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        """Make the object of the parts visible, whole.

        Args:
            request: The request that initiated the upload. It has a precondition only if the
                service declares `conditional_complete`.
            upload_id: Id of the upload.
            parts: Its parts, by number.
        """

    @abstractmethod
    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts. An unknown upload is no error."""

    @abstractmethod
    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """Return every open upload whose key begins with a prefix, by key and id."""

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        """Return those of `permissions` that the credentials in use have on the bucket.

        A service without permissions returns all.
        """
        return permissions

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections and sessions. The service cannot be used afterwards."""
