"""The contract that every storage service implements for `_transfer/`.

A service is bound to one bucket and prefix. Keys in arguments and results are relative to the
prefix. A method tries its operation once: `_transfer/` limits and retries the calls, and splits
large reads and writes. Methods raise the errors of `aioflux.errors`: `TransientError` if another
attempt may succeed. Over 500 lines because it is one contract: its values, and its methods.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import DEFAULT_ATTRIBUTES
from aioflux.errors import UnsupportedError

if TYPE_CHECKING:
    import ssl

    from aioflux._http import Connection, Response, ResponseFuture
    from aioflux._values.meta import ObjectAttributes, ObjectMeta, OpenUpload
    from aioflux._values.uri import Location
    from aioflux.errors import StorageError
    from aioflux.options import Timeouts

P = ParamSpec("P")
T = TypeVar("T")

Into: TypeAlias = "memoryview | Callable[[int], memoryview]"
"""Memory to receive a body into, or a function that allocates it, given the length in bytes."""

Exchange: TypeAlias = "tuple[Connection, Any, bool]"
"""A read that `begin_get` started: its connection, its credentials, and whether its request has no
Range, because the object probably ends within the range (see `EncodedRead` in `http`)."""

MIB = 1024 * 1024

ATTEMPT = ContextVar("aioflux_attempt", default=1)
"""Number of the attempt that sends the present request, for the log."""

MAX_EMPTY_PAGES = 10_000
"""Empty pages in a row after which a listing raises an error: a server that returns a new page
token each time would otherwise keep it running forever. Services do return empty pages, for keys
whose objects are deleted or filtered out (github.com/TileDB-Inc/TileDB/pull/1218 reports them from
AWS, Google and MinIO). 10,000 pages are 10,000,000 keys on S3, and 50,000,000 on gs and az."""

MAX_PAGE_ENTRIES = 100_000
"""Largest number of keys and prefixes in one page of a listing. No request asks for more than
5,000, but some servers ignore the requested size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Features and limits of a service, which transfers adapt to."""

    generations: bool = True
    """Reads can be pinned to a generation."""
    compose: bool = True
    """The service can concatenate objects."""
    max_compose_sources: int = 32
    """Largest number of sources of one compose."""
    conditional_create: bool = True
    """The service rejects a write with `if_absent` if the object exists. False: the server ignores
    or does not support the precondition."""
    conditional_replace: bool = True
    """The service rejects a write with `if_generation_match` if the object has another generation.
    False: the server ignores or does not support the precondition."""
    conditional_delete: bool = True
    """The service rejects a delete of one generation if the object has another generation. False:
    the server may delete the object anyway, so transfers compare its generation before they delete
    it."""
    conditional_complete: bool = False
    """The service compares a precondition when it completes a multipart upload."""
    min_part_size_bytes: int = 5 * MIB
    """Smallest size of a part, in bytes; the last part may be smaller."""
    max_part_size_bytes: int = 5 * 1024 * MIB
    """Largest size of a part, in bytes."""
    max_parts: int = 10_000
    """Largest number of parts of one multipart upload."""
    page_size: int = 1000
    """Largest number of objects in one page of a listing."""
    list_ranges: bool = True
    """A listing can start at a key without reading the keys before it."""
    match_glob: bool = False
    """The service filters keys by a pattern."""
    versions: bool = False
    """The service lists noncurrent generations."""
    checksums: bool = True
    """Responses contain the crc32c of an object, if it has one. If False, the service module
    compares other checksums if there are any."""
    part_checksums: bool = True
    """Parts are sent with their crc32c, which the service compares."""
    delete_page_size: int = 0
    """Largest number of objects in one `delete_page`; 0 if the service has no such request."""
    listed_checksums: bool = True
    """Listings and reads of a range return the crc32c of the whole object. False: only `head` and
    reads of the whole object return it."""
    max_checked_range_bytes: int = 0
    """Largest range whose bytes the service module compares with a checksum, if the request
    `wants_checksum`; 0 if the service has no checksum of ranges."""
    guarded_transport: bool = True
    """Bytes that change on the way cause an error, because they arrive over TLS, from this machine,
    or twice. Ranges are then trusted without a checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precondition:
    """Condition of a write; `Precondition()` always holds."""

    if_generation_match: str | None = None
    """Generation that the object must have; None for any."""
    if_absent: bool = False
    """The object must not exist."""

    def __bool__(self) -> bool:
        return self.if_absent or self.if_generation_match is not None


@dataclass(slots=True)
class ReadRequest:
    """The bytes `[start, end)` of an object, to read. Treat as immutable.

    Not frozen, since each read creates one: that takes 0.6 microseconds if frozen, 0.2 if not.
    """

    key: str
    generation: str = ""
    """Generation that the object must have; empty for the current one."""
    start: int = 0
    """First byte, counted from 0."""
    end: int | None = None
    """One past the last byte. None, or a value beyond the end, means the end of the object."""
    object_size: int | None = None
    """Size of the object, if it is known."""
    is_covered: bool = False
    """The caller compares the crc32c of the whole object, of which these bytes are a part; without
    a generation only if the response has a crc32c."""
    wants_checksum: bool = False
    """Request a checksum of the range, if the service has one for a range of this size."""


_ALWAYS = Precondition()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """An object to write, without its bytes."""

    key: str
    precondition: Precondition = _ALWAYS
    attributes: ObjectAttributes = DEFAULT_ATTRIBUTES
    """Attributes; names of metadata are in lower case."""


@dataclass(frozen=True, slots=True)
class PartRequest:
    """One part of a multipart upload: the concatenation of `pieces`."""

    key: str
    upload_id: str
    number: int
    """Number of the part, from 1."""
    pieces: Sequence[bytes | memoryview] = ()
    offset: int = 0
    """Position of the first byte in the object."""
    crc32c: int | None = None
    """CRC32C of the part, which the service compares; None to send none."""


@dataclass(frozen=True, slots=True)
class ListRequest:
    """One page of a listing: keys that begin with `prefix`, in `[start_offset, end_offset)`."""

    prefix: str
    """Prefix of all listed keys."""
    start_offset: str = ""
    """Smallest key to list; empty for no limit."""
    end_offset: str = ""
    """Key at which the listing ends, not itself listed; empty for no limit."""
    delimiter: str = ""
    """Keys that contain the delimiter after `prefix` are listed as one common prefix, which ends
    with it; empty to list all keys."""
    match_glob: str = ""
    """Pattern that keys match; set only for services that declare `match_glob`."""
    page_token: str = ""
    """Token of the page; empty for the first one."""
    page_size: int | None = None
    """Largest number of objects in the page; None for `Capabilities.page_size`."""
    versions: bool = False
    """List noncurrent generations, too; set only for services that declare `versions`, and without
    offsets, delimiter and pattern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a compose or copy."""

    key: str
    generation: str = ""
    """Generation that the source must have; empty for any."""
    is_latest: bool = True
    """False if the generation is known to be noncurrent."""


@dataclass(slots=True)
class Body:
    """Bytes of one response to a read, with properties of the whole object."""

    data: bytes | bytearray | memoryview
    """The bytes received: a view of the caller's memory if the caller passed some."""
    size: int
    """Stored size of the whole object, in bytes."""
    generation: str
    """Generation that was read; empty if the service has none."""
    crc32c: int | None
    """CRC32C of the whole object; None if unknown."""
    meta: Callable[[], ObjectMeta]
    """Builds the metadata from the headers of the response; some services send only part of it."""
    is_verified: bool = False
    """The service module has compared the bytes with another checksum, such as an MD5."""


@dataclass(frozen=True, slots=True)
class Page:
    """One response of a listing, sorted by key."""

    objects: Sequence[ObjectMeta]
    prefixes: Sequence[str]
    """Common prefixes, if the request has a delimiter."""
    next_token: str
    """Token of the next page; empty for the last page."""


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part that a service has stored for a multipart upload."""

    number: int
    """Number of the part, from 1."""
    etag: str
    """ETag of the part, which the request that completes the upload contains."""
    size: int
    """Size in bytes."""
    crc32c: int | None = None
    """CRC32C that the service returned for the part; None if it returned none."""


def combined_crc32c(parts: Sequence[UploadedPart]) -> int | None:
    """Return the crc32c of the concatenation of parts; None if a part has no known crc32c."""
    checksum = 0
    for part in parts:
        if part.crc32c is None:
            return None
        checksum = combine_crc32c(checksum, part.crc32c, part.size)
    return checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Settings to open a service."""

    location: Location
    """Bucket and prefix; the prefix is empty or ends with a slash."""
    timeouts: Timeouts
    """Deadlines of one attempt."""
    max_idle: int
    """Largest number of idle connections to one server."""
    credentials: Any = field(default=None, repr=False)
    """Credentials, as for `open_store`."""
    endpoint_url: str | None = None
    """Url of the server; None for the default of the service."""
    ssl_context: ssl.SSLContext | None = None
    """TLS settings; None for the system's trust store."""
    verify: bool = True
    """Compare the bytes that are read with checksums of the service, such as MD5 on Azure."""


class Service(ABC):
    """One bucket and prefix of one storage service."""

    capabilities: Capabilities
    conditions_known: bool = True
    """The `conditional_` fields of `capabilities` are known for this server. False: S3 servers
    differ, so a probe calls `set_conditions` before the first conditional write."""
    slow_phases: ClassVar[dict[str, str]] = {}
    """Longest phases of the last slow requests of all services of this process, by uri."""

    def __init__(self, *, root_uri: str, prefix: str) -> None:
        self._root_uri = root_uri
        self._prefix = prefix

    def uri(self, key: str = "") -> str:
        """Return the uri of a key."""
        return f"{self._root_uri}{self._prefix}{key}"

    async def unprobed_server(self) -> str:
        """Return endpoint and bucket if they need a probe, else "". Sends no request."""
        return ""

    def set_conditions(self, *, create: bool, replace: bool, delete: bool) -> None:
        """Set the `conditional_...` fields of `capabilities` to the results of a probe."""
        self.capabilities = dataclasses.replace(
            self.capabilities,
            conditional_create=create,
            conditional_replace=replace,
            conditional_delete=delete,
        )
        self.conditions_known = True

    def reject_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        """Raise for a write whose precondition the server ignores, unless the user allows it.

        For a write that the user allows, `warns` issues a warning, once for each server.

        Raises:
            UnsupportedError: The user does not allow the write.
        """
        raise NotImplementedError

    async def has_conditional_delete(self, *, in_pages: bool = False) -> bool:
        """Return whether `delete`, or with `in_pages` `delete_page`, compares the generation.

        Sends no request.
        """
        return self.capabilities.conditional_delete

    @abstractmethod
    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        """Read the metadata of an object."""

    @abstractmethod
    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        """Read bytes of an object.

        Args:
            request: Key, generation and range.
            into: Memory for the bytes, large enough for all of them. A function is called at most
                once, in any thread.

        Raises:
            NotFoundError: The object does not exist, or has another generation.
            TransientError: Another attempt may succeed. If the body ended early, `into` contains
                its first bytes; the error has their number and generation. Without a generation,
                the bytes are wrong, or of an unknown object, and are not kept.
        """

    def begin_get(self, request: ReadRequest, waiter: ResponseFuture) -> Exchange | None:
        """Send the request of `get(request)` without a task.

        When the waiter receives a response, the caller calls `end_get`; when it receives an error,
        `fail_get`. To cancel the read before that, the caller calls `abort_get`.

        Args:
            request: A read from the start of an object (`start` is 0), with an `end`.
            waiter: Receives the response or the error.

        Returns:
            The exchange. None if no request was sent, because the service does not support this,
            or because credentials or a connection are not available immediately.

        Raises:
            ValueError: No object can have this key.
        """
        return None

    def end_get(self, request: ReadRequest, exchange: Exchange, response: Response) -> Body | None:
        """Decode the response to a read of `begin_get`; raise the same errors as `get`.

        Returns:
            The body, with `data` of type `bytes`. None if another request is needed: the caller
            awaits `get`.
        """
        raise NotImplementedError

    def fail_get(
        self, request: ReadRequest, exchange: Exchange, error: Exception
    ) -> StorageError | None:
        """Return the error of a read of `begin_get` as `get` would raise it.

        Returns:
            The error; None if another request is needed: the caller awaits `get`.
        """
        raise NotImplementedError

    def abort_get(self, exchange: Exchange) -> None:
        """Cancel a read of `begin_get`."""
        raise NotImplementedError

    @abstractmethod
    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        """Write an object in one request; the service compares `crc32c` if it is not None."""

    @abstractmethod
    async def delete(self, key: str, *, generation: str = "") -> None:
        """Delete an object."""

    async def delete_version(self, key: str, *, generation: str) -> None:
        """Delete a noncurrent generation for good."""
        await self.delete(key, generation=generation)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        """Delete objects, in one request except for names that the request cannot contain.

        The request has the generations of the objects if the service compares them.

        Called only if the service declares a `delete_page_size`.

        Returns:
            An error for each key that was not deleted. For a missing or replaced object, some
            services return no error.
        """
        raise NotImplementedError

    @abstractmethod
    async def list_page(self, request: ListRequest) -> Page:
        """Read one page of a listing."""

    @abstractmethod
    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        """Concatenate objects of this bucket into a new object, on the server."""

    @abstractmethod
    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        """Copy an object within the bucket, on the server."""

    @abstractmethod
    async def initiate_upload(self, request: WriteRequest) -> str:
        """Start a multipart upload and return its id; `complete_upload` sends the precondition."""

    @abstractmethod
    async def put_part(self, request: PartRequest) -> UploadedPart:
        """Send one part."""

    @abstractmethod
    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        """Publish the concatenation of the parts as one object.

        Args:
            request: The same as for `initiate_upload`. It has a precondition only if the service
                declares `conditional_complete`.
            upload_id: Id of the upload.
            parts: All parts, sorted by number.
        """

    @abstractmethod
    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts. An unknown upload is not an error."""

    @abstractmethod
    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """Return every open upload whose key begins with a prefix, sorted by key and id."""

    async def list_buckets(self) -> Sequence[str]:
        """Return the names of all buckets of the project or account of the credentials.

        Raises:
            UnsupportedError: Buckets of this service are not listed.
        """
        raise UnsupportedError("only buckets of gs:// and s3:// are listed", uri=self.uri())

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        """Return the subset of `permissions` that the credentials have on the bucket.

        Raises:
            UnsupportedError: The service has no request for this.
        """
        uri = self.uri()
        raise UnsupportedError(
            f"could not test the permissions of {uri}: the service has no request for it; try the "
            "operation itself",
            uri=uri,
        )

    async def sign(self, key: str, *, method: str, seconds: int, now: float) -> str:
        """Return a url with which anyone can send one kind of request for an object.

        Args:
            key: Key of the object, which need not exist.
            method: HTTP method that the url allows.
            seconds: Time for which the url is valid, from `now` on.
            now: Unix time, in seconds.

        Raises:
            CredentialsError: There are no credentials, or they cannot sign.
            UnsupportedError: The service has no such urls, or none with these credentials.
        """
        uri = self.uri(key)
        raise UnsupportedError(
            f"could not sign a url of {uri}: only gs://, s3:// and az:// have signed urls", uri=uri
        )

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections and sessions. The service cannot be used afterwards."""


def _forward(
    method: Callable[Concatenate[Service, P], Awaitable[T]],
) -> Callable[Concatenate[ServiceWrapper, P], Coroutine[Any, Any, T]]:
    """Return a method that calls the same method of the inner service."""
    name = method.__name__

    async def call(self: ServiceWrapper, /, *args: P.args, **settings: P.kwargs) -> T:
        return await cast("Callable[P, Awaitable[T]]", getattr(self.inner, name))(*args, **settings)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class ServiceWrapper(Service):
    """A service that calls another one. Subclasses override methods.

    Attributes:
        inner: The other service.
    """

    def __init__(self, inner: Service) -> None:
        super().__init__(root_uri=inner.uri(), prefix="")
        self.capabilities = inner.capabilities
        self.conditions_known = inner.conditions_known
        self.inner = inner

    head = _forward(Service.head)
    get = _forward(Service.get)
    put = _forward(Service.put)
    delete = _forward(Service.delete)
    delete_version = _forward(Service.delete_version)
    delete_page = _forward(Service.delete_page)
    list_page = _forward(Service.list_page)
    compose = _forward(Service.compose)
    copy = _forward(Service.copy)
    initiate_upload = _forward(Service.initiate_upload)
    put_part = _forward(Service.put_part)
    complete_upload = _forward(Service.complete_upload)
    abort_upload = _forward(Service.abort_upload)
    list_uploads = _forward(Service.list_uploads)
    granted_permissions = _forward(Service.granted_permissions)
    sign = _forward(Service.sign)
    has_conditional_delete = _forward(Service.has_conditional_delete)
    aclose = _forward(Service.aclose)

    async def unprobed_server(self) -> str:
        server = await self.inner.unprobed_server()
        self.conditions_known = self.inner.conditions_known
        return server

    def set_conditions(self, *, create: bool, replace: bool, delete: bool) -> None:
        self.inner.set_conditions(create=create, replace=replace, delete=delete)
        super().set_conditions(create=create, replace=replace, delete=delete)

    def reject_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        self.inner.reject_condition(key, precondition, warns=warns)
