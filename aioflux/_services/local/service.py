"""Objects as files below one directory: `file:///dir`.

A write goes to a temporary name beside its target, is synced, and becomes visible by a rename, or
by a link if it must be new; both are atomic on local file systems and on NFS. Writers of one object
hold a lock for that step, in all processes, so that its preconditions hold. User metadata and
content types are not stored.

A key whose parent is an object cannot be written: `a` and `a/b` are not both files. See `walk` for
other entries of the directory and for symbolic links, and `write` for NFS.

Generations are made of modification time, inode and size. Objects written here have their crc32c in
an extended attribute (`checksums`), which reads of the whole object compare; reads of other files
are not verified.
"""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aioflux._http.memory import BytesBuffer
from aioflux._services.base import (
    Body,
    Capabilities,
    Page,
    Service,
    UploadedPart,
    WriteRequest,
)
from aioflux._services.local.checksums import read_checksum
from aioflux._services.local.errors import error_from_os
from aioflux._services.local.threads import BLOCK_BYTES, Stop, in_thread
from aioflux._services.local.walk import (
    Walk,
    check_key,
    is_temporary,
    locate,
    modified,
    status_of,
    temporaries,
)
from aioflux._services.local.write import (
    finish,
    link_new,
    locked,
    new_temporary,
    prune,
    replace_file,
    write_all,
)
from aioflux._services.xml_multipart import combined_crc32c
from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import ObjectMeta, OpenUpload
from aioflux._values.uri import quote_path
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aioflux._services.base import Into, ListRequest, Precondition, ReadRequest, Source

__all__ = ["LocalService"]

_MAX_WALKS = 16
"""Listings that are kept between two of their pages; others search for the next key."""


def generation_of(status: os.stat_result) -> str:
    """Return the generation of a file."""
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def _memory_for(into: Into | None, num_bytes: int) -> memoryview:
    """Return the caller's memory for a number of bytes."""
    assert into is not None
    return into(num_bytes) if callable(into) else into


class LocalService(Service):
    """One directory."""

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

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        check_key(key)

        def look(_: Stop) -> ObjectMeta:
            with self._mapped_errors("read the metadata of", key, reading=True):
                path, status = self._status(key)
                return self._meta(key, status, generation, read_checksum(path, status))

        return await in_thread(look)

    def _status(self, key: str) -> tuple[str, os.stat_result]:
        return status_of(str(self._root), key)

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        key, generation, start, end = request
        check_key(key)

        def read(stop: Stop) -> Body:
            with self._opened(key, generation) as (descriptor, meta):
                wanted = max(0, (meta.size if end is None else min(end, meta.size)) - start)
                own = BytesBuffer(wanted) if into is None else None
                view = own.view if own is not None else _memory_for(into, wanted)
                done = _fill(descriptor, view[:wanted], start, stop)
                self._require_unchanged(key, os.fstat(descriptor), meta, done, wanted)
                return Body(
                    data=own.finish() if own is not None else view[:done],
                    size=meta.size,
                    generation=meta.generation,
                    crc32c=meta.crc32c,
                    meta=lambda: meta,
                )

        return await in_thread(read, into_callers_memory=into is not None)

    @contextmanager
    def _opened(self, key: str, generation: str) -> Iterator[tuple[int, ObjectMeta]]:
        """Open an object and read its metadata, in one generation if it is given."""
        with self._mapped_errors("read", key, reading=True):
            path, _ = self._status(key)
            # If it is replaced by a pipe now, open does not wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                checksum = read_checksum(descriptor, status)
                yield descriptor, self._meta(key, status, generation, checksum)
            finally:
                os.close(descriptor)

    def _require_unchanged(
        self, key: str, status: os.stat_result, meta: ObjectMeta, done: int, wanted: int
    ) -> None:
        """Raise if a file was changed in place while it was read; no store does that."""
        if (generation_of(status), done) != (meta.generation, wanted):
            uri = self.uri(key)
            raise TransientError(
                f"could not read {uri}: it was changed in place meanwhile", uri=uri
            )

    async def put(
        self, request: WriteRequest, data: bytes | memoryview, *, crc32c: int | None
    ) -> ObjectMeta:
        key = request.key
        check_key(key)
        self._reject_metadata(request)

        def write(stop: Stop) -> ObjectMeta:
            with self._mapped_errors("write", key), self._temporary(key) as (path, temporary):
                with temporary.open("r+b", buffering=0) as file:
                    checksum = write_all(file.fileno(), data, 0, stop)
                    self._compare(key, checksum, crc32c)
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
                        raise self._changed(key, generation_of(status), generation)
                    stop.check()
                    # It exists, under the lock: NFS repeats a delete whose response was lost.
                    path.unlink(missing_ok=True)
            prune(path, self._root)

        await in_thread(remove)

    async def list_page(self, request: ListRequest) -> Page:
        prefix = request.prefix
        listing = replace(request, page_token="", page_size=None)
        _, _, next_key = request.page_token.partition("/")
        before, walk = self._walks.pop(request.page_token, (None, None))
        limit = request.page_size or self.capabilities.page_size

        def read(_: Stop) -> tuple[Page, Walk]:
            if walk is not None and before == listing:
                current = walk
            else:
                start = max(prefix, request.start_offset, next_key)
                current = Walk(str(self._root), prefix, start)
            found, prefixes, follows = current.read_page(
                limit, end=request.end_offset, delimiter=request.delimiter
            )
            metas = [self._meta(key, status, "", None) for key, status in found]
            token = f"{next(self._tokens)}/{follows}" if follows else ""
            return Page(metas, prefixes, token), current

        with self._mapped_errors("list", prefix):
            page, current = await in_thread(read)
        if page.next_token:
            self._walks[page.next_token] = (listing, current)
        while len(self._walks) > _MAX_WALKS:
            del self._walks[next(iter(self._walks))]
        return page

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        key = request.key
        for each in (key, *(source.key for source in sources)):
            check_key(each)
        self._reject_metadata(request)

        def concatenate(stop: Stop) -> ObjectMeta:
            with self._mapped_errors("compose", key), self._temporary(key) as (path, temporary):
                with temporary.open("r+b", buffering=0) as target:
                    size = checksum = 0
                    for source in sources:
                        num_bytes, own = self._append(target.fileno(), source, size, stop)
                        checksum = combine_crc32c(checksum, own, num_bytes)
                        size += num_bytes
                    meta = self._finish(target.fileno(), key, checksum)
                return self._publish(temporary, path, meta, request.precondition, stop)

        return await in_thread(concatenate)

    def _append(self, target: int, source: Source, offset: int, stop: Stop) -> tuple[int, int]:
        """Write a source at `offset` and return its size and crc32c.

        Raises:
            ChecksumError: The source is damaged.
        """
        with self._opened(source.key, source.generation) as (descriptor, meta):
            done = checksum = 0
            block = memoryview(bytearray(min(BLOCK_BYTES, meta.size)))
            while num_read := _fill(descriptor, block[: meta.size - done], done, stop):
                checksum = write_all(target, block[:num_read], offset + done, stop, checksum)
                done += num_read
            self._require_unchanged(source.key, os.fstat(descriptor), meta, done, meta.size)
            self._compare(source.key, checksum, meta.crc32c)
            return done, checksum

    def _compare(self, key: str, actual: int, expected: int | None) -> None:
        """Compare the crc32c of bytes with the expected one, if that is known."""
        if expected not in {None, actual}:
            uri = self.uri(key)
            raise ChecksumError(
                f"the bytes of {uri} have crc32c {actual:#010x}, not {expected:#010x}", uri=uri
            )

    def _finish(self, descriptor: int, key: str, checksum: int | None) -> ObjectMeta:
        """Finish a file, and return the metadata of its object."""
        status = finish(descriptor, checksum)
        return self._meta(key, status, "", read_checksum(descriptor, status))

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        return await self.compose(WriteRequest(key, precondition), [source])

    async def initiate_upload(self, request: WriteRequest) -> str:
        key = request.key
        check_key(key)
        self._reject_metadata(request)

        def begin(_: Stop) -> Path:
            with self._mapped_errors("write", key):
                return new_temporary(Path(locate(str(self._root), key)), self._root)

        temporary = await in_thread(begin)
        self._uploads[temporary.name] = (key, temporary)
        return temporary.name

    def _upload(self, key: str, upload_id: str) -> Path:
        held, path = self._uploads.get(upload_id, ("", self._root))
        if held != key:
            uri = self.uri(key)
            raise NotFoundError(f"there is no upload {upload_id} of {uri}", uri=uri, status=404)
        return path

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
        path = self._upload(key, upload_id)

        def write(stop: Stop) -> UploadedPart:
            at, checksum = offset, 0
            with self._mapped_errors("write", key), path.open("r+b", buffering=0) as file:
                for piece in pieces:
                    checksum = write_all(file.fileno(), piece, at, stop, checksum)
                    at += memoryview(piece).nbytes
                self._compare(key, checksum, crc32c)
            return UploadedPart(number, f"{offset}", at - offset, checksum)

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
                    raise ChecksumError(f"{uri} has {meta.size} bytes, not {expected}", uri=uri)
                path = temporary.with_name(key.rpartition("/")[2])
                self._publish(temporary, path, meta, request.precondition, stop)
                temporary.unlink(missing_ok=True)
                return meta

        meta = await in_thread(complete)
        del self._uploads[upload_id]
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """See base class. Uploads of other processes, too: the id is the temporary name."""
        if not is_temporary(upload_id):
            return

        def drop(_: Stop) -> None:
            with (
                self._mapped_errors("abort the upload of", key),
                suppress(FileNotFoundError, NotADirectoryError),
            ):
                target = f"{key.rpartition('/')[0]}/x".lstrip("/")
                self._drop(Path(locate(str(self._root), target)).with_name(upload_id))

        await in_thread(drop)
        self._uploads.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """See base class. Uploads of other processes are listed, too."""
        own = dict(self._uploads)

        def find(_: Stop) -> list[OpenUpload]:
            found: list[OpenUpload] = []
            for path, status in temporaries(str(self._root)):
                upload_id = path.rpartition("/")[2]
                key = own[upload_id][0] if upload_id in own else path
                if key.startswith(prefix):
                    initiated = modified(status)
                    found.append(OpenUpload(key=key, upload_id=upload_id, initiated=initiated))
            return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

        with self._mapped_errors("list", prefix):
            return await in_thread(find)

    async def aclose(self) -> None:
        """Forget the listings in progress: no file is kept open."""
        self._walks.clear()

    def _meta(
        self, key: str, status: os.stat_result, generation: str, crc32c: int | None
    ) -> ObjectMeta:
        actual = generation_of(status)
        if generation not in {"", actual}:
            uri = self.uri(key)
            raise NotFoundError(
                f"{uri} is no longer in generation {generation}: it was replaced; list again",
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

    def _changed(self, key: str, actual: str | None, expected: str) -> PreconditionFailedError:
        uri = self.uri(key)
        return PreconditionFailedError(f"{uri} has generation {actual}, not {expected}", uri=uri)

    def _reject_metadata(self, request: WriteRequest) -> None:
        if request.metadata:
            uri = self.uri(request.key)
            raise UnsupportedError(f"{uri} cannot carry metadata: files keep none", uri=uri)

    def _publish(
        self,
        temporary: Path,
        path: Path,
        meta: ObjectMeta,
        precondition: Precondition,
        stop: Stop,
    ) -> ObjectMeta:
        """Make a finished file visible as an object, and return its metadata."""
        key = meta.key
        expected = precondition.if_generation_match
        with locked(path, stop, required=expected is not None):
            stop.check()
            if precondition.if_absent:
                try:
                    link_new(temporary, path)
                except FileExistsError as exc:
                    raise self._changed(key, "already", "absent") from exc
            else:
                if expected is not None and (actual := self._current(key)) != expected:
                    raise self._changed(key, actual, expected)
                replace_file(temporary, path)
        return meta

    def _current(self, key: str) -> str | None:
        """Return the generation of an object, or None if there is no object."""
        try:
            return generation_of(self._status(key)[1])
        except FileNotFoundError:
            return None

    @contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, Path]]:
        """Create a file for the bytes of an object; yield the object's path and the file's."""
        path = Path(locate(str(self._root), key))
        temporary = new_temporary(path, self._root)
        try:
            yield path, temporary
        finally:
            self._drop(temporary)

    def _drop(self, temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        prune(temporary, self._root)

    @contextmanager
    def _mapped_errors(self, action: str, key: str, *, reading: bool = False) -> Iterator[None]:
        """Map OSError to a class of `errors.py`, naming the object.

        With an object `a/b`, reads of `a` or `a/b/c` find nothing, and writes of them fail.
        """
        uri = self.uri(key)
        try:
            yield
        except StorageError:
            raise
        except OSError as exc:
            raise error_from_os(exc, f"could not {action} {uri}", uri, reading=reading) from exc


def _fill(descriptor: int, view: memoryview, start: int, stop: Stop) -> int:
    """Read the bytes from `start` on and return how many there were."""
    done = 0
    while done < len(view):
        stop.check()
        num_read = os.preadv(descriptor, [view[done : done + BLOCK_BYTES]], start + done)
        if num_read == 0:
            break
        done += num_read
    return done
