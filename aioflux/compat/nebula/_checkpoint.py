"""The class Checkpoint, which saves and loads the parts of one tag."""

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


class Checkpoint:
    """One checkpoint: a tag, and parts with names.

        checkpoint = Checkpoint("global_step500")
        checkpoint.save("model", model)
        model = checkpoint.load("model")

    `save` returns when the part is copied to the memory of the node daemon. A complete tag can be
    loaded. The daemon keeps it in memory, and saves it to the persistent storage in the background.
    """

    def __init__(self, tag: str = "", num_of_files: int | None = None) -> None:
        """Check the arguments. No request is sent.

        Args:
            tag: Any text; by default a text with the current time. A complete save replaces an
                earlier save of the same tag.
            num_of_files: Number of parts, from all processes of the node, that complete the tag. By
                default, each part completes the tag. With -2, the tag is complete when every rank
                has called `commit`.
        """
        if num_of_files is not None and num_of_files != COMMITTED and num_of_files < 1:
            raise ValueError(
                "num_of_files must be a number of parts, or -2 if commit() completes the tag, not "
                f"{num_of_files!r}"
            )
        self._tag = tag or f"checkpoint-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z"
        quote_name(self._tag)
        self._num_files = GROWING if num_of_files is None else num_of_files
        self._run: TrainingRun | None = None
        self._saved_tag: SavedTag | None = None
        self._is_pinned = False
        """Whether to load only from the save that `of` was called with."""
        self._failures: dict[str, str] = {}

    @classmethod
    def of(cls, run: TrainingRun, saved_tag: SavedTag) -> Checkpoint:
        """Return the checkpoint of one save; a later save of the same tag is not loaded."""
        checkpoint = cls(saved_tag.tag)
        checkpoint._run, checkpoint._saved_tag, checkpoint._is_pinned = run, saved_tag, True
        return checkpoint

    @property
    def tag(self) -> str:
        """Name of the checkpoint."""
        return self._tag

    def __repr__(self) -> str:
        return f"<Checkpoint {self._tag}>"

    def save(self, name: str, obj: Any) -> None:
        """Copy an object to the memory of the node daemon, as a part of the tag.

        The caller may change the object after the call. If NEBULA_MEMORY_BUFFER_SIZE is exhausted,
        the call waits until the daemon frees memory, for example after a save to the persistent
        storage. If no memory will become free, the object is copied to a file on the local disk.

        Args:
            name: Name of the part. An existing part is replaced. Without `num_of_files`, the
                replacement starts a new save of the tag, without the earlier parts.
            obj: Any object that torch.save accepts.

        Raises:
            CheckpointError: The object could not be copied.
        """
        quote_name(name)
        try:
            self._training_run.snapshot_writer.save(self._tag, name, obj, self._num_files)
        except BaseException as exc:
            self._failures[name] = f"{name!r}: {type(exc).__name__}: {exc}"
            raise
        self._failures.pop(name, None)
        self._saved_tag, self._is_pinned = None, False

    def commit(self) -> bool:
        """Complete the tag, so that it is saved in the background, and return True.

        With `num_of_files=-2` and a process group, all ranks have to call this method. If it fails
        on one rank, it raises on all ranks.

        Raises:
            CheckpointError: A rank could not copy a part or did not call `commit`, or no part was
                saved.
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
        daemon, save_id, must_save = "", "", False
        try:
            daemon, save_id, must_save = run.client.call("prepare_commit")
        except AiofluxError as exc:
            failure = failure or str(exc)
        gathered = ranks.gather((failure, daemon))
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text]
        nodes = list(dict.fromkeys(name for _, name in gathered))
        failures, nodes, save_id, must_save = ranks.broadcast((failures, nodes, save_id, must_save))
        if failures:
            raise CheckpointError(f"{self._tag} is not complete: {'; '.join(failures)}")
        error: AiofluxError | None = None
        try:
            node = nodes.index(daemon)
            run.client.call("commit", self._tag, save_id, must_save, node, len(nodes))
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
            map_location: As in `torch.load`.
            weights_only: As in `torch.load`. The default False is Nebula's, and runs code in the
                pickle. Pass True if untrusted users can write to the storage.

        Raises:
            CheckpointNotFoundError: There is no such tag or part.
            CheckpointCorruptError: The part is damaged in every source.
        """
        if self._saved_tag is not None:
            try:
                return self._saved_tag.load(
                    name, map_location=map_location, weights_only=weights_only
                )
            except (CheckpointNotFoundError, CheckpointCorruptError):
                if not self._refresh():
                    raise
        run = self._training_run
        saved_tag = self._saved_tag or newest_valid(find_tag(run.client, run.stores(), self._tag))
        if saved_tag is None:
            storage = f"or at {run.settings.uri}" if run.settings.uri else "or on local disk"
            message = f"there is no checkpoint {self._tag!r} in memory {storage}"
            raise CheckpointNotFoundError(message)
        self._saved_tag = saved_tag
        return saved_tag.load(name, map_location=map_location, weights_only=weights_only)

    def _refresh(self) -> bool:
        """Look up the tag again, and return whether its save, sources or parts have changed.

        A pinned checkpoint only finds sources of its own save, so that it never mixes two saves.
        """
        assert self._saved_tag is not None
        run, previous = self._training_run, self._saved_tag
        saves = find_tag(run.client, run.stores(), self._tag)
        if self._is_pinned:
            saves = [save for save in saves if save.save_id == previous.save_id]
        saved_tag = newest_valid(saves)
        if saved_tag is None:
            return False
        self._saved_tag = saved_tag
        return (saved_tag.save_id, saved_tag.names) != (previous.save_id, previous.names) or (
            [source.tier for source in saved_tag.sources]
            != [source.tier for source in previous.sources]
        )

    @property
    def _training_run(self) -> TrainingRun:
        if self._run is None:
            self._run = current()
        return self._run
