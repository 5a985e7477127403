"""Node daemon, which keeps the saves of a node's trainers in memory and uploads them.

trainers --(requests, shared memory)--> node daemon --(uploads)--> local disk, bucket
trainers <--(shared memory)--
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import pickle
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from aioflux.checkpoint._save.process_uploader import (
    MAX_FDS,
    MAX_READ_BYTES,
    Inbox,
    encode,
    picklable_error,
)
from aioflux.checkpoint._tag_checkpoints import new_save_id
from aioflux.compat.nebula._memory_tier import COMMITTED, MemoryTier, Version
from aioflux.compat.nebula._settings import credential_variables
from aioflux.compat.nebula._storage_tier import DISK, STORAGE, StorageTier
from aioflux.errors import AiofluxError, CheckpointError

if TYPE_CHECKING:
    from aioflux.compat.nebula._memory_tier import Segment
    from aioflux.compat.nebula._settings import Settings
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_POLL_SECONDS: Final = 0.5
"""Time between two checks of conditions that no event reports, such as the time, in seconds."""


@dataclass(slots=True)
class TrainerConnection:
    """Connection to one process that saves or loads checkpoints."""

    number: int
    """Number of the connection, which is also the number of the trainer."""
    sock: socket.socket
    inbox: Inbox = field(default_factory=Inbox)
    response_fds: list[int] = field(default_factory=list)
    """Descriptors to send with the next response."""
    freed: list[int] = field(default_factory=list)
    """Numbers of this trainer's segments that were freed since the last response to `allocate`."""
    loading: list[Segment] = field(default_factory=list)
    """Segments that the trainer is loading from."""

    async def receive(self) -> tuple[bytes, list[int]]:
        """Wait for bytes and descriptors, and return them; no bytes after a disconnect."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, MAX_READ_BYTES, MAX_FDS)
            except BlockingIOError:
                is_ready = loop.create_future()
                loop.add_reader(self.sock.fileno(), _set, is_ready)
                try:
                    await is_ready
                finally:
                    loop.remove_reader(self.sock.fileno())
            else:
                return data, fds

    async def send_response(self, response: Any) -> None:
        """Send the response to a request, with `response_fds`."""
        data = memoryview(encode(response))
        fds, self.response_fds = self.response_fds, []
        if fds:  # This cannot block: the trainer has received all earlier responses.
            sent = socket.send_fds(self.sock, [data], fds)
            data = data[sent:]
        await asyncio.get_running_loop().sock_sendall(self.sock, data)


def _set(is_ready: asyncio.Future[None]) -> None:
    if not is_ready.done():
        is_ready.set_result(None)


@dataclass(slots=True)
class _MappedSegment:
    """A segment that is mapped into the memory of the daemon."""

    fd: int
    map: mmap.mmap

    def close(self) -> None:
        """Unmap and truncate the segment, which frees its memory even if a trainer maps it."""
        with suppress(BufferError):  # An upload is still reading the map.
            self.map.close()
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


class NodeDaemon:
    """Server for the trainers of one node.

    Args:
        save: Function that saves a version to a tier.
        retry_seconds: Pause before a failed save is retried. The store's own retries come before.
    """

    def __init__(
        self,
        *,
        save: Callable[..., Awaitable[None]] = StorageTier.save,
        retry_seconds: float = 30.0,
    ) -> None:
        self.memory = MemoryTier(0)
        self.tiers: list[StorageTier] = []
        self.linger_seconds = 600.0
        self.is_stopping = False
        self._save = save
        self._retry_seconds = retry_seconds
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._trainers: dict[int, TrainerConnection] = {}
        self._num_connections = 0
        self._mapped: dict[int, _MappedSegment] = {}
        self._replaced_stores: list[Store] = []
        self._savers: list[asyncio.Task[None]] = []
        self._commit_seconds = 600.0
        self._last_save_ms = 0
        self._changed = asyncio.Event()
        self._last_disconnect = time.monotonic()

    @property
    def has_served(self) -> bool:
        return self._num_connections > 0

    @property
    def is_idle(self) -> bool:
        """Return whether no trainer is connected, and no save is due or in progress."""
        return (
            not self._trainers
            and all(self._next_version(tier) is None for tier in self.tiers)
            and not any(version.num_readers for version in self.memory.versions)
        )

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until `notify` is called, or until the time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def notify(self) -> None:
        """Wake the tasks that wait in `wait_for_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, sock: socket.socket) -> None:
        """Serve one trainer until it disconnects."""
        self._num_connections += 1
        trainer = TrainerConnection(self._num_connections, sock)
        self._trainers[trainer.number] = trainer
        sock.setblocking(False)
        try:
            while True:
                data, fds = await trainer.receive()
                if not data:
                    return
                try:
                    messages = list(trainer.inbox.feed(data, fds))
                except Exception as exc:  # Unpickling imports modules, and may raise any error.
                    error = CheckpointError(
                        "the node daemon could not unpickle the arguments of init "
                        f"({type(exc).__name__}: {exc}); functions among them must be importable "
                        "there: define them in a module, not in the script"
                    )
                    await trainer.send_response(("error", error))
                    return
                for message in messages:
                    await trainer.send_response(await self.handle(trainer, message))
        except OSError:
            pass  # The trainer has died.
        finally:
            del self._trainers[trainer.number]
            self._last_disconnect = time.monotonic()
            for fd in trainer.inbox.fds:
                os.close(fd)
            for segment in trainer.loading:
                self.memory.release(segment)
            self.memory.remove_owner(trainer.number, is_last=not self._trainers)
            self._unmap_freed()
            self.notify()
            sock.close()

    async def handle(self, trainer: TrainerConnection, message: Any) -> tuple[str, Any]:
        """Run the method of a request; return `("ok", result)` or `("error", exception)`."""
        name, *arguments = message
        try:
            return "ok", await getattr(self, f"_do_{name}")(trainer, *arguments)
        except Exception as exc:  # The client raises it in the trainer.
            trainer.response_fds = []
            return "error", picklable_error(exc)
        finally:
            # Close the descriptors of this request that the method has not taken over.
            unused, trainer.inbox.fds = trainer.inbox.fds, []
            for fd in unused:
                os.close(fd)
            self._unmap_freed()
            self.notify()

    async def _do_hello(
        self, _: TrainerConnection, settings: Settings, variables: dict[str, str] | None = None
    ) -> None:
        """Apply the settings and credential variables of a trainer that has connected."""
        has_new_credentials = variables is not None and _use_credentials(variables)
        self.memory.budget_bytes = settings.budget_bytes
        self.memory.retention = settings.retention
        self.is_stopping = False
        self._commit_seconds = settings.commit_seconds
        self.linger_seconds = settings.linger_seconds
        new_tiers = []
        if settings.local is not None:
            new_tiers.append(StorageTier(DISK, settings.local, 0.0, settings.retention))
        if settings.store is not None:
            new_tiers.append(StorageTier(STORAGE, settings.store, settings.interval_seconds))
        existing_tiers = {tier.name: tier for tier in self.tiers}
        for tier in new_tiers:
            if (existing := existing_tiers.get(tier.name)) is not None:
                existing.interval_seconds, existing.keep = tier.interval_seconds, tier.keep
                is_equal = pickle.dumps(existing.store) == pickle.dumps(tier.store)
                if has_new_credentials or not is_equal:
                    self._replaced_stores.append(existing.store)
                    existing.store = tier.store
                continue
            self.tiers.append(tier)
            self._savers.append(asyncio.get_running_loop().create_task(self.run_saver(tier)))
        for version in self.memory.versions:
            version.failures.clear()  # so that failed saves are retried with the new stores
        self.memory.num_tiers = len(self.tiers)
        self.memory.remove_orphaned_parts()
        await self._close_replaced_stores()

    async def _do_allocate(
        self, trainer: TrainerConnection, size: int
    ) -> tuple[str, int, int, list[int]]:
        """Wait for a segment; return its kind, number, size, and numbers of freed segments."""
        while True:
            allocation = self.memory.allocate(trainer.number, size)
            self._unmap_freed()
            if (segment := allocation.segment) is not None:
                freed, trainer.freed = trainer.freed, []
                return allocation.kind, segment.number, segment.size, freed
            self.notify()
            await self.wait_for_change(_POLL_SECONDS)

    async def _do_add_part(
        self,
        trainer: TrainerConnection,
        number: int,
        part: tuple[str, str, int],
        num_files: int,
        seconds: float,
    ) -> None:
        """Add a part, which may complete its version."""
        segment = self.memory.segments[number]
        if number not in self._mapped:
            try:
                mapped = mmap.mmap(trainer.inbox.fds[0], segment.size, prot=mmap.PROT_READ)
            except OSError:
                self.memory.cancel(number, is_created=False)
                raise
            self._mapped[number] = _MappedSegment(trainer.inbox.fds.pop(0), mapped)
        version = self.memory.add_part(trainer.number, number, part, num_files, seconds)
        if self.memory.has_all_parts(version):
            self._complete(version, self._new_save_id())

    async def _do_cancel(self, _: TrainerConnection, number: int) -> None:
        self.memory.cancel(number, is_created=number in self._mapped)

    async def _do_prepare_commit(self, _: TrainerConnection) -> tuple[str, str, bool]:
        """Return the daemon's name, a save id, and whether to save to the persistent storage."""
        tier = next((tier for tier in self.tiers if tier.name == STORAGE), None)
        is_ending = self.is_stopping or not self._trainers
        must_save = tier is not None and tier.is_time(time.monotonic(), is_ending=is_ending)
        return self._name, self._new_save_id(), must_save

    async def _do_commit(
        self,
        _: TrainerConnection,
        tag: str,
        save_id: str,
        must_save: bool,
        rank: int,
        num_nodes: int,
    ) -> bool:
        if save_id and self.memory.find(tag, save_id) is not None:
            return True  # Another rank of this node has committed the version.
        version = self.memory.open.get(tag)
        if version is None and num_nodes > 1:  # Only other nodes have parts of the version.
            version = self.memory.open[tag] = Version(tag, COMMITTED)
        if version is not None:
            version.rank, version.num_nodes, version.must_save = rank, num_nodes, must_save
            self._complete(version, save_id or self._new_save_id())
        elif self.memory.find(tag) is None:
            raise CheckpointError(
                f"{tag!r} has nothing to commit: no part was saved, or the node daemon died "
                "after the save; save again"
            )
        return True

    async def _do_list_tags(self, _: TrainerConnection) -> list[dict[str, Any]]:
        return [
            {
                "tag": version.tag,
                "save_id": version.save_id,
                "names": sorted(version.parts),
                "size_bytes": version.num_bytes,
                "num_nodes": version.num_nodes,
                "saved_in": sorted(version.saved_in),
            }
            for version in self.memory.versions
        ]

    async def _do_open_part(
        self, trainer: TrainerConnection, tag: str, save_id: str, name: str
    ) -> tuple[int, int, int | None] | None:
        """Send a part's descriptor, and return its segment number, size and checksum.

        The result is None if the part is not in memory. The checksum is None until another tier has
        saved the part.
        """
        version = self.memory.find(tag, save_id)
        part = version.parts.get(name) if version is not None else None
        if part is None:
            return None
        part.segment.num_readers += 1
        trainer.loading.append(part.segment)
        trainer.response_fds.append(self._mapped[part.segment.number].fd)
        return part.segment.number, part.size, part.crc32c

    async def _do_close_part(self, trainer: TrainerConnection, number: int) -> None:
        segment = next(segment for segment in trainer.loading if segment.number == number)
        trainer.loading.remove(segment)
        self.memory.release(segment)

    async def _do_flush(self, _: TrainerConnection, tag: str) -> None:
        """Save a tag, or the newest version if `tag` is empty, to all tiers, and wait for it."""
        version = self.memory.find(tag) if tag else self.memory.newest
        if version is None and tag:
            raise CheckpointError(f"{tag!r} is not in memory: nothing to flush")
        while version is not None:
            version.must_save = True
            version.failures.clear()
            self.notify()
            while len(version.saved_in) + len(version.failures) < len(self.tiers):
                if version not in self.memory.versions:
                    break
                await self.wait_for_change(_POLL_SECONDS)
            else:
                if version.failures:
                    text = "; ".join(version.failures.values())
                    raise CheckpointError(f"{version.tag} was not saved: {text}")
                return
            version = self.memory.find(version.tag)  # a newer version has replaced it

    async def _do_remove(self, _: TrainerConnection, tag: str) -> None:
        """Remove a tag from memory now, and from the other tiers after their next save.

        The newest version, and versions that are being saved, stay in memory.
        """
        self.memory.remove(tag)
        for tier in self.tiers:
            tier.removed.add(tag)

    async def _do_stop(self, _: TrainerConnection) -> bool:
        """Stop once all trainers have disconnected; return whether this trainer is the last one."""
        self.is_stopping = True
        return len(self._trainers) == 1

    def _complete(self, version: Version, save_id: str) -> None:
        # With an interval of 0 every version is saved, even if a newer one is complete before that.
        if any(tier.name == STORAGE and not tier.interval_seconds for tier in self.tiers):
            version.must_save = True
        self.memory.complete(version, save_id)
        for tier in self.tiers:
            tier.removed.discard(version.tag)  # `remove` was called for an earlier version

    def _new_save_id(self) -> str:
        """Return the id of a new save, which sorts after all earlier ids of this daemon."""
        self._last_save_ms = max(self._last_save_ms + 1, time.time_ns() // 1_000_000)
        save_time = datetime.fromtimestamp(self._last_save_ms / 1000, UTC)
        return new_save_id(save_time, f"{secrets.randbits(32):08x}")

    def _next_version(self, tier: StorageTier) -> Version | None:
        return tier.next_version(
            self.memory,
            time.monotonic(),
            has_trainers=bool(self._trainers),
            is_stopping=self.is_stopping,
        )

    async def run_saver(self, tier: StorageTier) -> None:
        """Save versions to a tier, one after the other, until the task is cancelled."""
        while True:
            now = time.monotonic()
            version = self._next_version(tier) or tier.version_to_retry(
                self.memory,
                now,
                alone_seconds=0.0 if self._trainers else now - self._last_disconnect,
                linger_seconds=self.linger_seconds,
                is_stopping=self.is_stopping,
            )
            if version is None:
                await self.wait_for_change(_POLL_SECONDS)
                continue
            tier.started = time.monotonic()
            version.num_readers += 1
            failure = ""
            store = tier.store_in_use = tier.store
            try:
                await self._save(
                    tier,
                    store,
                    version,
                    self._views(version),
                    memory=self.memory,
                    commit_seconds=self._commit_seconds,
                )
            except Exception as exc:
                # Record the failure, which `flush` raises, and continue with the next version.
                failure = f"{store.uri}: {type(exc).__name__}: {exc}"
                _log.error("%s was not saved: %s", version.tag, failure)
            finally:
                version.num_readers -= 1
            if failure:
                tier.retry_at = time.monotonic() + self._retry_seconds
            self.memory.set_saved(version, tier.name, failure)
            self._unmap_freed()
            self.notify()
            tier.store_in_use = None
            await self._close_replaced_stores()

    def _views(self, version: Version) -> dict[int, memoryview]:
        """Return the memory of the segments of a version, by number."""
        numbers = {part.segment.number for part in version.parts.values()}
        return {
            number: memoryview(self._mapped[number].map)
            for number in numbers
            if number in self._mapped
        }

    async def _close_replaced_stores(self) -> None:
        """Close the stores that `hello` has replaced, except the stores of saves in progress."""
        in_use = [tier.store_in_use for tier in self.tiers]
        unused = [store for store in self._replaced_stores if store not in in_use]
        self._replaced_stores = [store for store in self._replaced_stores if store in in_use]
        for store in unused:
            with suppress(AiofluxError, OSError):
                await store.aclose()

    def _unmap_freed(self) -> None:
        """Unmap the segments that the memory tier has freed, and list them for their owners."""
        freed, self.memory.freed = self.memory.freed, []
        for segment in freed:
            if (mapped := self._mapped.pop(segment.number, None)) is not None:
                mapped.close()
            if (owner := self._trainers.get(segment.owner)) is not None:
                owner.freed.append(segment.number)

    async def close(self) -> None:
        """Cancel all saves, close the stores, and free all memory."""
        for saver in self._savers:
            saver.cancel()
        await asyncio.gather(*self._savers, return_exceptions=True)
        for store in (*self._replaced_stores, *(tier.store for tier in self.tiers)):
            await store.aclose()
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()


def _use_credentials(variables: dict[str, str]) -> bool:
    """Set the credential variables of a trainer in `os.environ`; return whether any has changed."""
    previous = credential_variables(os.environ)
    if variables == previous:
        return False
    for name in previous.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    return True
