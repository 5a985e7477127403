"""The checkpoint engine that DeepSpeed 0.19 calls.

    create(tag) on all ranks -> save(part), several times -> commit on all ranks -> `latest` moves
    decoupled:                  copy, upload during training -> commit when all ranks have finished

The engine is no subclass of DeepSpeed's: it needs no DeepSpeed to be imported, which takes seconds.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import secrets
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from aioflux import _bridge
from aioflux._store_cache import StoreCache
from aioflux.checkpoint import save as save_object
from aioflux.checkpoint._tag_checkpoints import (
    Arena,
    PartData,
    TagSave,
    UploadSettings,
    new_save_id,
    open_checkpoint,
    open_ranks,
    pickle_state,
    read_part,
    read_tag,
    tag_job,
    write_part,
)
from aioflux.errors import AiofluxError, CheckpointError, CheckpointNotFoundError
from aioflux.integrations.deepspeed._placeholders import LATEST, Placeholders, put_placeholders

if TYPE_CHECKING:
    from typing import Unpack

    from aioflux.checkpoint._tag_checkpoints import Job, Ranks, StoredObject
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["AiofluxCheckpointEngine", "CommitInfo"]

_log = logging.getLogger("aioflux")

_POLL_SECONDS: Final = 0.5
"""Interval at which a waiting caller wakes for signals."""


class CommitInfo(Protocol):
    """DeepSpeed's description of a checkpoint."""

    tag: str
    save_dir: str
    save_latest: bool


@dataclass(slots=True)
class _PendingCheckpoint:
    """One checkpoint that is not committed yet."""

    info: CommitInfo
    uri: str
    job: Job
    stored: list[StoredObject] = field(default_factory=list)
    uploads: list[concurrent.futures.Future[StoredObject]] = field(default_factory=list)
    arenas: list[Arena] = field(default_factory=list)
    failure: str = ""

    @property
    def is_uploaded(self) -> bool:
        """Return whether all uploads of this rank have finished or failed."""
        return all(upload.done() for upload in self.uploads)


class AiofluxCheckpointEngine:
    """Checkpoint engine of DeepSpeed that stores to uris; see `attach`.

    Attributes:
        name: Its name for DeepSpeed.
    """

    def __init__(
        self,
        config_params: Any = None,
        *,
        decoupled: bool = False,
        commit_seconds: float = 600.0,
        **options: Unpack[StoreOptions],
    ) -> None:
        """Take the settings; sends nothing yet.

        Args:
            config_params: Argument of DeepSpeed for its engines; unused.
            decoupled: Return from a save when the parts are copied, and commit when all ranks have
                stored theirs, at the end of a step.
            commit_seconds: Time that ranks wait for each other; 600 by default.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`.
        """
        if not commit_seconds > 0:
            raise ValueError(f"commit_seconds must be above 0, not {commit_seconds!r}")
        self.name = type(self).__name__
        self.placeholders = Placeholders()
        """Directories in place of uris."""
        self._is_decoupled = decoupled
        self._commit_seconds = commit_seconds
        self._options = options
        self._ranks: Ranks | None = None
        self._stores = StoreCache(functools.partial(_open_store, options))
        self._current: _PendingCheckpoint | None = None
        self._arenas: list[Arena] = []
        """Memory of the last checkpoint, reused for the next."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of the training; first read on every rank at the same time."""
        if self._ranks is None:
            self._ranks = open_ranks(None, self._commit_seconds)
        return self._ranks

    def store(self, uri: str) -> Store:
        """Return the store at a uri, which stays open."""
        return self._stores[uri]

    def create(self, info: CommitInfo) -> None:
        """Begin a checkpoint; called by every rank.

        A pending one is committed first if this engine is decoupled. Otherwise it was begun and
        never committed, so that parts of it may be missing: it is abandoned.

        Raises:
            CheckpointError: A rank could not store the one before, or the tag is not below
                `save_dir`.
        """
        if self._current is not None and self._is_decoupled:
            self.commit(self._current.info)
        self._abandon()
        uri = self.placeholders.uri_of(info.save_dir)
        put_placeholders(info.save_dir, info.tag, [])
        os.makedirs(info.save_dir, exist_ok=True)
        ranks = self.ranks
        save_id = ranks.broadcast(new_save_id(datetime.now(UTC), f"{secrets.randbits(32):08x}"))
        job = tag_job(
            info.tag,
            save_id,
            rank=ranks.rank,
            world_size=ranks.world_size,
            started=time.time(),
            staged_seconds=0.0,
        )
        self._current = _PendingCheckpoint(info, uri, job)

    def save(self, state_dict: Any, path: str) -> None:
        """Store one part, or copy it to be stored during training.

        Args:
            state_dict: Any state that torch.save accepts.
            path: Where DeepSpeed would write it, `save_dir/tag/name`.

        Raises:
            StorageError: It could not be stored; the commit then fails on all ranks.
        """
        current = self._current
        if current is None:
            raise CheckpointError(f"{path} is saved without a checkpoint; call create first")
        directory, name = os.path.split(path)
        if os.path.abspath(directory) == os.path.abspath(current.info.save_dir):
            save_object(state_dict, f"{current.uri}/{name}", **self._options)
            return  # `save_16bit_model`: an object of its own
        try:
            part = PartData(name, self._serialize(state_dict, current))
            upload = _bridge.begin(write_part(self.store(current.uri), current.job, part))
            current.uploads.append(upload)
            if not self._is_decoupled:
                _wait(upload)
        except BaseException as exc:
            current.failure = f"{name}: {type(exc).__name__}: {exc}"
            for each in current.uploads:
                each.cancel()
            raise
        put_placeholders(current.info.save_dir, current.info.tag, [name])

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one part, verified.

        Like DeepSpeed's own engines it unpickles anything, which can run code: load nothing that
        others can write to.

        Args:
            path: Where DeepSpeed would have written it, `load_dir/tag/name`.
            map_location: As `torch.load`.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint, or no such part.
            CheckpointCorruptError: Its bytes are not those that were saved.
        """
        directory, name = os.path.split(path)
        root, tag = self.placeholders.split_tag(directory)
        uri = self.placeholders.uri_of(root)
        store = self.store(uri)
        found = _bridge.run(read_tag(store, tag))
        if found is None and os.path.isfile(path) and os.path.getsize(path):
            return torch.load(path, map_location=map_location, weights_only=False)  # DeepSpeed's
        if found is None or name not in found.names:
            raise CheckpointNotFoundError(
                f"there is no {name} of {tag} at {uri}: the tag "
                + ("was not committed" if found is None else f"has {', '.join(found.names)}")
            )
        file = _bridge.run(read_part(store, found, name))
        try:
            return torch.load(file.path, map_location=map_location, weights_only=False, mmap=True)
        finally:
            file.close()

    def commit(self, info: CommitInfo) -> bool:
        """Commit a checkpoint, and move `latest` to it; called by every rank.

        Returns:
            True.

        Raises:
            CheckpointError: A rank could not store its parts: nothing is committed on any rank, and
                `latest` stays as it was.
        """
        current = self._current
        if current is None or (current.info.tag, current.info.save_dir) != (
            info.tag,
            info.save_dir,
        ):
            raise CheckpointError(f"{info.tag} is committed without being begun; call create first")
        self._current = None
        failure = self._finish(current)
        failures = self._gather_failures(failure, bool(current.stored))
        if failures is None:
            return True  # only an object of its own was saved
        error: AiofluxError | None = None
        job = current.job
        if failures and not failure:
            failure = f"another rank: {failures[0]}"
        try:
            _bridge.run(self._publish(current, job, failure))
        except AiofluxError as exc:
            error = exc
        (is_failed,) = self.ranks.largest([error is not None])
        if error is not None:
            raise CheckpointError(f"{info.tag} was not saved to {current.uri}: {error}") from error
        if is_failed:
            raise CheckpointError(f"{info.tag} was not saved to {current.uri}: another rank failed")
        return True

    @property
    def pending(self) -> object:
        """Identity of the checkpoint that is not committed yet; None without one."""
        return self._current

    def fail(self, reason: BaseException) -> None:
        """Record that a checkpoint was not saved to its end: it is never committed."""
        if self._current is not None and not self._current.failure:
            self._current.failure = f"{type(reason).__name__}: {reason}"

    def _abandon(self) -> None:
        """Delete the parts of a checkpoint that was begun and never committed, on this rank."""
        current, self._current = self._current, None
        if current is None:
            return
        for upload in current.uploads:
            upload.cancel()
        self._finish(current)
        _log.warning("%s at %s was never committed and is abandoned", current.info.tag, current.uri)
        keys = [current.job.prefix + stored.key for stored in current.stored]
        try:
            _bridge.run(self.store(current.uri).delete_many(keys))
        except AiofluxError as exc:
            _log.warning("its parts could not be deleted, run `aioflux clean`: %s", exc)

    def _finish(self, current: _PendingCheckpoint) -> str:
        """Wait for the uploads of this rank, and return the message of the first failure."""
        failure = current.failure
        for upload in current.uploads:
            try:
                current.stored.append(_wait(upload))
            except (AiofluxError, concurrent.futures.CancelledError) as exc:
                failure = failure or str(exc) or "it was cancelled"
        # Those of the checkpoint before are freed: two sets would be held for one in use.
        self._arenas, unused = current.arenas, self._arenas
        for arena in unused:
            arena.close()
        return failure

    def _gather_failures(self, failure: str, has_parts: bool) -> list[str] | None:
        """Return the failures of all ranks; None if no rank has saved a part."""
        ranks = self.ranks
        outcomes = ranks.gather((failure, has_parts))
        failures = [f"rank {rank}: {each[0]}" for rank, each in enumerate(outcomes) if each[0]]
        is_empty = not failures and not any(each[1] for each in outcomes)
        return ranks.broadcast(None if is_empty else failures)

    async def _publish(self, current: _PendingCheckpoint, job: Job, failure: str) -> None:
        store = self.store(current.uri)
        settings = UploadSettings(commit_seconds=self._commit_seconds)
        save = TagSave(store, settings, replace(job, failure=failure), current.stored)
        await save.run()
        if current.info.save_latest and job.rank == 0:
            await store.put(LATEST, current.info.tag.encode(), content_type="text/plain")

    def _serialize(self, state_dict: Any, current: _PendingCheckpoint) -> list[memoryview]:
        """Return the bytes of a part; a copy if training continues during its upload."""
        found = pickle_state(state_dict)
        if not self._is_decoupled:
            return found.views()
        arena = self._acquire_arena(found.num_bytes)
        current.arenas.append(arena)
        found.copy_to(arena.view)
        return [arena.view[: found.num_bytes]]

    def _acquire_arena(self, size: int) -> Arena:
        """Return memory, if possible that of an earlier checkpoint: warm memory is faster."""
        fitting = [arena for arena in self._arenas if size <= arena.size <= 2 * size]
        if not fitting:
            return Arena(0, size, is_shared=False)
        arena = min(fitting, key=lambda each: each.size)
        self._arenas.remove(arena)
        return arena

    # Further methods that DeepSpeed calls.

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory that DeepSpeed inspects."""
        self.placeholders.uri_of(path)
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether this rank saves the model: the first of those with the same state."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return whether DeepSpeed commits at the end of a step, not of a save."""
        return self._is_decoupled

    def set_commit_info(self, info: CommitInfo) -> None:
        """Do nothing: `create` has received the same."""

    def get_commit_info(self) -> CommitInfo | None:
        """Return the checkpoint to be committed now: all ranks have finished its uploads.

        DeepSpeed calls this on every rank at the end of a step; while a checkpoint is pending the
        ranks agree on the answer.
        """
        current = self._current
        if current is None:
            return None
        (is_waiting,) = self.ranks.largest([not current.is_uploaded])
        return None if is_waiting else current.info

    def cleanup(self) -> None:
        """Commit a pending decoupled checkpoint, and free everything; called by every rank.

        Raises:
            CheckpointError: It could not be committed.
        """
        try:
            if self._current is not None and self._is_decoupled:
                self.commit(self._current.info)
            self._abandon()
        finally:
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None
            for store in self._stores.values():
                _bridge.run(store.aclose())
            self._stores.clear()
            self.placeholders.close()
            for arena in self._arenas:
                arena.close()
            self._arenas.clear()

    def preserves_storage_sharing(self) -> bool:
        """Return True: as in torch.save, tensors that share memory are stored with all of it."""
        return True


def _open_store(options: StoreOptions, uri: str) -> Store:
    return _bridge.close_when_dropped(open_checkpoint(uri, **options))


def _wait(upload: concurrent.futures.Future[StoredObject]) -> StoredObject:
    """Wait for the upload of a part, interruptible by signals."""
    while not upload.done():
        concurrent.futures.wait([upload], _POLL_SECONDS)
    return upload.result()
