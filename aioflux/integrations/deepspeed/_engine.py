"""The checkpoint engine that DeepSpeed 0.19 calls.

    create(tag) on all ranks -> save(part), several times -> commit on all ranks -> write `latest`
    decoupled:                  copy, upload during training -> commit when all ranks have finished

The class is not derived from DeepSpeed's base class, because importing DeepSpeed takes seconds.
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
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import torch

from aioflux import _bridge
from aioflux._store_cache import StoreCache
from aioflux.checkpoint import save as save_object
from aioflux.checkpoint._tag_checkpoints import (
    Arena,
    HistoryWriter,
    PartData,
    TagSave,
    UploadSettings,
    new_save_id,
    open_ranks,
    pickle_state,
    read_part,
    read_tag,
    tag_job,
    write_part,
)
from aioflux.errors import AiofluxError, CheckpointError, CheckpointNotFoundError
from aioflux.integrations.deepspeed._placeholders import LATEST, Placeholders, put_placeholders
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux.checkpoint._tag_checkpoints import Job, Ranks, StoredObject
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_log = logging.getLogger("aioflux")


class CommitInfo(Protocol):
    """The part of DeepSpeed's `CheckpointCommitInfo` that the checkpoint engine uses."""

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
    """Checkpoint engine for DeepSpeed that stores checkpoints at uris; see `attach`."""

    def __init__(
        self,
        config_params: Any = None,
        *,
        decoupled: bool = False,
        commit_seconds: float = 600.0,
        **options: Unpack[StoreOptions],
    ) -> None:
        """Check the settings; sends no request.

        Args:
            config_params: Argument that DeepSpeed passes to its own engines; unused.
            decoupled: Return from a save when the parts are copied, and commit at the end of the
                step in which all ranks have stored their parts.
            commit_seconds: Maximum time that a rank waits for the other ranks; 600 by default.
            options: Options of `aioflux.open_store`: `transfer`, `retry`, `timeouts`,
                `credentials`, `endpoint_url` and `ssl_context`.
        """
        if not commit_seconds > 0:
            raise ValueError(f"commit_seconds must be above 0, not {commit_seconds!r}")
        self.name = type(self).__name__
        self.placeholders = Placeholders()
        self._is_decoupled = decoupled
        self._commit_seconds = commit_seconds
        self._options = options
        self._ranks: Ranks | None = None
        self._stores = StoreCache(functools.partial(_open_store, options))
        self._current: _PendingCheckpoint | None = None
        self._arenas: list[Arena] = []
        """Memory of the previous checkpoint, for reuse by the next."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of the training.

        The first access creates a process group, a collective: all ranks must make it together.
        """
        if self._ranks is None:
            self._ranks = open_ranks(None, self._commit_seconds)
        return self._ranks

    def store(self, uri: str) -> Store:
        """Return the store at a uri; it stays open until `cleanup`."""
        return self._stores[uri]

    def create(self, info: CommitInfo) -> None:
        """Start a checkpoint; called by every rank.

        If the engine is decoupled, the pending checkpoint is committed first. Otherwise a pending
        checkpoint was never committed and may lack parts: its parts are deleted.

        Raises:
            CheckpointError: A rank could not store the pending checkpoint, or the tag is not below
                `save_dir`.
        """
        if self._current is not None and self._is_decoupled:
            self.commit(self._current.info)
        self._delete_pending()
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
        """Store one part or, if the engine is decoupled, copy it and start its upload.

        Args:
            state_dict: Any state that torch.save accepts.
            path: Path that DeepSpeed's own engine would write, `save_dir/tag/name`.

        Raises:
            StorageError: The part could not be stored. `commit` will fail on all ranks.
        """
        current = self._current
        if current is None:
            raise CheckpointError(f"no checkpoint was started to save {path}; call create first")
        directory, name = os.path.split(path)
        if os.path.abspath(directory) == os.path.abspath(current.info.save_dir):
            save_object(state_dict, f"{current.uri}/{name}", **self._options)
            return  # `save_16bit_model` saves one object outside of the tag
        try:
            part = PartData(name, self._serialize(state_dict, current))
            upload = _bridge.submit(write_part(self.store(current.uri), current.job, part))
            current.uploads.append(upload)
            if not self._is_decoupled:
                _bridge.wait_for_result(upload)
        except BaseException as exc:
            current.failure = f"{name}: {type(exc).__name__}: {exc}"
            for upload in current.uploads:
                upload.cancel()
            raise
        put_placeholders(current.info.save_dir, current.info.tag, [name])

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one part, and compare its bytes with the checksums of the commit object.

        Like DeepSpeed's own engine, this unpickles any object, which can run code. Do not load
        checkpoints from a bucket that untrusted users can write to.

        Args:
            path: Path that DeepSpeed's own engine would read, `load_dir/tag/name`.
            map_location: As in `torch.load`.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint, or no such part.
            CheckpointCorruptError: The bytes do not match the checksums.
        """
        directory, name = os.path.split(path)
        root, tag = self.placeholders.split_tag(directory)
        uri = self.placeholders.uri_of(root)
        store = self.store(uri)
        checkpoint = _bridge.run(read_tag(store, tag))
        if checkpoint is None and os.path.isfile(path) and os.path.getsize(path):
            # DeepSpeed's own checkpoint engine wrote this file.
            return torch.load(path, map_location=map_location, weights_only=False)
        if checkpoint is None or name not in checkpoint.names:
            state = "was not committed" if not checkpoint else f"has {', '.join(checkpoint.names)}"
            message = f"there is no part {name} of {tag} at {uri}: the tag {state}"
            raise CheckpointNotFoundError(message)
        file = _bridge.run(read_part(store, checkpoint, name))
        try:
            return torch.load(file.path, map_location=map_location, weights_only=False, mmap=True)
        finally:
            file.close()

    def commit(self, info: CommitInfo) -> bool:
        """Commit a checkpoint and return True; called by every rank.

        If `info.save_latest` is set, rank 0 then writes the tag to `latest`.

        Raises:
            CheckpointError: A rank could not store its parts. All ranks raise it, the checkpoint is
                not committed, and `latest` does not change.
        """
        current = self._current
        if current is None or (current.info.tag, current.info.save_dir) != (
            info.tag,
            info.save_dir,
        ):
            raise CheckpointError(f"{info.tag} was not started before commit; call create first")
        self._current = None
        failure = self._finish(current)
        failures = self._gather_failures(failure, bool(current.stored))
        if failures is None:
            return True  # `save_16bit_model` has saved an object, and there are no parts to commit
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
        """The checkpoint that is not committed yet, to compare by identity, or None."""
        return self._current

    def fail(self, reason: BaseException) -> None:
        """Record that the pending checkpoint lacks parts, so that `commit` fails."""
        if self._current is not None and not self._current.failure:
            self._current.failure = f"{type(reason).__name__}: {reason}"

    def _delete_pending(self) -> None:
        """Delete this rank's parts of the pending checkpoint, if there is one."""
        current, self._current = self._current, None
        if current is None:
            return
        for upload in current.uploads:
            upload.cancel()
        self._finish(current)
        _log.warning("%s at %s was never committed and is deleted", current.info.tag, current.uri)
        keys = [current.job.prefix + stored.key for stored in current.stored]
        try:
            _bridge.run(self.store(current.uri).delete_many(keys))
        except AiofluxError as exc:
            tag, uri = current.info.tag, current.uri
            _log.warning("cannot delete parts of %s; run `aioflux clean %s`: %s", tag, uri, exc)

    def _finish(self, current: _PendingCheckpoint) -> str:
        """Wait for the uploads of this rank, and return the message of the first failure."""
        failure = current.failure
        for upload in current.uploads:
            try:
                current.stored.append(_bridge.wait_for_result(upload))
            except (AiofluxError, concurrent.futures.CancelledError) as exc:
                failure = failure or str(exc) or "an upload was cancelled"
        # Keep only the memory of this checkpoint; the memory of the previous one is freed.
        self._arenas, unused = current.arenas, self._arenas
        for arena in unused:
            arena.close()
        return failure

    def _gather_failures(self, failure: str, has_parts: bool) -> list[str] | None:
        """Return the failures of all ranks, or None if no rank has saved a part."""
        ranks = self.ranks
        outcomes = ranks.gather((failure, has_parts))
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
        is_empty = not failures and not any(rank_has_parts for _, rank_has_parts in outcomes)
        return ranks.broadcast(None if is_empty else failures)

    async def _publish(self, current: _PendingCheckpoint, job: Job, failure: str) -> None:
        store = self.store(current.uri)
        settings = UploadSettings(commit_seconds=self._commit_seconds)
        save = TagSave(store, settings, replace(job, failure=failure), current.stored)
        try:
            await save.run()
        finally:
            if save.record is not None:
                history = HistoryWriter(store)
                history.add(save.record)
                await history.write()
        if current.info.save_latest and job.rank == 0:
            await store.put(LATEST, current.info.tag.encode(), content_type="text/plain")

    def _serialize(self, state_dict: Any, current: _PendingCheckpoint) -> list[memoryview]:
        """Return the bytes of a part; a copy of them if the engine is decoupled."""
        pickled = pickle_state(state_dict)
        if not self._is_decoupled:
            return pickled.views()
        arena = self._acquire_arena(pickled.num_bytes)
        current.arenas.append(arena)
        pickled.copy_to(arena.view)
        return [arena.view[: pickled.num_bytes]]

    def _acquire_arena(self, size: int) -> Arena:
        """Return an arena of the previous checkpoint if one fits, which is faster, or a new one."""
        fitting = [arena for arena in self._arenas if size <= arena.size <= 2 * size]
        if not fitting:
            return Arena(0, size, is_shared=False)
        arena = min(fitting, key=lambda arena: arena.size)
        self._arenas.remove(arena)
        return arena

    # Further methods that DeepSpeed calls.

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a local directory, in which DeepSpeed looks for files."""
        self.placeholders.uri_of(path)
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether this rank saves the model, which all data-parallel ranks share."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return whether DeepSpeed commits at the end of a step and not at the end of a save."""
        return self._is_decoupled

    def set_commit_info(self, info: CommitInfo) -> None:
        """Do nothing: DeepSpeed passes the same object to `create`."""

    def get_commit_info(self) -> CommitInfo | None:
        """Return the pending checkpoint if all ranks have finished its uploads, else None.

        DeepSpeed calls this on every rank at the end of a step, and commits the returned
        checkpoint. The ranks agree on the result by a collective.
        """
        current = self._current
        if current is None:
            return None
        (is_waiting,) = self.ranks.largest([not current.is_uploaded])
        return None if is_waiting else current.info

    def cleanup(self) -> None:
        """Commit the pending checkpoint if decoupled, and free all resources; called by every rank.

        Raises:
            CheckpointError: The checkpoint could not be committed.
        """
        try:
            if self._current is not None and self._is_decoupled:
                self.commit(self._current.info)
            self._delete_pending()
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
        """Return True: as in torch.save, the whole memory that tensors share is stored."""
        return True


def _open_store(options: StoreOptions, uri: str) -> Store:
    return _bridge.close_when_dropped(open_store(uri, **options))
