"""One download for all ranks of a host that load the same checkpoint.

    first rank     lock, download into memory, write its path to the lock file, share the lock
    other ranks    wait for the lock, open that memory, release the lock

Lightning loads a checkpoint on every rank. Object storage serves many hosts at once, but the ranks
of one host share its network link, and would each hold a copy. The ranks use no collective, which
would hang if some do not load, and no file on a disk, which would be as slow as the disk. The
memory is freed with the last process that maps it; a killed process leaves two files of a few bytes
in the temporary directory. A rank that starts after the others have finished downloads again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aioflux import _bridge
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._tag_checkpoints import MemoryFile, read_into_memory

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.options import StoreOptions

__all__ = ["has_other_ranks", "load_shared", "shared_download"]

_MEMFD = "/memfd:aioflux-checkpoint"
"""Prefix of the system's name for the memory of a `MemoryFile`."""
_ZIP_MAGIC = b"PK\x03\x04"


def has_other_ranks() -> bool:
    """Return whether there are other ranks, with which memory can be shared."""
    return (
        sys.platform == "linux"
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def load_shared(
    uri: str, options: StoreOptions, *, map_location: Any, weights_only: bool | None, mmap: bool
) -> Any:
    """Load a checkpoint as `aioflux.checkpoint.load`, from one download for this host.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: Its bytes do not match its checksum, in three attempts.
    """
    with shared_download(uri, options) as path:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        return torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=mmap and is_zip
        )


@contextmanager
def shared_download(uri: str, options: StoreOptions) -> Iterator[str]:
    """Yield the path, in this process, of memory that holds a whole object."""
    directory = _own_directory()
    if directory is None:
        with _downloaded(uri, options) as file:
            yield file.path
        return
    identity = f"{uri} {options.get('endpoint_url')}"
    lock = directory / hashlib.sha256(identity.encode()).hexdigest()
    with ExitStack() as stack:
        # Held until the memory is open: the first rank waits for this lock before it closes the
        # memory, which the ranks that its other lock has woken may not have opened yet.
        queue = stack.enter_context(_opened(lock.with_suffix(".queue")))
        fcntl.flock(queue, fcntl.LOCK_SH)
        descriptor, is_first = stack.enter_context(_locked(lock))
        if is_first:
            stack.callback(_remove, lock, queue)
            file = stack.enter_context(_downloaded(uri, options))
            _write_path(descriptor, file)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # wakes the others
            yield file.path
            fcntl.flock(queue, fcntl.LOCK_EX)
            return
        memory = _open_path(descriptor)
        fcntl.flock(queue, fcntl.LOCK_UN)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if memory is None:
            file = stack.enter_context(_downloaded(uri, options))
            yield file.path
        else:
            with os.fdopen(memory, "rb"):
                yield f"/proc/self/fd/{memory}"


@contextmanager
def _downloaded(uri: str, options: StoreOptions) -> Iterator[MemoryFile]:
    store_uri, key = split_object_uri(uri)
    _, file = _bridge.run(read_into_memory(store_uri, key, options, MemoryFile))
    try:
        yield file
    finally:
        file.close()


def _own_directory() -> Path | None:
    """Return a directory that only this user can write to, None if there is none."""
    path = Path(tempfile.gettempdir(), f"aioflux-{os.getuid()}")
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError:  # a temporary directory that cannot be written
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return path if is_own and not status.st_mode & 0o077 else None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(lock: Path) -> Iterator[tuple[int, bool]]:
    """Yield the open lock, and whether this rank is the first, with an exclusive lock."""
    while True:
        with _opened(lock) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while the first rank downloads
                yield descriptor, False
                return
            if _is_in_place(lock, descriptor):
                yield descriptor, True
                return
            # Removed between opening and locking: the first rank has finished.


def _is_in_place(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(lock: Path, queue: int) -> None:
    if _is_in_place(lock.with_suffix(".queue"), queue):
        lock.with_suffix(".queue").unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


def _write_path(descriptor: int, file: MemoryFile) -> None:
    record = {"path": f"/proc/{os.getpid()}/fd/{file.fd}", "size": os.fstat(file.fd).st_size}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _open_path(descriptor: int) -> int | None:
    """Open the memory of the first rank; None if that has failed, or has ended."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        memory = os.open(record["path"], os.O_RDONLY | os.O_CLOEXEC)
    except (ValueError, OSError):
        return None
    name = os.readlink(f"/proc/self/fd/{memory}")
    if name.startswith(_MEMFD) and os.fstat(memory).st_size == record["size"]:
        return memory
    os.close(memory)
    return None
