"""verify: a check that every object of a checkpoint exists, with the bytes that were saved.

    one listing -> commit object -> consistent? (pure) -> agrees with the listing? (pure)
    -> deep: read all bytes

Listings have the size and generation of objects, and on most services their crc32c. So only a deep
check reads data objects.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._values.checksums import join_crc32c
from aioflux.checkpoint._format.commit import parse_step, step_prefix
from aioflux.checkpoint._store.objects import read_range
from aioflux.checkpoint._store.orphans import save_of
from aioflux.checkpoint._store.steps import (
    COMMIT_KEYS,
    Replacements,
    as_prefix,
    is_original,
    list_prefixes,
    read_commit,
    uri_below,
)
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ChecksumError,
)

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit, StoredObject
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

_ADVICE: Final = "; load an earlier checkpoint"

ProblemKind: TypeAlias = Literal[
    "no_commit", "commit", "foreign", "missing", "size", "generation", "crc32c", "bytes"
]

_PIECE_BYTES = 8 * 1024 * 1024
_MAX_PIECES = 8
"""Maximum number of pieces in memory at the same time."""
_MAX_STEPS = 16
"""Maximum number of steps that are verified at the same time; each needs memory for a commit object
and a listing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One defect of a checkpoint."""

    kind: ProblemKind
    """`no_commit`: there is no commit object. `commit`: the commit object is damaged, contradicts
    itself, or belongs to another step. `foreign`: another program wrote the commit object.
    `missing`: an object was deleted. `size`, `generation`, `crc32c`: an object was replaced.
    `bytes`: an object is damaged."""
    uri: str
    """Uri of the object; of the checkpoint if its commit object cannot be read."""
    message: str
    """A sentence that names the object and the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of a check of one checkpoint."""

    uri: str
    """Uri of the checkpoint."""
    step: int | None
    """Training step, from the prefix or the commit; None if neither has one."""
    problems: tuple[Problem, ...] = ()
    """Empty for a valid checkpoint."""
    num_objects: int = 0
    """Number of data objects that the commit lists."""
    num_bytes: int = 0
    """Size of these data objects in bytes."""
    created: float = 0.0
    """Time of the commit, in seconds since 1970, UTC."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step."""
    generation: str = ""
    """Generation of the commit object that was read."""
    found: CommitObject | None = field(default=None, repr=False)
    """The commit object; None if it could not be read. `verify_steps` drops it to save memory."""

    @property
    def is_valid(self) -> bool:
        """Return whether no problem was found."""
        return not self.problems

    @property
    def is_committed(self) -> bool:
        """Return whether there is a commit object, valid or not."""
        return all(problem.kind != "no_commit" for problem in self.problems)

    def check(self) -> None:
        """Raise the first problem as an error.

        Raises:
            CheckpointNotFoundError: There is no commit object.
            CheckpointCorruptError: There is any other problem.
        """
        if not self.is_committed:
            raise CheckpointNotFoundError(self.problems[0].message)
        if self.problems:
            first, *others = self.problems
            more = f" (and {len(others)} more problems)" if others else ""
            message = first.message.removesuffix(_ADVICE)
            raise CheckpointCorruptError(
                f"{self.uri} failed verification: {message}{more}{_ADVICE}"
            )


def check_commit(commit: Commit, uri: str) -> list[Problem]:
    """Return the contradictions in a commit. There may be some even if its checksum is right."""

    def contradiction(reason: str) -> Problem:
        return Problem("commit", uri, f"{uri} contradicts itself: {reason}")

    problems = []
    keys = [stored.key for stored in commit.objects]
    if len(set(keys)) < len(keys):
        problems.append(contradiction("it lists an object twice"))
    for stored in commit.objects:
        save = save_of(stored.key)
        if save is None or save[0]:
            problems.append(contradiction(f"{stored.key!r} is not a key that a save writes"))
        if any(
            not 0 <= item.offset <= item.offset + item.length <= stored.size
            for item in stored.items
        ):
            problems.append(contradiction(f"items of {stored.key!r} are beyond its end"))
    return problems


def check_blocks(stored: StoredObject, uri: str) -> list[Problem]:
    """Return a problem if the checksums of an object's blocks contradict the object's checksum."""
    crcs = struct.unpack(f">{len(stored.block_crcs) // 4}I", stored.block_crcs)
    if join_crc32c(crcs, stored.block_size, stored.size) == stored.crc32c:
        return []
    text = f"the commit contradicts itself: the crc32c of {uri} does not match its blocks"
    return [Problem("commit", uri, text)]


def check_listed(
    stored: StoredObject, meta: ObjectMeta | None, uri: str, *, is_pinned: bool
) -> list[Problem]:
    """Return a problem if the listed metadata of an object differs from the commit.

    Generations are compared only if `is_pinned`: in a copy that another program made, they differ.
    """
    if meta is None:
        return [Problem("missing", uri, f"{uri} is missing")]
    if meta.size != stored.size:
        text = f"{uri} has {meta.size} bytes, but {stored.size} were saved"
        return [Problem("size", uri, text)]
    if meta.crc32c is not None and meta.crc32c != stored.crc32c:
        text = f"{uri} has the crc32c {meta.crc32c:08x}, but {stored.crc32c:08x} was saved"
        return [Problem("crc32c", uri, text)]
    if is_pinned and meta.generation != stored.generation:
        text = (
            f"{uri} has generation {meta.generation}, but {stored.generation} was saved: it was "
            "replaced; if a backup restored the same bytes, `aioflux ckpt copy` repairs it"
        )
        return [Problem("generation", uri, text)]
    return []


async def verify(
    store: Store,
    prefix: str,
    *,
    deep: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Check that a checkpoint is complete.

    Sends one listing, and reads the commit object. A deep check also reads every byte, with a
    bounded part in memory. If another save replaces the checkpoint meanwhile, the new one is
    checked.

    Args:
        store: The store of the checkpoint.
        prefix: Prefix of the checkpoint in the store; empty if the store's own prefix is the
            checkpoint.
        deep: Also read all bytes, and compare the crc32c of every block. By default, the metadata
            of the service is trusted.
        progress: Called after each piece that a deep check has read, with its number of bytes.

    Raises:
        StorageError: A request failed; the checkpoint may be complete.
    """
    below = as_prefix(prefix)
    replacements = Replacements(store, below)
    while True:
        result = await _verify_commit(store, below, deep=deep, progress=progress)
        if (
            result.is_valid
            or result.found is None
            or not await replacements.has_newer(result.found.data)
        ):
            return result


async def _verify_commit(
    store: Store, below: str, *, deep: bool, progress: Callable[[int], None] | None
) -> Verification:
    """Check the checkpoint below a prefix as it is now."""
    uri = uri_below(store, below)
    step = parse_step(below.rstrip("/").rpartition("/")[2] or uri.rstrip("/").rpartition("/")[2])
    listed = await _list(store, below)
    try:
        names = [name for name in COMMIT_KEYS if below + name in listed]
        existing = await read_commit(store, below, names)
    except CheckpointNotFoundError as exc:
        return _unreadable(uri, step, "no_commit", str(exc))
    except (CheckpointCorruptError, ChecksumError) as exc:
        return _unreadable(uri, step, "commit", str(exc))
    commit = existing.commit
    if commit is None:
        text = f"{existing.meta.uri} has no commit of aioflux, so it cannot be verified"
        return _unreadable(uri, step, "foreign", text)
    problems = check_commit(commit, existing.meta.uri)
    if None not in {step, commit.step} and step != commit.step:
        text = f"{existing.meta.uri} was saved as step {commit.step}, not as step {step}"
        problems.append(Problem("commit", existing.meta.uri, text))
    if not problems:
        problems, intact = _check_objects(store, below, commit, listed, deep=deep)
        if problems:  # or the commit is newer than the listing
            listed = await _list(store, below)
            problems, intact = _check_objects(store, below, commit, listed, deep=deep)
        if deep:
            is_pinned = is_original(store, below, commit)
            problems += await _read(store, below, intact, is_pinned=is_pinned, progress=progress)
    return Verification(
        uri=uri,
        step=commit.step if step is None else step,
        problems=tuple(problems),
        num_objects=len(commit.objects),
        num_bytes=commit.num_bytes,
        created=commit.created,
        metrics=commit.metrics,
        generation=existing.meta.generation,
        found=existing,
    )


def _unreadable(uri: str, step: int | None, kind: ProblemKind, text: str) -> Verification:
    return Verification(uri=uri, step=step, problems=(Problem(kind, uri, text),))


async def _list(store: Store, below: str) -> Mapping[str, ObjectMeta]:
    return {meta.key: meta for meta in await store.list_all(below)}


def _check_objects(
    store: Store, below: str, commit: Commit, listed: Mapping[str, ObjectMeta], *, deep: bool
) -> tuple[list[Problem], list[StoredObject]]:
    """Return the problems of the objects of a commit in a listing, and the other objects."""
    is_pinned = is_original(store, below, commit)
    problems: list[Problem] = []
    intact: list[StoredObject] = []
    for stored in commit.objects:
        meta = listed.get(below + stored.key)
        uri = uri_below(store, below + stored.key)
        defects = check_listed(stored, meta, uri, is_pinned=is_pinned)
        if deep and not defects:
            defects = check_blocks(stored, uri)
        problems += defects
        if not defects:
            intact.append(stored)
    return problems, intact


async def _read(
    store: Store,
    below: str,
    objects: Sequence[StoredObject],
    *,
    is_pinned: bool,
    progress: Callable[[int], None] | None,
) -> list[Problem]:
    """Read all bytes of objects, and return one problem for each damaged object."""
    problems: dict[str, Problem] = {}

    async def read(piece: tuple[StoredObject, int, int]) -> None:
        stored, start, end = piece
        if stored.key in problems:
            return
        key = below + stored.key
        try:
            await read_range(
                store,
                stored,
                start=start,
                into=memoryview(bytearray(end - start)),
                key=key,
                is_pinned=is_pinned,
            )
        except CheckpointCorruptError as exc:
            problems.setdefault(stored.key, Problem("bytes", uri_below(store, key), str(exc)))
        if progress is not None:
            progress(end - start)

    pieces = [(stored, *piece) for stored in objects for piece in plan_pieces(stored)]
    await gather_bounded(read, pieces, max_in_flight=_MAX_PIECES)
    return [problems[stored.key] for stored in objects if stored.key in problems]


def plan_pieces(stored: StoredObject) -> list[tuple[int, int]]:
    """Return the pieces to read an object in: ranges of whole blocks, of about 8 MiB."""
    size = max(1, _PIECE_BYTES // stored.block_size) * stored.block_size
    return [(start, min(start + size, stored.size)) for start in range(0, stored.size, size)]


async def verify_steps(store: Store, steps: Sequence[int]) -> list[Verification]:
    """Verify many steps in parallel. The result omits steps that are not committed."""

    async def verify_step(step: int) -> Verification:
        # Drop the commit object, which can be large.
        return replace(await verify(store, step_prefix(step)), found=None)

    results = await gather_bounded(verify_step, steps, max_in_flight=_MAX_STEPS)
    return [result for result in results if result.is_committed]


async def newest_first(
    store: Store, *, deep: bool = False, relist: bool = False
) -> AsyncGenerator[Verification, None]:
    """Verify the steps, newest first, each when the caller requests the next result.

    Steps without a commit object are omitted: a save is in progress, or was killed.

    Args:
        store: The store of the steps.
        deep: See `verify`.
        relist: After the last step, list again, and verify new steps, and once more the steps that
            had no commit object; repeat this while there are any. Without it, no step is found if
            retention removes all steps of the first listing in the meantime.
    """
    finished: set[int] = set()
    uncommitted: set[int] = set()
    while True:
        steps = [step for step in await list_prefixes(store) if step not in finished]
        for step in reversed(steps):
            result = await verify(store, step_prefix(step), deep=deep)
            if result.is_committed or step in uncommitted:
                finished.add(step)
            uncommitted.add(step)
            if result.is_committed:
                yield result
        if not (relist and steps):
            return


async def latest(store: Store, *, deep: bool = False) -> int | None:
    """Return the newest step that passes verification; None if no step does.

    If this is the newest of all steps, the steps are listed once, and one step is verified.
    """
    async with aclosing(newest_first(store, deep=deep, relist=True)) as results:
        async for result in results:
            if result.is_valid:
                return result.step
    return None
