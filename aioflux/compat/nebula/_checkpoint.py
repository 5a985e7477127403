"""Checkpoint: saves and loads the parts of one tag."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._tag_checkpoints import quote_name
from aioflux.compat.nebula._memory_tier import COMMITTED, GROWING
from aioflux.compat.nebula._sources import find_tag, newest_valid
from aioflux.compat.nebula._training_run import current
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)

if TYPE_CHECKING:
    from aioflux.compat.nebula._sources import SavedTag
    from aioflux.compat.nebula._training_run import TrainingRun

__all__ = ["Checkpoint"]


class Checkpoint:
    """The named parts of one tag.

        checkpoint = Checkpoint("global_step500")
        checkpoint.save("model", model)
        model = checkpoint.load("model")

    `save` returns when the part is copied to the memory of the node. A complete tag can be loaded;
    it is kept in memory, and saved to the persistent storage in the background.
    """

    def __init__(self, tag: str = "", num_of_files: int | None = None) -> None:
        """Set the tag; no request is sent.

        Args:
            tag: Any text; by default one with the current time. An existing tag is replaced when
                the new one is complete.
            num_of_files: Number of parts of a complete tag, of all processes of the node. By
                default it is complete after each part. With -2 it is complete when every rank has
                called `commit`.
        """
        if num_of_files is not None and num_of_files != COMMITTED and num_of_files < 1:
            raise ValueError(
                f"num_of_files is a number of parts, or -2 if commit() completes the tag; not "
                f"{num_of_files!r}"
            )
        self._tag = tag or f"checkpoint-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z"
        quote_name(self._tag)
        self._num_files = GROWING if num_of_files is None else num_of_files
        self._run: TrainingRun | None = None
        self._found: SavedTag | None = None
        self._is_pinned = False
        self._failures: dict[str, str] = {}

    @classmethod
    def of(cls, run: TrainingRun, found: SavedTag) -> Checkpoint:
        """Return the checkpoint of a saved tag."""
        checkpoint = cls(found.tag)
        checkpoint._run, checkpoint._found, checkpoint._is_pinned = run, found, True
        return checkpoint

    @property
    def tag(self) -> str:
        """The tag."""
        return self._tag

    def __repr__(self) -> str:
        return f"<Checkpoint {self._tag}>"

    def save(self, name: str, obj: Any) -> None:
        """Copy an object to memory, as a part of the tag.

        The object may be changed when this returns. If NEBULA_MEMORY_BUFFER_SIZE is used up, this
        waits until another tag is saved to the storage.

        Args:
            name: Name of the part. An existing part is replaced; without `num_of_files`, it starts
                a new save of the tag.
            obj: Any object that torch.save takes.

        Raises:
            CheckpointError: It could not be copied.
        """
        quote_name(name)
        try:
            self._training_run.snapshots.save(self._tag, name, obj, self._num_files)
        except BaseException as exc:
            self._failures[name] = f"{name!r}: {type(exc).__name__}: {exc}"
            raise
        self._failures.pop(name, None)
        self._found, self._is_pinned = None, False

    def commit(self) -> bool:
        """Complete the tag; it is then saved in the background.

        With `num_of_files=-2` and a process group all ranks call it: the tag is complete on all
        ranks or on none.

        Returns:
            True.

        Raises:
            CheckpointError: A rank could not copy a part, or did not call this.
        """
        run, failure = self._training_run, "; ".join(self._failures.values())
        self._failures.clear()
        if self._num_files == COMMITTED and run.ranks.world_size > 1:
            self._commit_on_all_ranks(run, failure)
            return True
        if failure:
            raise CheckpointError(f"{self._tag} is not complete: {failure}")
        return bool(run.client.call("commit", self._tag, "", False, 0, 1))

    def _commit_on_all_ranks(self, run: TrainingRun, failure: str) -> None:
        ranks = run.ranks
        daemon, save_id, is_due = "", "", False
        try:
            daemon, save_id, is_due = run.client.call("prepare_commit")
        except AiofluxError as exc:
            failure = failure or str(exc)
        gathered = ranks.gather((failure, daemon))
        failures = [f"rank {rank}: {each[0]}" for rank, each in enumerate(gathered) if each[0]]
        nodes = list(dict.fromkeys(each[1] for each in gathered))
        failures, nodes, save_id, is_due = ranks.broadcast((failures, nodes, save_id, is_due))
        if failures:
            raise CheckpointError(f"{self._tag} is not complete: {'; '.join(failures)}")
        error: AiofluxError | None = None
        try:
            node = nodes.index(daemon)
            run.client.call("commit", self._tag, save_id, is_due, node, len(nodes))
        except AiofluxError as exc:
            error = exc
        (is_failed,) = ranks.largest([error is not None])
        if error is not None:
            raise error
        if is_failed:
            raise CheckpointError(f"{self._tag} is not complete: another rank could not commit it")

    def load(self, name: str, map_location: Any = None, weights_only: Any = False) -> Any:
        """Load one part from the nearest valid source: memory, local disk or persistent storage.

        Args:
            name: Name of the part.
            map_location: As `torch.load`.
            weights_only: As `torch.load`. The default is that of Nebula: it runs code in the
                pickle. Pass True if others can write to the storage.

        Raises:
            CheckpointNotFoundError: There is no such tag or part.
            CheckpointCorruptError: It is damaged in every source.
        """
        if self._found is not None:
            try:
                return self._found.load(name, map_location=map_location, weights_only=weights_only)
            except (CheckpointNotFoundError, CheckpointCorruptError):
                if not self._refresh():
                    raise
        run = self._training_run
        found = self._found or newest_valid(find_tag(run.client, run.stores(), self._tag))
        if found is None:
            raise CheckpointNotFoundError(
                f"there is no checkpoint {self._tag!r}, in memory or at "
                f"{run.settings.uri or 'a persistent storage, of which none is set'}"
            )
        self._found = found
        return found.load(name, map_location=map_location, weights_only=weights_only)

    def _refresh(self) -> bool:
        """Find the tag again; return whether its sources or parts have changed.

        A checkpoint that was found stays the same save, so that its parts belong together.
        """
        assert self._found is not None
        run, before = self._training_run, self._found
        saves = find_tag(run.client, run.stores(), self._tag)
        if self._is_pinned:
            saves = [each for each in saves if each.save_id == before.save_id]
        found = newest_valid(saves)
        if found is None:
            return False
        self._found = found
        return (found.save_id, found.names) != (before.save_id, before.names) or (
            [each.tier for each in found.sources] != [each.tier for each in before.sources]
        )

    @property
    def _training_run(self) -> TrainingRun:
        if self._run is None:
            self._run = current()
        return self._run
