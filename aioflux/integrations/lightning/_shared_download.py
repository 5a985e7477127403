"""One download of a checkpoint, shared by all ranks of a host that load it at the same time.

    first rank     acquire the download lock, download into memory, write the path of the memory to
                   the lock file, downgrade the lock to a shared lock
    other ranks    wait for a shared lock, read the path, open the memory, release the lock
    first rank     wait until the other ranks in the queue have opened the memory (an exclusive
                   queue lock), then close it

Lightning loads a checkpoint on every rank. The ranks of one host share its network link, and
without this module each would download and hold its own copy. They do not use a collective, which
would hang if only some ranks load, nor a file on disk, which would limit the speed to the disk's.

The memory is freed with the last process that maps it. A killed process leaves two files of a few
bytes in the temporary directory. A rank that starts after all others have finished downloads the
checkpoint again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
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
    from aioflux.options import StoreOptions

_MEMFD = "/memfd:aioflux-checkpoint"
"""Prefix of the name that Linux shows for the memory of a `MemoryFile`."""
_ZIP_MAGIC = b"PK\x03\x04"


def has_other_ranks() -> bool:
    """Return whether the training has several ranks, and the system can share memory."""
    return (
        sys.platform == "linux"
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def load_shared(
    uri: str, options: StoreOptions, *, map_location: Any, weights_only: bool | None, mmap: bool
) -> Any:
    """Load a checkpoint of one object from a download that the ranks of this host share.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: The bytes did not match the checksum in any of four reads.
    """
    with shared_download(uri, options) as path:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        return torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=mmap and is_zip
        )


@contextmanager
def shared_download(uri: str, options: StoreOptions) -> Iterator[str]:
    """Yield a path by which this process can read the whole object from memory."""
    directory = _private_directory()
    if directory is None:
        with _download(uri, options) as file:
            yield file.path
        return
    identity = f"{uri} {options.get('endpoint_url')}"
    lock_path = directory / hashlib.sha256(identity.encode()).hexdigest()
    with ExitStack() as stack:
        # Every rank shares the queue lock until it has opened the memory. The first rank waits for
        # an exclusive queue lock before it closes the memory: without this wait, ranks that just
        # acquired the download lock could find the memory closed.
        queue_lock = stack.enter_context(_open_lock_file(lock_path.with_suffix(".queue")))
        fcntl.flock(queue_lock, fcntl.LOCK_SH)
        download_lock, is_first = stack.enter_context(_acquire_lock(lock_path))
        if is_first:
            stack.callback(_remove_lock_files, lock_path, queue_lock)
            file = stack.enter_context(_download(uri, options))
            _write_memory_path(download_lock, file)
            fcntl.flock(download_lock, fcntl.LOCK_SH)  # lets the other ranks continue
            yield file.path
            fcntl.flock(queue_lock, fcntl.LOCK_EX)
            return
        memory = _open_memory(download_lock)
        fcntl.flock(queue_lock, fcntl.LOCK_UN)
        fcntl.flock(download_lock, fcntl.LOCK_UN)
        if memory is None:
            file = stack.enter_context(_download(uri, options))
            yield file.path
        else:
            with os.fdopen(memory, "rb"):
                yield f"/proc/self/fd/{memory}"


@contextmanager
def _download(uri: str, options: StoreOptions) -> Iterator[MemoryFile]:
    store_uri, key = split_object_uri(uri)
    _, file = _bridge.run(read_into_memory(store_uri, key, options, MemoryFile))
    try:
        yield file
    finally:
        file.close()


def _private_directory() -> Path | None:
    """Return a directory that only this user can read and write, or None if that is impossible."""
    path = Path(tempfile.gettempdir(), f"aioflux-{os.getuid()}")
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError:  # The temporary directory is not writable.
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return path if is_own and not status.st_mode & 0o077 else None


@contextmanager
def _open_lock_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _acquire_lock(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the locked file, and whether this rank is the first and has an exclusive lock."""
    while True:
        with _open_lock_file(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)  # waits while the first rank downloads
                yield lock, False
                return
            if _is_same_file(path, lock):
                yield lock, True
                return
            # The first rank has finished, and removed the file before this rank locked it.


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_lock_files(path: Path, queue_lock: int) -> None:
    if _is_same_file(path.with_suffix(".queue"), queue_lock):
        path.with_suffix(".queue").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _write_memory_path(lock: int, file: MemoryFile) -> None:
    record = {"path": f"/proc/{os.getpid()}/fd/{file.fd}", "size": os.fstat(file.fd).st_size}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(record).encode(), 0)


def _open_memory(lock: int) -> int | None:
    """Open the memory of the first rank; return None if its download failed or it has exited."""
    try:
        record = json.loads(os.pread(lock, 4096, 0))
        memory = os.open(record["path"], os.O_RDONLY | os.O_CLOEXEC)
    except (ValueError, OSError):
        return None
    name = os.readlink(f"/proc/self/fd/{memory}")
    if name.startswith(_MEMFD) and os.fstat(memory).st_size == record["size"]:
        return memory
    os.close(memory)
    return None
