"""The commit: the write that makes a checkpoint visible, and the deletes after it.

    write the commit object under a precondition -> log -> delete the replaced data objects

All saves and copies use this module. Each delete is pinned to the generation that the replaced
commit lists, so that it cannot delete an object that another save wrote meanwhile. If the replaced
checkpoint is a copy, its commit lists the generations of the source, and deletes are not pinned.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aioflux.checkpoint._format.commit import INDEX_KEY
from aioflux.checkpoint._store.steps import is_original, uri_below
from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

_log = logging.getLogger("aioflux")


async def write_commit(
    store: Store, key: str, data: bytes, new: Commit, *, replaces: Sequence[CommitObject]
) -> bool:
    """Write a commit object, and delete the objects of the commits that it replaces.

    Args:
        store: The store of the checkpoint.
        key: Key of the commit object in the store.
        data: The encoded commit object.
        new: The decoded content of `data`.
        replaces: The commit objects that the checkpoint had at the start of the save. The commit
            object at `key` is overwritten if its generation is unchanged. A commit object of the
            other layout is deleted if it can be decoded.

    Returns:
        False if a commit object of the other layout could not be deleted. A delete that fails is
        logged.

    Raises:
        CheckpointError: Another save of the checkpoint was committed meanwhile, and stays.
        StorageError: The commit object could not be written. After a TransientError it may exist.
    """
    started = time.monotonic()
    replaced = next((found.meta for found in replaces if found.meta.key == key), None)
    content_type = "application/json" if key.endswith(INDEX_KEY) else ""
    try:
        if replaced is None:
            await store.put(key, data, mode="create", content_type=content_type)
        else:
            await store.put(
                key, data, if_generation_match=replaced.generation, content_type=content_type
            )
    except (AlreadyExistsError, PreconditionFailedError) as exc:
        raise CheckpointError(
            f"could not commit {uri_below(store, key)}: another save of this checkpoint was "
            "committed meanwhile, and stays; save under another name, or again to replace it"
        ) from exc
    seconds = time.monotonic() - started
    return await finish_commit(store, key, new, replaces=replaces, seconds=seconds)


async def finish_commit(
    store: Store, key: str, new: Commit, *, replaces: Sequence[CommitObject], seconds: float
) -> bool:
    """Log a commit, and delete the objects of the commits that it replaces.

    `write_commit` calls this. A caller whose `write_commit` failed calls it, too, if the commit
    object turns out to exist. `seconds` is the time that the write took. Other arguments and the
    result are those of `write_commit`.
    """
    _log.info(
        "committed %s in %.2f s: %d objects of %d bytes, save %s",
        uri_below(store, key),
        seconds,
        len(new.objects),
        new.num_bytes,
        new.save_id,
    )
    prefix = key.rpartition("/")[0] + "/" if "/" in key else ""
    new_keys = {stored.key for stored in new.objects}
    is_only_commit = True
    for old in replaces:
        if old.commit is None:
            _log.info("cannot decode %s; its data objects are not deleted", old.meta.uri)
            continue
        if old.meta.key != key and not await delete_logged(store, [old.meta], "another layout"):
            is_only_commit = False
            continue
        is_pinned = is_original(store, prefix, old.commit)
        obsolete = [
            dataclasses.replace(
                old.meta,
                key=prefix + stored.key,
                uri=uri_below(store, prefix + stored.key),
                generation=stored.generation if is_pinned else "",
            )
            for stored in old.commit.objects
            if stored.key not in new_keys
        ]
        await delete_logged(store, obsolete, "the checkpoint that was replaced")
    return is_only_commit


async def delete_logged(store: Store, objects: Iterable[ObjectMeta | str], owner: str) -> bool:
    """Delete the objects of an owner, and return whether all deletes succeeded; log failures."""
    try:
        errors = (await store.delete_many(objects)).errors
    except (AiofluxError, OSError, ValueError) as exc:  # not raised: the commit stays valid
        _log.warning("could not delete objects of %s below %s: %s", owner, store.uri, exc)
        return False
    for key, error in errors.items():
        _log.warning("could not delete %s of %s: %s", uri_below(store, key), owner, error)
    return not errors
