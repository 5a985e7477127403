"""Leftovers of killed saves: objects of a save that no commit object names.

    list all below (objects by save) -> read the commit objects -> stale objects (pure) -> delete

The listing comes first, so that commits made since are read. A save that is under way is recognised
by its age alone, which is that of its youngest object.
"""

from __future__ import annotations

import pickle
import re
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._values.meta import CleanResult
from aioflux.checkpoint._format.commit import COMMIT_KEY, find_save_id
from aioflux.checkpoint._store.commits import COMMIT_KEYS, MAX_IN_FLIGHT, read_commits
from aioflux.errors import CheckpointCorruptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = [
    "SaveLeftovers",
    "clean_store",
    "named_keys",
    "save_of",
    "stale_objects",
]


_RANK_COMMIT = re.compile(rf"__\d+{re.escape(COMMIT_KEY)}")


@dataclass(slots=True)
class SaveLeftovers:
    """The objects of one save that were listed."""

    prefix: str
    """Prefix of the checkpoint."""
    save_id: str
    """Names the save."""
    metas: list[ObjectMeta] = field(default_factory=list)
    """Its objects."""


def save_of(key: str) -> tuple[str, str] | None:
    """Return prefix of the checkpoint and name of the save that made an object; None for others."""
    if "Z-" not in key:
        return None
    save_id = find_save_id(key)
    if not save_id:
        return None
    below, slash, _ = key.rpartition("/")
    if f"/{below}".endswith(f"/{save_id}"):
        return below.removesuffix(save_id), save_id
    return below + slash, save_id


def stale_objects(
    leftovers: SaveLeftovers, named: Collection[str], *, now: datetime, older_than_seconds: float
) -> list[ObjectMeta]:
    """Return the objects of a save that can be deleted: unnamed, and all of that age at least.

    If one object of the save is younger, or its time is unknown, all stay: the save may be under
    way.
    """
    times = [meta.updated for meta in leftovers.metas]
    if any(each is None or (now - each).total_seconds() < older_than_seconds for each in times):
        return []
    return [meta for meta in leftovers.metas if meta.key not in named]


def named_keys(prefix: str, commits: Iterable[CommitObject], save_ids: Iterable[str]) -> set[str]:
    """Return the keys that the commit objects of a checkpoint name.

    Raises:
        CheckpointCorruptError: The keys are unknown: a commit object is damaged, or another program
            wrote it, and it mentions one of these saves or was cut off.
    """
    named: set[str] = set()
    for each in commits:
        if each.problem is not None:
            raise each.problem
        if each.commit is not None:
            named.update(prefix + stored.key for stored in each.commit.objects)
            continue
        is_cut = each.meta.key.endswith(COMMIT_KEY) and not each.data.endswith(pickle.STOP)
        if is_cut or any(save_id.encode() in each.data for save_id in save_ids):
            raise CheckpointCorruptError(f"{each.meta.uri} holds no commit of aioflux")
    return named


async def _commit_names(store: Store, prefix: str) -> list[str]:
    """Return the names of the commit objects, also those that ranks wrote without collectives."""
    level = await store.list_all(f"{prefix}__", delimiter="/")
    names = (meta.key[len(prefix) :] for meta in level)
    return [*COMMIT_KEYS, *filter(_RANK_COMMIT.fullmatch, names)]


async def _list_saves(store: Store, prefix: str) -> Iterable[SaveLeftovers]:
    """Return the objects below a prefix that saves wrote, by save."""
    saves: dict[tuple[str, str], SaveLeftovers] = {}
    async with aclosing(store.list_pages(prefix)) as pages:
        async for page in pages:
            for at, key in enumerate(page.keys):
                if (save := save_of(key)) is not None:
                    saves.setdefault(save, SaveLeftovers(*save)).metas.append(page[at])
    return saves.values()


async def clean_store(
    store: Store,
    prefix: str = "",
    *,
    older_than_seconds: float = 86_400.0,
    dry_run: bool = False,
) -> CleanResult:
    """Delete leftovers of dead processes: those that `Store.clean` finds, and of killed saves.

    Lists all below the prefix, twice, and reads the commit objects of the checkpoints there.

    Args:
        store: The store.
        prefix: Prefix of the keys.
        older_than_seconds: Only objects and uploads at least so old, and saves whose youngest
            object is; one day by default.
        dry_run: Only return what would be deleted.

    Returns:
        The keys that were deleted. If the commit object of a checkpoint is damaged, or another
        program wrote it, objects there stay, and its key is among the errors.

    Raises:
        ValueError: `older_than_seconds` is negative.
    """
    done = await store.clean(prefix, older_than_seconds=older_than_seconds, dry_run=dry_run)
    errors = dict(done.errors)
    now = datetime.now(UTC)

    def stale(leftovers: SaveLeftovers, named: Collection[str] = ()) -> list[ObjectMeta]:
        return stale_objects(leftovers, named, now=now, older_than_seconds=older_than_seconds)

    async def find_removable(within: str) -> list[ObjectMeta]:
        mine = [each for each in old if each.prefix == within]
        commits = await read_commits(store, within, await _commit_names(store, within))
        try:
            named = named_keys(within, commits, [each.save_id for each in mine])
        except CheckpointCorruptError as exc:
            meta = commits[0].meta
            errors[meta.key] = StorageError(
                f"kept {sum(len(each.metas) for each in mine)} objects of saves, since it is "
                f"unknown which of them are needed: {exc}; remove the checkpoint with "
                "`aioflux rm -r` if it is of no use",
                uri=meta.uri,
            )
            return []
        return [meta for each in mine for meta in stale(each, named)]

    old = [each for each in await _list_saves(store, prefix) if stale(each)]
    prefixes = sorted({each.prefix for each in old})
    groups = await gather_bounded(find_removable, prefixes, max_in_flight=MAX_IN_FLIGHT)
    metas = [meta for group in groups for meta in group]
    removed = [meta.key for meta in metas]
    if not dry_run:
        deleted = await store.delete_many(metas)
        removed = list(deleted.deleted)
        errors.update(deleted.errors)
    return CleanResult(
        aborted=done.aborted, removed=tuple(sorted((*done.removed, *removed))), errors=errors
    )
