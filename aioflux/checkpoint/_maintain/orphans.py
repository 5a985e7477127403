"""What killed saves leave: objects of a save that no commit object names.

    list all below (objects by save) -> read the commit objects -> what is stale (pure) -> delete

The listing comes first: whatever was committed since is then seen as named. A save that is under
way is known by its age alone, which is that of its youngest object.
"""

from __future__ import annotations

import pickle
import re
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux._values.meta import CleanResult
from aioflux.checkpoint._format.commit import COMMIT_KEY, find_save_id
from aioflux.checkpoint._store.commits import COMMIT_KEYS, each_bounded, read_commits
from aioflux.errors import CheckpointCorruptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = ["Leaving", "clean_saves", "clean_store", "group_saves", "named_keys", "save_of", "stale"]


_RANK_COMMIT = re.compile(rf"__\d+{re.escape(COMMIT_KEY)}")


@dataclass(slots=True)
class Leaving:
    """The objects of one save, as they were listed."""

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


def group_saves(metas: Iterable[ObjectMeta]) -> dict[tuple[str, str], Leaving]:
    """Return the objects that saves made, by checkpoint and save."""
    found: dict[tuple[str, str], Leaving] = {}
    for meta in metas:
        save = save_of(meta.key)
        if save is not None:
            found.setdefault(save, Leaving(*save)).metas.append(meta)
    return found


def stale(
    leaving: Leaving, named: Collection[str], *, now: datetime, older_than_seconds: float
) -> list[ObjectMeta]:
    """Return the objects of a save that can go: named by none, and all of that age at least.

    Where one object of the save is younger, or its time is not known, all stay: the save may be
    under way.

    Args:
        leaving: Objects of the save.
        named: Keys that a commit object names.
        now: The time, aware.
        older_than_seconds: The age.
    """
    times = [meta.updated for meta in leaving.metas]
    if any(each is None or (now - each).total_seconds() < older_than_seconds for each in times):
        return []
    return [meta for meta in leaving.metas if meta.key not in named]


def named_keys(prefix: str, commits: Iterable[CommitObject], save_ids: Iterable[str]) -> set[str]:
    """Return the keys that the commit objects of a checkpoint name.

    Args:
        prefix: Prefix of the checkpoint.
        commits: Its commit objects.
        save_ids: Saves that a commit object of another program must not mention.

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


async def clean_saves(
    store: Store,
    prefix: str = "",
    *,
    now: datetime,
    older_than_seconds: float,
    dry_run: bool = False,
) -> CleanResult:
    """Remove what killed saves left below a prefix, and tell what that was.

    Lists all below the prefix, and reads the commit objects of the checkpoints there.

    Args:
        store: Where.
        prefix: What keys begin with.
        now: The time, aware.
        older_than_seconds: Only saves whose youngest object is at least so old.
        dry_run: Tell, and remove nothing.

    Returns:
        What was removed. Objects of a checkpoint whose commit object is damaged, or is none of
        ours, stay, and its key is among the errors.
    """
    saves: dict[tuple[str, str], Leaving] = {}
    pages = store.list_pages(prefix)
    async with aclosing(pages):
        async for page in pages:
            mine = [page[at] for at, key in enumerate(page.keys) if save_of(key) is not None]
            for save, leaving in group_saves(mine).items():
                saves.setdefault(save, Leaving(*save)).metas += leaving.metas
    old = [
        each
        for each in saves.values()
        if stale(each, (), now=now, older_than_seconds=older_than_seconds)
    ]
    errors: dict[str, StorageError] = {}

    async def left(within: str) -> list[ObjectMeta]:
        mine = [each for each in old if each.prefix == within]
        commits = await read_commits(store, within, await _commit_names(store, within))
        try:
            named = named_keys(within, commits, [each.save_id for each in mine])
        except CheckpointCorruptError as exc:
            meta = commits[0].meta
            errors[meta.key] = StorageError(
                f"kept {sum(len(each.metas) for each in mine)} objects of saves, since nobody can "
                f"tell which of them are needed: {exc}; remove the checkpoint with `aioflux rm -r` "
                "if it is of no use",
                uri=meta.uri,
            )
            return []
        return [
            meta
            for each in mine
            for meta in stale(each, named, now=now, older_than_seconds=older_than_seconds)
        ]

    prefixes = sorted({each.prefix for each in old})
    metas = [meta for group in await each_bounded(left, prefixes) for meta in group]
    metas.sort(key=lambda meta: meta.key)
    if dry_run:
        removed: tuple[str, ...] = tuple(meta.key for meta in metas)
    else:
        deleted = await store.delete_many(metas)
        removed = tuple(sorted(deleted.deleted))
        errors |= deleted.errors
    return CleanResult(aborted=(), removed=removed, errors=errors)


async def clean_store(
    store: Store,
    prefix: str = "",
    *,
    older_than_seconds: float = 86_400.0,
    dry_run: bool = False,
) -> CleanResult:
    """Remove what dead processes left: what `Store.clean` finds, and what killed saves left.

    Args:
        store: Where.
        prefix: What keys begin with.
        older_than_seconds: Only what was begun or written at least so long ago, one day by default.
        dry_run: Tell, and remove nothing.

    Raises:
        ValueError: `older_than_seconds` is negative.
    """
    first = await store.clean(prefix, older_than_seconds=older_than_seconds, dry_run=dry_run)
    second = await clean_saves(
        store,
        prefix,
        now=datetime.now(UTC),
        older_than_seconds=older_than_seconds,
        dry_run=dry_run,
    )
    return CleanResult(
        aborted=first.aborted,
        removed=tuple(sorted((*first.removed, *second.removed))),
        errors={**first.errors, **second.errors},
    )
