"""verify: checks that a checkpoint is complete: its commit object, and every object that it names.

    commit object -> consistent? (pure) -> agrees with one listing? (pure) -> deep: all bytes

Only a deep check reads more than the commit object: listings have size, generation and crc32c.
"""

from __future__ import annotations

import struct
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._values.checksums import join_crc32c
from aioflux.checkpoint._format.commit import parse_step, step_prefix
from aioflux.checkpoint._maintain.orphans import save_of
from aioflux.checkpoint._store.commits import (
    as_prefix,
    is_home,
    list_prefixes,
    read_commit,
    uri_below,
)
from aioflux.checkpoint._store.objects import read_range
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ChecksumError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit, StoredObject
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = [
    "Problem",
    "ProblemKind",
    "Verification",
    "check_blocks",
    "check_commit",
    "check_listed",
    "latest",
    "newest_first",
    "plan_pieces",
    "verify",
    "verify_steps",
]

_ADVICE: Final = "; load an earlier checkpoint"

ProblemKind: TypeAlias = Literal[
    "no_commit", "commit", "foreign", "missing", "size", "generation", "crc32c", "bytes"
]

_PIECE_BYTES = 8 * 1024 * 1024
_MAX_PIECES = 8
"""Pieces that are read, and held, at once."""
_MAX_STEPS = 16
"""Steps that are verified at once; each holds a commit object and a listing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint."""

    kind: ProblemKind
    """`no_commit`: nothing was committed; `commit`: the commit object is damaged or contradicts
    itself; `foreign`: another program wrote it; `missing`, `size`, `generation`, `crc32c`: an
    object is gone or was replaced; `bytes`: its bytes are not those that were saved."""
    uri: str
    """Uri of the object."""
    message: str
    """The problem in a sentence that names the object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of a check of one checkpoint."""

    uri: str
    """Uri of the checkpoint."""
    step: int | None
    """Its training step, if its prefix or its commit has one."""
    problems: tuple[Problem, ...] = ()
    """The problems, in the order of the commit."""
    num_objects: int = 0
    """Data objects that the commit names."""
    num_bytes: int = 0
    """Bytes of these data objects, without the commit object."""
    created: float = 0.0
    """Time of the commit, in seconds since 1970, UTC."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step."""
    generation: str = ""
    """Generation of the commit object that was read."""
    found: CommitObject | None = None
    """The commit object, if it could be read and one checkpoint was verified."""

    @property
    def is_valid(self) -> bool:
        """Return whether the checkpoint is complete."""
        return not self.problems

    @property
    def is_committed(self) -> bool:
        """Return whether there is a commit object at all."""
        return all(problem.kind != "no_commit" for problem in self.problems)

    def check(self) -> None:
        """Raise an error if there is a problem.

        Raises:
            CheckpointNotFoundError: Nothing was committed.
            CheckpointCorruptError: There is another problem.
        """
        if not self.is_committed:
            raise CheckpointNotFoundError(self.problems[0].message)
        if self.problems:
            first, *others = self.problems
            more = f" (and {len(others)} more problems)" if others else ""
            message = first.message.removesuffix(_ADVICE)
            raise CheckpointCorruptError(f"{self.uri} does not verify: {message}{more}{_ADVICE}")


def check_commit(commit: Commit, uri: str) -> list[Problem]:
    """Return the contradictions in a commit, which may be there even if its checksum is right."""

    def wrong(what: str) -> Problem:
        return Problem("commit", uri, f"{uri} contradicts itself: {what}")

    problems = []
    keys = [stored.key for stored in commit.objects]
    if len(set(keys)) < len(keys):
        problems.append(wrong("it names an object twice"))
    for stored in commit.objects:
        save = save_of(stored.key)
        if save is None or save[0]:
            problems.append(wrong(f"{stored.key!r} is not a key that a save writes"))
        if any(
            not 0 <= item.offset <= item.offset + item.length <= stored.size
            for item in stored.items
        ):
            problems.append(wrong(f"items of {stored.key!r} lie beyond its end"))
    return problems


def check_blocks(stored: StoredObject, uri: str) -> list[Problem]:
    """Return a problem if the checksums of an object's blocks do not combine to its own."""
    crcs = struct.unpack(f">{len(stored.block_crcs) // 4}I", stored.block_crcs)
    if join_crc32c(crcs, stored.block_size, stored.size) == stored.crc32c:
        return []
    what = f"the commit contradicts itself: the blocks of {uri} have another crc32c than the whole"
    return [Problem("commit", uri, what)]


def check_listed(
    stored: StoredObject, meta: ObjectMeta | None, uri: str, *, is_pinned: bool
) -> list[Problem]:
    """Return a problem if an object is not the one that was saved, by its metadata.

    Generations are compared if `is_pinned`, which is False for a copy by another program.
    """
    if meta is None:
        return [Problem("missing", uri, f"{uri} is missing")]
    if meta.size != stored.size:
        text = f"{uri} has {meta.size} bytes, and {stored.size} were saved"
        return [Problem("size", uri, text)]
    if meta.crc32c is not None and meta.crc32c != stored.crc32c:
        text = f"{uri} has the crc32c {meta.crc32c:08x}, and {stored.crc32c:08x} was saved"
        return [Problem("crc32c", uri, text)]
    if is_pinned and meta.generation != stored.generation:
        text = (
            f"{uri} has generation {meta.generation}, and {stored.generation} was saved: it was "
            "replaced; if by the same bytes, as from a backup, `aioflux ckpt copy` repairs it"
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

    Reads the commit object and one listing; with `deep` also every byte, of which a bounded number
    is in memory.

    Args:
        store: A store that holds the checkpoint.
        prefix: The checkpoint's prefix there; empty for the store's own.
        deep: Read all bytes, and compare the crc32c of every block, rather than trust the metadata
            of the service.
        progress: Called with the number of bytes of each piece that was read, if `deep`.

    Raises:
        StorageError: A request failed; the checkpoint may be complete.
    """
    below = as_prefix(prefix)
    uri = uri_below(store, below)
    step = parse_step(below.rstrip("/").rpartition("/")[2] or uri.rstrip("/").rpartition("/")[2])
    try:
        found = await read_commit(store, below)
    except CheckpointNotFoundError as exc:
        return _unreadable(uri, step, "no_commit", str(exc))
    except (CheckpointCorruptError, ChecksumError) as exc:
        return _unreadable(uri, step, "commit", str(exc))
    commit = found.commit
    if commit is None:
        text = f"{found.meta.uri} holds no commit of aioflux, so there is nothing to verify against"
        return _unreadable(uri, step, "foreign", text)
    problems = check_commit(commit, found.meta.uri)
    if None not in {step, commit.step} and step != commit.step:
        text = f"{found.meta.uri} was saved as step {commit.step}"
        problems.append(Problem("commit", found.meta.uri, text))
    if not problems:
        problems = await _check_objects(store, below, commit, deep=deep, progress=progress)
    return Verification(
        uri=uri,
        step=commit.step if step is None else step,
        problems=tuple(problems),
        num_objects=len(commit.objects),
        num_bytes=commit.num_bytes,
        created=commit.created,
        metrics=commit.metrics,
        generation=found.meta.generation,
        found=found,
    )


def _unreadable(uri: str, step: int | None, kind: ProblemKind, text: str) -> Verification:
    return Verification(uri=uri, step=step, problems=(Problem(kind, uri, text),))


async def _check_objects(
    store: Store,
    below: str,
    commit: Commit,
    *,
    deep: bool,
    progress: Callable[[int], None] | None,
) -> list[Problem]:
    """Return the problems of the objects that a commit names."""
    listed: Mapping[str, ObjectMeta] = {}
    if commit.objects:
        listed = {meta.key: meta for meta in await store.list_all(below)}
    is_pinned = is_home(store, below, commit)
    problems: list[Problem] = []
    whole: list[StoredObject] = []
    for stored in commit.objects:
        meta = listed.get(below + stored.key)
        uri = uri_below(store, below + stored.key)
        wrong = check_listed(stored, meta, uri, is_pinned=is_pinned)
        if deep and not wrong:
            wrong = check_blocks(stored, uri)
        problems += wrong
        if not wrong:
            whole.append(stored)
    if deep:
        problems += await _read(store, below, whole, is_pinned=is_pinned, progress=progress)
    return problems


async def _read(
    store: Store,
    below: str,
    objects: Sequence[StoredObject],
    *,
    is_pinned: bool,
    progress: Callable[[int], None] | None,
) -> list[Problem]:
    """Read all bytes of objects, and return the first damaged block of each."""
    wrong: dict[str, Problem] = {}

    async def one(piece: tuple[StoredObject, int, int]) -> None:
        stored, start, end = piece
        if stored.key in wrong:
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
            wrong.setdefault(stored.key, Problem("bytes", uri_below(store, key), str(exc)))
        if progress is not None:
            progress(end - start)

    pieces = [(stored, *piece) for stored in objects for piece in plan_pieces(stored)]
    await gather_bounded(one, pieces, max_in_flight=_MAX_PIECES)
    return [wrong[stored.key] for stored in objects if stored.key in wrong]


def plan_pieces(stored: StoredObject) -> list[tuple[int, int]]:
    """Return the ranges of whole blocks in which an object is read."""
    step = max(1, _PIECE_BYTES // stored.block_size) * stored.block_size
    return [(at, min(at + step, stored.size)) for at in range(0, stored.size, step)]


async def verify_steps(store: Store, steps: Sequence[int]) -> list[Verification]:
    """Verify many steps; those that are not committed are left out."""

    async def one(step: int) -> Verification:
        # Commit objects can be large: they are not kept.
        return replace(await verify(store, step_prefix(step)), found=None)

    found = await gather_bounded(one, steps, max_in_flight=_MAX_STEPS)
    return [each for each in found if each.is_committed]


async def newest_first(
    store: Store, *, deep: bool = False, repeats: bool = False
) -> AsyncGenerator[Verification, None]:
    """Verify the steps, newest first, each when it is requested.

    Steps that are not committed are left out: a save is under way there, or was killed.

    With `repeats` it lists again at the end, and verifies new steps and those that were not
    committed: retention may have removed all steps that were listed first.
    """
    known: set[int] = set()
    seen: set[int] = set()
    while True:
        steps = [step for step in await list_prefixes(store) if step not in known]
        for step in reversed(steps):
            found = await verify(store, step_prefix(step), deep=deep)
            if found.is_committed or step in seen:
                known.add(step)
            seen.add(step)
            if found.is_committed:
                yield found
        if not (repeats and steps):
            return


async def latest(store: Store, *, deep: bool = False) -> int | None:
    """Return the newest step that verifies, or None.

    Costs three requests if that is the newest of all.
    """
    async with aclosing(newest_first(store, deep=deep, repeats=True)) as found:
        async for each in found:
            if each.is_valid:
                return each.step
    return None
