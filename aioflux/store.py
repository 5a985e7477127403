"""Asynchronous stores: all operations on the objects below one uri.

A method checks its arguments and calls a module of `_transfer/`, which does the work. Over 500
lines because every public operation is declared here: more than half are signatures and docstrings.
"""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias, TypeVar, Unpack, cast

from aioflux._concurrency.async_iteration import aclosing_inner, rejects_plain_for
from aioflux._services.base import Precondition, ServiceConfig
from aioflux._services.open import check_credentials, check_proxy, open_service
from aioflux._transfer import compose as _compose
from aioflux._transfer import conditions as _conditions
from aioflux._transfer import delete as _delete
from aioflux._transfer import list as _list
from aioflux._transfer import put_many as _put_many
from aioflux._transfer import read as _read
from aioflux._transfer import write as _write
from aioflux._transfer.arguments import (
    check_listing,
    check_mode,
    check_offset,
    check_policies,
    check_range,
    parse_attributes,
    parse_data,
    parse_expires,
    parse_key,
    parse_memory,
    parse_path,
    parse_prefix,
    parse_source,
    require_many_keys,
    write_request,
)
from aioflux._transfer.composite_plan import can_compose
from aioflux._transfer.get_many import fetch_many, try_all, try_many
from aioflux._transfer.read_plan import MAX_GAP_BYTES
from aioflux._transfer.read_range import Pin, read_into
from aioflux._transfer.reader import ObjectReader
from aioflux._transfer.retry import with_retry
from aioflux._transfer.session import Sessions
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX, TEMPORARY_PREFIX
from aioflux._transfer.write import ObjectWriter, ZeroCopyWriter
from aioflux._values.meta import CleanResult, DeleteResult, ObjectMeta
from aioflux._values.uri import REMOTE_SCHEMES, Location, check_endpoint, parse_uri
from aioflux.errors import ChecksumError, NotFoundError, StorageError
from aioflux.options import RetryPolicy, Timeouts, TransferOptions, carries_secret, is_asynchronous

if TYPE_CHECKING:
    import ssl
    from os import PathLike

    from aioflux._concurrency.fan_out import Items
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.get_many import FetchedBatch, TriedMany
    from aioflux._values.listing import Listing
    from aioflux._values.stats import ProgressHook, StoreStats
    from aioflux.options import WriteAttributes

T = TypeVar("T")

__all__ = [
    "COMPOSITE_PREFIX",
    "TEMPORARY_PREFIX",
    "ObjectReader",
    "ObjectWriter",
    "Store",
    "open_store",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
WriteMode: TypeAlias = Literal["overwrite", "create"]
UrlMethod: TypeAlias = Literal["GET", "HEAD", "PUT", "DELETE"]
# Defined outside of the class, inside which `list` is a method.
RangesData: TypeAlias = list[bytes]
DataBatch: TypeAlias = list[tuple[str, bytes]]
MetaBatch: TypeAlias = list[tuple[ObjectMeta, bytes]]
TriedBatch: TypeAlias = list[tuple[ObjectMeta, bytes] | tuple[None, StorageError]]


def open_store(
    uri: str,
    *,
    transfer: TransferOptions | None = None,
    retry: RetryPolicy | None = None,
    timeouts: Timeouts | None = None,
    credentials: Any = None,
    endpoint_url: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    progress: ProgressHook | None = None,
) -> Store:
    """Open a store of the objects below a uri. No request is sent before the first operation.

    Args:
        uri: `gs://bucket/prefix`, `s3://bucket/prefix`, `az://account/container/prefix`,
            `file:///dir` or `memory://name/prefix`. Keys are relative to the prefix, to which a
            missing trailing slash is added.
        transfer: Limits of concurrency and memory; `TransferOptions()` by default.
        retry: Policy of retries; `RetryPolicy()` by default.
        timeouts: Timeouts of one attempt; `Timeouts()` by default.
        credentials: See Credentials below. Not allowed for `file://` and `memory://`.
        endpoint_url: Url of another endpoint, such as an emulator. See Endpoints below. Not allowed
            for `file://` and `memory://`.
        ssl_context: TLS settings, such as a custom CA; the system's trust store by default. A store
            with an `ssl_context` cannot be pickled.
        progress: Called with a `Progress` on the event loop when bytes of objects were received or
            sent. It is dropped when the store is pickled.

    Returns:
        A store. Use it with `async with`, or call `aclose` at the end.

    Raises:
        TypeError: `uri` is not a string, or `transfer`, `retry`, `timeouts` or `credentials` has
            another type.
        CredentialsError: `credentials` is malformed, for example half of a key file.
        ValueError: The uri cannot be opened, `credentials` or `endpoint_url` has no effect with it,
            or the environment names an invalid proxy.

    Credentials:
        `gs://`: google-auth credentials, the path of a JSON key file or its content as a mapping,
        "anonymous", a function that returns an access token, or `aioflux.GCSAccess`. By default
        Application Default Credentials.

        `s3://`: `aioflux.S3Access`, a value of its field `credentials`, or "anonymous". By default
        the credentials that botocore finds.

        `az://`: an account key, a SAS token, a connection string, "anonymous", a credential of
        azure-identity, or a function that returns an access token or a SAS token. By default
        AZURE_STORAGE_CONNECTION_STRING, else AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or
        AZURE_STORAGE_SAS_TOKEN, else azure-identity's DefaultAzureCredential.

        A function may return an awaitable. It is called with the first request. Its result is used
        for 5 s, or until the service rejects the token (401). A function without `async` is called
        in a thread.

        A store whose `credentials` may contain a secret cannot be pickled. These contain no secret:
        a function of a module, a path, "anonymous", None, and `GCSAccess` and `S3Access` with one
        of these as `credentials`.

    Endpoints:
        `gs://`: by default the environment variable STORAGE_EMULATOR_HOST, if it is set. Requests
        to an `http://` endpoint carry no credentials, unless `credentials` is given.

        `s3://`: by default AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS profile; `S3Access`
        lists the settings that are read.

        `az://`: by default the endpoint of the connection string, if it has one. If the host name
        does not contain the account, the account is the first part of the path, as in emulators.
    """
    return Store(
        parse_uri(uri),
        transfer=transfer or TransferOptions(),
        retry=retry or RetryPolicy(),
        timeouts=timeouts or Timeouts(),
        credentials=credentials,
        endpoint_url=endpoint_url,
        ssl_context=ssl_context,
        progress=progress,
    )


class Store:
    """Objects below one uri, with policies for their transfer.

    One store may be used on several event loops, and has separate connections on each. A pickled
    store contains its settings, but no connections and no secrets. A store may be used after a fork
    by the parent and the child.

    Methods that read or delete an object accept its key, or an `ObjectMeta` from `list` or `head`.
    A read with an `ObjectMeta` is pinned to the generation in it: it raises NotFoundError if the
    object was replaced since.

    Besides the errors in its docstring, every method that sends requests may raise
    PermissionDeniedError, CredentialsError, TransientError when attempts or time ran out, and
    StorageError after another error response. A closed store raises ValueError.
    """

    def __init__(
        self,
        location: Location,
        *,
        transfer: TransferOptions,
        retry: RetryPolicy,
        timeouts: Timeouts,
        credentials: Any = None,
        endpoint_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        progress: ProgressHook | None = None,
    ) -> None:
        check_policies(transfer=transfer, retry=retry, timeouts=timeouts)
        key = location.key
        if key and not key.endswith("/"):
            key += "/"
        self.transfer = transfer
        self.retry = retry
        if retry.connect_deadline_seconds is not None:
            seconds = min(timeouts.connect_seconds, retry.connect_deadline_seconds)
            timeouts = replace(timeouts, connect_seconds=seconds)
        self._config = ServiceConfig(
            location=Location(location.scheme, location.bucket, key),
            timeouts=timeouts,
            max_idle=transfer.max_in_flight,
            credentials=credentials,
            endpoint_url=endpoint_url,
            ssl_context=ssl_context,
            verify=transfer.verify,
        )
        is_remote = location.scheme in REMOTE_SCHEMES
        if not is_remote and (credentials is not None or endpoint_url is not None):
            raise ValueError(f"{location} accepts neither credentials nor an endpoint_url")
        check_credentials(location, credentials)
        check_proxy(location, credentials, endpoint_url)
        if transfer.num_loops > 1 and is_asynchronous(credentials):
            raise ValueError(
                f"num_loops={transfer.num_loops} does not work with asynchronous credentials, "
                "which belong to one event loop: pass blocking ones, or leave num_loops out"
            )
        self._sessions = Sessions(
            partial(self._open_service, self._config),
            transfer,
            retry,
            progress,
            num_loops=transfer.num_loops if is_remote else 1,
            cleanup_timeouts=timeouts.cleanup,
            slow_seconds=timeouts.slow_seconds,
            uri=self.uri,
        )

    _open_service = staticmethod(open_service)

    @property
    def uri(self) -> str:
        """The uri that keys are relative to."""
        return str(self._config.location)

    @property
    def stats(self) -> StoreStats:
        """Counters of this store in this process: requests, retries, bytes and latency."""
        return self._sessions.stats()

    def __repr__(self) -> str:
        return f"<Store {self.uri}>"

    def __reduce__(self) -> tuple[Any, ...]:
        config = self._config
        if config.ssl_context is not None:
            raise TypeError(f"{self!r} cannot be pickled: its ssl_context cannot leave the process")
        if carries_secret(config.credentials):
            raise TypeError(
                f"{self!r} holds credentials and cannot be pickled; pass "
                "a module-level function that returns them, or rely on the default credentials"
            )
        if config.endpoint_url is not None:  # which may have credentials in it
            check_endpoint(config.endpoint_url, may_have_path=True)
        return _restore, (config.location, self._settings())

    def _settings(self) -> dict[str, Any]:
        config = self._config
        return {
            "transfer": self.transfer,
            "retry": self.retry,
            "timeouts": config.timeouts,
            "credentials": config.credentials,
            "endpoint_url": config.endpoint_url,
        }

    def __enter__(self) -> NoReturn:
        raise TypeError(f"{self!r} is asynchronous: use `async with`, or aioflux.sync.open_store")

    def __exit__(self, *_: object) -> None:
        """Exist, because `with` looks it up before it calls `__enter__`."""

    async def __aenter__(self) -> Self:
        self._sessions.current()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # After a cancellation or Ctrl-C the shorter timeout for clean-up applies.
        is_interrupted = error is not None and not isinstance(error, Exception)
        await self._sessions.aclose(is_interrupted=is_interrupted)

    async def aclose(self) -> None:
        """Close the store, and its connections on the running loop. A second call has no effect.

        Open writers are aborted, within `CleanupTimeouts.close_seconds`.
        """
        await self._sessions.aclose()

    def reopened(self) -> Store:
        """Return a new store with the same settings except `progress`, which it does not have.

        It has separate connections and limits.
        """
        config = self._config
        return Store(config.location, ssl_context=config.ssl_context, **self._settings())

    async def head(self, key: str | ObjectMeta, *, generation: str | None = None) -> ObjectMeta:
        """Read the metadata of an object, by one request.

        Args:
            key: Name of the object, or its metadata.
            generation: Generation to read, as in the `generation` of an `ObjectMeta`; the current
                one by default. Noncurrent ones exist in buckets with versioning on `gs://` and
                `s3://`, where `version:<id>` names a version by its id.

        Raises:
            NotFoundError: No object has this key or this generation, or it was replaced since `key`
                was listed.
            TypeError: `key` is metadata, which has a generation, and `generation` is given.
            ValueError: `generation` is empty, or not one of `s3://` or `az://`.
        """
        source, session = parse_source(key, generation), self._sessions.current()
        started_at = session.clock()
        meta = await session.head(source.key, source.generation)
        session.counters.add_call(source.key, session.clock() - started_at)
        return meta

    async def exists(self, key: str | ObjectMeta) -> bool:
        """Return whether an object has this key, by one request.

        With metadata, return whether its generation exists: the current one, or in a bucket with
        versioning a noncurrent one.
        """
        try:
            await self.head(key)
        except NotFoundError:
            return False
        return True

    async def get(self, key: str | ObjectMeta, *, generation: str | None = None) -> bytes:
        """Read a whole object, in parallel ranges if it is large, and verify its checksum.

        A file of `file://` has a checksum if aioflux wrote it on a file system with extended
        attributes, and nothing changed it in place since. Other files are returned unverified.

        Args:
            key: Name of the object, or its metadata, which pins its generation.
            generation: As in `head`, which is called first if this is given.

        Raises:
            NotFoundError: No object has this key or this generation, or it was replaced since `key`
                was listed.
            ChecksumError: The bytes did not match the object's checksum in three reads.
            PreconditionFailedError: The object was replaced during every attempt. Only reads by
                name, not by `ObjectMeta`, raise it.
        """
        if generation is not None:
            key = await self.head(key, generation=generation)
        name, meta = parse_key(key)
        session = self._sessions.current()
        started_at = session.clock()
        fetched = await _read.fetch(session, name, meta)
        # Two calls less than `timed`.
        session.counters.add_call(name, session.clock() - started_at)
        session.memory.offer(fetched.data)
        return fetched.data

    async def get_into(
        self, key: str | ObjectMeta, buffer: bytearray | memoryview, *, start: int = 0
    ) -> int:
        """Read an object into memory of the caller, without a copy.

        Parallel ranges are used if the object is large. A whole object is verified by its checksum,
        a part of an object according to `TransferOptions.verify_ranges`.

        Args:
            key: Name of the object, or its metadata.
            buffer: Writable contiguous memory, whose length limits the number of bytes read.
            start: First byte to read, counted from 0.

        Returns:
            Number of bytes read; less than the length of `buffer` only if the object ends first.

        Raises:
            NotFoundError: No object has this key, or it was replaced since `key` was listed.
            ChecksumError: The bytes did not match their checksum in three reads.
            PreconditionFailedError: The object was replaced during every attempt. Only reads by
                name raise it.
            TypeError: `start` is not an integer, or `buffer` is not contiguous.
            ValueError: `start` is negative, or `buffer` is read-only.
        """
        view = parse_memory(buffer)
        check_offset("start", start)
        if start < 0:
            raise ValueError(f"start must be 0 or more, not {start}")
        name, meta = parse_key(key)
        session = self._sessions.current()
        return await session.timed(
            name, _read.fetch_into(session, name, view, start=start, meta=meta)
        )

    async def get_range(self, key: str | ObjectMeta, start: int, end: int) -> bytes:
        """Read the bytes `[start, end)` of an object.

        A range is verified according to `TransferOptions.verify_ranges`, or by the checksum of the
        object if it covers the whole object.

        Args:
            key: Name of the object, or its metadata.
            start: First byte, counted from 0.
            end: One past the last byte; may be beyond the end of the object.

        Returns:
            The bytes; fewer than `end - start` only if the object ends first.

        Raises:
            NotFoundError: No object has this key, or it was replaced since `key` was listed.
            ChecksumError: Three reads returned three different contents.
            PreconditionFailedError: The object was replaced during every attempt. Only reads by
                name raise it.
            TypeError: `start` or `end` is not an integer.
            ValueError: `start` is negative, or `end` is not above it.
        """
        check_range(start, end)
        name, meta = parse_key(key)
        session = self._sessions.current()
        return await session.timed(
            name, _read.fetch_range(session, name, start=start, end=end, meta=meta)
        )

    async def get_ranges(
        self,
        key: str | ObjectMeta,
        ranges: Sequence[tuple[int, int]],
        *,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> RangesData:
        """Read several ranges of one generation of an object.

        Ranges that overlap, or that have small gaps between them, are merged into reads of at most
        `TransferOptions.range_size_bytes`, or of the largest given range if that is larger. The
        merged ranges are verified as in `get_range`. If
        more than one read is needed and `key` is a name, a request for the metadata comes first.

        Args:
            key: Name of the object, or its metadata.
            ranges: Pairs `(start, end)` of the bytes `[start, end)`, in any order; `end` may be
                beyond the end of the object. No request is sent if there are none.
            max_gap_bytes: Longest gap between two merged ranges; its bytes are read and dropped.
                1 MiB by default: at 50 MB/s one connection receives 1 MiB in one round trip of
                20 ms.

        Returns:
            The bytes of each range, in the order of `ranges`; fewer than `end - start` only if the
            object ends first.

        Raises:
            NotFoundError: No object has this key, or it was replaced since `key` was listed.
            ChecksumError: Three reads returned three different contents.
            PreconditionFailedError: The object was replaced during every attempt. Only reads by
                name raise it.
            TypeError: A `start` or `end` is not an integer.
            ValueError: A `start` is negative, an `end` is not above its `start`, or
                `max_gap_bytes` is negative.
        """
        if max_gap_bytes < 0:
            raise ValueError(f"max_gap_bytes must be 0 or more, not {max_gap_bytes!r}")
        pairs = [(index(start), index(end)) for start, end in ranges]
        for start, end in pairs:
            check_range(start, end)
        name, meta = parse_key(key)
        session = self._sessions.current()
        return await session.timed(
            name, _read.fetch_ranges(session, name, pairs, max_gap_bytes=max_gap_bytes, meta=meta)
        )

    @rejects_plain_for
    async def get_many(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield `(key, data)` of many objects, verified and prefetched.

        Up to `TransferOptions.max_in_flight` requests are in flight. Bytes in flight and objects
        that wait for the consumer add up to at most `TransferOptions.max_in_flight_bytes`, plus one
        object. An object larger than this budget is read alone. The bytes of an object count until
        the consumer requests the next object. Objects smaller than a sixteenth of the budget are
        counted, and freed, in batches of about that size.

        Args:
            keys: Names, or metadata of a listing. Metadata saves one request for each large object,
                and pins the generation. May be a generator, synchronous or asynchronous, such as
                `list`; a key is taken from it only when the budget allows another object.
            ordered: Yield in the order of `keys`, the default; if False, as objects arrive.

        Raises:
            StorageError: An object cannot be read. The error names the object and ends the
                iteration.
            TypeError: `keys` is one string.
        """
        async with aclosing_inner(self.get_batches(keys, ordered=ordered)) as batches:
            async for batch in batches:
                for pair in batch:
                    yield pair
                del batch, pair

    @rejects_plain_for
    async def get_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[DataBatch, None]:
        """Yield lists of `(key, data)` of the objects that have arrived; otherwise as `get_many`.

        A list has at least one object, and ends at the object that brings it to a sixteenth of
        `TransferOptions.max_in_flight_bytes`. The bytes of a list count against the budget until
        the consumer requests the next list.
        """
        async with aclosing_inner(self._fetch_many(keys, ordered=ordered)) as batches:
            async for batch in batches:
                yield [(name, fetched.data) for name, fetched in batch]
                del batch

    @rejects_plain_for
    async def fetch_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[MetaBatch, None]:
        """Yield lists of `(meta, data)`; otherwise as `get_batches`.

        Metadata in `keys` is yielded as it is. For a name, the metadata of the response is yielded.
        """
        async with aclosing_inner(self._fetch_many(keys, ordered=ordered)) as batches:
            async for batch in batches:
                yield [(fetched.meta(), fetched.data) for _, fetched in batch]
                del batch

    @rejects_plain_for
    async def try_fetch_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[TriedBatch, None]:
        """Yield lists as `fetch_batches` does, and continue after objects that cannot be read.

        Such an object is represented by `(None, error)`; the error names the object.
        """
        session = self._sessions.current()
        require_many_keys(keys)
        async with aclosing_inner(try_many(session, keys, ordered=ordered)) as batches:
            async for batch in batches:
                yield _tried_batch(batch)
                del batch

    async def try_fetch_all(self, keys: Sequence[str | ObjectMeta]) -> TriedBatch:
        """Return what `try_fetch_batches` yields for all keys, in order, as one list.

        The objects are read in parallel, and all of them are in memory at the end. For few objects
        this costs less than an iteration.
        """
        session = self._sessions.current()
        require_many_keys(keys)
        return await try_all(session, keys)

    @rejects_plain_for
    async def fetch_composed(
        self, metas: Items[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> AsyncGenerator[MetaBatch, None]:
        """Yield lists of `(meta, data)`, in order, with fewer requests for small objects.

        The service composes up to 32 successive objects of `metas` into one temporary object, a
        composite. The composite is read, split into the objects, and deleted: three requests
        instead of up to 32. Sources are pinned, and each object is verified by its own crc32c.
        Composites have keys below `aioflux-composed-objects/`, which listings omit. If the process
        is killed, its composites remain until `clean` deletes them.

        This is faster than `fetch_batches` only for many objects of about 10 kB and a long round
        trip: 9,004 objects/s instead of 2,628 at 20 ms and 50 MB/s for each connection. Objects of
        500 KiB are read at 695 objects/s instead of 1,564, because one connection carries the bytes
        of up to 32 objects.

        These objects are read directly, without a composite: objects larger than a composite,
        empty objects, objects of a storage class other than STANDARD, with a Content-Encoding, or
        without crc32c or generation, and all objects of `s3://`, `az://` and `file://`.

        The credentials need storage.objects.create and storage.objects.delete on the bucket, and
        the bucket must not have a retention policy. With soft delete or versioning, composites are
        billed as long as they are retained.

        Args:
            metas: Metadata of a listing. May be a generator, as in `get_many`.
            max_composite_bytes: Maximum size of a composite, in bytes; 100 MB by default. It is
                also limited to half of `TransferOptions.max_in_flight_bytes`.

        Raises:
            PermissionDeniedError: The credentials may not write or delete composites.
            StorageError: An object cannot be read. The error names the object and ends the
                iteration.
            TypeError: `metas` contains a key instead of metadata.
            ValueError: `max_composite_bytes` is below 1.
        """
        batches = self.try_fetch_composed(metas, max_composite_bytes=max_composite_bytes)
        async with aclosing_inner(batches) as inner:
            async for batch in inner:
                failed = [index for index, (meta, _) in enumerate(batch) if meta is None]
                if failed:
                    if failed[0]:
                        yield cast("MetaBatch", batch[: failed[0]])
                    raise cast("StorageError", batch[failed[0]][1])
                yield cast("MetaBatch", batch)
                del batch

    @rejects_plain_for
    async def try_fetch_composed(
        self, metas: Items[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> AsyncGenerator[TriedBatch, None]:
        """Yield lists as `fetch_composed` does, and continue after objects that cannot be read.

        Such an object is represented by `(None, error)`; the error names the object. Without the
        permission to write or delete composites, the iteration raises PermissionDeniedError.
        """
        session = self._sessions.current()
        require_many_keys(metas)
        if max_composite_bytes < 1:
            raise ValueError(f"max_composite_bytes must be above 0, not {max_composite_bytes!r}")
        if can_compose(session.service.capabilities):
            from aioflux._transfer import composed_read

            batches = composed_read.try_fetch_composed(
                session, metas, max_composite_bytes=max_composite_bytes
            )
        else:
            batches = self.try_fetch_batches(metas)
        async with aclosing_inner(batches) as inner:
            async for batch in inner:
                yield batch
                del batch

    def _fetch_many(
        self, keys: Items[str | ObjectMeta], *, ordered: bool
    ) -> AsyncGenerator[FetchedBatch, None]:
        session = self._sessions.current()
        require_many_keys(keys)
        return fetch_many(session, keys, ordered=ordered)

    @rejects_plain_for
    async def list(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        limit: int | None = None,
        versions: bool = False,
    ) -> AsyncGenerator[ObjectMeta, None]:
        """Yield the metadata of every object whose key begins with `prefix`, sorted by key.

        Keys are sorted by their UTF-8 bytes. Temporary objects, whose keys are below
        `.aioflux-uploads/` or `aioflux-composed-objects/`, are omitted unless `prefix` names them;
        `list_pages` has an option for them.

        The first page is one request. When the consumer continues after it, up to 32 pages are
        prefetched in parallel, each for another range of keys, or one page if the service cannot
        list ranges (`az://`, `file://` and some S3 servers). An object that exists during the
        whole listing is listed exactly once. An object that is written or deleted meanwhile may be
        listed or not.

        Args:
            prefix: Common beginning of the keys, relative to the store's prefix. Empty lists all.
            delimiter: Usually "/": omit keys that contain the delimiter after `prefix`, so that
                only one level is listed. `list_pages` and `list_all` return the common prefixes of
                the omitted keys as `Listing.prefixes`.
            match_glob: Omit keys that do not match this pattern. `*` and `?` match any characters
                except "/", `**` matches any characters, `[a-z]` one character of a set, and
                `{a,b}` one of several texts. The pattern must match the whole key: "*.jpg" matches
                one level, "**.jpg" all levels.
            limit: Most keys to list; with a delimiter, most keys and common prefixes. Pages are
                requested one after another, and none after the limit.
            versions: List noncurrent generations, too: `is_latest` of their metadata is False, and
                they are read and deleted by their metadata. Those of one key are in the order of
                the service: on `gs://` the oldest first, on `s3://` the newest. Delete markers of
                S3 are omitted; then no version of the key is the latest. Pages are requested one
                after another.

        Raises:
            ValueError: Both `delimiter` and `match_glob` are given, or one of them with `versions`,
                the pattern is not valid, or `limit` is negative.
            UnsupportedError: `versions` is True, and the store is not `gs://` or `s3://`.
        """
        pages: AsyncGenerator[Sequence[ObjectMeta], None]
        if versions:
            if delimiter or match_glob:
                raise ValueError("versions are listed without a delimiter and without a pattern")
            check_listing("", "", limit)
            pages = _list.list_versions(self._sessions.current(), parse_prefix(prefix), limit=limit)
        else:
            pages = self.list_pages(prefix, delimiter=delimiter, match_glob=match_glob, limit=limit)
        async with aclosing_inner(pages) as inner:
            async for page in inner:
                for meta in page:
                    yield meta

    @rejects_plain_for
    async def list_pages(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        page_size: int | None = None,
        limit: int | None = None,
        with_temporary: bool = False,
    ) -> AsyncGenerator[Listing, None]:
        """Yield the pages of `list`, as the service returns them.

        Args:
            prefix: As in `list`.
            delimiter: As in `list`.
            match_glob: As in `list`.
            page_size: Most keys and prefixes in one page; by default the service's maximum. Pages
                are not prefetched if this is given: use 1 to check whether any object exists.
            limit: As in `list`.
            with_temporary: Include temporary objects.

        Raises:
            ValueError: As in `list`, or `page_size` is below 1.
        """
        check_listing(delimiter, match_glob, limit)
        if page_size is not None and page_size < 1:
            raise ValueError(f"page_size must be 1 or more, not {page_size!r}")
        pages = _list.list_pages(
            self._sessions.current(),
            parse_prefix(prefix),
            delimiter=delimiter,
            match_glob=match_glob,
            page_size=page_size,
            limit=limit,
            with_temporary=with_temporary,
        )
        async with aclosing_inner(pages) as inner:
            async for page in inner:
                yield page

    async def list_all(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        limit: int | None = None,
    ) -> Listing:
        """Return the whole listing as one sequence: about 70 bytes and the key for each object.

        Arguments and errors as in `list`.
        """
        check_listing(delimiter, match_glob, limit)
        return await _list.list_all(
            self._sessions.current(),
            parse_prefix(prefix),
            delimiter=delimiter,
            match_glob=match_glob,
            limit=limit,
        )

    async def save_manifest(self, key: str, prefix: str = "") -> ObjectMeta:
        """Store a listing as an object, a manifest, and return the metadata of the manifest.

        Many processes can read the manifest by one request each, and have the same objects in the
        same order: with `Listing.from_bytes(await store.get(key))`, or with `from_manifest` of a
        dataset.

        Args:
            key: Name of the manifest, which replaces an object of this name. The manifest contains
                neither this key nor names that begin with `aioflux-manifest`, which datasets leave
                out, too.
            prefix: Common beginning of the listed keys, as in `list`.
        """
        name, _ = parse_key(key)
        listing, _ = (await self.list_all(prefix)).without_manifests()
        indexes = [index for index, listed in enumerate(listing.keys) if listed != name]
        if len(indexes) < len(listing):
            listing = listing.pick(indexes)
        return await self.put(name, listing.to_bytes())

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Write an object atomically: the whole object becomes visible, or nothing.

        Args:
            key: Name of the object.
            data: Content of the object. It is sent without a copy, in parallel parts if it is
                larger than `TransferOptions.part_size_bytes`, and must not change meanwhile.
            mode: "overwrite" replaces an object of this name; "create" raises AlreadyExistsError
                if one exists. If the response was lost and an object with exactly these bytes
                exists then, it counts as created: write unique bytes into locks.
            if_generation_match: Write only if the object has this generation now. After a lost
                response, the error may have `maybe_done`: the write may have been carried out.
            attributes: `content_type`, `content_encoding`, `content_disposition`, `cache_control`,
                `storage_class` and `metadata` of the object. `content_encoding="gzip"` describes
                bytes that are compressed already. A storage class is a name of the service, such
                as `NEARLINE`, `STANDARD_IA`, or on Azure an access tier such as `Cool`. Names of
                metadata are stored in lower case, as most services return them.

        Returns:
            Metadata of the stored object.

        Raises:
            AlreadyExistsError: `mode` is "create", and an object of this name exists.
            PreconditionFailedError: The object has another generation, or does not exist.
            UnsupportedError: The server ignores the condition; see `S3Access.require_conditions`.
                Or a write of `file://` has an attribute other than `content_type`, which it drops.
            ChecksumError: The service received or stored other bytes than those sent. If it stored
                them, a note on the error says whether the damaged object was removed.
            ValueError: The service does not allow this key, the key is below `.aioflux-uploads/` or
                `aioflux-composed-objects/`, both `mode="create"` and `if_generation_match` are
                given, or two names of metadata differ in case only.
        """
        request = self._request(key, mode, if_generation_match, attributes)
        view, session = parse_data(request.key, data), self._sessions.current()
        started_at = session.clock()
        meta = await _write.put(session, request, view)
        session.counters.add_call(request.key, session.clock() - started_at)
        return meta

    async def put_many(
        self, pairs: Items[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> Listing:
        """Write many objects, and return the metadata of all of them, sorted by key.

        Up to `TransferOptions.max_in_flight` requests are in flight. The result has about 70 bytes
        and the key for each object; `put_batches` yields the metadata instead.

        Args:
            pairs: Pairs `(key, data)`. May be a generator, synchronous or asynchronous; a pair is
                taken from it only while the bodies of the pairs that were taken and are not stored
                yet have less than `TransferOptions.max_in_flight_bytes`. It may wait until earlier
                pairs are stored.
            mode: As in `put`.

        Raises:
            StorageError: An object cannot be written. The first such error ends the call. It names
                the object, and says how many objects were stored before.
            TypeError: An item of `pairs` is not a pair of a key and bytes.
        """
        session, condition = self._sessions.current(), self._condition(mode)
        return await _put_many.put_many(session, pairs, condition)

    @rejects_plain_for
    async def put_batches(
        self, pairs: Items[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """Yield lists of the metadata of objects that were stored; otherwise as `put_many`.

        Nothing is sent before the iteration starts, or after it is left. All objects that were
        yielded before an error are stored.
        """
        session, condition = self._sessions.current(), self._condition(mode)
        async with aclosing_inner(_put_many.put_batches(session, pairs, condition)) as batches:
            async for batch in batches:
                yield batch

    def _condition(self, mode: WriteMode) -> Precondition:
        check_mode(mode, None)
        return Precondition(if_absent=mode == "create")

    async def upload_file(
        self,
        path: str | PathLike[str],
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        progress: Callable[[int], object] | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Write an object from a local file, in parallel parts, and return its metadata.

        The whole object becomes visible, or nothing. Each part has its own memory while it is read
        and sent; all parts of all files of the store have at most
        `TransferOptions.max_in_flight_bytes`. Errors as in `put`, and:

        Args:
            path: Path of the file.
            key: Name of the object.
            mode: As in `put`.
            if_generation_match: As in `put`.
            progress: Called on the event loop with the number of bytes that were sent since the
                last call, such as `update` of a tqdm bar.
            attributes: As in `put`.

        Raises:
            OSError: The file cannot be read.
            ValueError: `path` is not a regular file, or it changed before its last part was stored;
                a file of one part, before it was read.
        """
        from aioflux._transfer.file_transfer import TransferProgress, upload_file

        request = self._request(key, mode, if_generation_match, attributes)
        done, session = TransferProgress(progress), self._sessions.current()
        uploading = upload_file(session, request, parse_path(path), done)
        return await session.timed(request.key, uploading)

    async def download_file(
        self,
        key: str | ObjectMeta,
        path: str | PathLike[str],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> ObjectMeta:
        """Read an object into a local file, in parallel ranges, and return its metadata.

        The complete and verified file replaces `path`; after an error, `path` is unchanged. Until
        then the bytes are in a file beside it, whose name begins with `.aioflux-partial-`. If the
        process is killed, or the call is cancelled or fails because of the network, this file
        remains. The next call with the same `path` reads only the ranges that it lacks if the
        object, its generation and `TransferOptions.range_size_bytes` are the same, and otherwise
        replaces it; `clean` of the directory's `file://` uri removes it. Two calls at the same time
        do not disturb each other: the second one reads all bytes into another temporary file.

        The buffers of all files of the store have at most `TransferOptions.max_in_flight_bytes`.
        With a name, one request for the metadata comes first.

        Args:
            key: Name of the object, or its metadata, which pins its generation.
            path: Path of the file, in an existing directory. A file of this name is replaced, and
                its mode is kept.
            progress: As in `upload_file`, with the bytes that were received, or kept by an earlier
                call; a negative number if bytes are read again.

        Raises:
            NotFoundError: No object has this key, or it was replaced since `key` was listed.
            ChecksumError: The bytes did not match the object's checksum in three reads.
            PreconditionFailedError: The object was replaced during every attempt. Only reads by
                name raise it.
            OSError: The file cannot be written; the error names `path`.
            ValueError: `path` exists and is not a regular file.
        """
        from aioflux._transfer.file_transfer import TransferProgress, download_file

        name, meta = parse_key(key)
        done, session = TransferProgress(progress), self._sessions.current()
        downloading = download_file(session, name, parse_path(path), meta, done)
        return await session.timed(name, downloading)

    @asynccontextmanager
    async def open_writer(
        self,
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        zero_copy: bool = False,
        **attributes: Unpack[WriteAttributes],
    ) -> AsyncIterator[ObjectWriter]:
        """Write an object piece by piece: `async with store.open_writer(key) as writer: ...`.

        The whole object becomes visible when the body of `async with` succeeds. If the body raises,
        or is cancelled, the upload is aborted and nothing becomes visible. The writer buffers at
        most `TransferOptions.max_buffered_bytes`; see `ObjectWriter` for very large objects. Errors
        as in `put`.

        Args:
            key: Name of the object.
            mode: As in `put`.
            if_generation_match: As in `put`.
            zero_copy: Send directly from the caller's memory, which must not change before the
                writer is closed: `write` returns before the bytes were sent.
            attributes: As in `put`.
        """
        request = self._request(key, mode, if_generation_match, attributes)
        kind = ZeroCopyWriter if zero_copy else ObjectWriter
        async with kind(self._sessions.current(), request) as writer:
            yield writer

    @asynccontextmanager
    async def open_reader(
        self, key: str | ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> AsyncIterator[ObjectReader]:
        """Read an object piece by piece: `async with store.open_reader(key) as reader: ...`.

        All bytes are of one generation. Ranges are prefetched in parallel.

        Args:
            key: Name of the object, for its current generation, or metadata of an earlier listing,
                for the generation in it. A name costs one more request.
            read_ahead_bytes: Most bytes that are prefetched and not yet read, in two or more
                ranges; `TransferOptions.max_buffered_bytes` by default.

        Raises:
            ValueError: `read_ahead_bytes` is not above 0.
            NotFoundError: No object has this key, or it was replaced since it was listed or opened.
            ChecksumError: The bytes do not match the object's checksum. Raised by a read, at the
                latest by the read at the end of the object, or on exit if not all was read.
        """
        name, meta = parse_key(key)
        if read_ahead_bytes is not None and read_ahead_bytes <= 0:
            raise ValueError(f"read_ahead_bytes must be above 0, not {read_ahead_bytes}")
        session = self._sessions.current()
        if meta is None:
            meta = await session.timed(name, session.head(name))
        reader = ObjectReader(session, meta, read_ahead_bytes=read_ahead_bytes)
        async with reader:
            yield reader

    async def compose(
        self,
        key: str,
        sources: Sequence[str | ObjectMeta],
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        **attributes: Unpack[WriteAttributes],
    ) -> ObjectMeta:
        """Concatenate objects into one object, on the service, and return its metadata.

        Args:
            key: Name of the result; may be the name of a source.
            sources: Names or metadata of the objects, in order; on `gs://` 1 to 32. Metadata pins
                the generation of its source.
            mode: As in `put`.
            if_generation_match: As in `put`.
            attributes: As in `put`, of the result. On `gs://` the sources must have one storage
                class, which the result has, too.

        Raises:
            NotFoundError: A source does not exist, or was replaced since it was listed; or the
                result is one of the sources, and other writers replaced it before every attempt.
            AlreadyExistsError: As in `put`.
            PreconditionFailedError: As in `put`.
            UnsupportedError: The service cannot concatenate objects.
            ValueError: `sources` is empty, or has more objects than the service can compose.
        """
        session = self._sessions.current()
        require_many_keys(sources)
        max_sources = session.service.capabilities.max_compose_sources
        if not 1 <= len(sources) <= max_sources:
            raise ValueError(
                f"compose needs 1 to {max_sources} sources, not {len(sources)}; compose groups of "
                "them first"
            )
        request = self._request(key, mode, if_generation_match, attributes)
        pins = [parse_source(source) for source in sources]
        return await session.timed(request.key, _compose.compose(session, request, pins))

    async def copy(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Copy an object within the store, on the service, and return the metadata of the copy.

        Args:
            source: Name of the object to copy, or its metadata, which pins its generation.
            key: Name of the copy.
            mode: As in `put`.

        Raises:
            NotFoundError: The source does not exist, or was replaced since it was listed.
            AlreadyExistsError: `mode` is "create", and an object named `key` exists.
        """
        session, condition = self._sessions.current(), self._condition(mode)
        name, _ = parse_key(key)
        copying = _compose.copy(session, parse_source(source), name, precondition=condition)
        return await session.timed(name, copying)

    async def move(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Rename an object within the store, on the service, and return its metadata.

        The object is copied, the copy is compared by size and crc32c, and the generation that was
        copied is deleted. If this fails or is cancelled, the source is kept unless the error has
        `maybe_done`, the copy may exist, and the call can be repeated.

        Args:
            source: Name of the object to move, or its metadata, which pins its generation.
            key: New name. An object of this name is replaced.
            mode: As in `put`.

        Raises:
            NotFoundError: The source does not exist, or was replaced since it was listed.
            AlreadyExistsError: `mode` is "create", and an object named `key` exists.
            ChecksumError: The copy differs from the source, which is kept.
            PreconditionFailedError: The source was replaced after it was copied. Both are kept.
            ValueError: `key` is the name of the source.
        """
        if parse_source(source).key == parse_key(key)[0]:
            raise ValueError(f"cannot move {key!r} to its own name; give another name")
        meta = await self.head(source)
        copied = await self.copy(meta, key, mode=mode)
        checksums = {meta.crc32c, copied.crc32c} - {None}
        if copied.size != meta.size or len(checksums) > 1:
            raise ChecksumError(
                f"{copied.uri} is not a copy of {meta.uri}, which is kept: {copied.size} and "
                f"{meta.size} bytes, crc32c {copied.crc32c} and {meta.crc32c}",
                uri=copied.uri,
            )
        with suppress(NotFoundError):  # deleted meanwhile, or by an attempt whose answer was lost
            await self.delete(meta)
        return copied

    async def delete(self, key: str | ObjectMeta) -> None:
        """Delete an object; with metadata, only the generation in the metadata.

        In a bucket with versioning, the object that was deleted becomes noncurrent, and a
        noncurrent generation, given by its metadata, is deleted for good.

        A delete by name needs two requests: the first finds the current generation, and the second
        deletes only this generation, so that a retry cannot delete a newer object. If other writers
        replace the object between the two requests three times in a row, the current object is
        deleted by a request without a generation. This request is retried only if it cannot have
        been carried out. With `RetryPolicy(max_attempts=1)`, only this request is sent.

        Some S3 servers ignore the generation in a delete request (Ceph, and gateways that ignore
        conditions). The generation is then compared by a HEAD request directly before the delete,
        and an object that is written between the two requests is deleted. AWS compares the
        generation itself, and needs no HEAD request.

        Args:
            key: Name of the object, or its metadata.

        Raises:
            NotFoundError: No object has this key.
            PreconditionFailedError: The object was replaced since it was listed.
        """
        source = parse_source(key)
        session = self._sessions.current()
        deleting = _delete.delete(
            session, source.key, generation=source.generation, is_latest=source.is_latest
        )
        await session.timed(source.key, deleting)

    async def delete_many(self, keys: Iterable[str | ObjectMeta]) -> DeleteResult:
        """Delete many objects, and return the outcome of each.

        Objects that cannot be deleted do not end the operation: their errors are returned as
        `DeleteResult.errors`. Up to `TransferOptions.max_in_flight` requests are in flight.

        If the server ignores generations in delete requests (see `delete`), they are compared
        directly before: by one HEAD request for each object, or by one listing for a page of up to
        1,000 objects. An object that is written after this comparison is deleted.

        Args:
            keys: Names or metadata of the objects. With metadata, only its generation is deleted.

        Raises:
            TypeError: `keys` is one string.
        """
        require_many_keys(keys)
        sources = [parse_source(key) for key in keys]
        return await _delete.delete_many(
            self._sessions.current(), sources, max_in_flight=self.transfer.max_in_flight
        )

    async def missing_permissions(self, names: Sequence[str]) -> Sequence[str]:
        """Return the permissions in `names` that the credentials lack on the bucket, in order.

        Sends one request. A permission that is granted only below a prefix counts as missing. In
        `memory://` no permission is ever missing.

        Args:
            names: Permissions, such as "storage.objects.create".

        Raises:
            UnsupportedError: The service has no request for this: S3, Azure and `file://`.
        """
        session = self._sessions.current()
        require_many_keys(names)
        if not names:
            return []
        granted = await session.call("", session.service.granted_permissions, list(names))
        return [name for name in names if name not in granted]

    async def sign(self, key: str, *, method: UrlMethod = "GET", expires: timedelta | float) -> str:
        """Return a url with which anyone can send one kind of request for an object.

        The url is a secret until it expires. Its request has the permissions of the store's
        credentials; whether they suffice, and whether the object exists, is not checked. With
        temporary keys of S3, the url expires with them at the latest. No request is sent for an
        object; the first call on S3 may request the region of the bucket, and impersonated
        credentials of Google sign with a request to the IAM API.

        Args:
            key: Name of the object, below the store's prefix.
            method: "GET", "HEAD", "PUT" or "DELETE". On Azure, a GET url allows HEAD, too, and a
                PUT needs the header `x-ms-blob-type: BlockBlob`.
            expires: Time from now on for which the url is valid, as a timedelta or in seconds,
                rounded up to whole seconds; at most 7 days on `gs://` and `s3://`.

        Raises:
            CredentialsError: There are no credentials, or on `gs://` and `s3://` they cannot sign:
                an access token, credentials without a private key, or "anonymous".
            UnsupportedError: The store is `memory://` or `file://`, or an `az://` store without an
                account key.
            TypeError: `expires` is neither a timedelta nor a number.
            ValueError: `method` is another one, `expires` is out of range, or no object can be
                stored with this key.
        """
        if isinstance(key, ObjectMeta):
            raise TypeError("a url is not pinned to a generation; pass meta.key, not the metadata")
        name, _ = parse_key(key)
        if method not in {"GET", "HEAD", "PUT", "DELETE"}:
            raise ValueError(f'method must be "GET", "HEAD", "PUT" or "DELETE", not {method!r}')
        if method == "PUT":
            write_request(name, Precondition())
        # The dates of Azure have years of four digits.
        max_days = 7 if self._config.location.scheme in {"gs", "s3"} else 36_500
        seconds = parse_expires(expires, max_days=max_days)
        session, now = self._sessions.current(), time.time()
        return await with_retry(
            lambda _: session.service.sign(name, method=method, seconds=seconds, now=now),
            session.retry,
            uri_of=lambda: session.service.uri(name),
            clock=session.clock,
        )

    async def check_conditions(self) -> Sequence[str]:
        """Return the conditions that the server ignores: "create", "replace" and "delete".

        "create" is `mode="create"`, "replace" is `if_generation_match`, and "delete" is the delete
        of one generation. Google Cloud Storage, Azure, AWS, files and memory support all of them,
        and no request is sent. At another S3 endpoint, the first call in a process tries the
        conditions on a temporary object, unless a conditional write did so before.

        Raises:
            UnsupportedError: The server ignores "create" or "replace", and
                `S3Access.require_conditions` is True. Such writes raise this error, too.
            StorageError: The conditions could not be tried, for example because the credentials
                may not write.
        """
        return await _conditions.check(self._sessions.current())

    async def clean(
        self, prefix: str = "", *, older_than_seconds: float = 86_400.0, dry_run: bool = False
    ) -> CleanResult:
        """Remove old uploads and temporary objects below a prefix, which killed processes left.

        Open multipart uploads are aborted. Objects below `.aioflux-uploads/` (conditional writes
        that are not visible yet) and `aioflux-composed-objects/` (composites), at any depth below
        `prefix`, are deleted. So are objects with names as `write_objects` of Ray gives them,
        `data-<32 hexadecimal digits>-00000-1a2b3c4d-00000.parquet`, if no manifest beside them
        lists the attempt that wrote them, and all objects of the write and all manifests are so
        old. The whole prefix is listed.

        Args:
            prefix: Common beginning of the keys, as in `list`.
            older_than_seconds: Minimum age of removed uploads and objects, in seconds; one day by
                default. Younger ones may be in use.
            dry_run: Remove nothing, and return the uploads and objects that would be removed.

        Raises:
            ValueError: `older_than_seconds` is negative.
        """
        if not older_than_seconds >= 0:
            raise ValueError(f"older_than_seconds must be 0 or more, not {older_than_seconds!r}")
        from aioflux._transfer.clean import clean

        return await clean(
            self._sessions.current(),
            prefix,
            now=datetime.now(UTC),
            older_than_seconds=older_than_seconds,
            dry_run=dry_run,
        )

    def _request(
        self,
        key: str,
        mode: WriteMode,
        if_generation_match: str | None,
        attributes: WriteAttributes,
    ) -> WriteRequest:
        check_mode(mode, if_generation_match)
        return write_request(
            parse_key(key)[0],
            Precondition(if_generation_match=if_generation_match, if_absent=mode == "create"),
            parse_attributes(attributes),
        )


def _restore(location: Location, settings: dict[str, Any]) -> Store:
    return Store(location, **settings)


def _tried_batch(results: TriedMany) -> TriedBatch:
    return [
        (result[1].meta(), result[1].data) if isinstance(result, tuple) else (None, result)
        for result in results
    ]


async def read_hashed(store: Store, meta: ObjectMeta, view: memoryview, *, start: int) -> int:
    """Fill `view` with bytes of an object from `start` on, and return their crc32c unverified.

    The crc32c is computed while the bytes are received, and the caller compares it. 0 is returned
    if `TransferOptions.verify` is off. The bytes must lie within the object.

    Raises:
        NotFoundError: No object has this key, or it was replaced since `meta` was listed.
    """
    session = sessions_of(store).current()
    pin = Pin(meta.generation, meta.size)
    return await read_into(session, meta.key, view, start=start, pin=pin, is_covered=True)


async def read_current(store: Store, key: str, read: Callable[[ObjectMeta], Awaitable[T]]) -> T:
    """Call `read` with the current metadata of an object; repeat if it is replaced meanwhile.

    Raises:
        NotFoundError: No object has this key.
        PreconditionFailedError: The object was replaced during each of the reads.
    """
    return await _read.fetch_pinned(sessions_of(store).current(), key, read)


def count_mismatch(store: Store, meta: ObjectMeta, reason: str) -> None:
    """Count bytes that the caller of `read_hashed` found wrong; warn that they are read again."""
    sessions_of(store).current().count_mismatch(meta.key, reason)


def sessions_of(store: Store) -> Sessions:
    """Return the sessions of a store, for code that closes connections on its own event loop."""
    return store._sessions  # noqa: SLF001  not for users
