"""The keeper: what the processes of one node have handed over, kept in memory and saved.

trainers --(pieces of memory, requests)--> keeper --(uploads)--> local disk, bucket
trainers <--(pieces of memory)--
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import pickle
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from aioflux.checkpoint._format.commit import new_save_id
from aioflux.checkpoint._maintain.tags import keep_newest, remove_tag
from aioflux.checkpoint._save.job import UploadSettings, portable
from aioflux.checkpoint._save.tag_save import PartData, tag_job
from aioflux.compat.nebula._memory_tier import COMMITTED, Shelf, Version
from aioflux.compat.nebula._persist import NebulaSave
from aioflux.compat.nebula._settings import signing_variables
from aioflux.compat.nebula._trainer import Trainer
from aioflux.errors import AiofluxError, CheckpointError

if TYPE_CHECKING:
    from aioflux.compat.nebula._settings import Settings
    from aioflux.store import Store

__all__ = ["Keeper"]

_log = logging.getLogger("aioflux")

_LOOK_SECONDS: Final = 0.5
"""Time between two looks at what nobody tells: the clock, a lock."""

_RETRY_SECONDS: Final = 30.0
"""Pause before what could not be saved is tried again, on top of the store's own retries."""

_LOCAL: Final = "disk"
_STORE: Final = "storage"


@dataclass(slots=True)
class _Memory:
    """A piece of memory, mapped here."""

    fd: int
    map: mmap.mmap

    def close(self) -> None:
        """Give its pages back at once, also those that its maker has mapped and will not touch."""
        with suppress(BufferError):  # goes with whoever looks at it still
            self.map.close()
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


@dataclass(slots=True)
class _Place:
    """Where versions are saved."""

    name: str
    store: Store
    interval_seconds: float
    keep: int = 0
    """How many tags are kept there; all by default."""
    begun: float | None = None
    """When a save began last."""
    retry_at: float = math.inf
    """When what could not be saved last is tried again."""
    in_use: Store | None = None
    """Of the save that is under way."""
    removed: set[str] = field(default_factory=set)
    """Tags that go when something newer is saved."""


class Keeper:
    """What the processes of one node have handed over."""

    def __init__(self) -> None:
        self.shelf = Shelf(0)
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._trainers: dict[int, Trainer] = {}
        self._num_trainers = 0
        self._memory: dict[int, _Memory] = {}
        self._places: list[_Place] = []
        self._unused: list[Store] = []
        self._savers: list[asyncio.Task[None]] = []
        self._commit_seconds = 600.0
        self.linger_seconds = 600.0
        self._last_ms = 0
        self._changed = asyncio.Event()
        self._left = time.monotonic()
        self.is_stopping = False

    @property
    def num_trainers(self) -> int:
        """Processes that are connected."""
        return len(self._trainers)

    @property
    def has_served(self) -> bool:
        """Whether anybody was ever connected."""
        return self._num_trainers > 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody is there and all is saved."""
        return (
            not self._trainers
            and all(self._next(place) is None for place in self._places)
            and not any(version.num_readers for version in self.shelf.versions)
        )

    async def changed(self, seconds: float) -> None:
        """Wait until something changes, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, sock: socket.socket) -> None:
        """Serve one trainer until it is gone."""
        self._num_trainers += 1
        trainer = Trainer(self._num_trainers, sock)
        self._trainers[trainer.number] = trainer
        sock.setblocking(False)
        try:
            while True:
                data, fds = await trainer.receive()
                if not data:
                    return
                try:
                    messages = list(trainer.inbox.feed(data, fds))
                except Exception as exc:  # a pickle runs what it names
                    await trainer.answer(("error", _unreadable(exc)), [])
                    return
                for message in messages:
                    await trainer.answer(*await self._handle(trainer, message))
        except OSError:
            pass  # it died meanwhile
        finally:
            del self._trainers[trainer.number]
            self._left = time.monotonic()
            for fd in trainer.inbox.fds:
                os.close(fd)
            for piece in trainer.lent:
                self.shelf.release(piece)
            self.shelf.leave(trainer.number, is_last=not self._trainers)
            self._give_back()
            self._notify()
            sock.close()

    async def _handle(self, trainer: Trainer, message: Any) -> tuple[Any, list[int]]:
        """Carry out a request, and return what is answered."""
        name, *arguments = message
        fds: list[int] = []
        try:
            reply = await getattr(self, f"_do_{name}")(trainer, fds, *arguments)
        except Exception as exc:  # whoever asked is told
            return ("error", portable(exc)), []
        finally:
            unused, trainer.inbox.fds = trainer.inbox.fds, []
            for fd in unused:  # else they would be taken for those of the next request
                os.close(fd)
            self._give_back()
            self._notify()
        return ("ok", reply), fds

    async def _do_hello(
        self,
        _: Trainer,
        __: list[int],
        settings: Settings,
        variables: dict[str, str] | None = None,
    ) -> int:
        has_others = variables is not None and _sign_by(variables)
        self.shelf.budget_bytes = settings.budget_bytes
        self.shelf.retention = settings.retention
        self.is_stopping = False
        self._commit_seconds = settings.commit_seconds
        self.linger_seconds = settings.linger_seconds
        wanted = []
        if settings.local is not None:
            wanted.append(_Place(_LOCAL, settings.local, 0.0, settings.retention))
        if settings.store is not None:
            wanted.append(_Place(_STORE, settings.store, settings.interval_seconds))
        known = {place.name: place for place in self._places}
        for place in wanted:
            if (there := known.get(place.name)) is not None:
                there.interval_seconds, there.keep = place.interval_seconds, place.keep
                if has_others or pickle.dumps(there.store) != pickle.dumps(place.store):
                    self._unused.append(there.store)
                    there.store = place.store  # with credentials that work, maybe
                continue
            self._places.append(place)
            self._savers.append(asyncio.get_running_loop().create_task(self._save_to(place)))
        for version in self.shelf.versions:
            version.failures.clear()  # tried once more
        self.shelf.num_places = len(self._places)
        self.shelf.arrive()
        await self._close_unused()
        return os.getpid()

    async def _do_room(
        self, trainer: Trainer, _: list[int], size: int
    ) -> tuple[str, int, int, list[int]]:
        while True:
            grant = self.shelf.ask(trainer.number, size)
            self._give_back()
            if grant.piece is not None:
                gone, trainer.gone = trainer.gone, []
                return grant.kind, grant.piece.number, grant.piece.size, gone
            self._notify()
            await self.changed(_LOOK_SECONDS)

    async def _do_saved(
        self,
        trainer: Trainer,
        _: list[int],
        number: int,
        part: tuple[str, str, int],
        num_files: int,
        seconds: float,
    ) -> bool:
        piece = self.shelf.pieces[number]
        if number not in self._memory:
            try:
                mapped = mmap.mmap(trainer.inbox.fds[0], piece.size, prot=mmap.PROT_READ)
            except OSError:
                self.shelf.abandon(number, is_made=False)
                raise
            self._memory[number] = _Memory(trainer.inbox.fds.pop(0), mapped)
        version = self.shelf.put(trainer.number, number, part, num_files, seconds)
        if self.shelf.is_full(version):
            self._close(version, self._mint())
        return version.is_complete

    async def _do_abandon(self, _: Trainer, __: list[int], number: int) -> None:
        self.shelf.abandon(number, is_made=number in self._memory)

    async def _do_offer(self, _: Trainer, __: list[int]) -> tuple[str, str, bool]:
        """Tell who this is, and what a version would be called that were complete now."""
        place = next((each for each in self._places if each.name == _STORE), None)
        return self._name, self._mint(), place is not None and self._is_time(place)

    async def _do_commit(
        self,
        _: Trainer,
        __: list[int],
        tag: str,
        save_id: str,
        is_due: bool,
        rank: int,
        num_nodes: int,
    ) -> bool:
        if save_id and self.shelf.find(tag, save_id) is not None:
            return True  # another rank of this node was faster
        version = self.shelf.open.get(tag)
        if version is None and num_nodes > 1:  # nothing of it was saved by this node
            version = self.shelf.open[tag] = Version(tag, COMMITTED)
        if version is not None:
            version.rank, version.num_nodes, version.is_due = rank, num_nodes, is_due
            self._close(version, save_id or self._mint())
        elif self.shelf.find(tag) is None:
            raise CheckpointError(
                f"{tag!r} has nothing to commit: nothing was saved under it, or the keeper of this "
                "node died since; save again"
            )
        return True

    async def _do_tags(self, _: Trainer, __: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "tag": version.tag,
                "save_id": version.save_id,
                "names": sorted(version.parts),
                "size_bytes": version.num_bytes,
                "num_nodes": version.num_nodes,
                "places": sorted(version.places),
            }
            for version in self.shelf.versions
        ]

    async def _do_fetch(
        self, trainer: Trainer, fds: list[int], tag: str, save_id: str, name: str
    ) -> tuple[int, int, int | None] | None:
        version = self.shelf.find(tag, save_id)
        part = version.parts.get(name) if version is not None else None
        if part is None:
            return None
        part.piece.num_readers += 1
        trainer.lent.append(part.piece)
        fds.append(self._memory[part.piece.number].fd)
        return part.piece.number, part.size, part.crc32c

    async def _do_done(self, trainer: Trainer, _: list[int], number: int) -> None:
        piece = next(each for each in trainer.lent if each.number == number)
        trainer.lent.remove(piece)
        self.shelf.release(piece)

    async def _do_flush(self, _: Trainer, __: list[int], tag: str) -> None:
        """Save a version everywhere, by default the newest one, and wait for it."""
        version = self.shelf.find(tag) if tag else self.shelf.newest
        if version is None and tag:
            raise CheckpointError(f"{tag!r} is not in memory: nothing to flush")
        while version is not None:
            version.is_due = True
            version.failures.clear()
            self._notify()
            while len(version.places) + len(version.failures) < len(self._places):
                if version not in self.shelf.versions:
                    break
                await self.changed(_LOOK_SECONDS)
            else:
                if version.failures:
                    raise CheckpointError(f"{version.tag} was not saved: {_all(version.failures)}")
                return
            version = self.shelf.find(version.tag)  # the newer one of its tag stands for it

    async def _do_remove(self, _: Trainer, __: list[int], tag: str) -> None:
        """Remove a tag wherever it is, once what is newer is there."""
        self.shelf.remove(tag)
        for place in self._places:
            place.removed.add(tag)

    async def _do_stop(self, _: Trainer, __: list[int]) -> bool:
        """End when all is saved and the last trainer is gone; tell whether this is the last."""
        self.is_stopping = True
        return len(self._trainers) == 1

    def _close(self, version: Version, save_id: str) -> None:
        self.shelf.close(version, save_id)
        for place in self._places:
            place.removed.discard(version.tag)  # it was meant of the one before

    def _mint(self) -> str:
        """Return the name of a save, newer than all before."""
        self._last_ms = max(self._last_ms + 1, time.time_ns() // 1_000_000)
        moment = datetime.fromtimestamp(self._last_ms / 1000, UTC)
        return new_save_id(moment, f"{secrets.randbits(32):08x}")

    def _is_time(self, place: _Place) -> bool:
        is_over = self.is_stopping or not self._trainers
        if place.begun is None or is_over:
            return True
        return time.monotonic() - place.begun >= place.interval_seconds

    def _next(self, place: _Place) -> Version | None:
        """Return the version that is to be saved next, None where none is yet."""
        waiting = [
            version
            for version in self.shelf.versions
            if place.name not in version.places and place.name not in version.failures
        ]
        for version in waiting:
            if version.is_due:
                return version
        newest = self.shelf.newest
        if newest is None or newest not in waiting or not self._is_time(place):
            return None
        # What several nodes save together, all of them have to know of: they were told at once.
        is_ours = newest.num_nodes == 1 or place.name == _LOCAL or not self._trainers
        return newest if is_ours else None

    def _again(self, place: _Place) -> Version | None:
        """Return the newest version where it was not saved and it is time to try that once more.

        Also when the last trainer is gone, as long as the keeper waits for the next one.
        """
        newest = self.shelf.newest
        if newest is None or place.name not in newest.failures or self.is_stopping:
            return None
        now = time.monotonic()
        is_kept = bool(self._trainers) or now - self._left < self.linger_seconds
        # What several nodes save together, all of them would have to try again at once.
        is_ours = newest.num_nodes == 1 or place.name == _LOCAL
        return newest if is_kept and is_ours and now >= place.retry_at else None

    async def _save_to(self, place: _Place) -> None:
        while True:
            version = self._next(place) or self._again(place)
            if version is None:
                await self.changed(_LOOK_SECONDS)
                continue
            place.begun = time.monotonic()
            version.num_readers += 1
            failure = ""
            store = place.in_use = place.store
            try:
                await self._save(place, store, version)
            except Exception as exc:
                # Whatever it is: who flushes is told, and the next one is saved.
                failure = f"{store.uri}: {type(exc).__name__}: {exc}"
                _log.error("%s was not saved: %s", version.tag, failure)
            finally:
                version.num_readers -= 1
            if failure:
                place.retry_at = time.monotonic() + _RETRY_SECONDS
            self.shelf.saved(version, place.name, failure)
            self._give_back()
            self._notify()
            place.in_use = None
            await self._close_unused()

    async def _close_unused(self) -> None:
        """Close the stores that others have replaced, but those of saves under way."""
        in_use = [place.in_use for place in self._places]
        closing = [store for store in self._unused if store not in in_use]
        self._unused = [store for store in self._unused if store in in_use]
        for store in closing:
            with suppress(AiofluxError, OSError):  # nobody needs it any more
                await store.aclose()

    async def _save(self, place: _Place, store: Store, version: Version) -> None:
        parts = [
            PartData(part.name, [memoryview(self._memory[part.piece.number].map)[: part.size]])
            for part in version.parts.values()
        ]
        is_shared = place.name == _STORE
        job = tag_job(
            version.tag,
            version.save_id,
            rank=version.rank if is_shared else 0,
            world_size=version.num_nodes if is_shared else 1,
            started=time.time(),
            staged_seconds=version.blocked_seconds,
        )
        settings = UploadSettings(commit_seconds=self._commit_seconds)
        save = NebulaSave(store, settings, job, version.tag, parts)
        await save.run()
        for name, checksum in save.checksums.items():
            version.parts[name].crc32c = checksum
        if place.keep:
            await keep_newest(store, place.keep)
        if place.removed and version is self.shelf.newest:
            removed, place.removed = place.removed, set()
            for tag in removed - {version.tag}:
                await remove_tag(store, tag)

    def _give_back(self) -> None:
        """Give memory back that the shelf has dropped."""
        dropped, self.shelf.dropped = self.shelf.dropped, []
        for piece in dropped:
            if (memory := self._memory.pop(piece.number, None)) is not None:
                memory.close()
            if (owner := self._trainers.get(piece.owner)) is not None:
                owner.gone.append(piece.number)

    async def close(self) -> None:
        """Stop saving, and give all back."""
        for saver in self._savers:
            saver.cancel()
        await asyncio.gather(*self._savers, return_exceptions=True)
        for store in (*self._unused, *(place.store for place in self._places)):
            await store.aclose()
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


def _sign_by(variables: dict[str, str]) -> bool:
    """Find credentials as who came last finds them; tell whether that is another way."""
    before = signing_variables(os.environ)
    if variables == before:
        return False
    for name in before.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    return True


def _unreadable(exc: Exception) -> CheckpointError:
    return CheckpointError(
        f"the process that keeps checkpoints could not read what it was sent "
        f"({type(exc).__name__}: {exc}); what init is given must be importable there: a function "
        "of a module, not of the script that runs"
    )


def _all(failures: dict[str, str]) -> str:
    return "; ".join(failures.values())
