"""clean_store: deletion of orphans, data objects of killed saves that no commit object lists.

    list the objects of each save -> read the commit objects -> stale objects (pure) -> delete

Commit objects are read after the listing. So if a save commits after the listing, its commit is
read, and its objects are kept. A save in progress has no commit: it is recognised by the age of its
youngest object alone.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._values.meta import CleanResult
from aioflux.checkpoint._format.commit import COMMIT_KEY, find_save_id
from aioflux.checkpoint._store.steps import COMMIT_KEYS, MAX_IN_FLIGHT, read_commits
from aioflux.errors import CheckpointCorruptError, StorageError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

_RANK_COMMIT = re.compile(rf"__\d+{re.escape(COMMIT_KEY)}")


@dataclass(slots=True)
class SaveLeftovers:
    """The objects of one save in a listing."""

    prefix: str
    """Prefix of the checkpoint."""
    save_id: str
    metas: list[ObjectMeta] = field(default_factory=list)


def save_of(key: str) -> tuple[str, str] | None:
    """Return the checkpoint's prefix and the save id of a data object; None for other objects."""
    if "Z-" not in key:
        return None
    save_id = find_save_id(key)
    if not save_id:
        return None
    parent, slash, _ = key.rpartition("/")
    if f"/{parent}".endswith(f"/{save_id}"):
        return parent.removesuffix(save_id), save_id
    return parent + slash, save_id


def orphaned_objects(
    save: SaveLeftovers, committed: Collection[str], *, now: datetime, older_than_seconds: float
) -> list[ObjectMeta]:
    """Return the objects of a save that can be deleted.

    If an object of the save is younger than `older_than_seconds`, or its age is unknown, the result
    is empty, since the save may be in progress. Otherwise the result is all objects whose keys are
    not in `committed`.
    """
    times = [meta.updated for meta in save.metas]
    if any(time is None or (now - time).total_seconds() < older_than_seconds for time in times):
        return []
    return [meta for meta in save.metas if meta.key not in committed]


def committed_keys(
    prefix: str, commits: Iterable[CommitObject], save_ids: Iterable[str]
) -> set[str]:
    """Return the keys of all data objects that the commit objects of a checkpoint list.

    Raises:
        CheckpointCorruptError: The keys are unknown, because a commit object is damaged, or because
            another program wrote it and it is truncated or contains one of the save ids.
    """
    keys: set[str] = set()
    for existing in commits:
        if existing.problem is not None:
            raise existing.problem
        if existing.commit is not None:
            keys.update(prefix + stored.key for stored in existing.commit.objects)
            continue
        is_truncated = existing.meta.key.endswith(COMMIT_KEY) and not existing.data.endswith(
            pickle.STOP
        )
        if is_truncated or any(save_id.encode() in existing.data for save_id in save_ids):
            raise CheckpointCorruptError(f"{existing.meta.uri} contains no commit of aioflux")
    return keys


async def _commit_names(store: Store, prefix: str) -> list[str]:
    """Return the names of the commit objects of a checkpoint and of ranks that commit alone."""
    listing = await store.list_all(f"{prefix}__", delimiter="/")
    names = (meta.key[len(prefix) :] for meta in listing)
    return [*COMMIT_KEYS, *filter(_RANK_COMMIT.fullmatch, names)]


async def _list_saves(store: Store, prefix: str) -> Iterable[SaveLeftovers]:
    """List the data objects below a prefix, grouped by save."""
    saves: dict[tuple[str, str], SaveLeftovers] = {}
    async with aclosing(store.list_pages(prefix)) as pages:
        async for page in pages:
            for index, key in enumerate(page.keys):
                if (save := save_of(key)) is not None:
                    saves.setdefault(save, SaveLeftovers(*save)).metas.append(page[index])
    return saves.values()


async def clean_store(
    store: Store,
    prefix: str = "",
    *,
    older_than_seconds: float = 86_400.0,
    dry_run: bool = False,
) -> CleanResult:
    """Delete leftovers of dead processes: everything that `Store.clean` deletes, and orphans.

    Lists all objects below the prefix twice, and reads the commit objects of the checkpoints with
    old objects.

    Args:
        store: The store.
        prefix: Prefix of the keys.
        older_than_seconds: Minimum age of an object or an upload, and of the youngest object of a
            save; one day by default.
        dry_run: Delete nothing, and return the keys that a clean-up would delete.

    Returns:
        The keys that were deleted. If a commit object of a checkpoint is damaged, or another
        program wrote it, the objects of the checkpoint may be kept; then the errors have an entry
        for the key of one of its commit objects.

    Raises:
        ValueError: `older_than_seconds` is negative.
    """
    cleaned = await store.clean(prefix, older_than_seconds=older_than_seconds, dry_run=dry_run)
    errors = dict(cleaned.errors)
    now = datetime.now(UTC)

    def stale(save: SaveLeftovers, committed: Collection[str] = ()) -> list[ObjectMeta]:
        return orphaned_objects(save, committed, now=now, older_than_seconds=older_than_seconds)

    async def find_orphans(checkpoint: str) -> list[ObjectMeta]:
        saves = [save for save in old if save.prefix == checkpoint]
        commits = await read_commits(store, checkpoint, await _commit_names(store, checkpoint))
        try:
            committed = committed_keys(checkpoint, commits, [save.save_id for save in saves])
        except CheckpointCorruptError as exc:
            meta = commits[0].meta
            errors[meta.key] = StorageError(
                f"kept {sum(len(save.metas) for save in saves)} objects of saves, since it is "
                f"unknown which of them are needed: {exc}; remove the checkpoint with "
                "`aioflux rm -r` if it is of no use",
                uri=meta.uri,
            )
            return []
        return [meta for save in saves for meta in stale(save, committed)]

    old = [save for save in await _list_saves(store, prefix) if stale(save)]
    prefixes = sorted({save.prefix for save in old})
    groups = await gather_bounded(find_orphans, prefixes, max_in_flight=MAX_IN_FLIGHT)
    metas = [meta for group in groups for meta in group]
    removed = [meta.key for meta in metas]
    if not dry_run:
        deleted = await store.delete_many(metas)
        removed = list(deleted.deleted)
        errors.update(deleted.errors)
    return CleanResult(
        aborted=cleaned.aborted, removed=tuple(sorted((*cleaned.removed, *removed))), errors=errors
    )
