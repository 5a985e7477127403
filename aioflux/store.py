"""Store: the objects below one uri.

A method checks its arguments and calls a module of `_transfer/`, which does the work. Over 500
lines because every public operation is declared here: more than half are signatures and docstrings.
"""

from __future__ import annotations

import os
import warnings
import weakref
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import Items, bounded_map
from aioflux._services.base import Precondition, ServiceConfig, Source
from aioflux._services.open import open_service
from aioflux._transfer import clean as _clean
from aioflux._transfer import compose as _compose
from aioflux._transfer import composed_read as _composed_read
from aioflux._transfer import conditions as _conditions
from aioflux._transfer import delete as _delete
from aioflux._transfer import get as _get
from aioflux._transfer import list as _list
from aioflux._transfer import writer as _writer
from aioflux._transfer.arguments import (
    check_listing,
    check_metadata,
    check_mode,
    check_offset,
    check_policies,
    parse_key,
    parse_prefix,
    require_many_keys,
)
from aioflux._transfer.composite_plan import can_compose
from aioflux._transfer.get_many import fetch_many, try_many
from aioflux._transfer.put import write_request
from aioflux._transfer.range_plan import MAX_GAP_BYTES
from aioflux._transfer.reader import ObjectReader
from aioflux._transfer.sessions import Sessions
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX
from aioflux._transfer.writer import ObjectWriter
from aioflux._transfer.zero_copy_writer import ZeroCopyWriter
from aioflux._values.meta import CleanResult, DeleteResult, ObjectMeta
from aioflux._values.uri import REMOTE_SCHEMES, Location, parse_uri
from aioflux.errors import StorageError
from aioflux.options import RetryPolicy, Timeouts, TransferOptions, carries_secret

if TYPE_CHECKING:
    import ssl
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )
    from types import TracebackType

    from aioflux._services.base import WriteRequest
    from aioflux._transfer.get_many import FetchedBatch
    from aioflux._values.listing import Listing
    from aioflux._values.stats import ProgressHook, StoreStats

__all__ = ["COMPOSITE_PREFIX", "ObjectReader", "ObjectWriter", "Store", "open_store"]

Buffer: TypeAlias = bytes | bytearray | memoryview
WriteMode: TypeAlias = Literal["overwrite", "create"]
# Named here, because inside the class `list` is a method.
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
    """Open the objects below a uri. Sends nothing: connections are made on first use.

    Args:
        uri: `gs://bucket/prefix`, `s3://bucket/prefix`, `az://account/container/prefix`,
            `file:///dir` or `memory://name/prefix`. Keys are relative to it; a prefix without a
            trailing slash gets one.
        transfer: How much is under way at once; `TransferOptions()` by default.
        retry: When a failed request is sent again; `RetryPolicy()` by default.
        timeouts: How long one attempt waits; `Timeouts()` by default.
        credentials: For `gs://`: google-auth credentials, the content of a JSON key file as a
            mapping, "anonymous" as text, or a function that returns an access token (or an
            awaitable of one). By default Application Default Credentials. A store with credentials
            of the first two kinds does not pickle. For `s3://`: `aioflux.S3Access`, or what
            its `credentials` takes; by default what botocore finds. For `az://`: an account key, a
            SAS token, a connection string or "anonymous" as text, a credential of azure-identity,
            or a function that returns an access token or a SAS token (or an awaitable of one). A
            function is called with the first request, again after 5 s of use and when the service
            rejects the token (401), in a thread if it is not a coroutine function. For `az://`
            the default is AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with
            AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or else azure-identity's
            DefaultAzureCredential.
        endpoint_url: Another endpoint, such as that of an emulator. The default for `gs://` is the
            environment variable STORAGE_EMULATOR_HOST; requests to `http://` endpoints carry no
            credentials. The default for `s3://` is AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS
            profile, with the other settings of botocore that `S3Access` lists. For `az://` the
            connection string may contain it; if the host's name does not contain the account, the
            account is the first part of the path, as in emulators.
        ssl_context: TLS settings, such as a custom CA; the system's trust store by default. A store
            with one does not pickle.
        progress: Called on the event loop with a `Progress` as bytes of objects move. A pickled
            store does not carry it.

    Returns:
        A store: use it with `async with`, or call `aclose` when done.

    Raises:
        ValueError: The uri cannot be opened, or a setting has no effect with it.
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
    """Objects below one uri, with the policies of their transfer.

    One store may be used from several event loops; each gets its own connections. A store pickles
    with its settings and without connections or credentials, and survives a fork.

    Every method that takes a key also takes an `ObjectMeta` from `list` or `head`: the read is then
    pinned to that generation, and fails with NotFoundError if the object was replaced since.
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
        self._config = ServiceConfig(
            location=Location(location.scheme, location.bucket, key),
            timeouts=timeouts,
            max_connections=transfer.max_in_flight,
            credentials=credentials,
            endpoint_url=endpoint_url,
            ssl_context=ssl_context,
            verify=transfer.verify,
        )
        is_remote = location.scheme in REMOTE_SCHEMES
        if not is_remote and (credentials is not None or endpoint_url is not None):
            raise ValueError(f"{location} takes neither credentials nor an endpoint_url")
        self._sessions = Sessions(
            partial(self._open_service, self._config),
            transfer,
            retry,
            progress,
            cleanup_timeouts=timeouts.cleanup,
            owner=repr(self),
        )

    _open_service = staticmethod(open_service)

    @property
    def uri(self) -> str:
        """The uri that keys are relative to."""
        return str(self._config.location)

    @property
    def stats(self) -> StoreStats:
        """Requests, retries, bytes and latency of this store so far, in this process."""
        return self._sessions.stats()

    def __repr__(self) -> str:
        return f"<Store {self.uri}>"

    def __reduce__(self) -> tuple[Any, ...]:
        config = self._config
        if config.ssl_context is not None:
            raise TypeError(f"{self!r} does not pickle: its ssl_context cannot leave the process")
        if carries_secret(config.credentials):
            raise TypeError(
                f"{self!r} holds credentials and does not pickle; pass "
                "a module-level function that returns them, or rely on the default credentials"
            )
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

    async def __aenter__(self) -> Self:
        self._sessions.current()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a cancellation or Ctrl-C a service that does not answer delays the end less.
        is_interrupted = error is not None and not isinstance(error, Exception)
        await self._sessions.aclose(is_interrupted=is_interrupted)

    async def aclose(self) -> None:
        """Close the connections of the running loop and end the store; twice does nothing.

        Writers that are open are aborted, for which a service that does not answer is given 5 s.
        """
        await self._sessions.aclose()

    def reopened(self) -> Store:
        """Return a store of the same settings, with connections and limits of its own."""
        config = self._config
        return Store(config.location, ssl_context=config.ssl_context, **self._settings())

    async def head(self, key: str | ObjectMeta) -> ObjectMeta:
        """Read the metadata of an object.

        Raises:
            NotFoundError: No object has this key.
        """
        source = _source(key)
        return await self._sessions.current().head(source.key, source.generation)

    async def get(self, key: str | ObjectMeta) -> bytes:
        """Read a whole object, in parallel ranges if it is large, and verify its crc32c.

        A file of `file://` that aioflux did not write, or that was changed in place since, has no
        crc32c and is returned unverified.

        Raises:
            NotFoundError: No object has this key, or not in the generation that was listed.
            ChecksumError: The bytes do not match the object's checksum, three times in a row.
            PreconditionFailedError: A read by name found the object replaced at every attempt.
        """
        name, meta = parse_key(key)
        fetched = await _get.fetch(self._sessions.current(), name, meta)
        return fetched.data

    async def get_into(
        self, key: str | ObjectMeta, buffer: bytearray | memoryview, *, start: int = 0
    ) -> int:
        """Read an object straight into memory, in parallel ranges if it is large.

        The whole object is verified by its crc32c, a part of it as `TransferOptions.verify_ranges`
        says.

        Args:
            key: Name of the object.
            buffer: Writable memory; its length is the most that is read.
            start: First byte.

        Returns:
            Bytes read; fewer than the length of `buffer` only if the object ends first.

        Raises:
            ChecksumError: The bytes do not match their checksum, three times in a row.
            PreconditionFailedError: A read by name found the object replaced at every attempt.
            ValueError: `start` is negative or `buffer` cannot be written.
        """
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("get_into needs writable memory, such as a bytearray")
        check_offset("start", start)
        if start < 0:
            raise ValueError(f"start must be 0 or more, not {start}")
        name, meta = parse_key(key)
        return await _get.fetch_into(self._sessions.current(), name, view, start=start, meta=meta)

    async def get_range(self, key: str | ObjectMeta, *, start: int, end: int) -> bytes:
        """Read the bytes `[start, end)` of an object.

        They are verified as `TransferOptions.verify_ranges` says, the whole object by its crc32c.

        Args:
            key: Name of the object.
            start: First byte, counted from 0.
            end: One past the last byte. Beyond the end of the object it means the end.

        Returns:
            The bytes; fewer than `end - start` only if the object ends first.

        Raises:
            NotFoundError: No object has this key.
            ChecksumError: Three reads gave three different contents.
            PreconditionFailedError: A read by name found the object replaced at every attempt.
            TypeError: `start` or `end` is not an integer.
            ValueError: `start` is negative, or `end` is not above it.
        """
        check_offset("start", start)
        check_offset("end", end)
        if start < 0 or end <= start:
            raise ValueError(f"a range needs 0 <= start < end, not [{start}, {end})")
        name, meta = parse_key(key)
        return await _get.fetch_range(
            self._sessions.current(), name, start=start, end=end, meta=meta
        )

    async def get_ranges(
        self,
        key: str | ObjectMeta,
        ranges: Sequence[tuple[int, int]],
        *,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> RangesData:
        """Read several ranges of an object, near ones together, all of one generation.

        Ranges that overlap or have small gaps between them are read as one, of at most
        `TransferOptions.range_size_bytes`, and verified as by `get_range`. A read by name of ranges
        that do not merge into one begins with a request for the metadata.

        Args:
            key: Name of the object.
            ranges: Pairs `(start, end)` of the bytes `[start, end)`, in any order. An end beyond
                the end of the object means the end.
            max_gap_bytes: Most bytes between two ranges that are read and dropped to save a
                request; 1 MiB by default, which is what one connection receives in one round trip
                (20 ms at 50 MB/s).

        Returns:
            The bytes of each range, in the order of `ranges`; fewer than `end - start` only if the
            object ends first. No request is sent if there are no ranges.

        Raises:
            NotFoundError: No object has this key.
            ChecksumError: Three reads gave three different contents.
            PreconditionFailedError: A read by name found the object replaced at every attempt.
            TypeError: A start or an end is not an integer.
            ValueError: A `start` is negative, an `end` not above it, or `max_gap_bytes` negative.
        """
        if max_gap_bytes < 0:
            raise ValueError(f"max_gap_bytes must be 0 or more, not {max_gap_bytes!r}")
        pairs = [(index(start), index(end)) for start, end in ranges]
        for start, end in pairs:
            if start < 0 or end <= start:
                raise ValueError(f"a range needs 0 <= start < end, not [{start}, {end})")
        name, meta = parse_key(key)
        session = self._sessions.current()
        return await _get.fetch_ranges(session, name, pairs, max_gap_bytes=max_gap_bytes, meta=meta)

    async def get_many(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield `(key, data)` of many objects, verified and prefetched.

        Up to `max_in_flight` requests are in flight. Bytes in flight and objects that wait for the
        consumer take up to `max_in_flight_bytes` (256 MiB by default) together, plus one object; an
        object larger than the budget is read alone. An object counts until the consumer asks for
        the next one; objects smaller than a sixteenth of the budget are counted, and freed, in
        batches of about that size.

        Args:
            keys: Names, or metadata of a listing (saves a request for a large object, and pins
                generations). May be a generator, synchronous or asynchronous, such as `list`; the
                next key is requested only when it fits.
            ordered: In the order of `keys`; otherwise as they arrive.

        Raises:
            StorageError: An object cannot be read; the error names it and ends the iteration.
        """
        async with nested(self.get_batches(keys, ordered=ordered)) as batches:
            async for batch in batches:
                for found in batch:
                    yield found
                del batch, found

    async def get_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[DataBatch, None]:
        """Yield what `get_many` yields, in lists of the objects that have arrived.

        Memory is bounded as in `get_many`. A list ends with the object that brings it to a
        sixteenth of `max_in_flight_bytes`; it counts against the budget until the next list is
        requested.
        """
        async with nested(self._fetch_many(keys, ordered=ordered)) as batches:
            async for batch in batches:
                yield [(name, fetched.data) for name, fetched in batch]
                del batch

    async def fetch_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[MetaBatch, None]:
        """Yield lists of `(meta, data)`, with the metadata of the listing or of the response.

        Arguments and errors as in `get_many`. Lists end, and memory is bounded, as in
        `get_batches`.
        """
        async with nested(self._fetch_many(keys, ordered=ordered)) as batches:
            async for batch in batches:
                yield [(fetched.meta(), fetched.data) for _, fetched in batch]
                del batch

    async def try_fetch_batches(
        self, keys: Items[str | ObjectMeta], *, ordered: bool = True
    ) -> AsyncGenerator[TriedBatch, None]:
        """Yield what `fetch_batches` yields, and continue after objects that cannot be read.

        `(None, error)` is in the place of such an object; the error names it.
        """
        session = self._sessions.current()
        require_many_keys(keys)
        async with nested(try_many(session, keys, ordered=ordered)) as tried:
            async for results in tried:
                yield [
                    (each[1].meta(), each[1].data) if isinstance(each, tuple) else (None, each)
                    for each in results
                ]
                del results

    async def fetch_composed(
        self, metas: Items[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> AsyncGenerator[MetaBatch, None]:
        """Yield what `fetch_batches` yields, in order, with fewer requests for small objects.

        Up to 32 neighbours in `metas` are composed on the service into one temporary object, which
        is read, split and deleted: three requests instead of up to 32. Composites are below
        `aioflux-composed-objects/`, which listings leave out; `clean` removes those of a killed
        process. Sources are pinned, and each slice is verified by its own crc32c.

        Faster than `fetch_batches` only for many objects of some 10 kB at a long round trip: 9,004
        objects/s against 2,628 at 20 ms and 50 MB/s for each connection; but 695 against 1,564 for
        objects of 500 KiB, because one connection carries what many would.

        Read directly are objects larger than a composite, of another storage class than STANDARD,
        with a Content-Encoding, empty or without crc32c or generation, and all objects of `file://`.

        It needs storage.objects.create and storage.objects.delete on the bucket, and no retention
        policy there; with soft delete or versioning, composites are billed as long as they are
        retained.

        Args:
            metas: Metadata of a listing. May be a generator, as in `get_many`.
            max_composite_bytes: Bytes of one composite, at most; 100 MB by default, and never more
                than half of `max_in_flight_bytes`.

        Raises:
            PermissionDeniedError: Composites may not be made or deleted.
            StorageError: An object cannot be read; the error names it and ends the iteration.
            TypeError: A key, not metadata.
            ValueError: `max_composite_bytes` is below 1.
        """
        batches = self.try_fetch_composed(metas, max_composite_bytes=max_composite_bytes)
        async with nested(batches) as inner:
            async for batch in inner:
                failed = [at for at, (meta, _) in enumerate(batch) if meta is None]
                if failed:
                    if failed[0]:
                        yield cast("MetaBatch", batch[: failed[0]])
                    raise cast("StorageError", batch[failed[0]][1])
                yield cast("MetaBatch", batch)
                del batch

    async def try_fetch_composed(
        self, metas: Items[ObjectMeta], *, max_composite_bytes: int = 100_000_000
    ) -> AsyncGenerator[TriedBatch, None]:
        """Yield what `fetch_composed` yields, and continue after objects that cannot be read.

        `(None, error)` is in the place of such an object; the error names it. Without the
        permission to make or delete composites it raises PermissionDeniedError.
        """
        session = self._sessions.current()
        require_many_keys(metas)
        if max_composite_bytes < 1:
            raise ValueError(f"max_composite_bytes must be above 0, not {max_composite_bytes!r}")
        if can_compose(session.service.capabilities):
            batches = _composed_read.try_fetch_composed(
                session, metas, max_composite_bytes=max_composite_bytes
            )
        else:
            batches = self.try_fetch_batches(metas)
        async with nested(batches) as inner:
            async for batch in inner:
                yield batch
                del batch

    def _fetch_many(
        self, keys: Items[str | ObjectMeta], *, ordered: bool
    ) -> AsyncGenerator[FetchedBatch, None]:
        session = self._sessions.current()
        require_many_keys(keys)
        return fetch_many(session, keys, ordered=ordered)

    async def list(
        self, prefix: str = "", *, delimiter: str = "", match_glob: str = ""
    ) -> AsyncGenerator[ObjectMeta, None]:
        """Yield the metadata of every object whose key begins with `prefix`, sorted by key.

        The order is that of the keys' UTF-8 bytes. Temporary objects, below `.aioflux-uploads/` and
        `aioflux-composed-objects/`, are left out, unless `prefix` names them.

        The first page is one request; once the consumer continues, up to 32 pages are prefetched,
        each for a range of the keys. An object that exists all the time is listed once.

        Args:
            prefix: What keys begin with.
            delimiter: List one level, as with "/": keys that contain it after `prefix` are left
                out. `list_pages` and `list_all` return their common prefixes in `prefixes`.
            match_glob: Leave out keys that this pattern does not match: `*` and `?` match anything
                but "/", `**` anything, `[a-z]` one of a set and `{a,b}` either. The pattern matches
                the whole key: "**.jpg", not "*.jpg", matches keys below prefixes, too.

        Raises:
            ValueError: Both `delimiter` and `match_glob` are given, or the pattern is not valid.
        """
        pages = self.list_pages(prefix, delimiter=delimiter, match_glob=match_glob)
        async with nested(pages) as inner:
            async for page in inner:
                for meta in page:
                    yield meta

    async def list_pages(
        self,
        prefix: str = "",
        *,
        delimiter: str = "",
        match_glob: str = "",
        page_size: int | None = None,
    ) -> AsyncGenerator[Listing, None]:
        """Yield the pages of `list`, as the service returns them.

        Args:
            prefix: As in `list`.
            delimiter: As in `list`.
            match_glob: As in `list`.
            page_size: Most keys and prefixes of one page; by default what the service allows. 1
                finds out whether there are any. Pages are not prefetched if it is given.

        Raises:
            ValueError: As in `list`, or `page_size` is below 1.
        """
        check_listing(delimiter, match_glob)
        if page_size is not None and page_size < 1:
            raise ValueError(f"page_size must be 1 or more, not {page_size!r}")
        pages = _list.list_pages(
            self._sessions.current(),
            parse_prefix(prefix),
            delimiter=delimiter,
            match_glob=match_glob,
            page_size=page_size,
        )
        async with nested(pages) as inner:
            async for page in inner:
                yield page

    async def list_all(
        self, prefix: str = "", *, delimiter: str = "", match_glob: str = ""
    ) -> Listing:
        """Return the listing as one sequence, which takes some 120 bytes for each object."""
        check_listing(delimiter, match_glob)
        return await _list.list_all(
            self._sessions.current(),
            parse_prefix(prefix),
            delimiter=delimiter,
            match_glob=match_glob,
        )

    async def save_manifest(self, key: str, prefix: str = "") -> ObjectMeta:
        """List the objects below `prefix`, and store the listing as an object.

        Many processes can open it, with `Listing.from_bytes(await store.get(key))` or a dataset's
        `from_manifest`, for one request each, and get the same objects in the same order.

        Args:
            key: Name of the manifest; an object of this name is replaced. It does not list itself.
            prefix: What the listed keys begin with.
        """
        name, _ = parse_key(key)
        listing = await self.list_all(prefix)
        others = [at for at, each in enumerate(listing.keys) if each != name]
        if len(others) < len(listing):
            listing = listing.pick(others)
        return await self.put(name, listing.to_bytes())

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Write a whole object: it appears whole or not at all.

        Args:
            key: Name of the object.
            data: Its bytes; sent without a copy, in parallel parts if it is large.
            mode: "overwrite" replaces an object of this name, "create" fails if there is one.
                After a lost response, an object with exactly these bytes counts as created: give
                locks unique bytes.
            if_generation_match: Replace only this generation.
            content_type: Media type; `application/octet-stream` by default.
            metadata: User metadata. Names are stored in lower case, as most services return them.

        Raises:
            AlreadyExistsError: `mode="create"`, and there is such an object.
            PreconditionFailedError: The object has another generation.
            UnsupportedError: The server ignores the condition; see `S3Access.require_conditions`.
            ChecksumError: The service received or stored other bytes; a note says what remains.
            ValueError: The service does not allow this key, or it is below `.aioflux-uploads/`, or
                two names of metadata differ in case only.
        """
        request = self._request(key, mode, if_generation_match, content_type, metadata)
        return await _writer.put(self._sessions.current(), request, memoryview(data).cast("B"))

    def put_many(
        self, pairs: Items[tuple[str, Buffer]], *, mode: WriteMode = "overwrite"
    ) -> AsyncGenerator[ObjectMeta, None]:
        """Write many objects, and yield the metadata of each as it is stored.

        Nothing is sent until it is iterated; if it never is, it issues a RuntimeWarning when it is
        collected. Up to `max_in_flight` requests are in flight.

            async for meta in store.put_many(pairs): ...

        Raises:
            StorageError: An object cannot be written; the error names it and ends the iteration.
                Those yielded are stored.
        """
        stored = self._put_many(pairs, mode, lambda: unused.detach())
        unused = weakref.finalize(stored, _warn_of_nothing_stored, self.uri, os.getpid())
        unused.atexit = False
        return stored

    async def _put_many(
        self, pairs: Items[tuple[str, Buffer]], mode: WriteMode, begin: Callable[[], object]
    ) -> AsyncGenerator[ObjectMeta, None]:
        begin()
        session = self._sessions.current()
        condition = self._request("any", mode, None, "", None).precondition

        async def one(pair: tuple[str, Buffer]) -> ObjectMeta:
            request = write_request(parse_key(pair[0])[0], condition)
            return await _writer.put(session, request, memoryview(pair[1]).cast("B"))

        stored = bounded_map(one, pairs, max_in_flight=self.transfer.max_in_flight, ordered=False)
        async with nested(stored) as inner:
            async for meta in inner:
                yield meta

    @asynccontextmanager
    async def open_writer(
        self,
        key: str,
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
        zero_copy: bool = False,
    ) -> AsyncIterator[ObjectWriter]:
        """Write an object piece by piece: `async with store.open_writer(key) as writer: ...`.

        The object becomes visible, whole, when the body ends without an exception; otherwise the
        upload is aborted. Memory is bounded by `TransferOptions.max_buffered_bytes`. Arguments and
        errors as `put`.

        Args:
            key: Name of the object.
            mode: As `put`.
            if_generation_match: As `put`.
            content_type: As `put`.
            metadata: As `put`.
            zero_copy: Send from the caller's memory, which must not change until the writer is
                closed; `write` returns before the bytes were sent.
        """
        request = self._request(key, mode, if_generation_match, content_type, metadata)
        kind = ZeroCopyWriter if zero_copy else ObjectWriter
        async with kind(self._sessions.current(), request) as writer:
            yield writer

    @asynccontextmanager
    async def open_reader(
        self, key: str | ObjectMeta, *, read_ahead_bytes: int | None = None
    ) -> AsyncIterator[ObjectReader]:
        """Read an object piece by piece: `async with store.open_reader(key) as reader: ...`.

        Pinned to the generation it has now. Ranges are prefetched.

        Args:
            key: Name of the object, or its metadata, which pins the generation that was seen.
            read_ahead_bytes: Most bytes that are prefetched and not yet read, in two ranges or
                more; `TransferOptions.max_buffered_bytes` by default.

        Raises:
            ValueError: `read_ahead_bytes` is not above 0.
            NotFoundError: No object has this key, or not in the generation that was listed.
            ChecksumError: The bytes do not match the object's checksum; raised before the end is
                reported at the latest, or when the reader is closed early.
        """
        name, meta = parse_key(key)
        if read_ahead_bytes is not None and read_ahead_bytes <= 0:
            raise ValueError(f"read_ahead_bytes must be above 0, not {read_ahead_bytes}")
        found = meta or await self.head(name)
        reader = ObjectReader(self._sessions.current(), found, read_ahead_bytes=read_ahead_bytes)
        async with reader:
            yield reader

    async def compose(
        self,
        key: str,
        sources: Sequence[str | ObjectMeta],
        *,
        mode: WriteMode = "overwrite",
        if_generation_match: str | None = None,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Concatenate objects of this store into one, on the service.

        Args:
            key: Name of the result; may be one of the sources.
            sources: 1 to 32 objects on `gs://`, in order.
            mode: As `put`.
            if_generation_match: As `put`.
            content_type: Media type of the result.
            metadata: As `put`.

        Raises:
            NotFoundError: A source does not exist, or not in the generation that was listed; or the
                result is one of the sources, and was replaced before each attempt.
            ValueError: No sources, or more than the service allows at once.
        """
        session = self._sessions.current()
        require_many_keys(sources)
        most = session.service.capabilities.max_compose_sources
        if not 1 <= len(sources) <= most:
            raise ValueError(
                f"compose takes 1 to {most} sources, not {len(sources)}; compose groups first"
            )
        request = self._request(key, mode, if_generation_match, content_type, metadata)
        return await _compose.compose(session, request, [_source(each) for each in sources])

    async def copy(
        self, source: str | ObjectMeta, key: str, *, mode: WriteMode = "overwrite"
    ) -> ObjectMeta:
        """Copy an object within the store, on the service.

        Raises:
            NotFoundError: The source does not exist.
            AlreadyExistsError: `mode="create"`, and there is an object of this name.
        """
        precondition = self._request(key, mode, None, "", None).precondition
        return await _compose.copy(
            self._sessions.current(), _source(source), key, precondition=precondition
        )

    async def delete(self, key: str | ObjectMeta) -> None:
        """Delete an object; with metadata of a listing, only in that generation.

        A name costs a second request, which finds the generation to delete, so that a repeated
        attempt cannot delete a newer object. If the object is replaced before each of three
        attempts, whatever has the name is deleted, by a request that is sent once.

        Some S3 servers ignore the generation when they delete (Ceph, and gateways that ignore
        conditions). It is then compared by a HEAD request directly before; an object written
        between the two is deleted. AWS compares it, and needs no such request.

        Raises:
            NotFoundError: No object has this key.
            PreconditionFailedError: The object was replaced since it was listed.
        """
        source = _source(key)
        session = self._sessions.current()
        await _delete.delete(session, source.key, generation=source.generation)

    async def delete_many(self, keys: Iterable[str | ObjectMeta]) -> DeleteResult:
        """Delete many objects, up to `max_in_flight` at once, and return the outcome of each.

        The others are deleted if one cannot be: see `DeleteResult.errors`. With metadata of a
        listing, an object is deleted only in the generation that was listed.

        If the server ignores generations when it deletes (see `delete`), they are compared
        directly before: by one HEAD request for each object, or by one listing for a page of up to
        1,000 objects. An object written between the two is deleted.

        Raises:
            TypeError: `keys` is one string.
        """
        require_many_keys(keys)
        sources = [_source(key) for key in keys]
        return await _delete.delete_many(
            self._sessions.current(), sources, max_in_flight=self.transfer.max_in_flight
        )

    async def missing_permissions(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of `names` that the credentials do not have on the bucket, in order.

        One request. A permission that is granted for some prefix only counts as missing; on a
        service without permissions none is missing.

        Args:
            names: Permissions, such as "storage.objects.create".
        """
        session = self._sessions.current()
        require_many_keys(names)
        if not names:
            return []
        granted = await session.call("", lambda _: session.service.granted_permissions(list(names)))
        return [name for name in names if name not in granted]

    async def check_conditions(self) -> Sequence[str]:
        """Return the conditions that the server ignores: "create", "replace" and "delete".

        "create" is `mode="create"`, "replace" is `if_generation_match`, and "delete" the deletion
        of one generation. Google Cloud Storage, Azure, AWS, files and memory compare all of them,
        and nothing is sent. On another S3 endpoint the first call of a process tries them on a
        temporary object, unless a conditional write has done so.

        Raises:
            UnsupportedError: "create" or "replace" is ignored, and `S3Access.require_conditions`
                is True, so that such writes are rejected.
            StorageError: The test failed; for example, the credentials may not write.
        """
        return await _conditions.check(self._sessions.current())

    async def clean(
        self, prefix: str = "", *, older_than_seconds: float = 86_400.0, dry_run: bool = False
    ) -> CleanResult:
        """Remove what killed processes left below a prefix, and return what that was.

        Open multipart uploads are aborted; objects below `.aioflux-uploads/` (conditional writes
        before they became visible) and `aioflux-composed-objects/` (composites of one download), at
        any depth, are deleted. Lists the whole prefix.

        Args:
            prefix: What keys begin with.
            older_than_seconds: Minimum age, one day by default. Younger uploads may be in progress.
            dry_run: Return what would be removed, and remove nothing.

        Raises:
            ValueError: `older_than_seconds` is negative.
        """
        if not older_than_seconds >= 0:
            raise ValueError(f"older_than_seconds must be 0 or more, not {older_than_seconds!r}")
        return await _clean.clean(
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
        content_type: str,
        metadata: Mapping[str, str] | None,
    ) -> WriteRequest:
        check_mode(mode, if_generation_match)
        check_metadata(content_type, metadata)
        return write_request(
            parse_key(key)[0],
            Precondition(if_generation_match=if_generation_match, if_absent=mode == "create"),
            content_type,
            metadata,
        )


def _restore(location: Location, settings: dict[str, Any]) -> Store:
    return Store(location, **settings)


def _warn_of_nothing_stored(uri: str, pid: int) -> None:
    """Warn of a `put_many` that was dropped without being iterated, by the process that called it.

    A generator that never started runs no code of its own when it is collected.
    """
    if os.getpid() == pid:
        warnings.warn(
            f"put_many below {uri} was never iterated, so nothing was stored: iterate over what it "
            "returns, as in `async for meta in store.put_many(pairs): ...`",
            RuntimeWarning,
            stacklevel=3,  # the code that drops it, above the finalizer
        )


def _source(key: str | ObjectMeta) -> Source:
    name, meta = parse_key(key)
    return Source(key=name, generation=meta.generation if meta else "")


def sessions_of(store: Store) -> Sessions:
    """Return the sessions of a store, for what closes connections on a loop of its own."""
    return store._sessions  # noqa: SLF001  not for users
