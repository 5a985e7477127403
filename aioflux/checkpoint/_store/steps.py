"""The steps below a root, and their commit objects: listed, read and written.

    root/step-00000100/.metadata                       the commit object, which makes the step exist
    root/step-00000100/<save_id>/__0_0.distcp          a data object of the commit

The root is the prefix of a run. `.metadata` begins with a pickle for stock DCP, and the commit
follows as JSON. Only the JSON is decoded here; nothing is unpickled.

    write the commit object under a precondition -> log -> delete the replaced data objects

Saves use `commit_save` and copies `write_commit`. Each delete is pinned to the generation that the
replaced commit lists, so that it cannot delete an object that another save wrote meanwhile. If the
replaced checkpoint is a copy, its commit lists the generations of the source, and deletes are not
pinned.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._transfer.retry import Backoff
from aioflux._values.uri import join_uri, parse_uri
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    NewerFormatError,
    StepInfo,
    decode_commit,
    decode_index,
    parse_step,
    step_prefix,
)
from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

COMMIT_KEYS = (COMMIT_KEY, INDEX_KEY)
"""Keys of a commit object below the prefix of its checkpoint, one for each layout."""

MAX_IN_FLIGHT = 64
"""Maximum number of commit objects that are read at the same time."""


class CommitObject(NamedTuple):
    """A commit object and its content."""

    meta: ObjectMeta
    """Metadata of the object. Its generation is the precondition of a delete."""
    data: bytes
    """Bytes of the object."""
    commit: Commit | None
    """The decoded commit; None if another program wrote the object, or if it is damaged."""
    problem: CheckpointCorruptError | None = None
    """The error of a damaged object."""


def as_prefix(prefix: str) -> str:
    """Return a prefix with a slash at its end, or the empty prefix unchanged."""
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


def uri_below(store: Store, key: str) -> str:
    """Return the uri of a key or prefix of a store."""
    return join_uri(store.uri, key)


def is_original(store: Store, prefix: str, commit: Commit) -> bool:
    """Return whether a checkpoint is at the uri that it was saved to, and is not a copy.

    The data objects of a copy have other generations than the commit lists.
    """
    try:
        saved, current = parse_uri(commit.uri), parse_uri(uri_below(store, prefix))
    except ValueError:
        return False
    if saved.scheme == "file" == current.scheme:
        # Because of links and `..` one directory has several paths.
        return os.path.realpath(saved.key) == os.path.realpath(current.key)
    return str(saved).rstrip("/") == str(current).rstrip("/")


async def list_prefixes(store: Store, root: str = "") -> list[int]:
    """Return the steps with objects below `root`, committed or not, ascending; by one listing."""
    root_prefix = as_prefix(root)
    listing = await store.list_all(root_prefix, delimiter="/")
    steps = (parse_step(prefix[len(root_prefix) :]) for prefix in listing.prefixes)
    return sorted(step for step in steps if step is not None)


async def list_steps(store: Store) -> list[int]:
    """Return the committed steps below the store's prefix, ascending, without verifying them.

    Costs one listing, and one or two requests for each step.
    """

    async def is_committed(step: int) -> bool:
        for key in COMMIT_KEYS:
            try:
                await store.head(step_prefix(step) + key)
            except NotFoundError:
                continue
            return True
        return False

    steps = await list_prefixes(store)
    committed = await gather_bounded(is_committed, steps, max_in_flight=MAX_IN_FLIGHT)
    return [step for step, exists in zip(steps, committed, strict=True) if exists]


def _decode(meta: ObjectMeta, data: bytes) -> CommitObject:
    """Decode a commit object in the layout that its key implies."""
    decode = decode_index if meta.key.endswith(INDEX_KEY) else decode_commit
    try:
        return CommitObject(meta, data, decode(data, uri=meta.uri)[1])
    except CheckpointCorruptError as exc:
        return CommitObject(meta, data, None, exc)


async def read_commits(
    store: Store, prefix: str, names: Sequence[str] = COMMIT_KEYS
) -> list[CommitObject]:
    """Return the commit objects of a checkpoint: damaged ones first, then the oldest save first.

    `names` are the keys to read below the prefix, by default those of all layouts.
    """
    keys = [as_prefix(prefix) + name for name in names]
    commit_objects: list[CommitObject] = []
    for key, result in zip(keys, await store.try_fetch_all(keys), strict=True):
        if result[0] is not None:
            commit_objects.append(_decode(*result))
        elif isinstance(result[1], ChecksumError):
            problem = CheckpointCorruptError(f"{uri_below(store, key)} is damaged: {result[1]}")
            commit_objects.append(CommitObject(await store.head(key), b"", None, problem))
        elif not isinstance(result[1], NotFoundError):
            raise result[1]
    return sorted(commit_objects, key=lambda each: each.commit.save_id if each.commit else "")


async def begin_save(
    store: Store, prefix: str, names: Sequence[str] = COMMIT_KEYS
) -> list[CommitObject]:
    """Return the commit objects that a save is about to replace, before its first upload.

    Raises:
        UnsupportedError: The server ignores the precondition of the commit.
    """
    await store.check_conditions()
    replaces = await read_commits(store, prefix, names)
    for old in replaces:
        if old.problem is not None:
            _log.warning("a save replaces a damaged checkpoint: %s", old.problem)
    return replaces


async def read_commit(
    store: Store, prefix: str, listed: Sequence[str] = COMMIT_KEYS
) -> CommitObject:
    """Read the commit object of a checkpoint; the newer one if both layouts were saved.

    `listed` are the commit keys below the prefix, if they are known from a listing: the others are
    read only if these were deleted since.

    Raises:
        CheckpointNotFoundError: No save of the checkpoint was committed.
        CheckpointCorruptError: A commit object is damaged.
    """
    commit_objects = await read_commits(store, prefix, listed)
    if not commit_objects and 0 < len(listed) < len(COMMIT_KEYS):
        commit_objects = await read_commits(store, prefix)
    for commit_object in commit_objects:
        if commit_object.problem is not None:
            raise commit_object.problem
    if not commit_objects:
        uri = uri_below(store, as_prefix(prefix))
        raise CheckpointNotFoundError(
            f"there is no checkpoint {uri}: it has no commit object; list the checkpoints with "
            "`aioflux ckpt list`"
        )
    return commit_objects[-1]


async def commit_of(store: Store, prefix: str, save_id: str) -> Commit | None:
    """Return the commit of a save, or None if the save has not committed the checkpoint.

    The commit of another save does not count, even if its save id is later: save ids contain the
    time of a clock that may be wrong.
    """
    try:
        commit = (await read_commit(store, prefix)).commit
    except CheckpointError:
        return None
    return commit if commit is not None and commit.save_id == save_id else None


class Replacements:
    """Saves that replace a checkpoint while it is read."""

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._backoff: Backoff | None = None

    async def has_newer(self, data: bytes) -> bool:
        """Return whether to read again, because the commit object `data` was replaced or deleted.

        The pauses and the number of tries are those of the retry policy.
        """
        self._backoff = self._backoff or Backoff(self._store.retry)
        try:
            newer = (await read_commit(self._store, self._prefix)).data
        except (CheckpointCorruptError, CheckpointNotFoundError):
            newer = b""
        return newer != data and await self._backoff.pause()


async def describe_steps(store: Store, steps: Sequence[int] | None = None) -> list[StepInfo]:
    """Return the facts of many steps, ascending, without verifying the steps.

    Costs one or two requests for each step. Steps without a commit are omitted.
    """

    async def describe_step(step: int) -> StepInfo | None:
        uri = uri_below(store, step_prefix(step))
        try:
            commit_object = await read_commit(store, step_prefix(step))
        except CheckpointNotFoundError:
            return None
        except CheckpointCorruptError as exc:
            is_ours = not isinstance(exc, NewerFormatError)
            return StepInfo(step=step, uri=uri, problem=str(exc), is_ours=is_ours)
        commit = commit_object.commit
        if commit is None:
            problem = f"{commit_object.meta.uri} has no commit of aioflux: another program wrote it"
            return StepInfo(step=step, uri=uri, problem=problem, is_ours=False)
        return commit.step_info(step, uri, commit_object.meta.generation)

    selected = sorted(set(steps)) if steps is not None else await list_prefixes(store)
    found = await gather_bounded(describe_step, selected, max_in_flight=MAX_IN_FLIGHT)
    return [each for each in found if each is not None]


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
    return await _finish_commit(store, key, new, replaces=replaces, seconds=seconds)


class UnknownOutcomeError(CheckpointError):
    """A save that may be committed, so that its objects must not be deleted."""


def as_public(error: CheckpointError) -> CheckpointError:
    """Return a CheckpointError with the message and the notes of an error of a private class."""
    public = CheckpointError(str(error))
    for note in getattr(error, "__notes__", ()):
        public.add_note(note)
    return public


async def commit_save(
    store: Store,
    key: str,
    data: bytes,
    new: Commit,
    *,
    replaces: Sequence[CommitObject],
    is_urgent: bool = False,
) -> None:
    """Commit a save by `write_commit`; after an error, read whether it is committed.

    `is_urgent` allows the save to replace a save of the same checkpoint that began earlier and was
    committed meanwhile, because it did not wait for that save. Other arguments are those of
    `write_commit`.

    Raises:
        UnknownOutcomeError: The save may be committed.
        CheckpointError: Another save of the checkpoint was committed meanwhile, and stays.
        StorageError, OSError: The commit object was not written.
    """
    started = time.monotonic()
    prefix, _, name = key.rpartition("/")
    while True:
        try:
            await write_commit(store, key, data, new, replaces=replaces)
        except Exception as exc:  # also of a function that returns credentials
            names = COMMIT_KEYS if name in COMMIT_KEYS else (name,)
            current = await _read_after(exc, store, prefix, names)
            saves = [each.commit.save_id if each.commit else "" for each in current]
            if new.save_id in saves:
                seconds = time.monotonic() - started
                await _finish_commit(store, key, new, replaces=replaces, seconds=seconds)
                return
            has_changed = _generations(current) != _generations(replaces)
            is_later = has_changed and all("" < save_id < new.save_id for save_id in saves)
            if is_urgent and current and is_later:
                replaces = current
                continue
            is_open = isinstance(exc, TransientError) or getattr(exc, "maybe_done", False)
            is_known = isinstance(exc, CheckpointError | StorageError | OSError) and not is_open
            if not is_known or any(each.problem for each in current):
                raise _unknown_outcome(store, prefix, exc) from exc
            raise
        return


async def _read_after(
    error: Exception, store: Store, prefix: str, names: Sequence[str]
) -> list[CommitObject]:
    """Return the commit objects of a checkpoint after a commit that failed with `error`."""
    try:
        return await read_commits(store, prefix, names)
    except Exception:
        raise _unknown_outcome(store, prefix, error) from error


def _unknown_outcome(store: Store, prefix: str, error: Exception) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"{uri_below(store, as_prefix(prefix))}: it is unknown whether this checkpoint was "
        f"committed ({error}); load it to see, and delete what is left of the other save with "
        "`aioflux clean`"
    )


def _generations(commits: Sequence[CommitObject]) -> set[tuple[str, str]]:
    return {(commit.meta.key, commit.meta.generation) for commit in commits}


async def _finish_commit(
    store: Store, key: str, new: Commit, *, replaces: Sequence[CommitObject], seconds: float
) -> bool:
    """Log a commit, and delete the objects of the commits that it replaces; see `write_commit`."""
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
