"""The commit: the write that makes a checkpoint visible, and the deletes after it.

    commit object, under its precondition -> objects of the commit that it replaced, pinned -> log

Saves of torch.distributed.checkpoint, saves of the Checkpointer and copies all commit by it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from aioflux.checkpoint._format.commit import INDEX_KEY
from aioflux.checkpoint._store.commits import is_home, uri_below
from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = ["commit", "delete_logged", "delete_replaced"]

_log = logging.getLogger("aioflux")


async def commit(
    store: Store, key: str, data: bytes, new: Commit, *, replaces: Sequence[CommitObject]
) -> bool:
    """Write a commit object, and delete the objects of the commit that it replaced.

    Args:
        store: A store that holds the checkpoint.
        key: Name of the commit object in the store.
        data: Its bytes.
        new: The commit that they hold.
        replaces: The commit objects that the checkpoint had when the save began. The one of the
            same key is replaced if it still has the generation that was read; one of the other
            layout is deleted.

    Returns:
        Whether no older commit object is left; objects that could not be deleted are logged.

    Raises:
        CheckpointError: Another save of the checkpoint was committed meanwhile, and is kept.
        StorageError: It could not be written. After a TransientError it may exist.
    """
    old = next((each.meta for each in replaces if each.meta.key == key), None)
    content_type = "application/json" if key.endswith(INDEX_KEY) else ""
    try:
        if old is None:
            await store.put(key, data, mode="create", content_type=content_type)
        else:
            await store.put(
                key, data, if_generation_match=old.generation, content_type=content_type
            )
    except (AlreadyExistsError, PreconditionFailedError) as exc:
        raise CheckpointError(
            f"could not commit {uri_below(store, key)}: another save of this checkpoint was "
            "committed meanwhile, and stays; save under another name, or again to replace it"
        ) from exc
    return await delete_replaced(store, key, new, replaces)


async def delete_replaced(
    store: Store, key: str, new: Commit, replaces: Sequence[CommitObject]
) -> bool:
    """Log a commit object that was written, and delete the objects of those that it replaced.

    Arguments and result are those of `commit`, which does this itself.
    """
    _log.info(
        "committed %s: %d objects of %d bytes, save %s",
        uri_below(store, key),
        len(new.objects),
        new.num_bytes,
        new.save_id,
    )
    prefix = key.rpartition("/")[0] + "/" if "/" in key else ""
    named = {each.key for each in new.objects}
    is_only_commit = True
    for old in replaces:
        if old.commit is None:
            _log.info("the objects of %s are left: aioflux cannot read it", old.meta.uri)
            continue
        if old.meta.key != key and not await delete_logged(store, [old.meta], "another layout"):
            is_only_commit = False
            continue
        is_pinned = is_home(store, prefix, old.commit)
        obsolete = [
            dataclasses.replace(
                old.meta,
                key=prefix + each.key,
                uri=uri_below(store, prefix + each.key),
                generation=each.generation if is_pinned else "",
            )
            for each in old.commit.objects
            if each.key not in named
        ]
        await delete_logged(store, obsolete, "the checkpoint that was replaced")
    return is_only_commit


async def delete_logged(store: Store, objects: Iterable[ObjectMeta | str], what: str) -> bool:
    """Delete objects, and return whether all are gone; those that are left are logged."""
    try:
        errors = (await store.delete_many(objects)).errors
    except (AiofluxError, OSError, ValueError) as exc:  # the commit stays valid
        _log.warning("%s below %s could not be deleted: %s", what, store.uri, exc)
        return False
    for key, error in errors.items():
        _log.warning("%s of %s could not be deleted: %s", uri_below(store, key), what, error)
    return not errors
