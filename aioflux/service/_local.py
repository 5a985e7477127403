"""Objects as files below one directory: `file:///dir`.

A write goes to a temporary name beside its target, is synced, and becomes visible by a rename, or
by a link where it must be new; both are atomic on local file systems and on NFS. A replacement
under `if_generation_match` compares just before the rename: two such writers at the very same
moment are not kept apart. User metadata and content types are not kept.

A key whose parent is an object cannot be written: `a` and `a/b` are not both files.

Generations are made of modification time, inode and size. Files carry no checksum, so that reads
are not verified.

Over 500 lines because a file system offers none of what a service does in one request: listing in
key order, conditions, uploads in parts and their clean-up are all written out here.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from aioflux._errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
)
from aioflux._meta import ObjectMeta
from aioflux._uri import quote_path
from aioflux.service._base import Body, Capabilities, Page, Service, UploadedPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aioflux.service._base import Precondition, Source

__all__ = ["LocalService"]

_TEMPORARY = ".aioflux-"
"""Names that begin so are writes under way: never listed, never taken as keys."""
_COPY_BYTES = 4 * 1024 * 1024
_MAX_DIRECTORY_RACES = 100


def generation_of(status: os.stat_result) -> str:
    """Return the identity of a file's content."""
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def check_key(key: str) -> None:
    """Refuse a key that is no path strictly below a directory.

    Raises:
        ValueError: It is empty or absolute, has an empty, `.` or `..` segment or a NUL, or looks
            like a write under way.
    """
    segments = key.split("/")
    bad = any(segment in {"", ".", ".."} or segment.startswith(_TEMPORARY) for segment in segments)
    if bad or "\0" in key:
        raise ValueError(
            f"{key!r} cannot be a file below a directory: segments must not be empty, '.' or "
            f"'..', nor begin with {_TEMPORARY!r}"
        )


class LocalService(Service):
    """One directory."""

    capabilities = Capabilities(
        conditional_complete=True,
        max_compose_sources=1_000_000,
        min_part_size_bytes=1,
        part_checksums=False,
    )

    def __init__(self, directory: str) -> None:
        self._root = Path(directory)
        super().__init__(root_uri=f"file://{quote_path(directory.rstrip('/'))}/", prefix="")
        self._uploads: dict[str, tuple[str, Path]] = {}

    def uri(self, key: str = "") -> str:
        return super().uri(quote_path(key))

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        path = self._path(key)

        def stat() -> ObjectMeta:
            with self._mapped("read the metadata of", key, reading=True):
                return self._meta(key, _regular(path), generation)

        return await asyncio.to_thread(stat)

    async def get(
        self,
        key: str,
        *,
        generation: str = "",
        start: int = 0,
        end: int | None = None,
        into: memoryview | None = None,
    ) -> Body:
        path = self._path(key)

        def read() -> Body:
            with (
                self._mapped("read", key, reading=True),
                path.open("rb", buffering=0) as file,
            ):
                meta = self._meta(key, os.fstat(file.fileno()), generation)
                stop = meta.size if end is None else min(end, meta.size)
                view = memoryview(bytearray(max(0, stop - start))) if into is None else into
                done = 0
                while done < stop - start:
                    num_read = os.preadv(file.fileno(), [view[done : stop - start]], start + done)
                    if num_read == 0:
                        break
                    done += num_read
                data = bytes(view[:done]) if into is None else into[:done]
                return Body(
                    data=data,
                    size=meta.size,
                    generation=meta.generation,
                    crc32c=None,
                    meta=lambda: meta,
                )

        return await asyncio.to_thread(read)

    async def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        crc32c: int | None,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        self._refuse_metadata(key, metadata)
        path = self._path(key)

        def write() -> ObjectMeta:
            with self._mapped("write", key), self._temporary(path) as temporary:
                with temporary.open("r+b", buffering=0) as file:
                    _write_all(file.fileno(), memoryview(data), 0)
                    _finish(file.fileno())
                return self._reveal(temporary, key, precondition)

        return await asyncio.to_thread(write)

    async def delete(self, key: str, *, generation: str = "") -> None:
        path = self._path(key)

        def remove() -> None:
            with self._mapped("delete", key, reading=True):
                status = _regular(path)
                if generation and generation_of(status) != generation:
                    raise self._changed(key, generation_of(status), generation)
                path.unlink()
            self._prune(path)

        await asyncio.to_thread(remove)

    async def list_page(
        self,
        prefix: str,
        *,
        start_offset: str = "",
        end_offset: str = "",
        delimiter: str = "",
        page_token: str = "",
        page_size: int | None = None,
    ) -> Page:
        low = max(prefix, start_offset, page_token)
        limit = page_size or self.capabilities.page_size

        def walk() -> Page:
            objects: list[ObjectMeta] = []
            prefixes: list[str] = []
            for key, entry in _walk(self._root, "", prefix, low):
                if end_offset and key >= end_offset:
                    break
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                common = key[: cut + len(delimiter)] if cut >= 0 else ""
                if common and prefixes and prefixes[-1] == common:
                    continue
                if len(objects) + len(prefixes) >= limit:
                    return Page(objects, prefixes, key)
                if common:
                    prefixes.append(common)
                    continue
                with suppress(FileNotFoundError):  # deleted while it was listed
                    objects.append(self._meta(key, entry.stat(), ""))
            return Page(objects, prefixes, "")

        with self._mapped("list", prefix):
            return await asyncio.to_thread(walk)

    async def compose(
        self,
        key: str,
        sources: Sequence[Source],
        *,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        self._refuse_metadata(key, metadata)
        path = self._path(key)
        paths = [self._path(source.key) for source in sources]

        def concatenate() -> ObjectMeta:
            with self._mapped("compose", key), self._temporary(path) as temporary:
                with temporary.open("r+b", buffering=0) as target:
                    for source, source_path in zip(sources, paths, strict=True):
                        self._append(target.fileno(), source, source_path)
                    _finish(target.fileno())
                return self._reveal(temporary, key, precondition)

        return await asyncio.to_thread(concatenate)

    def _append(self, target: int, source: Source, path: Path) -> None:
        with self._mapped("read", source.key, reading=True), path.open("rb", buffering=0) as file:
            self._meta(source.key, os.fstat(file.fileno()), source.generation)
            while data := file.read(_COPY_BYTES):
                _write_all(target, memoryview(data), None)

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        return await self.compose(key, [source], precondition=precondition)

    async def initiate_upload(
        self,
        key: str,
        *,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        self._refuse_metadata(key, metadata)
        path = self._path(key)

        def begin() -> Path:
            with self._mapped("write", key):
                return _new_temporary(path)

        temporary = await asyncio.to_thread(begin)
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

        def write() -> UploadedPart:
            at = offset
            with self._mapped("write", key), path.open("r+b", buffering=0) as file:
                for piece in pieces:
                    at += _write_all(file.fileno(), memoryview(piece), at)
            return UploadedPart(number, f"{offset}", at - offset)

        return await asyncio.to_thread(write)

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        precondition: Precondition,
    ) -> ObjectMeta:
        path = self._upload(key, upload_id)
        expected = sum(part.size for part in parts)

        def complete() -> ObjectMeta:
            with self._mapped("write", key):
                with path.open("r+b", buffering=0) as file:
                    _finish(file.fileno())
                    size = os.fstat(file.fileno()).st_size
                if size != expected:
                    uri = self.uri(key)
                    raise ChecksumError(f"{uri} has {size} bytes, not {expected}", uri=uri)
                meta = self._reveal(path, key, precondition)
                path.unlink(missing_ok=True)
                return meta

        meta = await asyncio.to_thread(complete)
        del self._uploads[upload_id]
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        if upload_id in self._uploads:
            path = self._upload(key, upload_id)
            with self._mapped("abort the upload of", key):
                await asyncio.to_thread(self._drop, path)
            self._uploads.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[tuple[str, str]]:
        return sorted(
            (key, upload_id)
            for upload_id, (key, _) in self._uploads.items()
            if key.startswith(prefix)
        )

    async def aclose(self) -> None:
        """Do nothing: no file is kept open."""

    def _meta(self, key: str, status: os.stat_result, generation: str) -> ObjectMeta:
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
            updated=datetime.fromtimestamp(status.st_mtime, UTC),
        )

    def _changed(self, key: str, actual: str | None, expected: str) -> PreconditionFailedError:
        uri = self.uri(key)
        return PreconditionFailedError(f"{uri} has generation {actual}, not {expected}", uri=uri)

    def _refuse_metadata(self, key: str, metadata: Mapping[str, str] | None) -> None:
        if metadata:
            uri = self.uri(key)
            raise StorageError(f"{uri} cannot carry metadata: files keep none", uri=uri)

    def _reveal(self, temporary: Path, key: str, precondition: Precondition) -> ObjectMeta:
        path = self._path(key)
        if precondition.if_absent:
            try:
                os.link(temporary, path)
            except FileExistsError as exc:
                raise self._changed(key, "already", "absent") from exc
        else:
            expected = precondition.if_generation_match
            if expected is not None and (actual := _current(path)) != expected:
                raise self._changed(key, actual, expected)
            temporary.replace(path)
        _sync_directory(path.parent)
        return self._meta(key, path.stat(), "")

    @contextmanager
    def _temporary(self, path: Path) -> Iterator[Path]:
        temporary = _new_temporary(path)
        try:
            yield temporary
        finally:
            self._drop(temporary)

    def _drop(self, temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        self._prune(temporary)

    def _prune(self, path: Path) -> None:
        """Remove the directories that held nothing but this: a bucket has no directories."""
        for parent in path.parents:
            if parent == self._root or not parent.is_relative_to(self._root):
                break
            try:
                parent.rmdir()
            except OSError:
                break

    @contextmanager
    def _mapped(self, action: str, key: str, *, reading: bool = False) -> Iterator[None]:
        """Map OSError to ours, naming the object.

        Reading `a` or `a/b/c` where there is an object `a/b` finds nothing; writing them fails.
        """
        uri = self.uri(key)
        try:
            yield
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            if not (reading or isinstance(exc, FileNotFoundError)):
                raise StorageError(
                    f"could not {action} {uri}: it is below an object, or objects are below it",
                    uri=uri,
                ) from exc
            raise NotFoundError(
                f"could not {action} {uri}: there is no such object", uri=uri
            ) from exc
        except PermissionError as exc:
            raise PermissionDeniedError(
                f"could not {action} {uri}: {exc.strerror}", uri=uri
            ) from exc
        except OSError as exc:
            raise StorageError(f"could not {action} {uri}: {exc.strerror or exc}", uri=uri) from exc


def _regular(path: Path) -> os.stat_result:
    if path.is_dir():
        raise FileNotFoundError(path)
    return path.stat()


def _current(path: Path) -> str | None:
    """Return the generation of the object at a path, or None where there is none."""
    try:
        return generation_of(_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _new_temporary(path: Path) -> Path:
    """Make an empty file beside a path, and the directories above it."""
    temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    for attempt in range(_MAX_DIRECTORY_RACES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch(exist_ok=False)
            break
        except (FileNotFoundError, FileExistsError):
            # A delete of the last object in a directory removes it, here between two lines or
            # within `mkdir`, which looks at what it met.
            if attempt == _MAX_DIRECTORY_RACES - 1 or path.parent.is_file():
                raise
    return temporary


def _finish(descriptor: int) -> None:
    """Stamp and sync a file that is about to become visible.

    The kernel stamps with a clock that ticks every 4 ms: an inode number that is given out again
    within one tick would repeat a generation.
    """
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
    os.fsync(descriptor)


def _write_all(descriptor: int, view: memoryview, offset: int | None) -> int:
    """Write all of `view` (at `offset`, or at the file's position) and return its length."""
    view = view.cast("B")
    done = 0
    while done < view.nbytes:
        if offset is None:
            done += os.write(descriptor, view[done:])
        else:
            done += os.pwrite(descriptor, view[done:], offset + done)
    return done


def _sync_directory(path: Path) -> None:
    """Make a rename durable: the directory entry is data of its own."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(
    directory: Path, base: str, prefix: str, low: str
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (key, entry) of every file of `prefix` whose key is not below `low`, sorted by key."""
    try:
        with os.scandir(directory) as found:
            entries = [entry for entry in found if not entry.name.startswith(_TEMPORARY)]
    except FileNotFoundError:
        return
    rows = sorted(((e.name + "/" if e.is_dir() else e.name, e) for e in entries), key=itemgetter(0))
    for name, entry in rows:
        key = base + name
        if name.endswith("/"):
            # A whole directory is left out where none of its keys can begin with the prefix or
            # reach the start.
            related = key.startswith(prefix) or prefix.startswith(key)
            if related and key + "\U0010ffff" >= low:
                yield from _walk(Path(entry.path), key, prefix, low)
        elif key.startswith(prefix) and key >= low:
            yield key, entry
