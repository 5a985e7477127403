"""Uploads and downloads of local files, in parallel, with bounded memory.

    file -> parts, each in its own memory -> writer -> all stored, file unchanged? -> publish
    object -> ranges -> .aioflux-partial-<hash> beside the target -> crc32c of the object -> rename

The buffers of all file transfers of a session have at most `max_in_flight_bytes`. Like `cp` of
Unix, a download does not call fsync.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import stat
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._concurrency.run_to_completion import run_in_thread
from aioflux._local_files import (
    TEMPORARY,
    create_file,
    errors_name,
    fill,
    mode_of_target,
    open_regular,
    reject_changed,
    write_all,
)
from aioflux._transfer.read import fetch_pinned, head_of, read_verified
from aioflux._transfer.read_plan import plan_ranges
from aioflux._transfer.read_range import Pin, read_range
from aioflux._transfer.session import call_hook
from aioflux._transfer.write import ObjectWriter
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import ChecksumError, NotFoundError, StorageError

if TYPE_CHECKING:
    from aioflux._services.base import UploadedPart, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_RECORD: Final = struct.Struct("<II")
"""Record of one range: 1 if it was received, and its crc32c."""


class TransferProgress:
    """Number of bytes of one transfer that are done; the hook is called with each difference."""

    def __init__(self, hook: Callable[[int], object] | None) -> None:
        self._hook = hook
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Set the number of bytes; it is lower than before if bytes must be read again."""
        change, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        if self._hook is not None and change:
            call_hook(self._hook, change)

    def add(self, num_bytes: int) -> None:
        """Add bytes that are done."""
        self.set(self._num_bytes + num_bytes)


async def upload_file(
    session: Session, request: WriteRequest, path: str, progress: TransferProgress
) -> ObjectMeta:
    """Write an object from a local file, and return its metadata.

    Raises:
        OSError: The file cannot be read.
        ValueError: The path is not a regular file, or the file changed before its last part was
            stored; of a file of one part, before it was read.
    """
    descriptor = open_regular(path)
    writer = _FileWriter(session, request, path, progress)
    try:
        before = os.fstat(descriptor)
        async with writer:
            while (num_left := before.st_size - writer.tell()) > 0:
                if not await writer.read_part(descriptor, num_left):
                    break
            await writer.store_parts()
            # One byte more than the size, to detect a file that has grown.
            num_read = writer.tell() + len(os.pread(descriptor, 1, before.st_size))
            reject_changed(path, before, os.fstat(descriptor), num_read)
    finally:
        os.close(descriptor)
        writer.release_unsent()
    progress.set(before.st_size)
    return writer.meta


class _FileWriter(ObjectWriter):
    """A writer of an object whose parts are read from a file, each into its own memory."""

    def __init__(
        self, session: Session, request: WriteRequest, path: str, progress: TransferProgress
    ) -> None:
        super().__init__(session, request)
        self._path = path
        self._budget = session.file_memory
        self._progress = progress

    async def read_part(self, descriptor: int, num_left: int) -> int:
        """Read the next part of a file, up to `num_left` bytes; return the number of bytes."""
        if self._num_unsent:
            await self._send_unsent()
        size = min(self._part_size, num_left)
        await self._hold(size)
        buffer = bytearray(size)
        with errors_name(self._path):
            size = await run_in_thread(fill, descriptor, memoryview(buffer), self._offset)
        self._buffer, self._num_unsent = buffer, size
        return size

    async def store_parts(self) -> None:
        """Wait until all parts are stored; do nothing if the file is one part."""
        if self._parts:
            await self._send_unsent()
            await asyncio.gather(*self._parts)

    async def _send_part(
        self, number: int, views: tuple[memoryview, ...], offset: int
    ) -> tuple[UploadedPart, int]:
        sent = await super()._send_part(number, views, offset)
        self._progress.add(sum(map(len, views)))
        return sent

    def release_unsent(self) -> None:
        """Release the memory that the last part holds, if it was not sent as a part."""
        self._budget.release(self._num_held)
        self._num_held = 0


async def download_file(
    session: Session, key: str, path: str, meta: ObjectMeta | None, progress: TransferProgress
) -> ObjectMeta:
    """Read an object into a local file, which appears whole, and return its metadata.

    Raises:
        ChecksumError: The bytes did not match in any read.
        OSError: The file cannot be written.
        PreconditionFailedError: `meta` is None, and the object was replaced during each read.
        ValueError: The path exists and is not a regular file.
    """
    if meta is None:
        return await fetch_pinned(
            session, key, lambda current: _download(session, current, path, progress)
        )
    can_ask = session.options.verify and session.service.capabilities.checksums
    if not meta.size or (meta.crc32c is None and can_ask):
        meta = await head_of(session, key, meta)
    return await _download(session, meta, path, progress)


async def _download(
    session: Session, meta: ObjectMeta, path: str, progress: TransferProgress
) -> ObjectMeta:
    file = PartialFile(path, meta, session.options.range_size_bytes)

    async def read() -> tuple[None, int | None, int]:
        progress.set(0)
        checksum = await _fill_file(session, meta, file, progress)
        if meta.crc32c is not None and meta.crc32c != checksum:
            file.forget()
        return None, meta.crc32c, checksum

    try:
        await run_in_thread(file.open)
        await read_verified(session, meta.key, read)
        session.count_unverified(meta.size, is_whole=True, expected=meta.crc32c)
        await run_in_thread(file.publish)
    except BaseException as exc:
        is_local = isinstance(exc, OSError) and not isinstance(exc, StorageError)
        is_useless = is_local or isinstance(exc, (ChecksumError, NotFoundError))
        file.close(may_resume=not is_useless)
        raise
    file.close()
    return meta


async def _fill_file(
    session: Session, meta: ObjectMeta, file: PartialFile, progress: TransferProgress
) -> int:
    """Read all ranges that the file does not have, and return the crc32c of the object."""
    pin, budget = Pin(meta.generation, meta.size, meta.crc32c), session.file_memory
    is_covered = meta.crc32c is not None

    async def transfer(index: int) -> int:
        start, end = file.ranges[index]
        await budget.acquire(end - start)
        try:
            buffer = session.memory.allocate(end - start)
            view, checksum = buffer.view, None
            if index in file.recorded:
                checksum = await run_in_thread(file.read_recorded, index, view)
            if checksum is None:
                checksum = await read_range(
                    session,
                    meta.key,
                    view,
                    start=start,
                    pin=pin,
                    is_covered=is_covered,
                    is_hashed=True,
                )
                await run_in_thread(file.write, index, view, checksum)
            session.memory.offer(buffer.finish())
        finally:
            budget.release(end - start)
        progress.add(end - start)
        return checksum

    indexes, max_in_flight = range(len(file.ranges)), session.options.max_in_flight
    combined = 0
    for index, checksum in enumerate(
        await gather_bounded(transfer, indexes, max_in_flight=max_in_flight)
    ):
        start, end = file.ranges[index]
        combined = combine_crc32c(combined, checksum, end - start)
    return combined


class PartialFile:
    """A file beside the target with the received ranges of one generation of an object.

        bytes of the object, at their offsets | sha256 of what they are | record of each range

    The name is derived from the name of the target, so that the next call finds what a killed one
    received. It is locked. If it is in use, or belongs to another user, or the object has no
    generation, a file with a random name takes its place, which no other call continues.

    Attributes:
        ranges: Ranges of the object.
        recorded: CRC32C of the received ranges, by index.
    """

    def __init__(self, path: str, meta: ObjectMeta, range_size_bytes: int) -> None:
        self.ranges = plan_ranges(0, meta.size, range_size_bytes)
        self.recorded: dict[int, int] = {}
        self._target = path
        self._size = meta.size
        what = repr((meta.uri, meta.generation, meta.size, range_size_bytes))
        self._identity = hashlib.sha256(os.fsencode(what)).digest()
        self._is_pinned = bool(meta.generation)
        self._path = ""
        self._descriptor = -1
        self._may_resume = False
        self._is_published = False

    def open(self) -> None:
        """Create the file, or open the file of an earlier call and read its record."""
        with errors_name(self._target):
            mode = mode_of_target(self._target)
            directory, name = os.path.split(self._target)
            digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
            self._path = f"{directory}/{TEMPORARY}partial-{digest}"
            if self._is_pinned:
                with suppress(OSError):
                    self._descriptor = self._open_locked(mode)
            self._may_resume = self._descriptor >= 0
            if not self._may_resume:
                self._path = f"{directory}/{TEMPORARY}{uuid.uuid4().hex}"
                self._descriptor = create_file(self._path, mode)
            self._read_record()

    def _open_locked(self, mode: int | None) -> int:
        """Open and lock the file that other calls may continue.

        Raises:
            OSError: It is in use, belongs to another user, or cannot be created or locked.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            descriptor = os.open(self._path, flags, 0o666 if mode is None else mode)
            try:
                if _lock(descriptor, self._path):
                    if mode is not None:
                        os.fchmod(descriptor, mode)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _read_record(self) -> None:
        size = len(self._identity) + _RECORD.size * len(self.ranges)
        found = os.pread(self._descriptor, size, self._size)
        if not found.startswith(self._identity):
            self.forget()
            return
        record = found[len(self._identity) :]
        record = record[: len(record) // _RECORD.size * _RECORD.size]
        for index, (is_received, checksum) in enumerate(_RECORD.iter_unpack(record)):
            if is_received:
                self.recorded[index] = checksum

    def forget(self) -> None:
        """Drop all bytes, which are those of another generation, or wrong."""
        self.recorded.clear()
        with errors_name(self._target):
            os.ftruncate(self._descriptor, 0)
            write_all(self._descriptor, self._identity, self._size)

    def read_recorded(self, index: int, view: memoryview) -> int | None:
        """Return the crc32c of a recorded range; None if its bytes are not those received.

        After a power failure, the record may be on the disk, and the bytes not.
        """
        with errors_name(self._target):
            num_read = fill(self._descriptor, view, self.ranges[index][0])
        checksum = crc32c(view[:num_read])
        return checksum if checksum == self.recorded[index] else None

    def write(self, index: int, view: memoryview, checksum: int) -> None:
        """Write a range, and then its record."""
        start, _ = self.ranges[index]
        offset = self._size + len(self._identity) + index * _RECORD.size
        with errors_name(self._target):
            write_all(self._descriptor, view, start)
            write_all(self._descriptor, _RECORD.pack(1, checksum), offset)
        self.recorded[index] = checksum

    def publish(self) -> None:
        """Give the complete file the name of the target."""
        with errors_name(self._target):
            os.ftruncate(self._descriptor, self._size)
            os.replace(self._path, self._target)
        self._is_published = True

    def close(self, *, may_resume: bool = False) -> None:
        """Close the file, and remove it unless it is published or another call may continue it."""
        if self._descriptor < 0:
            return
        if not self._is_published and not (may_resume and self._may_resume and self.recorded):
            with suppress(OSError):
                os.unlink(self._path)
        # `close` alone would not unlock it while a forked child also has the file open.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def _lock(descriptor: int, path: str) -> bool:
    """Lock a file, and return whether it still has its name: its last user may have published it.

    Raises:
        OSError: The file is in use, or belongs to another user, or locks are not supported.
    """
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "not a file of this user", path)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        return os.path.samestat(status, os.stat(path))
    except FileNotFoundError:
        return False
