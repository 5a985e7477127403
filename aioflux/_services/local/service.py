"""Objects as files below one directory: `file:///dir`.

A write creates a temporary file in the directory of the object, syncs it, and publishes it by a
rename, or by a link if the object must not exist yet. Both are atomic on local file systems and on
NFS. A lock excludes other writers of the object, in all processes, while its precondition is
checked and the file is published. On a file system without locks, writes with a generation as
precondition fail, and other writes are not locked. Content types are not stored, and writes with
another attribute are rejected.

`a` and `a/b` cannot both be objects, because `a` would be a file and a directory. See `walk` for
symbolic links and for files that are not objects, and `write` for NFS.

The generation is made of modification time, inode and size. A write stores the crc32c in an
extended attribute, and reads of the whole object compare it. Files of other programs
have no such attribute, and are not verified.

Over 500 lines because it is one class with a method for each operation of the contract.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aioflux._http.memory import BytesBuffer
from aioflux._local_files import is_temporary
from aioflux._services.base import (
    Body,
    Capabilities,
    Page,
    Service,
    UploadedPart,
    WriteRequest,
    combined_crc32c,
)
from aioflux._services.local.walk import (
    Walk,
    check_key,
    locate,
    modified,
    status_of,
    temporary_files,
)
from aioflux._services.local.write import (
    BLOCK_BYTES,
    Stop,
    finish,
    in_thread,
    link_new,
    locked,
    new_temporary,
    prune,
    read_checksum,
    replace_file,
    write_all,
)
from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import ATTRIBUTE_NAMES, ObjectMeta, OpenUpload
from aioflux._values.uri import quote_path
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from aioflux._services.base import (
        Into,
        ListRequest,
        PartRequest,
        Precondition,
        ReadRequest,
        Source,
    )

_MAX_WALKS = 16
"""Maximum number of listings whose `Walk` is kept for the next page; others start a new walk."""


def generation_of(status: os.stat_result) -> str:
    """Return the generation of a file."""
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def _memory_of_caller(into: Into | None, num_bytes: int) -> memoryview:
    """Return the memory that the caller passed, or that the caller's function allocates."""
    assert into is not None
    return into(num_bytes) if callable(into) else into


class LocalService(Service):
    """One directory as a bucket."""

    capabilities = Capabilities(
        conditional_complete=True,
        max_compose_sources=1_000_000,
        min_part_size_bytes=1,
        list_ranges=False,
        listed_checksums=False,
    )

    def __init__(self, directory: str) -> None:
        self._root = Path(directory)
        super().__init__(root_uri=f"file://{quote_path(directory.rstrip('/'))}/", prefix="")
        self._uploads: dict[str, tuple[str, Path]] = {}
        self._walks: dict[str, tuple[ListRequest, Walk]] = {}
        self._tokens = itertools.count(1)

    def uri(self, key: str = "") -> str:
        return super().uri(quote_path(key))

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        check_key(key)

        def read_metadata(_: Stop) -> ObjectMeta:
            with self._mapped_errors("read the metadata of", key, reading=True):
                path, status = self._status(key)
                return self._meta(key, status, generation, read_checksum(path, status))

        return await in_thread(read_metadata)

    def _status(self, key: str) -> tuple[str, os.stat_result]:
        return status_of(str(self._root), key)

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        key, generation, start, end = request.key, request.generation, request.start, request.end
        check_key(key)

        def read(stop: Stop) -> Body:
            with self._opened(key, generation) as (descriptor, meta):
                num_bytes = max(0, (meta.size if end is None else min(end, meta.size)) - start)
                buffer = BytesBuffer(num_bytes) if into is None else None
                view = buffer.view if buffer is not None else _memory_of_caller(into, num_bytes)
                num_read = _read_into(descriptor, view[:num_bytes], start, stop)
                self._require_unchanged(key, os.fstat(descriptor), meta, num_read, num_bytes)
                return Body(
                    data=buffer.finish() if buffer is not None else view[:num_read],
                    size=meta.size,
                    generation=meta.generation,
                    crc32c=meta.crc32c,
                    meta=lambda: meta,
                )

        return await in_thread(read, into_callers_memory=into is not None)

    @contextmanager
    def _opened(self, key: str, generation: str) -> Iterator[tuple[int, ObjectMeta]]:
        """Open an object; yield its descriptor and metadata. Raise if it has another generation."""
        with self._mapped_errors("read", key, reading=True):
            path, _ = self._status(key)
            # O_NONBLOCK: if a pipe has replaced the file, do not wait for a writer of the pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                checksum = read_checksum(descriptor, status)
                yield descriptor, self._meta(key, status, generation, checksum)
            finally:
                os.close(descriptor)

    def _require_unchanged(
        self, key: str, status: os.stat_result, meta: ObjectMeta, num_read: int, num_bytes: int
    ) -> None:
        """Raise if another program changed a file in place while it was read."""
        if (generation_of(status), num_read) != (meta.generation, num_bytes):
            uri = self.uri(key)
            raise TransientError(
                f"could not read {uri}: another program changed it during the read", uri=uri
            )

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        key = request.key
        check_key(key)
        self._reject_attributes(request)

        def write(stop: Stop) -> ObjectMeta:
            with self._mapped_errors("write", key), self._temporary(key) as (path, temporary):
                with temporary.open("r+b", buffering=0) as file:
                    checksum = write_all(file.fileno(), pieces, 0, stop)
                    self._check_crc32c(key, checksum, crc32c)
                    meta = self._finish(file.fileno(), key, checksum)
                return self._publish(temporary, path, meta, request.precondition, stop)

        return await in_thread(write)

    async def delete(self, key: str, *, generation: str = "") -> None:
        check_key(key)

        def remove(stop: Stop) -> None:
            with self._mapped_errors("delete", key, reading=True):
                self._status(key)
                path = Path(locate(str(self._root), key))
                with locked(path, stop):
                    _, status = self._status(key)
                    if generation and generation_of(status) != generation:
                        raise self._replaced_error("delete", key, generation_of(status), generation)
                    stop.check()
                    # The file exists, but NFS may send a delete twice, after a lost response.
                    path.unlink(missing_ok=True)
            prune(path, self._root)

        await in_thread(remove)

    async def list_page(self, request: ListRequest) -> Page:
        prefix = request.prefix
        listing = replace(request, page_token="", page_size=None)
        _, _, next_key = request.page_token.partition("/")
        previous, previous_walk = self._walks.pop(request.page_token, (None, None))
        limit = request.page_size or self.capabilities.page_size

        def read(_: Stop) -> tuple[Page, Walk]:
            if previous_walk is not None and previous == listing:
                walk = previous_walk
            else:
                start = max(prefix, request.start_offset, next_key)
                walk = Walk(str(self._root), prefix, start)
            files, prefixes, following_key = walk.read_page(
                limit, end=request.end_offset, delimiter=request.delimiter
            )
            metas = [self._meta(key, status, "", None) for key, status in files]
            token = f"{next(self._tokens)}/{following_key}" if following_key else ""
            return Page(metas, prefixes, token), walk

        with self._mapped_errors("list", prefix):
            page, walk = await in_thread(read)
        if page.next_token:
            self._walks[page.next_token] = (listing, walk)
        while len(self._walks) > _MAX_WALKS:
            del self._walks[next(iter(self._walks))]
        return page

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        key = request.key
        for used_key in (key, *(source.key for source in sources)):
            check_key(used_key)
        self._reject_attributes(request)

        def concatenate(stop: Stop) -> ObjectMeta:
            with self._mapped_errors("compose", key), self._temporary(key) as (path, temporary):
                with temporary.open("r+b", buffering=0) as target:
                    size = checksum = 0
                    for source in sources:
                        num_bytes, crc32c = self._append(target.fileno(), source, size, stop)
                        checksum = combine_crc32c(checksum, crc32c, num_bytes)
                        size += num_bytes
                    meta = self._finish(target.fileno(), key, checksum)
                return self._publish(temporary, path, meta, request.precondition, stop)

        return await in_thread(concatenate)

    def _append(self, target: int, source: Source, offset: int, stop: Stop) -> tuple[int, int]:
        """Write the bytes of a source at `offset`; return its size and crc32c.

        Raises:
            ChecksumError: The source is damaged.
        """
        with self._opened(source.key, source.generation) as (descriptor, meta):
            num_copied = checksum = 0
            block = memoryview(bytearray(min(BLOCK_BYTES, meta.size)))
            while num_read := _read_into(
                descriptor, block[: meta.size - num_copied], num_copied, stop
            ):
                crc32c = write_all(target, [block[:num_read]], offset + num_copied, stop)
                checksum = combine_crc32c(checksum, crc32c, num_read)
                num_copied += num_read
            self._require_unchanged(source.key, os.fstat(descriptor), meta, num_copied, meta.size)
            self._check_crc32c(source.key, checksum, meta.crc32c)
            return num_copied, checksum

    def _check_crc32c(self, key: str, actual: int, expected: int | None) -> None:
        """Raise ChecksumError if the crc32c differs from `expected`, which is None if unknown."""
        if expected not in {None, actual}:
            uri = self.uri(key)
            raise ChecksumError(
                f"the bytes of {uri} have crc32c {actual:#010x}, not {expected:#010x}", uri=uri
            )

    def _finish(self, descriptor: int, key: str, checksum: int | None) -> ObjectMeta:
        """Sync a file with its checksum (see `finish`), and return the metadata of its object."""
        status = finish(descriptor, checksum)
        return self._meta(key, status, "", read_checksum(descriptor, status))

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        return await self.compose(WriteRequest(key, precondition), [source])

    async def initiate_upload(self, request: WriteRequest) -> str:
        key = request.key
        check_key(key)
        self._reject_attributes(request)

        def create(_: Stop) -> Path:
            with self._mapped_errors("write", key):
                return new_temporary(Path(locate(str(self._root), key)), self._root)

        temporary = await in_thread(create)
        self._uploads[temporary.name] = (key, temporary)
        return temporary.name

    def _upload(self, key: str, upload_id: str) -> Path:
        upload_key, path = self._uploads.get(upload_id, ("", self._root))
        if upload_key != key:
            uri = self.uri(key)
            raise NotFoundError(f"there is no upload {upload_id} of {uri}", uri=uri, status=404)
        return path

    async def put_part(self, request: PartRequest) -> UploadedPart:
        key, pieces, offset = request.key, request.pieces, request.offset
        path = self._upload(key, request.upload_id)

        def write(stop: Stop) -> UploadedPart:
            with self._mapped_errors("write", key), path.open("r+b", buffering=0) as file:
                checksum = write_all(file.fileno(), pieces, offset, stop)
                self._check_crc32c(key, checksum, request.crc32c)
            return UploadedPart(request.number, f"{offset}", sum(map(len, pieces)), checksum)

        return await in_thread(write)

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        key = request.key
        temporary = self._upload(key, upload_id)
        expected = sum(part.size for part in parts)

        def complete(stop: Stop) -> ObjectMeta:
            with self._mapped_errors("write", key):
                with temporary.open("r+b", buffering=0) as file:
                    meta = self._finish(file.fileno(), key, combined_crc32c(parts))
                if meta.size != expected:
                    uri = self.uri(key)
                    raise ChecksumError(
                        f"could not write {uri}: its temporary file has {meta.size} bytes, and its "
                        f"parts have {expected}",
                        uri=uri,
                    )
                path = temporary.with_name(key.rpartition("/")[2])
                self._publish(temporary, path, meta, request.precondition, stop)
                temporary.unlink(missing_ok=True)
                return meta

        meta = await in_thread(complete)
        del self._uploads[upload_id]
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload of any process: the upload id is the name of the temporary file."""
        if not is_temporary(upload_id):
            return

        def remove(_: Stop) -> None:
            with (
                self._mapped_errors("abort the upload of", key),
                suppress(FileNotFoundError, NotADirectoryError),
            ):
                target = f"{key.rpartition('/')[0]}/x".lstrip("/")
                self._remove_temporary(Path(locate(str(self._root), target)).with_name(upload_id))

        await in_thread(remove)
        self._uploads.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """Return open uploads, and single writes that are in progress or were killed.

        The key of an upload that another process has started is the path of its temporary file.
        """
        started_here = dict(self._uploads)

        def list_files(_: Stop) -> list[OpenUpload]:
            uploads: list[OpenUpload] = []
            for path, status in temporary_files(str(self._root)):
                upload_id = path.rpartition("/")[2]
                key = started_here[upload_id][0] if upload_id in started_here else path
                if key.startswith(prefix):
                    initiated = modified(status)
                    uploads.append(OpenUpload(key=key, upload_id=upload_id, initiated=initiated))
            return sorted(uploads, key=lambda upload: (upload.key, upload.upload_id))

        with self._mapped_errors("list", prefix):
            return await in_thread(list_files)

    async def aclose(self) -> None:
        """Drop the listings in progress; no file is open between two calls."""
        self._walks.clear()

    def _meta(
        self, key: str, status: os.stat_result, generation: str, crc32c: int | None
    ) -> ObjectMeta:
        actual = generation_of(status)
        if generation not in {"", actual}:
            uri = self.uri(key)
            raise NotFoundError(
                f"{uri} no longer has generation {generation}: it was replaced; list it again",
                uri=uri,
            )
        return ObjectMeta(
            key=key,
            uri=self.uri(key),
            size=status.st_size,
            etag=actual,
            generation=actual,
            crc32c=crc32c,
            updated=modified(status),
        )

    def _replaced_error(
        self, action: str, key: str, actual: str | None, expected: str
    ) -> PreconditionFailedError:
        state = "it does not exist" if actual is None else f"it has generation {actual}"
        why = f"{state}, but the request requires generation {expected}"
        return PreconditionFailedError.of(action, self.uri(key), why)

    def _reject_attributes(self, request: WriteRequest) -> None:
        names = [name for name in ATTRIBUTE_NAMES if getattr(request.attributes, name)]
        if given := " and ".join(name for name in names if name != "content_type"):
            uri = self.uri(request.key)
            raise UnsupportedError(
                f"could not write {uri}: file:// stores no {given}; write it without {given}",
                uri=uri,
            )

    def _publish(
        self,
        temporary: Path,
        path: Path,
        meta: ObjectMeta,
        precondition: Precondition,
        stop: Stop,
    ) -> ObjectMeta:
        """Publish a finished file as an object, and return its metadata.

        Raises:
            PreconditionFailedError: The precondition does not hold.
        """
        key = meta.key
        expected = precondition.if_generation_match
        with locked(path, stop, required=expected is not None):
            stop.check()
            if precondition.if_absent:
                try:
                    link_new(temporary, path)
                except FileExistsError as exc:
                    why = "it exists already, but the write may only create it"
                    raise PreconditionFailedError.of("write", self.uri(key), why) from exc
            else:
                if expected is not None and (actual := self._current_generation(key)) != expected:
                    raise self._replaced_error("write", key, actual, expected)
                replace_file(temporary, path)
        return meta

    def _current_generation(self, key: str) -> str | None:
        """Return the generation of an object, or None if there is no object."""
        try:
            return generation_of(self._status(key)[1])
        except FileNotFoundError:
            return None

    @contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, Path]]:
        """Create a temporary file for an object; yield the paths of the object and of the file."""
        path = Path(locate(str(self._root), key))
        temporary = new_temporary(path, self._root)
        try:
            yield path, temporary
        finally:
            self._remove_temporary(temporary)

    def _remove_temporary(self, temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        prune(temporary, self._root)

    @contextmanager
    def _mapped_errors(self, action: str, key: str, *, reading: bool = False) -> Iterator[None]:
        """Map OSError to an error of `errors.py` that names the object.

        If `a/b` is an object, reads of `a` and of `a/b/c` raise NotFoundError (`reading`), and
        writes of them raise StorageError.
        """
        uri = self.uri(key)
        try:
            yield
        except StorageError:
            raise
        except OSError as exc:
            raise error_from_os(exc, f"could not {action} {uri}", uri, reading=reading) from exc


def _read_into(descriptor: int, view: memoryview, start: int, stop: Stop) -> int:
    """Read bytes from `start` on until the view is full or the file ends; return their number."""
    num_filled = 0
    while num_filled < len(view):
        stop.check()
        block = view[num_filled : num_filled + BLOCK_BYTES]
        num_read = os.preadv(descriptor, [block], start + num_filled)
        if num_read == 0:
            break
        num_filled += num_read
    return num_filled


_TRANSIENT_ERRNOS = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""Errors of NFS that are retried: ESTALE for a file that was removed while it was open, ETIMEDOUT
for a server that does not respond, with the mount option `soft`."""


def error_from_os(error: OSError, failure: str, uri: str, *, reading: bool) -> StorageError:
    """Map an error of the file system to an error of this package.

    `failure` begins the message: "could not read <uri>". `reading` is true for an operation that
    needs an existing object: a file in the place of a directory then means a missing object.
    """
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) or (
        reading and error.errno in {errno.ENOTDIR, errno.EISDIR}
    ):
        return NotFoundError(f"{failure}: there is no such object ({reason})", uri=uri)
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return StorageError(
            f"{failure}: a part of its path is an object, or it is a directory ({reason})", uri=uri
        )
    if isinstance(error, PermissionError):
        directory, name = os.path.split(error.filename or "")
        denied_path = directory if is_temporary(name) else error.filename or ""
        return PermissionDeniedError(
            f"{failure}: {reason}; check the permissions of {denied_path}".rstrip(),
            uri=uri,
        )
    if error.errno in _TRANSIENT_ERRNOS:
        return TransientError(
            f"{failure}: {reason}; another machine replaced or removed the file, or the file "
            "server did not respond",
            uri=uri,
            maybe_done=not reading,
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{failure}: {reason}; nothing was stored, free some space", uri=uri)
    return StorageError(f"{failure}: {reason}", uri=uri)
