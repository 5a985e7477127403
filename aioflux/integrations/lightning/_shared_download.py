"""One download for all ranks of a host that load the same checkpoint.

    first rank   lock, download into memory, write down where it is, let the others in
    others       wait for the lock, open that memory, let go of the lock

Lightning loads a checkpoint on every rank. Object storage serves many hosts at once, but the ranks
of one host share its link, and would each hold a copy. No rank talks to another one: a collective
would hang where some do not load, and a file on a disk would be as slow as the disk. What nobody
waits for any more is gone with its last process; of a killed one two files of a few bytes stay in
the temporary directory. A rank that comes late downloads again.
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
from aioflux.checkpoint._store.mapping import MemoryFile, read_into_memory

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.options import StoreOptions

__all__ = ["has_company", "load_together", "opened_together"]

_MEMFD = "/memfd:aioflux-checkpoint"
"""What the system calls the memory of a `MemoryFile`."""
_ZIP_MAGIC = b"PK\x03\x04"


def has_company() -> bool:
    """Tell whether there are other ranks, and memory can be shared with them."""
    return (
        sys.platform == "linux"
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def load_together(
    uri: str, options: StoreOptions, *, map_location: Any, weights_only: bool | None, mmap: bool
) -> Any:
    """Load a checkpoint as `aioflux.checkpoint.load`, with what other ranks of this host read.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: Its bytes do not match its checksum, three times.
    """
    with opened_together(uri, options) as path:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        return torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=mmap and is_zip
        )


@contextmanager
def opened_together(uri: str, options: StoreOptions) -> Iterator[str]:
    """Give the path, in this process, of memory that holds a whole object."""
    directory = _own_directory()
    if directory is None:
        with _downloaded(uri, options) as file:
            yield file.path
        return
    of_what = f"{uri} {options.get('endpoint_url')}"
    lock = directory / hashlib.sha256(of_what.encode()).hexdigest()
    with ExitStack() as stack:
        # Held from here until the memory is open: the first rank waits for it at the end. That the
        # others were woken by its lock does not say that they have run since.
        queue = stack.enter_context(_opened(lock.with_suffix(".queue")))
        fcntl.flock(queue, fcntl.LOCK_SH)
        held, is_first = stack.enter_context(_entered(lock))
        if is_first:
            stack.callback(_remove, lock, queue)
            file = stack.enter_context(_downloaded(uri, options))
            _tell(held, file)
            fcntl.flock(held, fcntl.LOCK_SH)  # lets the others in
            yield file.path
            fcntl.flock(queue, fcntl.LOCK_EX)
            return
        opened = _open_told(held)
        fcntl.flock(queue, fcntl.LOCK_UN)
        fcntl.flock(held, fcntl.LOCK_UN)
        if opened is None:
            file = stack.enter_context(_downloaded(uri, options))
            yield file.path
        else:
            with os.fdopen(opened, "rb"):
                yield f"/proc/self/fd/{opened}"


@contextmanager
def _downloaded(uri: str, options: StoreOptions) -> Iterator[MemoryFile]:
    root, key = split_object_uri(uri)
    _, file = _bridge.run(read_into_memory(root, key, options, MemoryFile))
    try:
        yield file
    finally:
        file.close()


def _own_directory() -> Path | None:
    """Return a directory in which nobody else can lay out anything, if there can be one."""
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
def _entered(lock: Path) -> Iterator[tuple[int, bool]]:
    """Give the open lock, and whether this rank is the first and holds it alone."""
    while True:
        with _opened(lock) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while the first one downloads
                yield descriptor, False
                return
            if _is_in_place(lock, descriptor):
                yield descriptor, True
                return
            # Removed between opening and locking: the first one has ended.


def _is_in_place(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(lock: Path, queue: int) -> None:
    if _is_in_place(lock.with_suffix(".queue"), queue):
        lock.with_suffix(".queue").unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


def _tell(descriptor: int, file: MemoryFile) -> None:
    told = {"path": f"/proc/{os.getpid()}/fd/{file.fd}", "size": os.fstat(file.fd).st_size}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(told).encode(), 0)


def _open_told(descriptor: int) -> int | None:
    """Open the memory that the first rank told of; None where it failed, or is gone."""
    try:
        told = json.loads(os.pread(descriptor, 4096, 0))
        opened = os.open(told["path"], os.O_RDONLY | os.O_CLOEXEC)
    except (ValueError, OSError):
        return None
    name = os.readlink(f"/proc/self/fd/{opened}")
    if name.startswith(_MEMFD) and os.fstat(opened).st_size == told["size"]:
        return opened
    os.close(opened)
    return None
