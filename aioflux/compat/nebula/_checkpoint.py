"""Checkpoint: what is saved and loaded under one tag."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._store.tag_names import quote_name
from aioflux.compat.nebula._memory_tier import COMMITTED, GROWING
from aioflux.compat.nebula._run import current
from aioflux.compat.nebula._sources import find_tag, newest_valid
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)

if TYPE_CHECKING:
    from aioflux.compat.nebula._run import Run
    from aioflux.compat.nebula._sources import Found

__all__ = ["Checkpoint"]


class Checkpoint:
    """The parts that are saved under one tag, each by a name.

        checkpoint = Checkpoint("global_step500")
        checkpoint.save("model", model)
        model = checkpoint.load("model")

    `save` returns when the part is copied to the memory of the node. A tag counts when it is
    complete; it is then kept in memory, and saved to the persistent storage beside the training.
    """

    def __init__(self, tag: str = "", num_of_files: int | None = None) -> None:
        """Names what is saved; nothing is sent.

        Args:
            tag: Any text; by default one made of the time. A tag that exists is replaced when the
                new one is complete.
            num_of_files: Parts that make the tag complete, over all processes of the node. By
                default it is complete with each part that comes. With -2 it is complete when
                `commit` says so, which then every rank calls.
        """
        if num_of_files is not None and num_of_files != COMMITTED and num_of_files < 1:
            raise ValueError(
                f"num_of_files is the number of parts of a tag, or -2 where commit() completes it; "
                f"not {num_of_files!r}"
            )
        self._tag = tag or f"checkpoint-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z"
        quote_name(self._tag)
        self._num_files = GROWING if num_of_files is None else num_of_files
        self._run: Run | None = None
        self._found: Found | None = None
        self._is_pinned = False
        self._failures: dict[str, str] = {}

    @classmethod
    def of(cls, run: Run, found: Found) -> Checkpoint:
        """Return what was found."""
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

        It may be changed as soon as this returns. Waits where NEBULA_MEMORY_BUFFER_SIZE has no
        room, until something is saved elsewhere.

        Args:
            name: Name of the part. Without `num_of_files` one that the tag has already begins the
                tag anew; else it is replaced.
            obj: Anything that torch.save takes.

        Raises:
            CheckpointError: It could not be copied.
        """
        quote_name(name)
        try:
            self._mine.snapshots.save(self._tag, name, obj, self._num_files)
        except BaseException as exc:
            self._failures[name] = f"{name!r}: {type(exc).__name__}: {exc}"
            raise
        self._failures.pop(name, None)
        self._found, self._is_pinned = None, False

    def commit(self) -> bool:
        """Say that all parts are there: the tag counts, and is saved beside the training.

        With `num_of_files=-2` and a process group all ranks call it: it counts on all or on none.

        Returns:
            True.

        Raises:
            CheckpointError: A rank could not copy something, or did not come here: on no rank does
                the tag count.
        """
        run, failure = self._mine, "; ".join(self._failures.values())
        self._failures.clear()
        if self._num_files == COMMITTED and run.ranks.world_size > 1:
            self._commit_together(run, failure)
            return True
        if failure:
            raise CheckpointError(f"{self._tag} is not complete: {failure}")
        return bool(run.client.call("commit", self._tag, "", False, 0, 1))

    def _commit_together(self, run: Run, failure: str) -> None:
        ranks = run.ranks
        keeper, save_id, is_due = "", "", False
        try:
            keeper, save_id, is_due = run.client.call("offer")
        except AiofluxError as exc:
            failure = failure or str(exc)
        told = ranks.gather((failure, keeper))
        failures = [f"rank {rank}: {each[0]}" for rank, each in enumerate(told) if each[0]]
        nodes = list(dict.fromkeys(each[1] for each in told))
        failures, nodes, save_id, is_due = ranks.broadcast((failures, nodes, save_id, is_due))
        if failures:
            raise CheckpointError(f"{self._tag} is not complete: {'; '.join(failures)}")
        error: AiofluxError | None = None
        try:
            node = nodes.index(keeper)
            run.client.call("commit", self._tag, save_id, is_due, node, len(nodes))
        except AiofluxError as exc:
            error = exc
        (is_failed,) = ranks.largest([error is not None])
        if error is not None:
            raise error
        if is_failed:
            raise CheckpointError(f"{self._tag} is not complete: another rank could not commit it")

    def load(self, name: str, map_location: Any = None, weights_only: Any = False) -> Any:
        """Load one part, from memory, the local disk or the persistent storage: the nearest valid.

        Args:
            name: Name of the part.
            map_location: As `torch.load`.
            weights_only: As `torch.load`. As Nebula did, all that pickles is loaded, which runs
                code: pass True where others can write to the storage.

        Raises:
            CheckpointNotFoundError: There is no such tag, or no such part.
            CheckpointCorruptError: It is nowhere what was saved.
        """
        if self._found is not None:
            try:
                return self._found.load(name, map_location=map_location, weights_only=weights_only)
            except (CheckpointNotFoundError, CheckpointCorruptError):
                if not self._has_moved():
                    raise
        run = self._mine
        found = self._found or newest_valid(find_tag(run.client, run.stores(), self._tag))
        if found is None:
            raise CheckpointNotFoundError(
                f"there is no checkpoint {self._tag!r}, in memory or at "
                f"{run.settings.uri or 'a persistent storage, of which none is set'}"
            )
        self._found = found
        return found.load(name, map_location=map_location, weights_only=weights_only)

    def _has_moved(self) -> bool:
        """Look again where it is: it may have left memory, or have grown, since it was found.

        What was found as a checkpoint stays that save, so that its parts belong together.
        """
        assert self._found is not None
        run, before = self._mine, self._found
        there = find_tag(run.client, run.stores(), self._tag)
        if self._is_pinned:
            there = [each for each in there if each.save_id == before.save_id]
        found = newest_valid(there)
        if found is None:
            return False
        self._found = found
        return (found.save_id, found.names) != (before.save_id, before.names) or (
            [each.place for each in found.sources] != [each.place for each in before.sources]
        )

    @property
    def _mine(self) -> Run:
        if self._run is None:
            self._run = current()
        return self._run
